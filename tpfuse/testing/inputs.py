"""Inputs that every rank can draw by itself: functions of a seed and a shape, on the CPU."""

import torch
from torch import Tensor


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, rounded to `dtype` from one float64 draw, so that dtypes see the same values."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def integers(seed: int, *shape: int, low: int = -4, high: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers from low to high, both included.

    Sums of their products are exact in any order while they stay below 2^24 (float32): communication is
    compared by `torch.equal`, and a wrong index shows as a whole number.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(dtype)
