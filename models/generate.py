"""Generate text with a GPT, greedily or by sampling, with a key/value cache until the context is full.

A sequence longer than the context is continued from its last n_positions tokens. Learned positions are absolute, so all
keys of this window change with every step and none can be kept. From then on, the whole window is computed again for
each token, with and without the cache.

Every sequence starts at the first position, also that of a padded prompt, and all sequences grow together: a sequence
draws its next token once its own prompt has ended, while longer prompts still supply their tokens (the reference code
of Llama, arXiv:2302.13971, does the same). So the model needs no mask. It computes one token at a time once the
shortest prompt has ended.

Ranks hold equal logits and draw from equal CPU generators, so they agree on every token, and on the end, without
communication. With a cache, all context-parallel ranks compute everything. Without one, they share the window if it has
a token for each of them. Every sequence has a generator of its own, so that its tokens do not depend on the other
sequences.

Shape suffixes: B sequences, T positions, N positions including the generated ones, V vocabulary.
"""

from collections.abc import Callable

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
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    forward: Callable[[Tensor, KeyValueCache | None], Tensor] | None = None,
) -> Tensor:
    """Return the prompts, each with its continuation: [B, T + tokens] int64.

    ids_BT: [B, T] int64, equal on all ranks. attention_mask: [B, T], 1 for the tokens of a prompt and 0 for the padding
    before it, as the tokenizers of transformers return it with padding_side="left"; None if no prompt is padded. A
    padded prompt has the same logits as the prompt alone, up to rounding. temperature: 0 takes the most probable token;
    otherwise the logits are divided by it. top_k: draw from the top_k most probable tokens (from more if logits are
    equal). top_p: draw from the smallest set of most probable tokens whose probabilities, after temperature and top_k,
    sum to at least top_p (nucleus sampling, arXiv:1904.09751). eos: a sequence that has produced this token is filled
    with it; once all sequences have, the result ends there and is shorter than T + tokens. seed: sequence i draws the
    same tokens as it would alone with seed + i. use_cache: whether to trade memory for speed; the tokens are the same.
    forward: returns the logits [B, vocab_size] of the last of some positions, equal on all ranks, given their ids and
    the cache, where the stages of the model are on several ranks; None where this rank has the whole model.

    Raise ValueError for an empty prompt, a mask that is not padding before prompts, and options outside their range.
    """
    _check(ids_BT, tokens, temperature, top_k, top_p)
    if eos is not None and not 0 <= eos < model.config.vocab_size:
        raise ValueError(f"eos {eos}: expected a token of the vocabulary, 0 to {model.config.vocab_size - 1}")
    batch, longest = ids_BT.shape
    lengths_B = _lengths(ids_BT, attention_mask)
    shortest = int(lengths_B.min())
    window = model.config.n_positions
    text_BN = ids_BT.new_full((batch, longest + tokens), 0 if eos is None else eos)  # without padding, from the left
    for row, length in enumerate(lengths_B.tolist()):
        text_BN[row, :length] = ids_BT[row, longest - length :]
    produced_B = torch.zeros_like(lengths_B)  # tokens that each sequence has produced
    ended_B = torch.full_like(lengths_B, tokens == 0, dtype=torch.bool)
    generators = [torch.Generator("cpu").manual_seed(seed + row) for row in range(batch)]
    cache = None
    if use_cache and shortest <= window:
        cache = _empty_cache(model, batch)
    for end in range(shortest, longest + tokens):
        (rows,) = ((end >= lengths_B) & ~ended_B).nonzero(as_tuple=True)
        if not len(rows):
            continue
        if end > window:
            cache = None
        start = max(0, end - window) if cache is None else cache.length
        short = cache is None and end - start < model.context.size
        cached = _empty_cache(model, batch) if short else cache
        window_BT = text_BN[:, start:end]
        logits_BV = model(window_BT, cache=cached)[:, -1] if forward is None else forward(window_BT, cached)
        drawing = [generators[row] for row in rows.tolist()]
        drawn = choose(logits_BV[rows], temperature, top_k, top_p, drawing).to(ids_BT.device)
        text_BN[rows, end] = drawn
        produced_B[rows] += 1
        ended_B[rows] = (produced_B[rows] == tokens) | (drawn == (-1 if eos is None else eos))
    columns_BN = lengths_B.unsqueeze(1) + torch.arange(int(produced_B.max()), device=ids_BT.device)
    return torch.cat([ids_BT, text_BN.gather(1, columns_BN)], dim=1)


def _empty_cache(model: GPT, batch: int) -> KeyValueCache:
    weight = next(model.parameters())
    return KeyValueCache(model.config, batch, model.tp, weight.device, weight.dtype)


def choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generators: list[torch.Generator]
) -> Tensor:
    """Return one token for each row of logits, [B], drawn as `generate` says by a generator of its own."""
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    logits_BV = logits_BV.cpu().double()
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    # The maximum is subtracted first, since dividing large logits by a small temperature would give infinities.
    relative_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature
    probabilities_BV = relative_BV.softmax(dim=-1)
    if top_p is not None and top_p < 1.0:
        falling_BV, tokens_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
        likelier_BV = falling_BV.cumsum(dim=-1) - falling_BV  # the sum over the more probable tokens
        nucleus_BV = falling_BV.masked_fill(likelier_BV >= top_p, 0.0)
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(1, tokens_BV, nucleus_BV)
    drawn = [torch.multinomial(row, 1, generator=each) for row, each in zip(probabilities_BV, generators, strict=True)]
    return torch.cat(drawn)


def _lengths(ids_BT: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return how many tokens each prompt has, [B]. Raise ValueError for a mask that is not padding before prompts."""
    batch, longest = ids_BT.shape
    if attention_mask is None:
        return torch.full((batch,), longest, device=ids_BT.device)
    if attention_mask.shape != ids_BT.shape:
        shapes = f"{tuple(attention_mask.shape)}: expected that of the prompts, {tuple(ids_BT.shape)}"
        raise ValueError(f"attention_mask of shape {shapes}")
    mask_BT = attention_mask.to(ids_BT.device).long()
    lengths_B = mask_BT.sum(dim=1)
    columns_T = torch.arange(longest, device=ids_BT.device)
    if not torch.equal(mask_BT, (columns_T >= longest - lengths_B.unsqueeze(1)).long()):
        raise ValueError("attention_mask: expected 0 for padding, then 1 to the end: pad prompts on the left")
    if not lengths_B.all():
        raise ValueError("attention_mask: expected at least one token in every prompt")
    return lengths_B


def _check(ids_BT: Tensor, tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if ids_BT.ndim != 2 or not ids_BT.numel():
        raise ValueError(f"prompts of shape {tuple(ids_BT.shape)}: expected [B, T] with at least one token")
    if tokens < 0:
        raise ValueError(f"tokens {tokens}: expected 0 or more")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature {temperature}: expected 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k}: expected at least 1")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p {top_p}: expected more than 0 and at most 1")
