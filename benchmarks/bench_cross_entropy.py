"""Time cross_entropy beside F.cross_entropy and Liger-Kernel's, on bf16 logits: the forward pass, and both passes.

The loss of each row is requested, and every row has its own gradient. The result is compared on the first rows: all
rows in float64 would not fit in memory beside the rest.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import Function, compiled, described, fresh_compiler, liger
from benchmarks.harness import Bench, BenchCase, Built
from benchmarks.shapes import TOKENS, model
from tpfuse.ops.cross_entropy import as_torch
from tpfuse.tools.operator import Draw, Tensors
from tpfuse.tools.operators.cross_entropy import CrossEntropyShape

EAGER, UPCAST, COMPILED = "F.cross_entropy", "F.cross_entropy in float32", "torch.compile in float32"
LIGER = "Liger-Kernel"
_COMPARED = 1024  # rows


class _ForPeers(CrossEntropyShape):
    """Targets that all candidates can ignore: peers ignore -100 by default, and one value alone."""

    def inputs(self, draw: Draw) -> Tensors:
        inputs = super().inputs(draw)
        return {**inputs, "target": as_torch(inputs["target"])}


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none").float()


def _upcast(logits: Tensor, target: Tensor) -> Tensor:
    wide = logits if logits.itemsize == 8 else logits.float()
    return F.cross_entropy(wide, target, reduction="none")


_LIGER = liger("liger_cross_entropy")


def _liger(logits: Tensor, target: Tensor) -> Tensor:
    return _LIGER(logits, target, reduction="none")


def _build(shape: CrossEntropyShape, bench: Bench) -> Built:
    def first(name: str, x: Tensor) -> Tensor:
        return x[:_COMPARED]

    fresh_compiler()
    peers: dict[str, Function | None] = {UPCAST: _upcast, EAGER: _eager, COMPILED: compiled(_upcast, bench)}
    if not bench.interpreted:
        peers[LIGER] = _liger
    return described(shape, bench, ("forward", "both"), peers, narrow=first, memory=("both",))


def _case(name: str, rows: int, width: int, asked: bool = False) -> BenchCase:
    shape = _ForPeers(name, rows, width)
    return BenchCase("cross_entropy", f"{name}, {rows} x {width}", partial(_build, shape), asked, compiled=True)


def cases(tiny: bool) -> list[BenchCase]:
    """Return cases of whole vocabularies, and of one rank's slice of them."""
    if tiny:
        return [_case("tiny", 24, 50, True)]
    gpt2, llama = model("124m").vocabulary, model("7b").vocabulary
    widths = {"gpt2 tp1": gpt2, "gpt2 tp4": -(-gpt2 // 4), "7b tp1": llama}
    return [_case(name, TOKENS, width) for name, width in widths.items()]
