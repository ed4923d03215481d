"""linear_cross_entropy: the loss of a linear layer's logits, chunk by chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.ops.linear_cross_entropy import chunks, linear_cross_entropy
from tpfuse.tools.operator import CallCost, Draw, Operator, Shape, Tensors


@dataclass(frozen=True)
class LinearCrossEntropyShape(Shape):
    """The sum of the losses, with or without weights [M], or their mean: x [M, K], weight [V, K], targets [M]."""

    name: str
    M: int
    V: int
    K: int
    weighted: bool = False
    mean: bool = False
    chunk_tokens: int | None = None

    def inputs(self, draw: Draw) -> Tensors:
        inputs = {
            "x": draw.normal(self.M, self.K),
            "weight": draw.normal(self.V, self.K, scale=self.K**-0.5 if self.mean else 1.0),
            "target": draw.whole(self.V, self.M) if self.mean else draw.whole(self.V + 1, self.M) - 1,
        }
        return inputs | ({"weights": draw.normal(self.M, dtype=torch.float32).abs()} if self.weighted else {})

    def function(self, x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.mean:
            weights = torch.full(target.shape, 1 / len(target), device=target.device)
        return linear_cross_entropy(x, weight, target, len(weight), weights=weights, chunk_tokens=self.chunk_tokens)[0]

    def reference(self, x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        loss = reference.linear_cross_entropy(x, weight, target, weights)
        return loss / len(target) if self.mean else loss

    def gradient(self, draw: Draw) -> Tensor:
        return draw.normal(dtype=torch.float32).abs() + 1

    def costs(self) -> dict[str, CallCost]:
        return {"both": CallCost(6 * self.M * self.V * self.K, 4 * (self.M * self.K + self.V * self.K))}


def launches(dtype: torch.dtype) -> None:
    """Launch losses and gradients for GPT-2's vocabulary, in two chunks and in one, and a 7B model's, unpadded."""
    for tokens, width, vocabulary in ((8192, 768, 50257), (4096, 768, 50257), (8192, 4096, 32000)):
        x, weight = (torch.empty(rows, width, dtype=dtype, device="meta") for rows in (tokens, vocabulary))
        target, weights = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.empty(tokens, device="meta")
        chunks(x, weight, target, weights, vocabulary, None, 4096, True, True, triton=True)


_SMALL = (
    LinearCrossEntropyShape("one chunk", 31, 100, 64, chunk_tokens=32),
    LinearCrossEntropyShape("chunks, weights", 63, 257, 32, weighted=True, chunk_tokens=32),
)

OPERATOR = Operator("linear_cross_entropy", launches, _SMALL)
