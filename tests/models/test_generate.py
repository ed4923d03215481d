"""Generated text is that of plain recomputation, on any number of ranks and with every sampling option."""

import pytest
import torch
from torch import Tensor

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive, pairwise
from tpfuse.comm.layout import copy_whole_
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12)
PROMPTS = integers(1, 2, 5, low=0, high=100, dtype=torch.int64)


def _model(sharded: bool = False) -> GPT:
    """Return a model with large weights, whose greedy text does not repeat one token."""
    model = GPT(CONFIG, device_mesh=tensor_mesh() if sharded else None, dtype=torch.float64)
    for seed, parameter in enumerate(model.parameters()):
        copy_whole_(parameter.detach(), normal(seed, *parameter.shape) * 0.5)
    return model


def _naive(model: GPT, ids: Tensor, tokens: int) -> Tensor:
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids[:, -CONFIG.n_positions :])[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize(
    ("length", "use_cache"),
    [(5, True), (15, True), (17, True), (16, False), *exhaustive((1, True), (16, True), (20, True), (5, False))],
)
def test_greedy_text_of_every_length_is_that_of_plain_recomputation(length: int, use_cache: bool) -> None:
    model = _model()
    prompts = integers(2, 2, length, low=0, high=100, dtype=torch.int64)
    expected = _naive(model, prompts, 20)
    assert len(set(expected[0, length:].tolist())) > 3
    assert torch.equal(generate(model, prompts, 20, temperature=0.0, use_cache=use_cache), expected)


def _padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (ids, attention mask) as a tokenizer that pads on the left makes them."""
    longest = max(map(len, prompts))
    ids = [torch.cat([torch.full((longest - len(prompt),), 5000), prompt]) for prompt in prompts]
    mask = [torch.cat([torch.zeros(longest - len(prompt)), torch.ones(len(prompt))]) for prompt in prompts]
    return torch.stack(ids), torch.stack(mask).long()


@pytest.mark.parametrize(
    ("lengths", "temperature", "use_cache"),
    [((3, 7, 5), 0.0, True), ((7, 15, 17), 0.9, True), *exhaustive(((2, 9), 0.9, False), ((16, 20), 0.0, True))],
)
def test_padded_prompts_are_continued_as_each_of_them_alone(
    lengths: tuple[int, ...], temperature: float, use_cache: bool
) -> None:
    model = _model()
    prompts = [integers(seed, length, low=0, high=99, dtype=torch.int64) for seed, length in enumerate(lengths)]
    ids, mask = _padded(prompts)
    options = {"temperature": temperature, "use_cache": use_cache}
    together = generate(model, ids, 12, attention_mask=mask, seed=3, **options)
    assert together.shape == (len(lengths), max(lengths) + 12) and torch.equal(together[:, : max(lengths)], ids)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt.unsqueeze(0), 12, seed=3 + row, **options)[0]
        assert torch.equal(together[row, -12:], alone[-12:])


def test_a_sequence_ends_with_its_eos_and_the_batch_with_the_last_one() -> None:
    model = _model()
    ids, mask = _padded([PROMPTS[0], PROMPTS[1, :3]])
    free = generate(model, ids, 20, attention_mask=mask, temperature=0.0)[:, 5:]
    eos = int(free[1, 4])
    made = [row.tolist().index(eos) + 1 if eos in row else 20 for row in free]
    assert made[1] <= 5 and made[0] != made[1], "one ends early, and not both at once"
    ended = generate(model, ids, 20, attention_mask=mask, temperature=0.0, eos=eos)
    assert ended.shape == (2, 5 + max(made))
    for row, count in enumerate(made):
        assert torch.equal(ended[row, 5 : 5 + count], free[row, :count])
        assert (ended[row, 5 + count :] == eos).all()
    prompt = torch.cat([PROMPTS[0], torch.tensor([eos])]).unsqueeze(0)
    assert generate(model, prompt, 3, temperature=0.0, eos=eos).shape[1] > 6, "that of a prompt ends nothing"


def _text(model: GPT, temperature: float, top_k: int | None, use_cache: bool = True) -> Tensor:
    ids, mask = _padded([PROMPTS[0], PROMPTS[1, :3]])
    options = {"temperature": temperature, "top_k": top_k, "top_p": 0.95, "eos": 7, "seed": 3, "use_cache": use_cache}
    return generate(model, ids, 20, attention_mask=mask, **options)


def _on_ranks(temperature: float, top_k: int | None, use_cache: bool) -> Tensor:
    return _text(_model(sharded=True), temperature, top_k, use_cache)


@pytest.mark.parametrize(*pairwise(world=[2, 4, 1], temperature=[0.7, 0.0], top_k=[5, None], use_cache=[True, False]))
def test_the_text_is_the_same_on_any_number_of_ranks(
    world: int, temperature: float, top_k: int | None, use_cache: bool
) -> None:
    expected = _text(_model(), temperature, top_k)
    for text in pool(world).run(_on_ranks, temperature, top_k, use_cache):
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


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (5, 0.6), *exhaustive((None, None), (1000, 1.0), (None, 0.6))])
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


def test_generating_no_tokens_returns_the_prompt() -> None:
    assert torch.equal(generate(_model(), PROMPTS, 0), PROMPTS)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    assert torch.equal(generate(_model(), PROMPTS, 0, attention_mask=mask), PROMPTS)


def test_bad_input_is_refused() -> None:
    model = _model()
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, PROMPTS[:, :0], 5)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, PROMPTS[0], 5)
    with pytest.raises(ValueError, match="tokens -1"):
        generate(model, PROMPTS, -1)
    for temperature in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            generate(model, PROMPTS, 5, temperature=temperature)
    with pytest.raises(ValueError, match="top_k 0: expected at least 1"):
        generate(model, PROMPTS, 5, top_k=0)
    for top_p in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"top_p .*: expected more than 0 and at most 1"):
            generate(model, PROMPTS, 5, top_p=top_p)
    with pytest.raises(ValueError, match="eos 101: expected a token of the vocabulary, 0 to 100"):
        generate(model, PROMPTS, 5, eos=101)
    mask = torch.ones_like(PROMPTS)
    for wrong, message in (
        (mask[:, 1:], r"attention_mask of shape \(2, 4\): expected that of the prompts, \(2, 5\)"),
        (mask * torch.tensor([1, 1, 1, 1, 0]), "pad prompts on the left"),
        (mask * torch.tensor([1, 0, 1, 1, 1]), "pad prompts on the left"),
        (mask * torch.tensor([[1], [0]]), "at least one token in every prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, 5, attention_mask=wrong)
    with pytest.raises(ValueError, match="do not fit a table of 101 rows"):
        generate(model, PROMPTS + 100, 5)
