"""Generate text with a GPT, greedily or by sampling, with a key/value cache until the context is full.

A sequence longer than the context is continued from its last n_positions tokens. Learned positions are absolute, so all
keys of this window change with every step and none can be kept. From then on, the whole window is computed again for
each token, with and without the cache.

Ranks hold equal logits and draw from equal CPU generators, so they agree on every token, and on the end, without
communication. With a cache, all context-parallel ranks compute everything. Without one, they share the window. Every
sequence has a generator of its own, so that its tokens do not depend on the other sequences.

Shape suffixes: B sequences, T positions, N positions including the generated ones, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tpfuse.comm.collectives.one_model import compare_inputs
from tpfuse.comm.layout import model_device
from tpfuse.comm.mesh import groups_of
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
    top_p: float | None = None,
    eos: int | None = None,
    seed: int = 0,
    forward: Callable[[Tensor, KeyValueCache | None], Tensor] | None = None,
) -> Tensor:
    """Return the prompts, each with its continuation: [B, T + tokens] int64.

    ids_BT: [B, T] integers, equal on all ranks. temperature: 0 takes the most probable token; otherwise the logits are
    divided by it. top_k: draw from the top_k most probable tokens (from more if logits are equal). top_p: draw from the
    smallest set of most probable tokens whose probabilities, after temperature and top_k, sum to at least top_p
    (nucleus sampling, arXiv:1904.09751). eos: a sequence that has produced this token is filled with it; once all
    sequences have, the result ends there and is shorter than T + tokens. seed: sequence i draws the same tokens as it
    would alone with seed + i. forward: returns the logits [B, vocab_size] of the last of some positions, equal on all
    ranks, given their ids and the cache, where the stages of the model are on several ranks; None where this rank has
    the whole model.

    Raise ValueError for an empty prompt, and options outside their range.
    """
    last, shape = model.config.vocab_size - 1, tuple(ids_BT.shape)
    for fits, message in (
        (ids_BT.ndim == 2 and ids_BT.numel(), f"prompts of shape {shape}: expected [B, T] with at least one token"),
        (tokens >= 0, f"tokens {tokens}: expected 0 or more"),
        (0.0 <= temperature < float("inf"), f"temperature {temperature}: expected 0 (greedy) or more"),
        (top_k is None or top_k >= 1, f"top_k {top_k}: expected at least 1"),
        (top_p is None or 0.0 < top_p <= 1.0, f"top_p {top_p}: expected more than 0 and at most 1"),
        (eos is None or 0 <= eos <= last, f"eos {eos}: expected a token of the vocabulary, 0 to {last}"),
    ):
        if not fits:
            raise ValueError(message)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "eos": eos, "seed": seed}
    inputs = {"ids": ids_BT, "tokens": tokens} | options
    compare_inputs("generate", inputs, groups_of(model.device_mesh), model_device(model))
    batch, length = ids_BT.shape
    window = model.config.n_positions
    ids_BT = ids_BT.long()
    text_BN = torch.cat([ids_BT, ids_BT.new_full((batch, tokens), 0 if eos is None else eos)], dim=1)
    ended_B = torch.zeros(batch, dtype=torch.bool, device=ids_BT.device)
    generators = [torch.Generator("cpu").manual_seed(seed + row) for row in range(batch)]
    weight = next(model.parameters())
    cache = KeyValueCache(model.config, batch, model.tp, weight.device, weight.dtype) if length <= window else None
    for end in range(length, length + tokens):
        if end > window:
            cache = None
        start = max(0, end - window) if cache is None else cache.length
        window_BT = text_BN[:, start:end]
        logits_BV = model(window_BT, cache=cache)[:, -1] if forward is None else forward(window_BT, cache)
        (rows,) = (~ended_B).nonzero(as_tuple=True)
        drawn = choose(logits_BV[rows], temperature, top_k, top_p, [generators[row] for row in rows.tolist()])
        text_BN[rows, end] = drawn.to(ids_BT.device)
        ended_B = text_BN[:, end] == (-1 if eos is None else eos)
        if ended_B.all():
            return text_BN[:, : end + 1]
    return text_BN


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
