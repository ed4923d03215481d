"""Time operators beside named peers: products, attention, norms and losses. CASES has the cases of all benchmarks.

gemm: the models' products with bias and activation. The peers compute the same expression: `F.linear` and the
activation as torch runs them one after the other, `torch._addmm_activation` (cuBLASLt's epilogue, gelu_tanh only, not
differentiable), and torch.compile with max-autotune. Without bias and activation the peer is cuBLAS itself.
Max-autotune tries dozens of kernels for each product, so its training pass, which has three products, and gelu by erf
are measured at one shape.

attention: the peers are the backends of scaled_dot_product_attention. cuDNN is what torch prefers on compute capability
9.0 and 10.0, and so does tpfuse with `kernels auto` (`tpfuse.ops.attention.chosen_attention`). q, k, v and the gradient
are in memory as a model's projection leaves them, [B, T, H, D] seen as [B, H, T, D]. One head of keys and values and
the queries that use it are compared: all scores in float64 would take more memory than there is.

Norms only move memory, so that the share of the copy bandwidth is the figure. The tensors of the rows for the figures
have 256 MiB in bf16, several times any L2 cache, which would otherwise keep a part of the written data.

cross_entropy: the loss of each row is requested, and every row has its own gradient; the first rows are compared.
linear_cross_entropy: the peer keeps its logits in bf16, and F.cross_entropy reads them in that type. A peer that first
converts them to float32, as most training loops do, takes more memory; it has a row too. The result is compared on
fewer rows, with the whole vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import bench_adamw, bench_carried_attention, bench_overlapped_gemm
from benchmarks.candidates import Function, described, liger
from benchmarks.harness import BenchCase
from benchmarks.shapes import GPT2, LLAMA_7B, LLAMA_70B, MODELS, TENSOR_PARALLEL, TOKENS, LayerSizes, layers
from tpfuse.ops.cross_entropy import as_torch
from tpfuse.tools.operator import Draw, Shape, Tensors
from tpfuse.tools.operators.attention import AttentionShape
from tpfuse.tools.operators.cross_entropy import CrossEntropyShape
from tpfuse.tools.operators.gemm import GemmShape
from tpfuse.tools.operators.layer_norm import EPS, LayerNormShape, NormShape
from tpfuse.tools.operators.linear_cross_entropy import LinearCrossEntropyShape
from tpfuse.tools.operators.rms_norm import RmsNormShape

LIGER = "Liger-Kernel"
ADDMM, COMPILED = "_addmm_activation", "torch.compile max-autotune"
# The figures are computed from these shapes: plain, and with bias and each gelu. They are layers of GPT-2 and Llama.
ASKED = ("7b tp4 up", "1558m tp1 up", "70b tp8 up", "7b tp1 proj")
TRAINED = "7b tp4 up"  # torch.compile's training pass is measured at this shape too
LARGE = 1 << 27  # elements
BACKENDS = {
    "SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
_LONGEST_MATH = 4096  # positions: this backend holds all scores


def _case(operator: str, name: str, asked: bool, shape: Shape, *modes: str, **options: Any) -> BenchCase:
    """Return a case that compares a shape with peers. options: those of `benchmarks.candidates.described`."""
    build = partial(described, shape, modes=modes, **options)
    return BenchCase(operator, name, build, asked, compiled=bool(options.get("compiled")))


def _addmm_activation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._addmm_activation(bias, x, weight.T, use_gelu=True)


def _product(
    name: str, M: int, N: int, K: int, activation: str | None, compile_for: str = "", asked: bool = False
) -> BenchCase:
    """Return a case of gemm. compile_for: "", "inference" or "training"."""
    title = f"{name}, {M} x {N} x {K}"
    if activation is None:
        plain = GemmShape(name, M, N, K, None, terms=())
        return _case("gemm", f"{title}, plain", asked, plain, "inference", "backward", peers={"F.linear": F.linear})
    shape, modes = GemmShape(name, M, N, K, activation), ("inference", "forward", "backward")
    return _case(
        "gemm", f"{title}, bias, {activation}", asked, shape, *modes,
        peers={"F.linear + activation": shape.reference},
        on_gpu={ADDMM: _addmm_activation} if activation == "gelu_tanh" else {},
        compiled={COMPILED: (shape.reference, "max-autotune-no-cudagraphs")} if compile_for else {},
        forward_only=(ADDMM,) if compile_for == "training" else (ADDMM, COMPILED),
    )  # fmt: skip


def gemm(tiny: bool) -> list[BenchCase]:
    """Return the cases of the figures, then each distinct product of the models with its layer's activation."""
    if tiny:
        sizes = ("tiny", 48, 64, 32)
        wanted = ((None, ""), ("gelu_tanh", "training"), ("swiglu", "inference"))
        return [_product(*sizes, *x, asked=True) for x in wanted]
    named = {
        f"{model.name} tp{tp} {layer}": sizes
        for model in MODELS
        for tp in TENSOR_PARALLEL
        for layer, *sizes in layers(model, tp)
    }
    chosen_cases = []
    for activation in (None, "gelu_tanh", "gelu"):
        for name in ASKED:
            compile_for = ""
            if activation == "gelu_tanh" or (activation and name == TRAINED):
                compile_for = "training" if (activation, name) == ("gelu_tanh", TRAINED) else "inference"
            chosen_cases.append(_product(name, TOKENS, *named[name][:2], activation, compile_for, True))
    distinct = {tuple(sizes): name for name, sizes in reversed(named.items())}  # the first name of each
    others = [_product(distinct[*sizes], TOKENS, *sizes) for name, sizes in named.items() if distinct[*sizes] == name]
    return chosen_cases + [case for case in others if case.name not in {x.name for x in chosen_cases}]


