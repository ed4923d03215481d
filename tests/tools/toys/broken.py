"""An operator whose launcher raises before it launches."""

import torch

from tpfuse.tools import operators

sound = operators.load("sound")


def launches(dtype: torch.dtype) -> None:
    sound.copy(*(torch.empty(1024, dtype=dtype, device="meta") for _ in range(2)))
    raise ValueError("tiles of 3 rows")
