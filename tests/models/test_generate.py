import pytest
import torch
from torch import Tensor

from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.whole import load_whole_
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive, pairwise

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12)
PROMPTS = integers(1, 2, 5, low=0, high=100, dtype=torch.int64)


def _model(sharded: bool = False) -> GPT:
    """Weights that are large: greedy text then wanders instead of repeating one token."""
    model = GPT(CONFIG, device_mesh=tensor_mesh() if sharded else None, dtype=torch.float64)
    for seed, parameter in enumerate(model.parameters()):
        load_whole_(parameter, normal(seed, *parameter.shape) * 0.5)
    return model


def _naive(model: GPT, ids: Tensor, tokens: int) -> Tensor:
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids[:, -CONFIG.n_positions :])[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize(
    ("length", "use_cache"),
    [(5, True), (15, True), (17, True), (16, False), *exhaustive((1, True), (16, True), (20, True), (5, False))],
)
def test_greedy_at_every_length(length: int, use_cache: bool) -> None:
    model = _model()
    prompts = integers(2, 2, length, low=0, high=100, dtype=torch.int64)
    expected = _naive(model, prompts, 20)
    assert len(set(expected[0, length:].tolist())) > 3
    assert torch.equal(generate(model, prompts, 20, temperature=0.0, use_cache=use_cache), expected)


def _on_ranks(temperature: float, top_k: int | None, use_cache: bool) -> Tensor:
    model = _model(sharded=True)
    return generate(model, PROMPTS, 20, temperature=temperature, top_k=top_k, seed=3, use_cache=use_cache)


@pytest.mark.parametrize(*pairwise(world=[2, 4, 1], temperature=[0.7, 0.0], top_k=[5, None], use_cache=[True, False]))
def test_same_text_on_any_number_of_ranks(world: int, temperature: float, top_k: int | None, use_cache: bool) -> None:
    expected = generate(_model(), PROMPTS, 20, temperature=temperature, top_k=top_k, seed=3)
    for text in pool(world).run(_on_ranks, temperature, top_k, use_cache):
        assert torch.equal(text, expected)


def test_seeds() -> None:
    model = _model()
    texts = [generate(model, PROMPTS, 20, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert all(torch.equal(text[:, :5], PROMPTS) and text.shape == (2, 25) for text in texts)


def test_top_k_one_and_a_small_temperature_are_greedy() -> None:
    model = _model()
    greedy = generate(model, PROMPTS, 20, temperature=0.0)
    assert torch.equal(generate(model, PROMPTS, 20, top_k=1), greedy)
    assert torch.equal(generate(model, PROMPTS, 20, temperature=1e-300), greedy)


@pytest.mark.parametrize("top_k", [None, 3, 1000])
def test_tokens_are_drawn_from_the_distribution(top_k: int | None) -> None:
    model = _model()
    logits = model(PROMPTS[:1])[0, -1].detach() / 2.0
    if top_k == 3:
        logits = logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf)
    drawn = generate(model, PROMPTS[:1].expand(4000, -1), 1, temperature=2.0, top_k=top_k)[:, -1]
    shares = torch.bincount(drawn, minlength=101) / 4000
    expected = logits.softmax(0)
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-12).all()


def test_no_tokens() -> None:
    assert torch.equal(generate(_model(), PROMPTS, 0), PROMPTS)


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
    with pytest.raises(ValueError, match="do not fit a table of 101 rows"):
        generate(model, PROMPTS + 100, 5)
