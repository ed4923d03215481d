"""The description of an operator, which `tpfuse verify` and the compile gate read."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A small comparison of an operator with its reference.

    name: what the table of `tpfuse verify` shows ("gelu_tanh, residual"). function: is called with the inputs by
    keyword under `kernels("triton")` and returns one tensor; reference: the same in plain torch. inputs: CPU tensors
    of a dtype, by name; those of a floating-point type get gradients.
    """

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[torch.dtype], Tensors]


@dataclass(frozen=True)
class Operator:
    """An operator.

    launches: calls the launchers on meta tensors of a dtype, so that they choose every row of the operator's
    configurations and reach every variant of its kernels. cases: what `tpfuse verify` compares.
    """

    name: str
    launches: Callable[[torch.dtype], None]
    cases: tuple[Case, ...] = ()
