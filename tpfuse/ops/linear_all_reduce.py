"""linear_all_reduce: all_reduce(x Wᵀ) + bias, the row-parallel product without sequence parallelism."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.ops.collectives import all_reduce


def linear_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    """all_reduce(x Wᵀ) + bias.

    x: [..., K], this rank's slice of the features; weight: [N, K], this rank's columns; bias: [N], equal on
    all ranks. Returns [..., N], equal on all ranks.
    """
    if group is None:
        return F.linear(x, weight, bias)
    out = all_reduce(F.linear(x, weight), group)
    return out if bias is None else out + bias
