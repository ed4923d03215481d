"""torch's own operators on symmetric memory, as candidates of a measurement on GPUs.

| candidate      | operators of torch.ops.symm_mem                      | products                                 |
|----------------|------------------------------------------------------|------------------------------------------|
| torch fused    | fused_all_gather_matmul, fused_matmul_reduce_scatter | all_gather_linear, linear_reduce_scatter |
| torch one-shot | one_shot_all_reduce                                  | linear_all_reduce                        |
| torch two-shot | two_shot_all_reduce_                                 | linear_all_reduce                        |
| torch multimem | multimem_all_reduce_: the switch of the links sums   | linear_all_reduce                        |

torchtitan's asynchronous tensor parallelism consists of the first two. Their signatures and conditions were read in
torch 2.11 and 2.13 (torch/distributed/_symmetric_memory/__init__.py, CUDASymmetricMemoryOps.cu). Bias, activation and
residual are added afterwards. One-shot and two-shot sum in rank order, and round half types after each term. All of
them use the workspace of the group that torch keeps. None of them is measured yet.

torch's kernels wait without a deadline and heed no abort word. The guard of the memory compares the ranks before them;
if a rank does not come after that, the watchdog ends the process (`tpfuse.comm.stream_watchdog`).
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.agreement import exchange
from tpfuse.comm.channel import slot_size
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import Unavailable
from tpfuse.comm.settings import settings
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.ops.gemm import activated, flat, weight_gradient
from tpfuse.ops.linear.collective import CollectiveLinear, plus
from tpfuse.ops.linear.parallel_linear import joined

GATHERING = "all_gather", "all_gather_backward", "reduce_scatter", "reduce_scatter_backward"
CANDIDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch fused": (("fused_all_gather_matmul", "fused_matmul_reduce_scatter"), GATHERING),
    "torch one-shot": (("one_shot_all_reduce",), ("all_reduce",)),
    "torch two-shot": (("two_shot_all_reduce_",), ("all_reduce",)),
    "torch multimem": (("multimem_all_reduce_",), ("all_reduce",)),
}
"""The candidates: their operators, and the methods of `ParallelLinear` that they compute."""
MOST_RANKS = 8  # torch's kernels are made for 2, 4 and 8 ranks
_SUMMED = (torch.float32, torch.bfloat16)  # by the kernels of all-reduces
_ALIGNMENT = 16  # bytes: the widest access of these kernels

_obstacles: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], dict[str, str]]] = WeakKeyDictionary()


def obstacles(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return why each candidate is not possible for a group's tensors; empty if it is. The first call is collective."""
    of_group, key = _obstacles.setdefault(group, {}), (device.type, dtype)
    if key not in of_group:
        shared = ""
        try:
            symmetric_memory(group, device)
        except Unavailable as error:
            shared = f"the ranks share no memory: {error}"
        own = {name: shared or _obstacle(name, group.size(), device, dtype) for name in CANDIDATES}
        every = exchange(own, group, op="torch's operators", within=settings().timeout)
        of_group[key] = {name: next((each[name] for each in every if each[name]), "") for name in CANDIDATES}
    return of_group[key]


def _obstacle(name: str, world: int, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a candidate is not possible on this rank, as far as the group's memory does not say it."""
    reason = _missing(device, CANDIDATES[name][0])
    if reason:
        return reason
    if not 1 < world <= MOST_RANKS:
        return f"torch's operators are tried for 2 to {MOST_RANKS} ranks, not for {world}"
    if name != "torch fused" and dtype not in _SUMMED:
        return f"torch's kernels sum float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if name == "torch multimem" and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are required, and the switch decides the order of sums"
    if name == "torch multimem" and not _has_multicast(device):
        return "the GPU has no multicast, or TORCH_SYMM_MEM_DISABLE_MULTICAST=1 turns it off"
    return ""


def _missing(device: torch.device, operators: Sequence[str]) -> str:
    if device.type != "cuda":
        return f"torch's operators are for GPUs, not for {device.type}"
    missing = next((name for name in operators if not hasattr(_operators(), name)), "")
    return missing and f"torch {torch.__version__} has no torch.ops.symm_mem.{missing}"


def _has_multicast(device: torch.device) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    allowed = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") != "1"
    return allowed and _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)


