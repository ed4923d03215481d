"""gemm: small comparisons for `tpfuse verify`, and launches that reach every row of its tables."""

from functools import partial

import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.activations import ACTIVATIONS, GATED
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_input_gradient import gemm_input_gradient
from tpfuse.kernels.gemm_weight_gradient import gemm_weight_gradient
from tpfuse.ops.gemm import gemm
from tpfuse.profile.case import Case
from tpfuse.testing.inputs import normal


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
        "gemm",
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
    for activation in ACTIVATIONS:
        width = n // 2 if activation in GATED else n
        gemm_input_gradient(empty(m, width), empty(n, k), empty(m, n), activation=activation)
        into, bias_into = (torch.empty(shape, device="meta") for shape in ((n, k), (n,)))
        gemm_weight_gradient(
            empty(m, width),
            empty(m, k),
            empty(m, n),
            activation=activation,
            with_bias=True,
            accumulate_into=into,
            accumulate_bias_into=bias_into,
        )
    for activation in ("gelu", "geglu"):
        width = n // 2 if activation in GATED else n
        gemm_forward(empty(16, k), empty(n, k), activation=activation)  # one token of 16 sequences
        gemm_input_gradient(empty(16, width), empty(n, k), empty(16, n), activation=activation)
        x, weight, grad = empty(m, k + 1), empty(n, k + 1), empty(m, width)  # rows that TMA cannot read
        gemm_forward(x, weight, activation=activation)
        gemm_input_gradient(grad, weight, empty(m, n), activation=activation)
        gemm_weight_gradient(grad, x, empty(m, n), activation=activation, with_bias=True)
    gemm_forward(empty(16, n), empty(768, n), empty(768), empty(16, 768), activation="gelu")  # few tiles: split
    gemm_weight_gradient(empty(m, 768), empty(m, 768), with_bias=True)
