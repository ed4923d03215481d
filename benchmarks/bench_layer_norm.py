"""Time layer_norm beside F.layer_norm, eager and compiled, and Liger-Kernel's, forward and backward.

python -m benchmarks.bench_layer_norm --quick
"""

import sys
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import liger
from benchmarks.harness import BenchCase, Scale, command
from benchmarks.norms import GPT2, LLAMA, norm_cases
from tpfuse.tools.operators.layer_norm import EPS, LayerNormShape


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


_LIGER = liger("liger_layer_norm")


def _liger(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _LIGER(x, weight, bias, EPS)


def cases(scale: Scale) -> list[BenchCase]:
    """Return cases of GPT-2's largest width and of the larger models' widths."""
    return norm_cases(
        "layer_norm", scale, (*GPT2[-1:], *LLAMA), partial(LayerNormShape, terms=("bias",)), _plain, _liger
    )


if __name__ == "__main__":
    sys.exit(command("layer_norm", cases))
