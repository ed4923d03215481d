"""Random inputs on the CPU that depend on a seed and a shape alone, so that every rank can draw them by itself."""

import torch
from torch import Tensor


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, drawn in float64 and rounded to `dtype`: the same draw for all dtypes."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def integers(seed: int, *shape: int, low: int = -4, high: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return whole numbers from low to high, both included.

    Sums of their products are exact in any order while they stay below 2^24 (float32). Tests of communication can
    therefore compare by `torch.equal`, and a wrong index shows as a difference of a whole number.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, device="cpu").to(dtype)
