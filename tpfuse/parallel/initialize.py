"""Initial weights that do not depend on the layout: each parameter is drawn whole from (seed, name), then sharded."""

import hashlib

import torch
from torch import nn

from tpfuse.comm.layout import copy_whole_


def seed_of(*parts: object) -> int:
    """Return a seed for torch's generators that depends on the texts of `parts` alone."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(seed: int, name: str, shape: torch.Size, mean: float, std: float) -> torch.Tensor:
    """Return the whole initial value of parameter `name`: float32 on CPU, normal, a function of (seed, name) alone."""
    if std == 0.0:
        return torch.full(shape, mean, dtype=torch.float32, device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed_of(seed, name))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(mean, std, generator=generator)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter of `model` without communication.

    model: has a method initial_distribution(name), which returns mean and standard deviation of a parameter.
    Every rank draws each whole parameter on the CPU, which needs the memory of the largest one, and keeps its shard.
    """
    for name, parameter in model.named_parameters():
        mean, std = model.initial_distribution(name)  # type: ignore[operator]
        copy_whole_(parameter, draw(seed, name, parameter.shape, mean, std))
