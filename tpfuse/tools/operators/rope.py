"""rope: the rotation of queries and keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.rope import rope_forward
from tpfuse.ops.rope import rope
from tpfuse.testing.inputs import integers, normal
from tpfuse.tools.operator import CallCost, Draw, Given, Launchers, Operator, Outputs, Shape, Tensors


@dataclass(frozen=True)
class RopeShape(Shape):
    """The rotation of q [B, T, H, D] and k [B, T, Hk, D] by Llama's angles."""

    name: str
    B: int
    T: int
    H: int
    Hk: int
    D: int

    def inputs(self, draw: Draw) -> Tensors:
        return {name: draw.normal(self.B, self.T, h, self.D) for name, h in (("q", self.H), ("k", self.Hk))}

    def tables(self, device: torch.device) -> Tensors:
        """Return cos and sin [T, D / 2] of the angles, and the positions [T]."""
        positions = torch.arange(self.T, device=device)
        angles = positions.unsqueeze(1) * 10000.0 ** (-torch.arange(0, self.D, 2, device=device) / self.D)
        return {"cos": angles.cos(), "sin": angles.sin(), "positions": positions}

    def costs(self) -> dict[str, CallCost]:
        moved = 2 * 2 * self.B * self.T * (self.H + self.Hk) * self.D + 4 * self.T * self.D
        return dict.fromkeys(("forward", "backward"), CallCost(0.0, moved))

    def drawn(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        return self.inputs(Draw(device, dtype)) | self.tables(device)

    def launch(self, q: Tensor, k: Tensor, **tables: Any) -> Outputs:
        q_out, k_out = rope_forward(q, k, **tables)
        assert k_out is not None
        return q_out, k_out

    def plain(self, q: Tensor, k: Tensor, **tables: Any) -> Outputs:
        return reference.rope(q, **tables), reference.rope(k, **tables)

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain)}


def _case(name: str, *, heads: tuple[int, int], rotated: int, size: int, interleaved: bool) -> Given:
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

    return Given(name, function, plain, inputs)


CASES = (
    _case("halves", heads=(3, 3), rotated=16, size=16, interleaved=False),
    _case("halves, part of a head", heads=(3, 1), rotated=20, size=32, interleaved=False),
    _case("interleaved", heads=(3, 1), rotated=40, size=40, interleaved=True),
)


def launches(dtype: torch.dtype) -> None:
    """Launch heads of 64 and 128 elements, with fewer heads of keys, in both ways of pairing."""
    positions = torch.empty(4096, dtype=torch.int64, device="meta")
    for size in (64, 128):
        table = torch.empty(8192, size // 2, device="meta")
        q, k = (torch.empty(2, 4096, heads, size, dtype=dtype, device="meta") for heads in (32, 8))
        for interleaved in (False, True):
            rope_forward(q, k, table, table, positions, interleaved=interleaved)


OPERATOR = Operator(
    name="rope",
    launches=launches,
    cases=CASES,
    models=(RopeShape("7b tp1 rope", 2, 4096, 32, 32, 128), RopeShape("heads of 64", 2, 4096, 32, 32, 64)),
    tiny=(RopeShape("tiny", 2, 6, 2, 1, 16),),
)
