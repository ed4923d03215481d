"""dropout: a mask that depends on the position and equals the mask of the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels.dropout import dropout_forward
from tpfuse.ops.dropout import dropout, keep_mask
from tpfuse.tools.operator import CallCost, Draw, Launchers, Operator, Outputs, Shape, Tensors


@dataclass(frozen=True)
class DropoutShape(Shape):
    """Dropout of x [M, C], whose elements are dropped with probability p."""

    name: str
    M: int
    C: int
    p: float

    def inputs(self, draw: Draw) -> Tensors:
        rows = torch.arange(self.M, device=draw.device) + 2**33
        key = torch.full((), -(2**61) - 5, dtype=torch.int64, device=draw.device)
        return {"x": draw.normal(self.M, self.C), "rows": rows, "key": key}

    def function(self, x: Tensor, rows: Tensor, key: Tensor) -> Tensor:
        return dropout(x, self.p, rows, key)

    def reference(self, x: Tensor, rows: Tensor, key: Tensor) -> Tensor:
        return x * (keep_mask(rows, self.C, self.p, key) / (1.0 - self.p)).to(x.dtype)

    def gradient(self, draw: Draw) -> Tensor:
        return draw.normal(self.M, self.C)

    def costs(self) -> dict[str, CallCost]:
        return {"forward": CallCost(0.0, 4 * self.M * self.C)}

    def launch(self, x: Tensor, rows: Tensor, key: Tensor, **_: Tensor) -> Outputs:
        return (dropout_forward(x, self.p, rows, key),)

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain_forward)}


def launches(dtype: torch.dtype) -> None:
    """Launch the residual stream between the blocks of GPT-2, on meta tensors."""
    x = torch.empty(8192, 768, dtype=dtype, device="meta")
    rows, key = (torch.empty(n, dtype=torch.int64, device="meta") for n in (8192, 1))
    dropout_forward(x, 0.1, rows, key)


OPERATOR = Operator(
    name="dropout",
    launches=launches,
    cases=(DropoutShape("p 0.3", 63, 200, 0.3),),
    models=(DropoutShape("124m dropout", 8 * 8192, 768, 0.1),),
    tiny=(DropoutShape("tiny", 12, 40, 0.1),),
)
