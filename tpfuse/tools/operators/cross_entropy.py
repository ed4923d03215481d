"""cross_entropy: the loss of each row of logits, and its gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_combine,
    cross_entropy_forward,
)
from tpfuse.ops.cross_entropy import IGNORE, TORCH_IGNORE, cross_entropy
from tpfuse.tools.operator import CallCost, Draw, Launchers, Operator, Outputs, Shape, Tensors


@dataclass(frozen=True)
class CrossEntropyShape(Shape):
    """The loss of logits [M, V], normal numbers times `scale`, for targets [M], some of which have no loss."""

    name: str
    M: int
    V: int
    scale: float = 3.0

    def inputs(self, draw: Draw) -> Tensors:
        target = draw.whole(self.V, self.M)
        every = max(self.M // 8, 4)
        target[::every], target[1::every] = IGNORE, TORCH_IGNORE
        return {"logits": draw.normal(self.M, self.V, scale=self.scale), "target": target}

    def function(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target, logits.shape[1], None)

    def reference(self, logits: Tensor, target: Tensor) -> Tensor:
        return reference.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)

    def gradient(self, draw: Draw) -> Tensor:
        return draw.normal(self.M, dtype=torch.float32)

    def costs(self) -> dict[str, CallCost]:
        logits = 2 * self.M * self.V
        return {
            "forward": CallCost(0.0, logits),
            "backward": CallCost(0.0, 2 * logits),
            "both": CallCost(0.0, 3 * logits),
        }

    def saved(self, inputs: Tensors) -> Tensors:
        logits = inputs["logits"].float()
        maximum = logits.amax(1)
        return {"normalizer": torch.stack([maximum, (logits - maximum.unsqueeze(1)).exp().sum(1)])}

    def launch(self, logits: Tensor, target: Tensor, **_: Tensor) -> Outputs:
        statistics = cross_entropy_forward(logits, target, 0)
        return (cross_entropy_combine(statistics.unsqueeze(0), target, self.V)[0],)

    def backward(self, logits: Tensor, target: Tensor, normalizer: Tensor, **_: Tensor) -> Outputs:
        """Return the gradient of the sum of all losses."""
        return (cross_entropy_backward(logits, target, 0, normalizer),)

    def plain_sum_backward(self, grad: Tensor, **tensors: Tensor) -> Outputs:
        return self.plain_backward(torch.ones_like(grad), **tensors)

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, self.plain_forward), "backward": (self.backward, self.plain_sum_backward)}


def launches(dtype: torch.dtype) -> None:
    """Launch rows of a small vocabulary, and of GPT-2's with and without padding, on one rank and on a shard."""
    target = torch.empty(4096, dtype=torch.int64, device="meta")
    scale = torch.empty(4096, device="meta")
    for width, stride in ((256, 256), (50257, 50257), (50257, 50272)):
        logits = torch.empty(4096, stride, dtype=dtype, device="meta")[:, :width]
        statistics = cross_entropy_forward(logits, target, 0)
        _, normalizer = cross_entropy_combine(statistics[None], target, width)
        cross_entropy_backward_(logits, target, 0, normalizer)
    cross_entropy_backward(torch.empty(4096, 50257, dtype=dtype, device="meta"), target, 0, normalizer, scale)
    cross_entropy_forward(torch.empty(4096, 12565, dtype=dtype, device="meta"), target, 37692)
    cross_entropy_combine(torch.empty(4, 3, 4096, device="meta"), target, 50257)


_SMALL = (
    CrossEntropyShape("vocabulary of 100", 63, 100, 1.0),
    CrossEntropyShape("vocabulary of 1000", 33, 1000, 1.0),
    CrossEntropyShape("large logits", 33, 257, 1e3),
)

OPERATOR = Operator(
    name="cross_entropy",
    launches=launches,
    cases=_SMALL,
    models=tuple(CrossEntropyShape(f"vocabulary {size}", 8192, size) for size in (50257, 32000, 1000)),
    tiny=(CrossEntropyShape("tiny", 12, 40),),
)
