"""`tpfuse evaluate` predicts every token once and names the text."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tpfuse.cli import run
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.train import evaluate
from tpfuse.train.token_file import write_token_file
from tpfuse.train.tokenizer import ByteTokenizer, CharTokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [2, 8, 9, 10, 24, 25, 60])
def test_every_token_is_predicted_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass has 3 windows of 8 tokens."""
    monkeypatch.setattr(evaluate, "_TOKENS", 24)
    model = GPT(GPTConfig(61, 8, 16, 2, 4), dtype=torch.float64)
    initialize(model, 1)
    tokens = np.random.default_rng(count).integers(0, 61, count).astype(np.uint16)
    expected = 0.0
    for target in range(1, count):
        start = (target - 1) // 8 * 8
        ids = torch.from_numpy(tokens[start:target].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None])[0, -1]
        expected += F.cross_entropy(logits, torch.tensor(int(tokens[target]))).item()
    assert evaluate.mean_loss(model.eval(), tokens, CPU) == pytest.approx(expected / (count - 1), rel=1e-10)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "run"
    flags = (
        f"--data.path {text} --model.n-layer 1 --model.n-embd 32 --model.n-head 4 --model.n-positions 16 --out {out}"
        " --train.steps 3 --train.batch 4 --train.eval-every 0"
    ).split()
    assert run(["train", *flags]) == 0
    return out


def result(capfd: pytest.CaptureFixture[str], *arguments: str) -> re.Match[str]:
    capfd.readouterr()
    assert run(["evaluate", *arguments]) == 0
    out = capfd.readouterr().out
    found = re.fullmatch(
        r"\S+: loss ([\d.]+) nats per token, perplexity ([\d.]+), ([\d.]+) bits per byte \(([\d,]+) tokens of (.*)\)\n",
        out,
    )
    assert found is not None, out
    return found


def test_the_validation_tokens_of_a_run_are_evaluated(
    trained: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = result(capfd, str(trained))
    validation = int(len(text.read_text()) * 0.1)
    assert (found[4], found[5]) == (str(validation - 1), f"the end of {text}")
    loss, perplexity, bits = (float(found[index]) for index in (1, 2, 3))
    assert 2.0 < loss < 5.6
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert bits == pytest.approx(loss / math.log(2), abs=1e-3)
    end = trained.parent / "end.txt"
    end.write_text(text.read_text()[-validation:])
    assert result(capfd, str(trained), "--data.path", str(end))[1] == found[1]


def test_token_files(trained: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_token_file(tmp_path / "data", ByteTokenizer().encode(text.read_text()), ByteTokenizer(), "a book")
    found = result(capfd, str(trained), "--data.path", str(tmp_path / "data"))
    assert found[1] == result(capfd, str(trained), "--data.path", str(text))[1]
    assert found[5] == "a book"


def test_bad_input(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_token_file(tmp_path / "data", np.zeros(9, np.uint16), CharTokenizer("ab"), "test")
    (tmp_path / "short.txt").write_text("a")
    cases = {
        "expected the folder of a run: tpfuse evaluate RUN": [],
        "holds no checkpoint": [str(tmp_path)],
        "did you mean --data.path": [str(trained), "--data.paht", "x"],
        "/nowhere/x.txt does not exist": [str(trained), "--data.path", "/nowhere/x.txt"],
        "found 1 tokens, expected at least 2": [str(trained), "--data.path", str(tmp_path / "short.txt")],
        "another tokenizer": [str(trained), "--data.path", str(tmp_path / "data")],
    }
    for message, arguments in cases.items():
        capfd.readouterr()
        assert run(["evaluate", *arguments]) == 2
        captured = capfd.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
