"""A cache of keys and values of earlier positions, so that they are not computed again for each new position."""

import torch
from torch import Tensor

from tpfuse.models.gpt_config import GPTConfig


class KeyValueCache:
    """The keys and values of the first `length` positions, [B, H, n_positions, D] for each layer."""

    def __init__(self, config: GPTConfig, batch: int, tp: int, device: torch.device, dtype: torch.dtype) -> None:
        heads, size = config.n_head // tp, config.n_embd // config.n_head
        shape = (config.n_layer, batch, heads, config.n_positions, size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, H, T, D] after the first `length` positions, and return those of all positions so far."""
        stop = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : stop] = k
        self.values[layer, :, :, self.length : stop] = v
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]
