"""cross_entropy beside F.cross_entropy and Liger-Kernel's, on bf16 logits, forward and both passes.

    python -m benchmarks.bench_cross_entropy --quick

The loss of each row is asked for, with every row's gradient its own. The result is compared on the first rows: all of
them in float64 would not fit beside the rest.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import Function, Operator, absent, compiled, fresh_compiler, installed
from benchmarks.harness import OURS, Case, Scale, Stage, Work, command
from benchmarks.shapes import TOKENS, model
from tpfuse.ops.cross_entropy import IGNORE, cross_entropy

EAGER, UPCAST, COMPILED = "F.cross_entropy", "F.cross_entropy in float32", "torch.compile in float32"
LIGER = "Liger-Kernel"
_COMPARED = 1024  # rows


def _ours(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, logits.shape[1], None)


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none").float()


def _upcast(logits: Tensor, target: Tensor) -> Tensor:
    wide = logits if logits.itemsize == 8 else logits.float()
    return F.cross_entropy(wide, target, ignore_index=IGNORE, reduction="none")


if installed("liger_kernel.transformers.functional"):
    from liger_kernel.transformers.functional import liger_cross_entropy

    def _liger(logits: Tensor, target: Tensor) -> Tensor:
        return liger_cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
else:
    _liger = absent("Liger-Kernel")


def _build(rows: int, width: int, stage: Stage) -> tuple[Callable[[], dict[str, str]], list[Work]]:
    def first(name: str, x: Tensor) -> Tensor:
        return x[:_COMPARED]

    fresh_compiler()
    functions: dict[str, Function] = {OURS: _ours, UPCAST: _upcast, EAGER: _eager, COMPILED: compiled(_upcast, stage)}
    if not stage.interpreted:
        functions[LIGER] = _liger
    target = stage.whole(width, rows)
    target[:: max(rows // 8, 1)] = IGNORE
    logits = 2 * rows * width
    operator = Operator(
        inputs={"logits": stage.normal(rows, width, scale=3.0), "target": target},
        grad=stage.normal(rows).float(),
        reference=_upcast,
        functions=functions,
        costs={"forward": (0.0, logits), "both": (0.0, 3 * logits)},
        narrow=first,
        memory=("both",),
    )
    return operator.check, operator.works()


def cases(scale: Scale) -> list[Case]:
    """Whole vocabularies, and one rank's slice of them."""
    if scale == "tiny":
        return [Case("cross_entropy", "tiny, 24 x 50", partial(_build, 24, 50), True)]
    gpt2, llama = model("124m").vocabulary, model("7b").vocabulary
    widths = {"gpt2 tp1": gpt2} if scale == "quick" else {"gpt2 tp1": gpt2, "gpt2 tp4": -(-gpt2 // 4), "7b tp1": llama}
    return [
        Case("cross_entropy", f"{name}, {TOKENS} x {width}", partial(_build, TOKENS, width))
        for name, width in widths.items()
    ]


if __name__ == "__main__":
    sys.exit(command("cross_entropy", cases))
