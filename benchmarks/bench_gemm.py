"""Time gemm beside cuBLASLt through torch, eager and compiled: the models' products with bias and activation.

The peers compute the same expression: `F.linear` and the activation as torch runs them one after the other,
`torch._addmm_activation` (cuBLASLt's epilogue, gelu_tanh only, not differentiable), and torch.compile with
max-autotune, which may write a Triton kernel for it. Without bias and activation the peer is cuBLAS itself.
Max-autotune tries dozens of kernels for each product. So its training pass, which has three products, and gelu by erf
are measured at one shape.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import Function, compiled, described, fresh_compiler
from benchmarks.harness import Bench, BenchCase, Built
from benchmarks.shapes import LayerProduct, products
from tpfuse.tools.operators.gemm import GemmShape

EAGER, ADDMM, COMPILED, CUBLAS = "F.linear + activation", "_addmm_activation", "torch.compile max-autotune", "F.linear"

# The figures are computed from these shapes: plain, and with bias and each gelu. They are layers of GPT-2 and Llama.
ASKED = ("7b tp4 up", "1558m tp1 up", "70b tp8 up", "7b tp1 proj")
TRAINED = "7b tp4 up"  # torch.compile's training pass is measured at this shape too


def _addmm_activation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.T, use_gelu=True)


def _plain(shape: GemmShape, bench: Bench) -> Built:
    return described(shape, bench, ("inference", "backward"), {CUBLAS: F.linear})


def _fused(shape: GemmShape, compile_for: str, bench: Bench) -> Built:
    """Build the case with bias and activation. compile_for: "", "inference" or "training"."""
    peers: dict[str, Function | None] = {EAGER: shape.reference}
    if shape.activation == "gelu_tanh" and bench.device.type == "cuda":
        peers[ADDMM] = _addmm_activation
    if compile_for:
        fresh_compiler()
        peers[COMPILED] = compiled(shape.reference, bench, "max-autotune-no-cudagraphs")
    forward_only = (ADDMM,) if compile_for == "training" else (ADDMM, COMPILED)
    return described(shape, bench, ("inference", "forward", "backward"), peers, forward_only=forward_only)


def _case(product: LayerProduct, activation: str | None, compile_for: str, asked: bool) -> BenchCase:
    sizes = product.names[0], product.M, product.N, product.K, activation
    if activation is None:
        return BenchCase("gemm", f"{product}, plain", partial(_plain, GemmShape(*sizes, terms=())), asked)
    name, build = f"{product}, bias, {activation}", partial(_fused, GemmShape(*sizes), compile_for)
    return BenchCase("gemm", name, build, asked, compiled=bool(compile_for))


def cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of the figures, then each product once with its layer's activation."""
    if tiny:
        product = LayerProduct(("tiny",), 48, 64, 32, None)
        return [_case(product, *x, True) for x in ((None, ""), ("gelu_tanh", "training"), ("swiglu", "inference"))]
    all_products = products()
    asked = [replace(x, names=(name,)) for name in ASKED for x in all_products if name in x.names]
    chosen_cases = [_case(x, None, "", True) for x in asked]
    for activation in ("gelu_tanh", "gelu"):
        for x in asked:
            compile_for = "inference" if activation == "gelu_tanh" or x.names == (TRAINED,) else ""
            if activation == "gelu_tanh" and x.names == (TRAINED,):
                compile_for = "training"
            chosen_cases.append(_case(x, activation, compile_for, True))
    others = [_case(x, x.activation, "", False) for x in all_products]
    return chosen_cases + [case for case in others if case.name not in {x.name for x in chosen_cases}]
