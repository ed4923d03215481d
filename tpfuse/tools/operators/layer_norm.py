"""layer_norm: the norm of each row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.layer_norm import norm_forward
from tpfuse.kernels.layer_norm_backward import norm_backward
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.tools.operator import CallCost, Draw, Launchers, Operator, Outputs, Shape, Tensors

EPS = 1e-5
# The widths of heads, of GPT-2, of 7B and 70B models, and one that is larger than a block.
WIDTHS = (128, 768, 1600, 4096, 8192, 16384)


@dataclass(frozen=True)
class NormShape(Shape):
    """The norm of x [M, C] with mean `offset`, for weight [C] and perhaps bias [C]."""

    name: str
    M: int
    C: int
    with_bias: bool = False
    offset: float = 0.0

    def inputs(self, draw: Draw) -> Tensors:
        x, weight = draw.normal(self.M, self.C) + self.offset, draw.normal(self.C)
        return {"x": x, "weight": weight} | ({"bias": draw.normal(self.C)} if self.with_bias else {})

    def gradient(self, draw: Draw) -> Tensor:
        return draw.normal(self.M, self.C)

    def costs(self) -> dict[str, CallCost]:
        statistics = 2 if self.with_bias else 1  # mean and 1 / deviation, or 1 / root mean square alone
        tensor, rest = 2 * self.M * self.C, 4 * statistics * self.M + 2 * (1 + statistics) * self.C
        return {"forward": CallCost(0.0, 2 * tensor + rest), "backward": CallCost(0.0, 3 * tensor + rest)}


@dataclass(frozen=True)
class LayerNormShape(NormShape):
    """The norm that subtracts the mean of each row."""

    def function(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer_norm(x, weight, bias, EPS)

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.layer_norm(x, weight, bias, EPS)

    def saved(self, inputs: Tensors) -> Tensors:
        wide = inputs["x"].float()
        return {"mean": wide.mean(1), "rstd": (wide.var(1, correction=0) + EPS).rsqrt()}

    def launch(self, x: Tensor, weight: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
        return (norm_forward(x, weight, bias, EPS, centered=True)[0],)

    def backward(self, x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, **_: Tensor) -> Outputs:
        dx, dweight, dbias = norm_backward(grad, x, weight, mean, rstd, with_bias=True)
        assert dx is not None and dweight is not None and dbias is not None
        return dx, dweight, dbias

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain_forward), "backward": (self.backward, self.plain_backward)}


def launches(dtype: torch.dtype) -> None:
    """Launch every width with a bias and a residual path's gradient, and one of GPT-2's widths also without a bias.

    The shortest and the longest rows are also launched without that gradient, for dx alone, and for the gradients of
    weight and bias alone.
    """
    for columns, with_bias in [(c, True) for c in WIDTHS] + [(768, False)]:
        x = torch.empty(8192, columns, dtype=dtype, device="meta")
        weight = torch.empty(columns, dtype=dtype, device="meta")
        _, mean, rstd = norm_forward(x, weight, weight if with_bias else None, EPS, centered=True)
        norm_backward(x, x, weight, mean, rstd, x, with_bias=with_bias)
        if columns in (WIDTHS[0], WIDTHS[-1]):
            norm_backward(x, x, weight, mean, rstd, with_bias=True)
            norm_backward(x, x, weight, mean, rstd, with_bias=True, with_weight=False)
            norm_backward(x, x, weight, mean, rstd, with_bias=True, with_x=False)


_SMALL = (
    LayerNormShape("bias", 63, 100, with_bias=True),
    LayerNormShape("no bias", 33, 64),
    LayerNormShape("several blocks", 33, 257, with_bias=True),
    LayerNormShape("large mean", 16, 63, with_bias=True, offset=300.0),
)

OPERATOR = Operator(
    name="layer_norm",
    launches=launches,
    cases=_SMALL,
    models=tuple(LayerNormShape(f"width {c}", (1 << 26) // c, c, with_bias=True) for c in (256, 768, 1600, 4096, 8192)),
    tiny=(LayerNormShape("tiny", 12, 40, with_bias=True),),
)
