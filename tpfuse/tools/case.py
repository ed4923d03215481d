"""One comparison of an operator with its plain meaning."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """An operator of `tpfuse.ops` on small inputs beside its reference.

    operator, name: what the table shows ("gemm", "gelu_tanh, residual"). function: called with the inputs by
    keyword, returns one tensor and runs under `kernels("triton")`; reference: the same from
    `tpfuse.kernels.reference`. inputs: CPU tensors of a dtype, by name; those that are floats get gradients.
    """

    operator: str
    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[torch.dtype], dict[str, Tensor]]
