"""How tensor-parallel products and collectives communicate: one switch for the whole library, per process.

| name       | what it is                                                         | where it is possible              |
|------------|--------------------------------------------------------------------|-----------------------------------|
| auto       | the fastest of these for the tensor, as far as it was measured     | everywhere                        |
| fused      | Triton kernels on symmetric memory that compute while data arrives | CUDA; CPU with TRITON_INTERPRET=1 |
| direct     | torch's products on memory that the ranks share: nothing is copied | CPU ranks of one host             |
| collective | torch.distributed (NCCL, Gloo) before or behind a product          | everywhere                        |

On CPU ranks `auto` is direct; on GPUs it is collective, and for tensor-parallel products what a measurement on this
machine finds to be faster (`tpfuse.measuring`). What was chosen and cannot be is replaced by the next below, with one
warning. `tpfuse.explain(model)` says what is taken, and why. `tpfuse train --parallel.impl` sets it; in your own
program call `set_implementation`, on every rank.
"""

import contextlib
from collections.abc import Iterator
from typing import get_args

from tpfuse.choices import Implementation as Implementation

_chosen: Implementation = "auto"


def set_implementation(name: Implementation) -> None:
    """Chooses for this process. Raises ValueError for another name."""
    global _chosen
    if name not in get_args(Implementation):
        raise ValueError(f"implementation {name!r}: expected one of {', '.join(get_args(Implementation))}")
    _chosen = name


def chosen_implementation() -> Implementation:
    """What was chosen for this process."""
    return _chosen


@contextlib.contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """`set_implementation(name)` within a with block."""
    before = _chosen
    set_implementation(name)
    try:
        yield
    finally:
        set_implementation(before)
