"""Which kernels compute: one switch for the whole library, per process.

| name   | CUDA tensors | CPU tensors                                      |
|--------|--------------|--------------------------------------------------|
| auto   | Triton       | torch                                            |
| triton | Triton       | Triton, interpreted (TRITON_INTERPRET=1)         |
| torch  | torch        | torch                                            |

float64 is always torch's, and so are matrix products without an activation or a residual: on GPUs cuBLAS computes them.
With `auto` a GPU trains by torch's attention, which may be cuDNN's, where nothing of ours is needed
(`tpfuse.ops.attention.chosen_attention`).
`tpfuse train --kernels` sets the name; in your own program call `set_kernels`.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from tpfuse.choices import Kernels as Kernels
from tpfuse.kernels.launch import INTERPRETED as INTERPRETED

_chosen: Kernels = "auto"


def set_kernels(name: Kernels) -> None:
    """Chooses for this process. Raises ValueError for another name."""
    global _chosen
    if name not in get_args(Kernels):
        raise ValueError(f"kernels {name!r}: expected one of {', '.join(get_args(Kernels))}")
    _chosen = name


def chosen_kernels() -> Kernels:
    """What was chosen for this process."""
    return _chosen


@contextlib.contextmanager
def kernels(name: Kernels) -> Iterator[None]:
    """`set_kernels(name)` within a with block."""
    before = _chosen
    set_kernels(name)
    try:
        yield
    finally:
        set_kernels(before)


def implementation(device_type: str) -> Literal["triton", "torch"]:
    """What computes on "cuda" or "cpu" tensors now; other devices are torch's.

    Raises ValueError where Triton was chosen, and the tensors are the CPU's, and this process does not interpret.
    """
    if _chosen == "torch" or device_type not in ("cuda", "cpu") or (_chosen == "auto" and device_type == "cpu"):
        return "torch"
    if device_type == "cpu" and not INTERPRETED:
        raise ValueError("kernels triton on a CPU are interpreted: set TRITON_INTERPRET=1 before the program starts")
    return "triton"


def use_triton(x: Tensor) -> bool:
    """Whether an operator on x runs as a Triton kernel. Raises ValueError as `implementation` does."""
    return x.dtype != torch.float64 and implementation(x.device.type) == "triton"
