"""linear_cross_entropy: comparisons and compilations."""

from functools import partial

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.ops.linear_cross_entropy import chunks, linear_cross_entropy
from tpfuse.testing.inputs import integers, normal
from tpfuse.tools.operator import Case, Operator


def _function(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    return linear_cross_entropy(x, weight, target, len(weight), weights=weights, chunk_tokens=32)[0]


def _inputs(rows: int, width: int, vocabulary: int, weighted: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = {
        "x": normal(1, rows, width, dtype=dtype),
        "weight": normal(2, vocabulary, width, dtype=dtype),
        "target": integers(3, rows, low=-1, high=vocabulary - 1, dtype=torch.int64),
    }
    return inputs | ({"weights": normal(4, rows).abs()} if weighted else {})


CASES = tuple(
    Case(name, _function, reference.linear_cross_entropy, partial(_inputs, *arguments))
    for name, arguments in {
        "one chunk": (31, 64, 100, False),
        "chunks, weights": (63, 32, 257, True),
    }.items()
)


def launches(dtype: torch.dtype) -> None:
    """GPT-2's vocabulary in two chunks and in one, and a 7B model's that needs no padding; gradients of both."""
    for tokens, width, vocabulary in ((8192, 768, 50257), (4096, 768, 50257), (8192, 4096, 32000)):
        x, weight = (torch.empty(rows, width, dtype=dtype, device="meta") for rows in (tokens, vocabulary))
        target, weights = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.empty(tokens, device="meta")
        chunks(x, weight, target, weights, vocabulary, None, 4096, True, True, triton=True)


OPERATOR = Operator("linear_cross_entropy", launches, CASES)
