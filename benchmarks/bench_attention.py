"""attention beside scaled_dot_product_attention in each of its backends, forward and backward.

    python -m benchmarks.bench_attention --quick

cuDNN is the peer on compute capability 9.0 and 10.0: torch takes it first there, and so does tpfuse where it trains
with `kernels auto` (`tpfuse.ops.attention.chosen_attention`). What is timed as ours are the Triton kernels.

q, k and v lie in memory as a model's projection leaves them, [B, T, H, D] seen as [B, H, T, D], and so does the
gradient of the result. The result is compared for one head of keys and values and the queries that use it: all scores
in float64 would take more memory than there is.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.contenders import Function, Operator
from benchmarks.harness import OURS, Case, Scale, Stage, Work, command
from tpfuse.kernels import reference
from tpfuse.ops.attention import attention

BACKENDS = {
    "SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
_LONGEST_MATH = 4096  # positions: it holds all scores


@dataclass(frozen=True)
class Heads:
    """B sequences of T positions, H heads of size D of which H / Hk share keys and values."""

    name: str
    B: int
    H: int
    Hk: int
    T: int
    D: int
    causal: bool = True

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.name}, B {self.B}, H {self.H}/{self.Hk}, T {self.T}, D {self.D}, {kind}"


def _backend(name: str, heads: Heads) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=heads.causal, enable_gqa=heads.Hk != heads.H)

    return run


def _reference(heads: Heads) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, causal=heads.causal)[0]

    return run


def _build(heads: Heads, stage: Stage) -> tuple[Callable[[], dict[str, str]], list[Work]]:
    def draw(count: int) -> Tensor:
        return stage.normal(heads.B, heads.T, count, heads.D).transpose(1, 2)

    def one_group(name: str, x: Tensor) -> Tensor:
        return x[:1, : 1 if name in "kv" else heads.H // heads.Hk]

    names = ["SDPA math"] if stage.interpreted else list(BACKENDS)
    if heads.T > _LONGEST_MATH:
        names.remove("SDPA math")
    pairs = heads.T * (heads.T + 1) / 2 if heads.causal else heads.T**2
    flops = 4 * heads.B * heads.H * heads.D * pairs  # two products forward, five backward
    rows = heads.B * heads.T
    of_q, of_kv, of_lse = 2 * rows * heads.H * heads.D, 4 * rows * heads.Hk * heads.D, 4 * rows * heads.H
    operator = Operator(
        inputs={"q": draw(heads.H), "k": draw(heads.Hk), "v": draw(heads.Hk)},
        grad=draw(heads.H),
        reference=_reference(heads),
        functions={OURS: partial(attention, causal=heads.causal)} | {name: _backend(name, heads) for name in names},
        costs={
            "forward": (flops, 2 * of_q + of_kv + of_lse),
            "backward": (2.5 * flops, 4 * of_q + 2 * of_kv + of_lse),
        },
        narrow=one_group,
    )
    return operator.check, operator.works()


def cases(scale: Scale) -> list[Case]:
    """Causal with head sizes 64 and 128 and 4k and 16k positions, of 16k tokens each; then the models' own."""
    if scale == "tiny":
        sizes = [Heads("tiny", 1, 2, 1, 40, 16), Heads("tiny", 1, 2, 2, 40, 16, causal=False)]
        return [Case("attention", str(x), partial(_build, x), True) for x in sizes]
    asked = [Heads("asked", 16384 // t, 16, 16, t, d) for d in (64, 128) for t in (4096, 16384)]
    made = [Case("attention", str(heads), partial(_build, heads), True) for heads in asked]
    if scale == "all":
        others = [
            Heads("124m tp1", 8, 12, 12, 1024, 64),
            Heads("1558m tp1", 8, 25, 25, 1024, 64),
            Heads("7b tp1", 2, 32, 32, 4096, 128),
            Heads("70b tp1", 2, 64, 8, 4096, 128),
            Heads("70b tp8", 2, 8, 1, 4096, 128),
            Heads("not causal", 4, 16, 16, 4096, 64, causal=False),
            Heads("not causal", 4, 16, 16, 4096, 128, causal=False),
        ]
        made += [Case("attention", str(heads), partial(_build, heads)) for heads in others]
    return made


if __name__ == "__main__":
    sys.exit(command("attention", cases))
