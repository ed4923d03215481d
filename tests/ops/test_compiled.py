"""Each operator compiles into one graph, which gives the results and gradients of the call without one, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.choices import Kernels
from tpfuse.ops.attention import attention
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.ops.gemm import gemm
from tpfuse.ops.layer_norm import layer_norm
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.ops.rms_norm import rms_norm
from tpfuse.switches import use
from tpfuse.testing.compare import evaluate
from tpfuse.testing.inputs import integers, normal

F32, BF16 = torch.float32, torch.bfloat16
TARGET = integers(3, 20, low=-1, high=29, dtype=torch.int64)
HEAD_ROWS, KEY = torch.arange(8).view(2, 4), torch.tensor(7)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attention(q, k, v, window=15, dropout_p=0.3, key=KEY, head_rows=HEAD_ROWS, return_lse=True)
    return torch.cat([out, lse.to(out.dtype).unsqueeze(-1)], dim=-1)


# A function of tensors, and their shapes.
OPERATORS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "gemm": (
        lambda x, weight, bias, residual: gemm(x, weight, bias, activation="gelu", residual=residual).square(),
        {"x": (3, 11, 36), "weight": (70, 36), "bias": (70,), "residual": (3, 11, 70)},
    ),
    "attention": (_attention, {"q": (2, 4, 40, 16), "k": (2, 2, 70, 16), "v": (2, 2, 70, 16)}),
    "cross_entropy": (lambda x: cross_entropy(x * 2, TARGET, 30, None).mean(), {"x": (20, 30)}),
    "linear_cross_entropy": (
        lambda x, weight: linear_cross_entropy(x * 2, weight, TARGET, 30, chunk_tokens=8)[0] / 20,
        {"x": (20, 16), "weight": (30, 16)},
    ),
    "layer_norm": (
        lambda *tensors: layer_norm(*tensors, 1e-5).square(),
        {"x": (7, 64), "weight": (64,), "bias": (64,)},
    ),
    "rms_norm": (
        lambda *tensors: rms_norm(*tensors, 1e-5).square(),
        {"x": (7, 64), "weight": (64,)},
    ),
}


FIRST = ("gemm", "linear_cross_entropy")


@pytest.mark.parametrize(
    ("operator", "name", "dtype"),
    [
        *((operator, "triton", F32) for operator in FIRST),
        *exhaustive(
            *((operator, "triton", F32) for operator in OPERATORS if not operator.startswith(("gemm", "linear")))
        ),
        *exhaustive(("attention", "torch", F32), ("linear_cross_entropy", "triton", BF16)),
    ],
)
def test_one_graph_gives_the_same(operator: str, name: Kernels, dtype: torch.dtype) -> None:
    function, shapes = OPERATORS[operator]
    inputs = {key: normal(seed, *shape, dtype=dtype) for seed, (key, shape) in enumerate(shapes.items())}

    def call(**tensors: Tensor) -> Tensor:
        return function(*tensors.values())

    torch._dynamo.reset()
    with use(kernels=name):
        grad = normal(9, *call(**inputs).shape)
        expected = evaluate(call, inputs, grad)
        found = evaluate(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs, grad)
    assert found.keys() == expected.keys() == {"out", *inputs}
    assert all(torch.equal(found[key], x) for key, x in expected.items())
