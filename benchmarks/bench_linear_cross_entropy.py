"""Time linear_cross_entropy beside the same expression in torch and Liger-Kernel's: both passes and peak memory.

The peer keeps its logits in bf16, and F.cross_entropy reads them in that type. A peer that first converts them to
float32, as most training loops do, takes more memory; it has a row too. The result is compared on fewer rows, with the
whole vocabulary.
"""

from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import Function, described, liger
from benchmarks.harness import Bench, BenchCase, Built
from benchmarks.shapes import TOKENS, model
from tpfuse.tools.operators.linear_cross_entropy import LinearCrossEntropyShape

EAGER, UPCAST, LIGER = "F.cross_entropy(F.linear)", "the same, logits in float32", "Liger-Kernel"
_COMPARED = 2048  # rows


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target).float()


def _upcast(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits if logits.itemsize == 8 else logits.float(), target)


_LIGER = liger("liger_fused_linear_cross_entropy")


def _liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _LIGER(x, weight, target)


def _build(shape: LinearCrossEntropyShape, bench: Bench) -> Built:
    peers: dict[str, Function] = {EAGER: _eager, UPCAST: _upcast}
    if bench.device.type == "cuda":
        peers[LIGER] = _liger
    check, _ = described(replace(shape, M=min(shape.M, _COMPARED)), bench, (), peers)
    _, works = described(shape, bench, ("both",), peers, memory=("both",))
    return check, works


def _case(name: str, rows: int, vocabulary: int, width: int, asked: bool) -> BenchCase:
    shape = LinearCrossEntropyShape(name, rows, vocabulary, width, mean=True)
    return BenchCase("linear_cross_entropy", f"{name}, {rows} x {vocabulary} x {width}", partial(_build, shape), asked)


def cases(tiny: bool) -> list[BenchCase]:
    """Return 32k tokens with GPT-2's vocabulary; the larger models, and one rank's slice of their vocabulary."""
    if tiny:
        return [_case("tiny", 40, 50, 32, True)]
    small, large, largest = (model(name) for name in ("124m", "7b", "70b"))
    shapes = {
        "124m tp1": (4 * TOKENS, small.vocabulary, small.width),
        "7b tp1": (TOKENS, large.vocabulary, large.width),
        "70b tp8": (TOKENS, largest.vocabulary // 8, largest.width),
    }
    return [_case(name, *sizes, asked=name == "124m tp1") for name, sizes in shapes.items()]
