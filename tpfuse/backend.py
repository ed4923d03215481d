"""Two switches for the whole process: which kernels compute, and how ranks communicate.

| kernels | CUDA tensors | CPU tensors                              |
|---------|--------------|------------------------------------------|
| auto    | Triton       | torch                                    |
| triton  | Triton       | Triton, interpreted (TRITON_INTERPRET=1) |
| torch   | torch        | torch                                    |

torch always computes on float64 tensors, and it always computes matrix products without an activation or a residual: on
GPUs it calls cuBLAS for them. With `auto` a GPU trains with torch's attention, which may be that of cuDNN, unless an
option needs tpfuse's own (`tpfuse.ops.attention.chosen_attention`).
`tpfuse train --kernels` sets the name; your own program calls `set_kernels`.

| name       | what it is                                                         | where it is possible              |
|------------|--------------------------------------------------------------------|-----------------------------------|
| auto       | the fastest of these for the tensor, as far as it was measured     | everywhere                        |
| fused      | Triton kernels on symmetric memory that compute while data arrives | CUDA; CPU with TRITON_INTERPRET=1 |
| direct     | torch's products on memory that the ranks share: nothing is copied | CPU ranks of one host             |
| collective | torch.distributed (NCCL, Gloo) before or after a product           | everywhere                        |

On CPU ranks `auto` is direct. On GPUs it is collective, except for tensor-parallel products, which use the
implementation that a measurement on this machine found to be the fastest (`tpfuse.autotune`). If an implementation
that was chosen is not possible, the next one below it in the table replaces it, with one warning.
`tpfuse.explain(model)` shows which one is used, and why. `tpfuse train --parallel.impl` sets the name; your own program
calls `set_implementation`, on every rank.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from tpfuse.choices import Implementation as Implementation
from tpfuse.choices import Kernels as Kernels
from tpfuse.kernels.launch import INTERPRETED as INTERPRETED

_kernels: Kernels = "auto"
_implementation: Implementation = "auto"


def set_kernels(name: Kernels) -> None:
    """Sets the kernels of this process. Raises ValueError for an unknown name."""
    global _kernels
    if name not in get_args(Kernels):
        raise ValueError(f"kernels {name!r}: expected one of {', '.join(get_args(Kernels))}")
    _kernels = name


def chosen_kernels() -> Kernels:
    """Returns the name that was set for this process."""
    return _kernels


@contextlib.contextmanager
def kernels(name: Kernels) -> Iterator[None]:
    """Sets the kernels of this process within a with block, as `set_kernels` does."""
    previous = _kernels
    set_kernels(name)
    try:
        yield
    finally:
        set_kernels(previous)


def resolved_kernels(device_type: str) -> Literal["triton", "torch"]:
    """Returns which kernels compute on tensors of a device type: "cuda" or "cpu"; on other devices it is always torch.

    Raises ValueError if Triton was chosen for CPU tensors in a process that does not interpret kernels.
    """
    if _kernels == "torch" or device_type not in ("cuda", "cpu") or (_kernels == "auto" and device_type == "cpu"):
        return "torch"
    if device_type == "cpu" and not INTERPRETED:
        raise ValueError("kernels triton on a CPU are interpreted: set TRITON_INTERPRET=1 before the program starts")
    return "triton"


def use_triton(x: Tensor) -> bool:
    """Returns whether an operator on x runs as a Triton kernel. Raises ValueError as `resolved_kernels` does."""
    return x.dtype != torch.float64 and resolved_kernels(x.device.type) == "triton"


def set_implementation(name: Implementation) -> None:
    """Sets the implementation of this process. Raises ValueError for an unknown name."""
    global _implementation
    if name not in get_args(Implementation):
        raise ValueError(f"implementation {name!r}: expected one of {', '.join(get_args(Implementation))}")
    _implementation = name


def chosen_implementation() -> Implementation:
    """Returns the name that was set for this process."""
    return _implementation


@contextlib.contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """Sets the implementation of this process within a with block, as `set_implementation` does."""
    previous = _implementation
    set_implementation(name)
    try:
        yield
    finally:
        set_implementation(previous)
