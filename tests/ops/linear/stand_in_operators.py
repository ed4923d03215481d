"""A stand-in for torch.ops.symm_mem on CPU ranks.

Faked: the operators, which compute by Gloo's collectives and record what is called, and the workspace. Real: the
conditions on shapes, strides, dtypes and addresses that torch's operators have. Not covered: their speed and rounding.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import TorchCollectives
from tpfuse.comm.mesh import named_group


class StandInOperators:
    """The operators, with the conditions of torch's. calls: the name and the shapes of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def workspace(self, group: str, nbytes: int) -> Any:
        """Return a handle as torch's for this rank's part of the group's workspace."""
        rank, part = named_group(group).rank(), torch.empty(nbytes, dtype=torch.uint8)

        def get_buffer(owner: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            assert owner == rank, "another rank's product would be overwritten"
            return part[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)

        return SimpleNamespace(get_buffer=get_buffer)

    def fused_all_gather_matmul(
        self, x: Tensor, weights: list[Tensor], dim: int, group: str, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        assert x.dim() == 2 and x.is_contiguous() and dim == 0 and all(w.dim() == 2 for w in weights)
        self.calls.append(("fused_all_gather_matmul", tuple(x.shape), return_A))
        gathered = collectives.all_gather(x, named_group(group), by=TorchCollectives(named_group(group)))
        return gathered if return_A else None, [gathered @ w for w in weights]

    def fused_matmul_reduce_scatter(self, x: Tensor, weight: Tensor, op: str, dim: int, group: str) -> Tensor:
        assert x.dim() == weight.dim() == 2 and (op, dim) == ("sum", 0)
        self.calls.append(("fused_matmul_reduce_scatter", tuple(x.shape)))
        return collectives.reduce_scatter(x @ weight, named_group(group), by=TorchCollectives(named_group(group)))

    def one_shot_all_reduce(self, x: Tensor, op: str, group: str) -> Tensor:
        return self._summed("one_shot_all_reduce", x.clone(), op, group)

    def two_shot_all_reduce_(self, x: Tensor, op: str, group: str) -> Tensor:
        return self._summed("two_shot_all_reduce_", x, op, group)

    def multimem_all_reduce_(self, x: Tensor, op: str, group: str) -> Tensor:
        return self._summed("multimem_all_reduce_", x, op, group)

    def _summed(self, name: str, x: Tensor, op: str, group: str) -> Tensor:
        assert x.is_contiguous() and op == "sum" and x.dtype in (torch.float32, torch.bfloat16)
        assert x.nbytes % 16 == 0 and x.storage_offset() * x.element_size() % 16 == 0
        self.calls.append((name, tuple(x.shape)))
        dist.all_reduce(x, group=named_group(group))
        return x
