"""linear_all_reduce: all_reduce(x Wᵀ) + bias + residual, the row-parallel product without sequence parallelism."""

import torch.distributed as dist
from torch import Tensor

from tpfuse.ops.collectives import all_reduce
from tpfuse.ops.gemm import gemm


def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """all_reduce(x Wᵀ) + bias + residual.

    x: [..., K], this rank's slice of the features; weight: [N, K], this rank's columns; bias: [N] and residual:
    [..., N], equal on all ranks. Returns [..., N], equal on all ranks.
    """
    if group is None:
        return gemm(x, weight, bias, residual=residual)
    out = all_reduce(gemm(x, weight), group)
    for term in (bias, residual):
        out = out if term is None else out + term
    return out
