"""cross_entropy: comparisons and compilations."""

from functools import partial

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_combine,
    cross_entropy_forward,
)
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.testing.inputs import integers, normal
from tpfuse.tools.operator import Case, Operator


def _function(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, logits.shape[1], None)


def _reference(logits: Tensor, target: Tensor) -> Tensor:
    return reference.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)


def _inputs(rows: int, vocabulary: int, scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    target = integers(2, rows, low=-1, high=vocabulary - 1, dtype=torch.int64)
    return {"logits": normal(1, rows, vocabulary, dtype=dtype) * scale, "target": target}


CASES = tuple(
    Case(name, _function, _reference, partial(_inputs, *shape))
    for name, shape in {
        "vocabulary of 100": (63, 100, 1.0),
        "vocabulary of 1000": (33, 1000, 1.0),
        "large logits": (33, 257, 1e3),
    }.items()
)


def launches(dtype: torch.dtype) -> None:
    """Rows of a small vocabulary, of GPT-2's as they lie, and of padded ones; one rank and a shard."""
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


OPERATOR = Operator("cross_entropy", launches, CASES)
