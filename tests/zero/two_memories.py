"""A stand-in for the memory of a GPU, beside the host's.

Faked: that the two are apart. All tensors are on the CPU; a mode notes which of them count as the host's, refuses
operations and collectives of tensors of both, and counts what `.to` copies. Real: the values, the engines of ZeRO, the
collectives and the ranks. Not covered: streams, pinned memory, and copies that are not finished yet.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpfuse.comm import collectives
from tpfuse.zero import muon

DEVICE = torch.device("cpu", 0)  # the device of `TwoMemories`, whose host is torch.device("cpu")


class TwoMemories(TorchDispatchMode):
    """A host's memory and a device's on a CPU: an operation or a collective of tensors that it cannot reach fails.

    What is computed from tensors of the host is there too, and everything else on the device. `.to` with one of both
    copies a tensor to the other one, and counts its bytes in `to_device` or `to_host`; `copy_` does it uncounted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = 0
        self._host: dict[int, Tensor] = {}  # by their storage, which is never used again

    def keep(self, x: Tensor) -> None:
        """Let a tensor be in the host's memory."""
        if x.untyped_storage().data_ptr():  # fake tensors have no memory
            self._host[x.untyped_storage().data_ptr()] = x

    def on_host(self, x: Tensor) -> bool:
        """Return whether a tensor is in the host's memory."""
        return bool(x.numel()) and x.untyped_storage().data_ptr() in self._host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the local tensors
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        places = [self.on_host(x) for x in given]
        wide = {place for x, place in zip(given, places, strict=True) if x.ndim}  # a scalar may be on the host
        assert len(wide) < 2 or func is torch.ops.aten.copy_.default, f"{func} of tensors of the host and the device"
        out = func(*args, **(kwargs or {}))
        if places and all(places):
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.numel():
                    self.keep(x)
        return out

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Take every `.to` of a device as a copy, and check what ranks send."""
        to = Tensor.to

        def moved(x: Tensor, *args: Any, **options: Any) -> Tensor:
            if not (args and isinstance(args[0], torch.device)) or isinstance(x, DTensor):
                return to(x, *args, **options)
            host = args[0] != DEVICE
            if self.on_host(x) == host or not x.numel():
                return x
            y = torch.empty(x.shape, dtype=x.dtype).copy_(x)
            if host:
                self.keep(y)
                self.to_host += x.nbytes
            else:
                self.to_device += x.nbytes
            return y

        def checked(send: Callable[..., Any]) -> Callable[..., Any]:
            def call(x: Tensor, *args: Any, **options: Any) -> Any:
                assert not self.on_host(x), "a collective of a tensor of the host"
                return send(x, *args, **options)

            return call

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Tensor, "to", moved))
            for module, name in (
                *((collectives, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "start_all_reduce")),
                (muon, "start_all_to_all"),
            ):
                stack.enter_context(mock.patch.object(module, name, checked(getattr(module, name))))
            stack.enter_context(self)
            yield