def _backend(name: str, shape: AttentionShape) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.Hk != shape.H)

    return run


def attention(tiny: bool) -> list[BenchCase]:
    """Return causal cases of head sizes 64 and 128 at 4k and 16k positions, 16k tokens each; then the models' own."""

    def case(shape: AttentionShape, asked: bool) -> BenchCase:
        def one_group(name: str, x: Tensor) -> Tensor:
            return x[:1, : 1 if name in "kv" else shape.H // shape.Hk]

        *on_gpu, math = BACKENDS
        kind = "causal" if shape.causal else "full"
        name = f"{shape.name}, B {shape.B}, H {shape.H}/{shape.Hk}, T {shape.T}, D {shape.D}, {kind}"
        return _case(
            "attention", name, asked, shape, "forward", "backward",
            on_gpu={name: _backend(name, shape) for name in on_gpu},
            peers={math: _backend(math, shape)} if shape.T <= _LONGEST_MATH else {},
            narrow=one_group,
        )  # fmt: skip

    if tiny:
        sizes = [AttentionShape("tiny", 1, 2, 1, 40, 16), AttentionShape("tiny", 1, 2, 2, 40, 16, causal=False)]
        return [case(x, True) for x in sizes]
    chosen = [AttentionShape("asked", 16384 // t, 16, 16, t, d) for d in (64, 128) for t in (4096, 16384)]
    others = [
        AttentionShape("124m tp1", 8, 12, 12, 1024, 64),
        AttentionShape("1558m tp1", 8, 25, 25, 1024, 64),
        AttentionShape("7b tp1", 2, 32, 32, 4096, 128),
        AttentionShape("70b tp1", 2, 64, 8, 4096, 128),
        AttentionShape("70b tp8", 2, 8, 1, 4096, 128),
        AttentionShape("not causal", 4, 16, 16, 4096, 64, causal=False),
        AttentionShape("not causal", 4, 16, 16, 4096, 128, causal=False),
    ]
    return [*(case(x, True) for x in chosen), *(case(x, False) for x in others)]


def _norms(
    operator: str,
    models: Sequence[LayerSizes],
    shape: Callable[[str, int, int], NormShape],
    plain: Function,
    liger_norm: Function,
    tiny: bool,
) -> list[BenchCase]:
    """Return the cases of a norm over the widths of `models`. shape: a function of a name, rows and width."""

    def case(name: str, rows: int, width: int, asked: bool) -> BenchCase:
        return _case(
            operator, f"{name}, {rows} x {width}", asked, shape(name, rows, width), "forward", "backward",
            peers={"eager": plain}, compiled={"torch.compile": (plain, None)}, on_gpu={LIGER: liger_norm},
        )  # fmt: skip

    if tiny:
        return [case("tiny", 24, 48, True)]
    large = [case(model.name, LARGE // model.width, model.width, True) for model in models]
    return large + [case(model.name, TOKENS, model.width, False) for model in models]


def layer_norm(tiny: bool) -> list[BenchCase]:
    """Return cases of GPT-2's largest width and of the larger models' widths."""

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)

    shape = partial(LayerNormShape, with_bias=True)
    return _norms("layer_norm", (GPT2[-1], LLAMA_7B, LLAMA_70B), shape, plain, liger("liger_layer_norm", EPS), tiny)


def rms_norm(tiny: bool) -> list[BenchCase]:
    """Return cases of the widths of the models that have this norm."""

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    by_liger = liger("liger_rms_norm", EPS, in_place=False)
    return _norms("rms_norm", (LLAMA_7B, LLAMA_70B), RmsNormShape, plain, by_liger, tiny)


class _ForPeers(CrossEntropyShape):
    """Targets that all candidates can ignore: peers ignore -100 by default, and one value alone."""

    def inputs(self, draw: Draw) -> Tensors:
        inputs = super().inputs(draw)
        return {**inputs, "target": as_torch(inputs["target"])}


def cross_entropy(tiny: bool) -> list[BenchCase]:
    """Return cases of whole vocabularies, and of one rank's slice of them."""

    def eager(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none").float()

    def upcast(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits if logits.itemsize == 8 else logits.float(), target, reduction="none")

    def case(name: str, rows: int, width: int, asked: bool = False) -> BenchCase:
        return _case(
            "cross_entropy", f"{name}, {rows} x {width}", asked, _ForPeers(name, rows, width), "forward", "both",
            peers={"F.cross_entropy in float32": upcast, "F.cross_entropy": eager},
            compiled={"torch.compile in float32": (upcast, None)},
            on_gpu={LIGER: liger("liger_cross_entropy", reduction="none")},
            narrow=lambda _, x: x[:1024],
            memory=("both",),
        )  # fmt: skip

    if tiny:
        return [case("tiny", 24, 50, True)]
    gpt2 = GPT2[0].vocabulary
    widths = {"gpt2 tp1": gpt2, "gpt2 tp4": -(-gpt2 // 4), "7b tp1": LLAMA_7B.vocabulary}
    return [case(name, TOKENS, width) for name, width in widths.items()]


def linear_cross_entropy(tiny: bool) -> list[BenchCase]:
    """Return 32k tokens with GPT-2's vocabulary; the larger models, and one rank's slice of their vocabulary."""

    def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target).float()

    def upcast(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return F.cross_entropy(logits if logits.itemsize == 8 else logits.float(), target)

    def case(name: str, rows: int, vocabulary: int, width: int, asked: bool) -> BenchCase:
        shape = LinearCrossEntropyShape(name, rows, vocabulary, width, mean=True)
        return _case(
            "linear_cross_entropy", f"{name}, {rows} x {vocabulary} x {width}", asked, shape, "both",
            peers={"F.cross_entropy(F.linear)": eager, "the same, logits in float32": upcast},
            on_gpu={LIGER: liger("liger_fused_linear_cross_entropy")},
            compared=replace(shape, M=min(rows, 2048)),
            memory=("both",),
        )  # fmt: skip

    if tiny:
        return [case("tiny", 40, 50, 32, True)]
    small = case("124m tp1", 4 * TOKENS, GPT2[0].vocabulary, GPT2[0].width, True)
    large = case("7b tp1", TOKENS, LLAMA_7B.vocabulary, LLAMA_7B.width, False)
    return [small, large, case("70b tp8", TOKENS, LLAMA_70B.vocabulary // 8, LLAMA_70B.width, False)]


CASES: dict[str, Callable[[bool], list[BenchCase]]] = {
    "adamw": bench_adamw.adamw,
    "attention": attention,
    "carried_attention": bench_carried_attention.cases,
    "cross_entropy": cross_entropy,
    "gemm": gemm,
    "layer_norm": layer_norm,
    "linear_cross_entropy": linear_cross_entropy,
    "overlapped_gemm": bench_overlapped_gemm.cases,
    "rms_norm": rms_norm,
    "sharded_adamw": bench_adamw.sharded_adamw,
}
