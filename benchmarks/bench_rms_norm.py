"""Time rms_norm beside F.rms_norm, eager and compiled, and Liger-Kernel's, forward and backward."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_layer_norm import norm_cases
from benchmarks.candidates import liger
from benchmarks.harness import BenchCase
from benchmarks.shapes import MODELS
from tpfuse.tools.operators.layer_norm import EPS
from tpfuse.tools.operators.rms_norm import RmsNormShape


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


_LIGER = liger("liger_rms_norm")


def _liger(x: Tensor, weight: Tensor) -> Tensor:
    return _LIGER(x, weight, EPS, in_place=False)


def cases(tiny: bool) -> list[BenchCase]:
    """Return cases of the widths of the models that have this norm."""
    models = [model for model in MODELS if model.gated]
    return norm_cases("rms_norm", tiny, models, RmsNormShape, _plain, _liger)
