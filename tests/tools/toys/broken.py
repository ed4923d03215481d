"""An operator whose launcher raises before it launches."""

import importlib

import torch

from tpfuse.tools.operator import Operator

sound = importlib.import_module("tpfuse.tools.operators.sound")


def launches(dtype: torch.dtype) -> None:
    sound.copy(*(torch.empty(1024, dtype=dtype, device="meta") for _ in range(2)))
    raise ValueError("tiles of 3 rows")


OPERATOR = Operator("broken", launches)
