"""A stand-in for CUDA graphs on a CPU.

Faked: the graph, which is a list of torch's operations with their arguments. As a CUDA graph does, a replay calls the
same operations on the same memory, and no code of the host. So it repeats whatever the host decided at the capture: a
seed, a factor, which gradient is the first of a step. The capture computes too, but its result is lost: a step needs
the replay. What the host would have to wait for fails at the capture. Real: the trainer, the engines and the ranks. Not
covered: streams, memory pools, kernels and NCCL in a graph (the test that needs a GPU).
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpfuse.comm import collectives
from tpfuse.ops import checks
from tpfuse.zero.parameter_takeover import TakenGradient

_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "equal")  # CUDA waits for these, or copies


class _Recorder(TorchDispatchMode):
    """Record the operations, each with its arguments and results, which stay alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in _HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(x, TakenGradient) for x in tree_leaves(args)):  # it has no memory: no device sees it
            self.calls.append((func, args, kwargs or {}, out))
        return out


class GraphStandIn:
    """The calls of `tpfuse.train.step_graph.GraphCalls`. Tests read how many there were."""

    def __init__(self, *_: object) -> None:
        self.launches = self.captures = self.replays = 0
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def launch(self, compute: Callable[[], Tensor]) -> Tensor:
        self.launches += 1
        return compute()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        self.captures += 1
        with (  # of what CPU ranks check on every call, GPUs check nothing, or only new shapes
            mock.patch.object(checks, "is_traced", return_value=True),
            mock.patch.object(collectives, "compare"),
            _Recorder() as recorder,
        ):
            try:
                result = compute()
            except Exception:  # its context, as in torch.cuda.graph
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self._calls = recorder.calls
        return result.fill_(torch.nan)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for call in self._calls:
                _repeat(*call)

    def release(self) -> None:
        self._calls.clear()


def _repeat(func: Any, args: Any, kwargs: Any, recorded: Any) -> None:
    """Call an operation again, and copy what it returns into the tensors that it returned before."""
    for old, new in zip(_results(recorded), _results(func(*args, **kwargs)), strict=True):
        if not isinstance(old, Tensor):  # the work of a collective
            new.wait()
        elif old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)
        else:
            assert old.storage_offset() == new.storage_offset()


def _results(out: Any) -> Iterator[Any]:
    return (x for x in tree_leaves(out) if isinstance(x, (Tensor, torch.ScriptObject)))
