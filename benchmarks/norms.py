"""The cases of the norms. The norms only move memory, so that the share of the copy bandwidth is the figure.

The tensors of the rows for the figures have 256 MiB in bf16, several times any L2 cache, which would otherwise keep a
part of the written data. The other tensors have the tokens of a micro-batch.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.candidates import Function, compiled, described, fresh_compiler
from benchmarks.harness import Bench, BenchCase, Built, Scale
from benchmarks.shapes import MODELS, TOKENS, LayerSizes
from tpfuse.tools.operators.layer_norm import NormShape

LARGE = 1 << 27  # elements
EAGER, COMPILED, LIGER = "eager", "torch.compile", "Liger-Kernel"


def _build(shape: NormShape, plain: Function, liger: Function, bench: Bench) -> Built:
    fresh_compiler()
    peers = {EAGER: plain, COMPILED: compiled(plain, bench)}
    if bench.device.type == "cuda":
        peers[LIGER] = liger
    return described(shape, bench, ("forward", "backward"), peers)


def norm_cases(
    operator: str,
    scale: Scale,
    models: tuple[LayerSizes, ...],
    shape: Callable[[str, int, int], NormShape],
    plain: Function,
    liger: Function,
) -> list[BenchCase]:
    """Return the cases of a norm over the widths of `models`. shape: a function of a name, rows and width."""

    def case(name: str, rows: int, width: int, asked: bool) -> BenchCase:
        return BenchCase(
            operator, f"{name}, {rows} x {width}", partial(_build, shape(name, rows, width), plain, liger), asked
        )

    if scale == "tiny":
        return [case("tiny", 24, 48, True)]
    large = [case(model.name, LARGE // model.width, model.width, True) for model in models]
    if scale == "quick":
        return large[-1:]
    return large + [case(model.name, TOKENS, model.width, False) for model in models]


GPT2 = tuple(model for model in MODELS if not model.gated)
LLAMA = tuple(model for model in MODELS if model.gated)
