"""What ranks have brought, combined on the host in absolute rank order: bitwise the same everywhere and always."""

from collections.abc import Sequence

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)  # summed in float32


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of this dtype are summed, and their masters and moments kept."""
    return torch.float32 if dtype in HALF else dtype


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + …, half types in float32."""
    if out.dtype in HALF:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def max_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = the largest of parts, element by element; NaN wins."""
    out.copy_(parts[0])
    for part in parts[1:]:
        torch.maximum(out, part, out=out)


def rows_of(x: Tensor, world: int) -> Tensor:
    """The contiguous x as one row for each rank, [world, elements / world]; it may be empty."""
    return x.view(world, x.numel() // world)
