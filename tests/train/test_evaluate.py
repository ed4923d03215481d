"""`tpfuse evaluate` predicts every token once and names the text."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support.command import Commands
from tpfuse.models.gpt import GPTConfig
from tpfuse.train import evaluate
from tpfuse.train.language_model import language_model
from tpfuse.train.options import TrainCommand
from tpfuse.train.token_file import write_token_file
from tpfuse.train.tokenizer import ByteTokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [2, 8, 9, 10, 24, 25, 60])
def test_every_token_is_predicted_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass has 3 windows of 8 tokens."""
    monkeypatch.setattr(evaluate, "_TOKENS", 24)
    model = language_model(GPTConfig(61, 8, 16, 2, 4), TrainCommand(), None, CPU, torch.float64)
    model.draw(1)
    tokens = np.random.default_rng(count).integers(0, 61, count).astype(np.uint16)
    expected = 0.0
    for target in range(1, count):
        start = (target - 1) // 8 * 8
        ids = torch.from_numpy(tokens[start:target].astype(np.int64))
        with torch.no_grad():
            logits = model.module(ids[None])[0, -1]
        expected += F.cross_entropy(logits, torch.tensor(int(tokens[target]))).item()
    assert evaluate.mean_loss(model, tokens, CPU, 8) == pytest.approx(expected / (count - 1), rel=1e-10)


# Loss, perplexity, bits per byte, the number of tokens, their source and the length of windows.
LINE = (
    r"\S+: loss ([\d.]+) nats per token, perplexity ([\d.]+), ([\d.]+) bits per byte"
    r" \(([\d,]+) tokens of (.*), in windows of (\d+)\)\n"
)


def test_the_validation_tokens_of_a_run_are_evaluated_and_those_of_other_data(
    text: Path, tmp_path: Path, commands: Commands
) -> None:
    def evaluated(*data: str | Path) -> re.Match[str]:
        out = commands.do("evaluate", commands.out, *data)
        found = re.fullmatch(LINE, out)
        assert found is not None, out
        return found

    commands.train("--train.steps", "3", "--train.eval-every", "0")
    found, validation = evaluated(), int(len(text.read_text()) * 0.1)
    assert (found[4], found[5]) == (str(validation - 1), f"the end of {text}")
    loss, perplexity, bits = (float(found[index]) for index in (1, 2, 3))
    assert 2.0 < loss < 5.6
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert bits == pytest.approx(loss / math.log(2), abs=1e-3)
    (tmp_path / "end.txt").write_text(text.read_text()[-validation:])
    assert evaluated("--data.path", tmp_path / "end.txt")[1] == found[1]
    shorter = evaluated("--length", "3")
    assert shorter[6] == "3" != found[6] and shorter[1] != found[1]
    assert f"--length 999: expected 1 to {found[6]}" in commands.fail("evaluate", commands.out, "--length", "999")
    write_token_file(tmp_path / "data", [ByteTokenizer().encode(text.read_text())], ByteTokenizer(), "a book")
    found = evaluated("--data.path", tmp_path / "data")
    assert found[1] == evaluated("--data.path", text)[1]
    assert found[5] == "a book"
