"""Time layer_norm beside F.layer_norm, eager and compiled, and Liger-Kernel's, forward and backward.

The norms only move memory, so that the share of the copy bandwidth is the figure. The tensors of the rows for the
figures have 256 MiB in bf16, several times any L2 cache, which would otherwise keep a part of the written data. The
other tensors have the tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import Function, compiled, described, fresh_compiler, liger
from benchmarks.harness import Bench, BenchCase, Built
from benchmarks.shapes import MODELS, TOKENS, LayerSizes
from tpfuse.tools.operators.layer_norm import EPS, LayerNormShape, NormShape

LARGE = 1 << 27  # elements


def norm_cases(
    operator: str,
    tiny: bool,
    models: Sequence[LayerSizes],
    shape: Callable[[str, int, int], NormShape],
    plain: Function,
    liger: Function,
) -> list[BenchCase]:
    """Return the cases of a norm over the widths of `models`. shape: a function of a name, rows and width."""

    def build(shape: NormShape, bench: Bench) -> Built:
        fresh_compiler()
        peers = {"eager": plain, "torch.compile": compiled(plain, bench)}
        if bench.device.type == "cuda":
            peers["Liger-Kernel"] = liger
        return described(shape, bench, ("forward", "backward"), peers)

    def case(name: str, rows: int, width: int, asked: bool) -> BenchCase:
        title = f"{name}, {rows} x {width}"
        return BenchCase(operator, title, partial(build, shape(name, rows, width)), asked, compiled=True)

    if tiny:
        return [case("tiny", 24, 48, True)]
    large = [case(model.name, LARGE // model.width, model.width, True) for model in models]
    return large + [case(model.name, TOKENS, model.width, False) for model in models]


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


_LIGER = liger("liger_layer_norm")


def _liger(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _LIGER(x, weight, bias, EPS)


def cases(tiny: bool) -> list[BenchCase]:
    """Return cases of GPT-2's largest width and of the larger models' widths."""
    shape = partial(LayerNormShape, with_bias=True)
    return norm_cases("layer_norm", tiny, MODELS[3:], shape, _plain, _liger)
