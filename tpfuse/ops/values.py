"""Checks of what is in a tensor, where looking costs nothing."""

import torch
from torch import Tensor


def check_range(x: Tensor, lowest: int, highest: int, message: str) -> None:
    """Raises ValueError unless all of the integers x are from `lowest` to `highest`, both included.

    message: says what is wrong, with the fields {low} and {high} for what x holds. Looks at CPU tensors only (on
    CUDA that would stop the stream), and not while torch.compile traces (it would break the graph).
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
        return
    low, high = int(x.min()), int(x.max())
    if low < lowest or high > highest:
        raise ValueError(message.format(low=low, high=high))
