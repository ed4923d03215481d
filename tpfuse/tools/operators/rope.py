"""rope: small comparisons for `tpfuse verify`, and launches that reach every row of its tables."""

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.rope import rope_, rope_forward
from tpfuse.ops.rope import rope
from tpfuse.testing.inputs import integers, normal
from tpfuse.tools.operator import Case, Operator


def _case(name: str, *, heads: tuple[int, int], rotated: int, size: int, interleaved: bool) -> Case:
    angles = normal(3, 50, rotated // 2)
    cos, sin = angles.cos(), angles.sin()

    def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
        q, k = (normal(seed, 2, 21, h, size, dtype=dtype) for seed, h in enumerate(heads))
        return {"q": q, "k": k, "positions": integers(4, 2, 21, low=0, high=49, dtype=torch.int64)}

    def function(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        tables = cos.to(q.device), sin.to(q.device)
        return torch.cat(rope(q, k, *tables, positions, interleaved=interleaved), dim=2)

    def plain(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        tables = cos.to(q.device), sin.to(q.device)
        return torch.cat([reference.rope(x, *tables, positions, interleaved=interleaved) for x in (q, k)], dim=2)

    return Case(name, function, plain, inputs)


CASES = (
    _case("halves", heads=(3, 3), rotated=16, size=16, interleaved=False),
    _case("halves, part of a head", heads=(3, 1), rotated=20, size=32, interleaved=False),
    _case("interleaved", heads=(3, 1), rotated=40, size=40, interleaved=True),
)


def launches(dtype: torch.dtype) -> None:
    """Heads of 64 and 128 elements with fewer for the keys, both ways of pairing; one tensor alone."""
    positions = torch.empty(4096, dtype=torch.int64, device="meta")
    for size in (64, 128):
        table = torch.empty(8192, size // 2, device="meta")
        q, k = (torch.empty(2, 4096, heads, size, dtype=dtype, device="meta") for heads in (32, 8))
        for interleaved in (False, True):
            rope_forward(q, k, table, table, positions, interleaved=interleaved)
    rope_(q, None, table, table, positions)


OPERATOR = Operator("rope", launches, CASES)
