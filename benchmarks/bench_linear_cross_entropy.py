"""linear_cross_entropy beside the same expression in torch and Liger-Kernel's: time and peak memory of both passes.

    python -m benchmarks.bench_linear_cross_entropy --quick

The peer keeps its logits in bf16 and lets F.cross_entropy read them as they are: a peer that makes float32 of them
first, as most training loops do, takes more memory; it has a row too. The result is compared on fewer rows, with the
whole vocabulary.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import Function, Operator, absent, installed
from benchmarks.harness import OURS, Case, Scale, Stage, Work, command
from benchmarks.shapes import TOKENS, model
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy

EAGER, UPCAST, LIGER = "F.cross_entropy(F.linear)", "the same, logits in float32", "Liger-Kernel"
_COMPARED = 2048  # rows


def _ours(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    mean = torch.full(target.shape, 1 / len(target), device=target.device)
    return linear_cross_entropy(x, weight, target, weight.shape[0], None, weights=mean)[0]


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target).float()


def _upcast(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits if logits.itemsize == 8 else logits.float(), target)


if installed("liger_kernel.transformers.functional"):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def _liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy(x, weight, target)
else:
    _liger = absent("Liger-Kernel")


def _operator(rows: int, vocabulary: int, width: int, stage: Stage) -> Operator:
    functions: dict[str, Function] = {OURS: _ours, EAGER: _eager, UPCAST: _upcast}
    if not stage.interpreted:
        functions[LIGER] = _liger
    return Operator(
        inputs={
            "x": stage.normal(rows, width),
            "weight": stage.normal(vocabulary, width, scale=width**-0.5),
            "target": stage.whole(vocabulary, rows),
        },
        grad=stage.normal().float().abs() + 1,
        reference=_upcast,
        functions=functions,
        costs={"both": (6 * rows * vocabulary * width, 4 * (rows * width + vocabulary * width))},
        memory=("both",),
    )


def _build(rows: int, vocabulary: int, width: int, stage: Stage) -> tuple[Callable[[], dict[str, str]], list[Work]]:
    compared = _operator(min(rows, _COMPARED), vocabulary, width, stage)
    return compared.check, _operator(rows, vocabulary, width, stage).works()


def cases(scale: Scale) -> list[Case]:
    """32k tokens with GPT-2's vocabulary; the larger models, and one rank's slice of theirs."""
    if scale == "tiny":
        return [Case("linear_cross_entropy", "tiny, 40 x 50 x 32", partial(_build, 40, 50, 32), True)]
    small, large, largest = (model(name) for name in ("124m", "7b", "70b"))
    shapes = {"124m tp1": (4 * TOKENS, small.vocabulary, small.width)}
    if scale == "all":
        shapes |= {
            "7b tp1": (TOKENS, large.vocabulary, large.width),
            "70b tp8": (TOKENS, largest.vocabulary // 8, largest.width),
        }
    return [
        Case("linear_cross_entropy", f"{name}, {m} x {v} x {k}", partial(_build, m, v, k), name == "124m tp1")
        for name, (m, v, k) in shapes.items()
    ]


if __name__ == "__main__":
    sys.exit(command("linear_cross_entropy", cases))
