"""Time rms_norm beside F.rms_norm, eager and compiled, and Liger-Kernel's, forward and backward.

python -m benchmarks.bench_rms_norm --quick
"""

import sys

import torch.nn.functional as F
from torch import Tensor

from benchmarks.candidates import liger
from benchmarks.harness import BenchCase, Scale, command
from benchmarks.norms import LLAMA, norm_cases
from tpfuse.tools.operators.layer_norm import EPS
from tpfuse.tools.operators.rms_norm import RmsNormShape


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


_LIGER = liger("liger_rms_norm")


def _liger(x: Tensor, weight: Tensor) -> Tensor:
    return _LIGER(x, weight, EPS, in_place=False)


def cases(scale: Scale) -> list[BenchCase]:
    """Return cases of the widths of the models that have this norm."""
    return norm_cases("rms_norm", scale, LLAMA, RmsNormShape, _plain, _liger)


if __name__ == "__main__":
    sys.exit(command("rms_norm", cases))
