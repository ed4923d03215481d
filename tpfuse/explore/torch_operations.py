"""Torch operations on symmetric memory, which count as reads and writes of the current stream."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpfuse.explore.memory import Addresses, CheckedMemory
from tpfuse.explore.streams import current_stream, here

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # the host waits for results of these


class LeavingTorch(TorchFunctionMode):
    """Reports the elements that `tolist` and `repr` read to a run; torch's dispatcher does not see them."""

    def __init__(self, memory: CheckedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.tolist, Tensor.__repr__):
            return func(*args, **(kwargs or {}))
        here().check_wait(func.__name__)
        if parts := self._memory.touched(_addresses(args[0])):
            self._memory.access(parts, args[0].element_size(), "read", write=False)
        with self._memory.reading((parts, args[0].element_size())):
            result = func(*args, **(kwargs or {}))
        here().host_waits(func.__name__, current_stream())
        self._memory.seen(result)
        return result


class TorchOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the elements that the torch operations of one rank read and write to a run.

    Accesses outside torch (`numpy`, `data_ptr`) are not seen.
    """

    def __init__(self, memory: CheckedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # the operations inside a composite or a custom operator are reported
            result = func.decompose(*args, **kwargs)  # in inference mode composite operators come here
            if result is NotImplemented and func.namespace not in ("aten", "prim", "prims"):
                result = func.redispatch(_CPU, *args, **kwargs)
        if result is not NotImplemented:
            return result
        waits = not _WAITS.isdisjoint(func.tags)
        if waits:
            here().check_wait(str(func))
        elif current_stream().graph is not None and not _is_view(func) and "empty" not in func.__name__:
            return _keep(func, args, kwargs)
        read, written = [], []
        for tensor, write in _operands(func, args, kwargs):
            parts = self._memory.touched(_addresses(tensor))
            if parts:
                self._memory.access(parts, tensor.element_size(), "write" if write else "read", write=write)
                written += parts if write else []
                read += [] if write else [(parts, tensor.element_size())]
        with self._memory.reading(*read):
            result = func(*args, **kwargs)
        self._memory.written(written)
        if waits:
            here().host_waits(str(func), current_stream())
        if not isinstance(result, Tensor):
            self._memory.seen(result)
        return result


def _keep(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a graph keep an operation. Until a replay its new results are NaN, or all their bits are set."""
    changed = [tensor for tensor, write in _operands(func, args, kwargs) if write]
    returns = len(func._schema.returns)
    if not changed:
        result = func(*args, **kwargs)
        for new in _tensors(result):
            ctypes.memset(new.untyped_storage().data_ptr(), 0xFF, new.untyped_storage().nbytes())
    elif returns in (0, len(changed)):
        result = changed[0] if returns == 1 else tuple(changed[:returns])
    else:
        raise RuntimeError(
            f"{func} in a capture: it changes tensors and returns others, which the explorer cannot keep"
        )

    def again() -> None:
        with torch.no_grad():
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    here().keeps(again)
    return result


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def _is_view(func: Any) -> bool:
    """Return whether the operation only makes another view of a tensor, or changes this one's."""
    returns = func._schema.returns
    views = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return views or torch.Tag.inplace_view in func.tags


def _operands(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors whose elements the operation reads (False) or writes (True); reads come first."""
    schema: Any = func._schema  # type: ignore[attr-defined]
    name = schema.name.removeprefix("aten::")
    shapes_only = name.startswith("new_") or name.endswith("_like")
    if _is_view(func) or shapes_only:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    writes = []
    for argument in schema.arguments:
        value = given.get(argument.name)
        tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
        else:
            yield from ((tensor, False) for tensor in tensors)
    yield from ((tensor, True) for tensor in writes)


def _addresses(tensor: Tensor) -> Addresses:
    """Return the address of each element; an empty array for tensors that have no plain CPU storage."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return np.zeros(0, np.uint64)
    offsets: Any = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * stride
    addresses: Addresses = (tensor.data_ptr() + offsets.ravel() * tensor.element_size()).astype(np.uint64)
    return addresses
