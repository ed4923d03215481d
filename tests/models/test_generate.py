"""Generated text is that of plain recomputation, on any number of ranks and with every sampling option."""

import pytest
import torch
from torch import Tensor

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive, pairwise
from tpfuse.comm.layout import copy_whole_
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12)
PROMPTS = integers(1, 2, 5, low=0, high=100, dtype=torch.int64)


def _model(sharded: bool = False) -> GPT:
    """Return a model with large weights, whose greedy text does not repeat one token."""
    model = parallelize_gpt(GPT(CONFIG, dtype=torch.float64), tensor_mesh() if sharded else None)
    for seed, parameter in enumerate(model.parameters()):
        copy_whole_(parameter.detach(), normal(seed, *parameter.shape) * 0.5)
    return model


def _naive(model: GPT, ids: Tensor, tokens: int) -> Tensor:
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids[:, -CONFIG.n_positions :])[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("length", [5, 15, 17, *exhaustive(16)])
def test_greedy_text_of_every_length_is_that_of_plain_recomputation(length: int) -> None:
    model = _model()
    prompts = integers(2, 2, length, low=0, high=100, dtype=torch.int64)
    expected = _naive(model, prompts, 20)
    assert len(set(expected[0, length:].tolist())) > 3
    assert torch.equal(generate(model, prompts, 20, temperature=0.0), expected)


def test_a_sequence_ends_with_its_eos_and_the_batch_with_the_last_one() -> None:
    model = _model()
    free = generate(model, PROMPTS, 20, temperature=0.0)[:, 5:]
    lengths = {eos: [row.index(eos) + 1 if eos in row else 20 for row in free.tolist()] for eos in free[1].tolist()}
    eos, made = next((eos, made) for eos, made in lengths.items() if made[0] != made[1] < 20)
    ended = generate(model, PROMPTS, 20, temperature=0.0, eos=eos)
    assert ended.shape == (2, 5 + max(made))
    for row, count in enumerate(made):
        assert torch.equal(ended[row, 5 : 5 + count], free[row, :count])
        assert (ended[row, 5 + count :] == eos).all()
    prompt = torch.cat([PROMPTS[0], torch.tensor([eos])]).unsqueeze(0)
    assert generate(model, prompt, 3, temperature=0.0, eos=eos).shape[1] > 6, "that of a prompt ends nothing"


def _text(model: GPT, temperature: float, top_k: int | None, ids: Tensor = PROMPTS, seed: int = 3) -> Tensor:
    return generate(model, ids, 20, temperature=temperature, top_k=top_k, top_p=0.95, eos=7, seed=seed)


def _on_ranks(temperature: float, top_k: int | None) -> Tensor:
    return _text(_model(sharded=True), temperature, top_k)


@pytest.mark.parametrize(*pairwise(world=[2, 4], temperature=[0.7, 0.0], top_k=[5, None]))
def test_the_text_is_the_same_on_any_number_of_ranks(world: int, temperature: float, top_k: int | None) -> None:
    expected = _text(_model(), temperature, top_k)
    for row in range(2):
        alone = _text(_model(), temperature, top_k, PROMPTS[row : row + 1], 3 + row)[0]
        assert torch.equal(alone, expected[row, : len(alone)]), "each sequence draws what it would alone"
    for text in pool(world).run(_on_ranks, temperature, top_k):
        assert torch.equal(text, expected)


def test_equal_seeds_draw_equal_text_and_other_seeds_do_not() -> None:
    model = _model()
    texts = [generate(model, PROMPTS, 20, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert all(torch.equal(text[:, :5], PROMPTS) and text.shape == (2, 25) for text in texts)


def test_top_k_one_and_a_small_temperature_are_greedy() -> None:
    model = _model()
    greedy = generate(model, PROMPTS, 20, temperature=0.0)
    assert torch.equal(generate(model, PROMPTS, 20, top_k=1), greedy)
    assert torch.equal(generate(model, PROMPTS, 20, temperature=1e-300), greedy)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (5, 0.6), *exhaustive((1000, 1.0), (None, 0.6))])
def test_tokens_are_drawn_from_the_distribution(top_k: int | None, top_p: float | None) -> None:
    model = _model()
    logits = model(PROMPTS[:1])[0, -1].detach() / 2.0
    if top_k is not None and top_k < 101:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    drawn = generate(model, PROMPTS[:1].expand(4000, -1), 1, temperature=2.0, top_k=top_k, top_p=top_p)[:, -1]
    shares = torch.bincount(drawn, minlength=101) / 4000
    expected = logits.softmax(0)
    if top_p == 0.6:  # the most probable tokens are added until the sum is reached
        kept, total = [], 0.0
        for token in expected.argsort(descending=True).tolist():
            if total < top_p:
                kept.append(token)
                total += float(expected[token])
        assert 1 < len(kept) < (top_k or 101), "a nucleus that is neither one token nor all"
        nucleus = torch.zeros_like(expected)
        nucleus[kept] = expected[kept] / total
        expected = nucleus
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-12).all()


def test_prompts_of_other_integers_are_converted() -> None:
    model = _model()
    assert torch.equal(generate(model, PROMPTS.int(), 2), generate(model, PROMPTS, 2))


def test_generating_no_tokens_returns_the_prompt() -> None:
    assert torch.equal(generate(_model(), PROMPTS, 0), PROMPTS)


def test_bad_input_is_refused() -> None:
    model, tokens = _model(), "at least one token"
    for ids, count, options, message in (
        *((ids, 5, {}, tokens) for ids in (PROMPTS[:, :0], PROMPTS[0])),
        (PROMPTS, -1, {}, "tokens -1"),
        *((PROMPTS, 5, {"temperature": x}, "temperature") for x in (-0.1, float("nan"), float("inf"))),
        (PROMPTS, 5, {"top_k": 0}, "top_k 0: expected at least 1"),
        *((PROMPTS, 5, {"top_p": x}, "top_p .*: expected more than 0 and at most 1") for x in (0.0, 1.1, float("nan"))),
        (PROMPTS, 5, {"eos": 101}, "eos 101: expected a token of the vocabulary, 0 to 100"),
        (PROMPTS + 100, 5, {}, "do not fit a table of 101 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, ids, count, **options)  # type: ignore[arg-type]
