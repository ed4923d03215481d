"""Two switches for the whole process: which kernels compute, and how ranks communicate.

| kernels | CUDA tensors | CPU tensors                              |
|---------|--------------|------------------------------------------|
| auto    | Triton       | torch                                    |
| triton  | Triton       | Triton, interpreted (TRITON_INTERPRET=1) |
| torch   | torch        | torch                                    |

torch always computes on float64 tensors, and it always computes matrix products without an activation or a residual: on
GPUs it calls cuBLAS for them. With `auto` a GPU trains with torch's attention, which may be that of cuDNN, unless an
option needs tpfuse's own (`tpfuse.ops.attention.chosen_attention`); so do rings of messages, block by block.

| name       | what it is                                                         | where it is possible              |
|------------|--------------------------------------------------------------------|-----------------------------------|
| auto       | the fastest of these for the tensor, as far as it was measured     | everywhere                        |
| fused      | Triton kernels on symmetric memory that compute while data arrives | CUDA; CPU with TRITON_INTERPRET=1 |
| direct     | torch's products on memory that the ranks share: nothing is copied | CPU ranks of one host             |
| collective | torch.distributed (NCCL, Gloo) before or after a product           | everywhere                        |

On CPU ranks `auto` is direct. On GPUs it is collective, except for tensor-parallel products, which use the
implementation that a measurement on this machine found to be the fastest (`tpfuse.autotune`). If an implementation
that was chosen is not possible, the next one below it in the table replaces it, with one warning.
`tpfuse.explain(model)` shows which one is used, and why.

`tpfuse train --kernels --parallel.impl` sets the switches; your own program calls `tpfuse.use`, on every rank.
"""

import contextlib
from typing import Literal, get_args

import torch
from torch import Tensor

from tpfuse.choices import Implementation, Kernels
from tpfuse.kernels.interpreter import INTERPRETED as INTERPRETED
from tpfuse.kernels.launch import forget_plans

_implementation: Implementation = "auto"
_kernels: Kernels = "auto"


def use(
    *, implementation: Implementation | None = None, kernels: Kernels | None = None
) -> contextlib.AbstractContextManager[object]:
    """Set the switches of this process that are given: for good, or until the end of a with block.

        tpfuse.use(implementation="fused")              # from now on
        with tpfuse.use(kernels="torch"): ...           # in the block

    Raise ValueError for an unknown name.
    """
    for switch, name, known in (
        ("implementation", implementation, get_args(Implementation)),
        ("kernels", kernels, get_args(Kernels)),
    ):
        if name is not None and name not in known:
            raise ValueError(f"{switch} {name!r}: expected one of {', '.join(known)}")
    previous = contextlib.ExitStack()
    previous.callback(_set, _implementation, _kernels)
    _set(implementation or _implementation, kernels or _kernels)
    return previous


def _set(implementation: Implementation, kernels: Kernels) -> None:
    global _implementation, _kernels
    _implementation, _kernels = implementation, kernels
    forget_plans()


def chosen_implementation() -> Implementation:
    """Return the implementation that was set for this process."""
    return _implementation


def chosen_kernels() -> Kernels:
    """Return the kernels that were set for this process."""
    return _kernels


def resolved_kernels(device_type: str) -> Literal["triton", "torch"]:
    """Return which kernels compute on tensors of a device type: "cuda" or "cpu"; on other devices it is always torch.

    Raise ValueError if Triton was chosen for CPU tensors in a process that does not interpret kernels.
    """
    if _kernels == "torch" or device_type not in ("cuda", "cpu") or (_kernels == "auto" and device_type == "cpu"):
        return "torch"
    if device_type == "cpu" and not INTERPRETED:
        raise ValueError("kernels triton on a CPU are interpreted: set TRITON_INTERPRET=1 before the program starts")
    return "triton"


def use_triton(x: Tensor) -> bool:
    """Return whether an operator on x runs as a Triton kernel. Raise ValueError as `resolved_kernels` does."""
    return x.dtype != torch.float64 and resolved_kernels(x.device.type) == "triton"
