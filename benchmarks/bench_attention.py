"""Time attention beside each backend of scaled_dot_product_attention, forward and backward.

cuDNN is the peer on compute capability 9.0 and 10.0: torch prefers it there, and so does tpfuse where it trains with
`kernels auto` (`tpfuse.ops.attention.chosen_attention`). The rows of tpfuse are always those of its Triton kernels.

q, k and v are in memory as a model's projection leaves them, [B, T, H, D] seen as [B, H, T, D], and so is the gradient
of the result. The result is compared for one head of keys and values and the queries that use it: all scores in float64
would take more memory than there is.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.candidates import Function, described
from benchmarks.harness import Bench, BenchCase, Built
from tpfuse.tools.operators.attention import AttentionShape

BACKENDS = {
    "SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
_LONGEST_MATH = 4096  # positions: this backend holds all scores


def _backend(name: str, shape: AttentionShape) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.Hk != shape.H)

    return run


def _build(shape: AttentionShape, bench: Bench) -> Built:
    def one_group(name: str, x: Tensor) -> Tensor:
        return x[:1, : 1 if name in "kv" else shape.H // shape.Hk]

    names = ["SDPA math"] if bench.interpreted else list(BACKENDS)
    if shape.T > _LONGEST_MATH:
        names.remove("SDPA math")
    peers = {name: _backend(name, shape) for name in names}
    return described(shape, bench, ("forward", "backward"), peers, narrow=one_group)


def _case(shape: AttentionShape, asked: bool = False) -> BenchCase:
    kind = "causal" if shape.causal else "full"
    name = f"{shape.name}, B {shape.B}, H {shape.H}/{shape.Hk}, T {shape.T}, D {shape.D}, {kind}"
    return BenchCase("attention", name, partial(_build, shape), asked)


def cases(tiny: bool) -> list[BenchCase]:
    """Return causal cases of head sizes 64 and 128 at 4k and 16k positions, 16k tokens each; then the models' own."""
    if tiny:
        sizes = [AttentionShape("tiny", 1, 2, 1, 40, 16), AttentionShape("tiny", 1, 2, 2, 40, 16, causal=False)]
        return [_case(x, True) for x in sizes]
    asked = [AttentionShape("asked", 16384 // t, 16, 16, t, d) for d in (64, 128) for t in (4096, 16384)]
    others = [
        AttentionShape("124m tp1", 8, 12, 12, 1024, 64),
        AttentionShape("1558m tp1", 8, 25, 25, 1024, 64),
        AttentionShape("7b tp1", 2, 32, 32, 4096, 128),
        AttentionShape("70b tp1", 2, 64, 8, 4096, 128),
        AttentionShape("70b tp8", 2, 8, 1, 4096, 128),
        AttentionShape("not causal", 4, 16, 16, 4096, 64, causal=False),
        AttentionShape("not causal", 4, 16, 16, 4096, 128, causal=False),
    ]
    return [*(_case(x, True) for x in asked), *(_case(x) for x in others)]
