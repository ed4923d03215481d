"""--data.documents mask: the tokens of a document see each other alone, in every layout and model that can."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from tests.support.command import Commands
from tests.support.decoders import decoder, exact
from tests.support.tiers import exhaustive
from tests.support.training import check_same, decoder_config, new_trainer, options_of, ranks_of, whole_weights
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import MicroBatch
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.rank_model import ModelConfig

START = 5  # in the tokens of `new_trainer`, about one in 61, so that the windows of 7 tokens below have few documents
LENGTH = 23


def _config(family: str) -> ModelConfig:
    if family == "gpt":
        return GPTConfig(vocab_size=61, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, dropout=0.0)
    return decoder_config(family, LENGTH)


def _ids(vocabulary: int) -> torch.Tensor:
    """Return sequences with documents of all lengths, which begin at their second token, or end with their last."""
    ids = torch.randint(0, vocabulary, (3, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    ids[ids == START] += 1
    for row, places in enumerate(([0, 1, 5, 22], [9], [3, 4, 10, 11, 23])):
        ids[row, places] = START
    return ids


def losses(options: Any, config: ModelConfig) -> tuple[float, float, list[float]]:
    """Return the sum of the losses of the sequences, and of those of their documents alone."""
    with exact(config.empty(torch.float64)) if isinstance(config, DecoderConfig) else torch.no_grad():
        model = new_trainer(options, config)[0].language_model
        model.document_start = START
        both = _ids(config.vocab_size)
        ids, targets = both[:, :-1], both[:, 1:]
        with torch.no_grad():
            whole = model.loss(MicroBatch(ids, targets)).item()
            model.document_start = None
            attending = model.loss(MicroBatch(ids, targets)).item()
            alone = 0.0
            for row in range(len(ids)):
                starts = sorted({0, *(ids[row] == START).nonzero().flatten().tolist()})
                for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
                    alone += model.loss(MicroBatch(*(x[row : row + 1, start:end] for x in (ids, targets)))).item()
    return whole, attending, alone


@pytest.mark.parametrize("family", ["gpt", "llama", "gpt2", *exhaustive("gemma", "neox", "mistral", "phi3")])
def test_a_document_has_the_loss_that_it_has_alone(family: str) -> None:
    whole, attending, alone = pool(1).run(losses, options_of(batch=3, micro_batch=3), _config(family))[0]
    assert whole == pytest.approx(alone, rel=1e-12)
    assert abs(attending - alone) > 1e-3


def masked(options: Any, config: ModelConfig, steps: int) -> Any:
    with exact(config.empty(torch.float64)) if isinstance(config, DecoderConfig) else torch.enable_grad():
        trainer, windows = new_trainer(options, config)
        trainer.language_model.document_start = START
        results = [trainer.train_step(windows, lambda: False) for _ in range(steps)]
        evaluated = trainer.evaluate(windows, 1)
    return [*(r.loss for r in results), evaluated], [r.grad_norm for r in results], whole_weights(trainer)


def test_commands_mask_documents(tmp_path: Path, commands: Commands) -> None:
    names = {name: index for index, name in enumerate(["<|endoftext|>", "?", *"abcdefgh"])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    generator = np.random.default_rng(0)
    words = [" ".join(generator.permutation(list("abcdefgh"))[:5]) for _ in range(30)]
    lines = "".join(json.dumps({"body": each}) + "\n" for each in words)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    named = ("--data.path", tmp_path / "a.jsonl.gz", "--data.field", "body", "--data.tokenizer", tmp_path)
    commands.do("prepare", *named, "--out", tmp_path / "tokens")
    small = "--model.n-layer 1 --model.n-embd 32 --model.n-positions 16 --train.batch 2"
    short = f"train {small} --train.steps 2 --train.eval-every 0 --data.path".split()
    train = (*short, tmp_path / "tokens", "--data.documents")
    commands.do(*train, "mask", "--out", tmp_path / "run")
    tokens = ("evaluate", tmp_path / "run", "--data.path", tmp_path / "tokens")
    found = [commands.do("evaluate", tmp_path / "run", *named[:4]), commands.do(*tokens)]
    options = tmp_path / "run" / "config.toml"
    options.write_text(options.read_text().replace('documents = "mask"', 'documents = "attend"'))
    found.append(commands.do(*tokens))
    first, second, attending = (re.search(r"loss ([\d.]+)", said)[1] for said in found)  # type: ignore[index]
    assert first == second != attending
    new = ("--out", tmp_path / "new")
    assert "is not for --train.compile" in commands.fail(*train, "mask", "--train.compile", *new)
    text = ("train", "--data.path", tmp_path / "a.txt", "--data.documents", "mask", *new)
    (tmp_path / "a.txt").write_text("a b c " * 999)
    assert "the tokenizer bytes has no token such as" in commands.fail(*text)
    said = commands.fail(*text, "--data.tokenizer", tmp_path)
    assert re.search("none of the first 2997 tokens of .*a.txt is token 0", said)
    tokens_of_another = np.full(40_000, 3, "<u2")
    tokens_of_another[3000] = 99
    tokens_of_another.tofile(tmp_path / "b.bin")
    said = commands.fail(*text, "--data.path", tmp_path / "b.bin", "--data.tokenizer", tmp_path)
    assert "b.bin: token 99 at 3000 is outside the vocabulary of 10: it is damaged, or another tokenizer" in said
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".staging*"))


LAYOUTS = [
    {"tp": 2, "cp": 2, "accumulation": 2},
    *exhaustive(
        {"pp": 2, "dp": 2, "accumulation": 2},
        {"dp": 3, "stage": 3},
        {"cp": 4, "cp_schedule": "ring", "cp_balance": "striped"},
        {"cp": 2, "cp_schedule": "all_gather"},
        {"cp": 4, "cp_schedule": "ulysses_ring", "cp_balance": "contiguous"},
        {"pp": 2, "cp": 2, "accumulation": 4, "recompute": "full"},
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_masks_as_one_rank(layout: dict[str, Any]) -> None:
    """Dropout masks are equal too."""
    config = GPTConfig(vocab_size=61, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, dropout=0.2)
    alone = pool(1).run(masked, options_of(batch=12), config, 4)[0]
    options = options_of(batch=12, **layout)
    for found in pool(ranks_of(options)).run(masked, options, config, 4):
        check_same(found, alone)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *exhaustive(
            ("llama", {"tp": 2, "cp": 2}),
            ("gpt2", {"tp": 2, "dp": 2}),
            ("qwen3", {"pp": 2, "cp": 2, "accumulation": 2}),
        ),
    ],
    ids=str,
)
def test_every_layout_of_a_decoder_masks_as_one_rank(family: str, layout: dict[str, Any]) -> None:
    config, options = _config(family), options_of(batch=4, **layout)
    alone = pool(1).run(masked, options_of(batch=4), config, 3)[0]
    for found in pool(ranks_of(options)).run(masked, options, config, 3):
        check_same(found, alone, 1e-9)


def test_a_model_that_cannot_mask_is_refused_before_a_run_starts(tmp_path: Path, commands: Commands) -> None:
    for family in ("gpt_oss", "falcon_h1"):  # masks that do not follow positions; states that pass through all tokens
        decoder(family, torch.float32).config.save_pretrained(tmp_path / family)
        model = "--model.from", str(tmp_path / family), "--out", str(tmp_path / "run")
        said = commands.fail("train", *model, "--data.documents", "mask")
        assert f"error: --model.from {tmp_path / family}: --data.documents mask: " in said
        why = "ForCausalLM lets a document see those before it, whatever its positions"
        assert said.endswith(f"{why}: give --data.documents attend") and not (tmp_path / "run").exists()