@cache
def _operators() -> Any:
    """Return torch.ops.symm_mem. The import registers its operators, and is left to processes that measure them."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def _workspace(group_name: str, nbytes: int) -> Any:
    """Return the handle of the workspace that torch keeps for a group, of `nbytes` or more. It may be collective.

    It has a multicast object where the links have one. Allocations of `CudaMemory` have none.
    """
    from torch.distributed._symmetric_memory import get_symm_mem_workspace

    return get_symm_mem_workspace(group_name, nbytes)  # type: ignore[arg-type]


def serves(name: str, method: str, *call: Any) -> bool:
    """Return whether a candidate computes a call of a method of `ParallelLinear`, by its shapes."""
    x = call[1] if method == "all_gather_backward" else call[0]
    if method not in CANDIDATES[name][1] or not x.numel():
        return False
    return method != "all_reduce" or not x.shape[:-1].numel() * len(call[1]) * x.element_size() % _ALIGNMENT


class TorchLinear(CollectiveLinear):
    """The products of one group's ranks by a candidate; what torch has no operator for is computed by collectives."""

    def __init__(self, group: dist.ProcessGroup, memory: SymmetricMemory, name: str) -> None:
        super().__init__(group)
        self._memory, self._name = memory, name

    def _gather(self, x: Tensor, weights: Sequence[Tensor], keep: bool) -> tuple[Tensor | None, list[Tensor]]:
        """Return (all ranks' rows of x [n, K] if `keep`; their products with each weight [K, N])."""
        gathered, products = _operators().fused_all_gather_matmul(
            x.contiguous(), list(weights), 0, self._group.group_name, return_A=keep
        )
        return gathered, list(products)

    def _scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks of x [world * n, K] weight [K, N]."""
        out: Tensor = _operators().fused_matmul_reduce_scatter(x, weight, "sum", 0, self._group.group_name)
        return out

    def _guard(self, op: str, x: Tensor, width: int) -> Any:
        """Return the guard of an operation that communicates tensors of x's rows and dtype, and of this width."""
        return self._memory.guard(f"{op} by {self._name}, {x.dtype} {[*x.shape[:-1], width]}", kernel=True)

    def all_gather(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None, keep: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        with self._guard("all_gather_linear", x, x.shape[-1]):
            _, outs = self._gather(flat(x), [weight.t() for weight in weights], keep=False)
        shape = len(x) * self._group.size(), *x.shape[1:-1]
        pairs = zip(outs, biases, strict=True)
        return [activated(plus(out.view(*shape, -1), bias), activation, keep) for out, bias in pairs]

    def all_gather_backward(
        self, lefts: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """See `ParallelLinear`. A collective gathers x: torch has no operator for that gather and dW."""
        _, grad_weights = super().all_gather_backward(lefts, x, weights, needs, False)
        if not needs_x:
            return None, grad_weights
        left, weight = joined([flat(left) for left in lefts], weights)
        with self._guard("all_gather_linear backward", x, x.shape[-1]):
            return self._scatter(left, weight).view(x.shape), grad_weights

    def reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        with self._guard("linear_reduce_scatter", x, len(weight)):
            out = self._scatter(flat(x), weight.t())
        return plus(out.view(len(x) // self._group.size(), *x.shape[1:-1], len(weight)), bias, residual)

    def reduce_scatter_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        needs_x, needs_weight, needs_bias = needs
        if not needs_x:
            return super().reduce_scatter_backward(grad, x, weight, needs)
        with self._guard("linear_reduce_scatter backward", grad, grad.shape[-1]):
            gathered, (grad_x,) = self._gather(flat(grad), [weight], keep=needs_weight or needs_bias)
        grad_weight = weight_gradient(gathered, x) if gathered is not None and needs_weight else None
        grad_bias = gathered.sum(0) if gathered is not None and needs_bias else None
        return grad_x.view(x.shape), grad_weight, grad_bias

    def all_reduce(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """See `ParallelLinear`. The product is written to the group's workspace, where torch's operator sums it."""
        rows, n = flat(x), len(weight)
        with self._guard("linear_all_reduce", x, n):
            workspace = _workspace(self._group.group_name, slot_size(len(rows) * n * x.element_size()))
            partial = workspace.get_buffer(self._group.rank(), (len(rows), n), x.dtype)
            torch.mm(rows, weight.t(), out=partial)
            run: Callable[..., Tensor] = getattr(_operators(), CANDIDATES[self._name][0][0])
            total = run(partial, "sum", self._group.group_name)
            out = (total.clone() if self._name != "torch one-shot" else total).view(*x.shape[:-1], n)
        return plus(out, bias, residual)
