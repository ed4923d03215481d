"""Keys and values of the positions that a model has seen, so that the next ones need not compute them again."""

import torch
from torch import Tensor

from tpfuse.models.gpt_config import GPTConfig


class KeyValueCache:
    """Keys and values of the positions seen so far: per layer [B, H, n_positions, D]."""

    def __init__(self, config: GPTConfig, batch: int, tp: int, device: torch.device, dtype: torch.dtype) -> None:
        heads, size = config.n_head // tp, config.n_embd // config.n_head
        shape = (config.n_layer, batch, heads, config.n_positions, size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v [B, H, T, D] behind the `length` positions there are; returns all of them."""
        stop = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : stop] = k
        self.values[layer, :, :, self.length : stop] = v
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]
