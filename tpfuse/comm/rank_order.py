"""Sums and maxima of the ranks' tensors on the host, in absolute rank order: bitwise equal on every rank and run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpfuse.comm.trace import span

HALF = (torch.bfloat16, torch.float16)  # summed in float32


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which floats of `dtype` are computed and summed, and their master copies are kept."""
    return torch.float32 if dtype in HALF else dtype


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Compute out = ((parts[0] + parts[1]) + parts[2]) + …, half types in float32."""
    with span("communication", "sum over ranks"):
        if out.dtype in HALF:
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            out.copy_(total)
        elif len(parts) == 1:
            out.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out += part


def max_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Compute out = the largest of parts, element by element; it is NaN if one of them is."""
    out.copy_(parts[0])
    for part in parts[1:]:
        torch.maximum(out, part, out=out)


def rows_of(x: Tensor, world: int) -> Tensor:
    """Return a view of the contiguous x with one row for each rank, [world, elements / world]; x may be empty."""
    return x.view(world, x.numel() // world)
