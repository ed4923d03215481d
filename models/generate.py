"""Text from a GPT: greedy or sampled, with a key/value cache while the context lasts.

A sequence longer than the context is continued from its last n_positions tokens. Learned positions are
absolute, so the window's keys change with every step and nothing of them can be kept: from there on the
window is computed anew for each token, with and without the cache alike.

Ranks hold equal logits and draw from equal CPU generators, so they agree on every token without a word. With a cache
all context-parallel ranks compute everything; without one they share the window, if it has a token for each.

Shape suffixes: B sequences, T positions, V vocabulary.
"""

import torch
from torch import Tensor

from tpfuse.models.gpt import GPT
from tpfuse.models.key_value_cache import KeyValueCache


@torch.no_grad()
def generate(
    model: GPT,
    ids_BT: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Tensor:
    """ids_BT: [B, T] int64, equal on all ranks -> [B, T + tokens]: the prompts, each with its continuation.

    temperature: 0 takes the likeliest token; otherwise the logits are divided by it. top_k: draw from the
    top_k likeliest tokens alone (more where logits are equal). use_cache: trades memory for speed, the
    tokens are the same. Raises ValueError for an empty prompt and for options outside their range.
    """
    _check(ids_BT, tokens, temperature, top_k)
    batch, length = ids_BT.shape
    window = model.config.n_positions
    out_BT = torch.cat([ids_BT, ids_BT.new_zeros(batch, tokens)], dim=1)
    generator = torch.Generator("cpu").manual_seed(seed)
    cache = None
    if use_cache and length <= window:
        cache = _empty_cache(model, batch)
    for end in range(length, length + tokens):
        if end > window:
            cache = None
        start = max(0, end - window) if cache is None else cache.length
        short = cache is None and end - start < model.context.size
        logits_BV = model(out_BT[:, start:end], cache=_empty_cache(model, batch) if short else cache)[:, -1]
        out_BT[:, end] = _choose(logits_BV, temperature, top_k, generator).to(out_BT.device)
    return out_BT


def _empty_cache(model: GPT, batch: int) -> KeyValueCache:
    weight = model.transformer.wte.weight
    return KeyValueCache(model.config, batch, model.tp, weight.device, weight.dtype)


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    logits_BV = logits_BV.cpu().double()
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    # Relative to the maximum first: a small temperature would make infinities of large logits.
    relative_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature
    return torch.multinomial(relative_BV.softmax(dim=-1), 1, generator=generator).squeeze(1)


def _check(ids_BT: Tensor, tokens: int, temperature: float, top_k: int | None) -> None:
    if ids_BT.ndim != 2 or not ids_BT.numel():
        raise ValueError(f"prompts of shape {tuple(ids_BT.shape)}: expected [B, T] with at least one token")
    if tokens < 0:
        raise ValueError(f"tokens {tokens}: expected 0 or more")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature {temperature}: expected 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k}: expected at least 1")
