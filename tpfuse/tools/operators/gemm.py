"""gemm: small comparisons for `tpfuse verify`, and launches that reach every row of its tables."""

from functools import partial

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activation_backward import activation_backward
from tpfuse.kernels.activations import ACTIVATIONS, GATED
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.ops.gemm import gemm
from tpfuse.testing.inputs import normal
from tpfuse.tools.operator import Case, Operator


def _inputs(names: str, dtype: torch.dtype) -> dict[str, Tensor]:
    m, n, k = 100, 96, 80
    tensors = {
        "x": normal(1, m, k, dtype=dtype),
        "weight": normal(2, n, k, dtype=dtype) / k**0.5,
        "bias": normal(3, n, dtype=dtype),
        "residual": normal(4, m, n, dtype=dtype),
    }
    return {name: tensors[name] for name in names.split()}


def _case(name: str, inputs: str, activation: str | None) -> Case:
    return Case(
        name,
        partial(gemm, activation=activation),
        partial(reference.linear, activation_name=activation),
        partial(_inputs, inputs),
    )


CASES = (
    _case("no activation, bias, residual", "x weight bias residual", None),
    _case("gelu, bias, residual", "x weight bias residual", "gelu"),
    _case("gelu_tanh", "x weight", "gelu_tanh"),
    _case("relu2, bias", "x weight bias", "relu2"),
    _case("swiglu", "x weight", "swiglu"),
    _case("geglu, bias", "x weight bias", "geglu"),
)


def launches(dtype: torch.dtype) -> None:
    """On meta tensors: every activation forward and backward, thin and large, aligned for TMA and not."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    m, n, k = 8192, 16384, 4096
    for activation in ACTIVATIONS:
        width = n // 2 if activation in GATED else n
        keep = activation is not None
        gemm_forward(
            empty(m, k), empty(n, k), empty(n), empty(m, width), activation=activation, keep_preactivation=keep
        )
        if activation is not None:
            activation_backward(empty(m, width), empty(m, n), activation, with_sums=True)
    for activation in ("gelu", "geglu"):
        gemm_forward(empty(16, k), empty(n, k), activation=activation)  # one token of 16 sequences
        gemm_forward(empty(m, k + 1), empty(n, k + 1), activation=activation)  # rows that TMA cannot read
    for activation in (None, "gelu_tanh"):  # wide tiles would leave multiprocessors idle
        gemm_forward(empty(4096, k), empty(1280, k), activation=activation, residual=empty(4096, 1280))
    activation_backward(empty(m, n), empty(m, n), "gelu_tanh")
    gemm_forward(empty(16, n), empty(768, n), empty(768), empty(16, 768), activation="gelu")  # few tiles: split


OPERATOR = Operator("gemm", launches, CASES)
