"""`tpfuse evaluate` predicts every token once and names the text; it and `sample` say the same on any ranks."""

import contextlib
import json
import math
import re
import signal
import sys
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support.command import Command, Commands, printed_loss
from tests.support.decoders import decoder
from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse import cli
from tpfuse.comm.layout import local_tensor
from tpfuse.commands import evaluate, sample
from tpfuse.commands.shared_model import ModelRanks, SavedModel, _print_result, options_of
from tpfuse.errors import CheckpointError, RunError, UserError
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.patience import wait_until
from tpfuse.testing.ranks import pool
from tpfuse.train.launch import RankInfo
from tpfuse.train.model_options import check_layout
from tpfuse.train.options import (
    CommOptions,
    EvaluateCommand,
    EvaluateDataOptions,
    LayoutOptions,
    SampleCommand,
)
from tpfuse.train.rank_model import language_model, outlined
from tpfuse.train.token_file import write_token_file
from tpfuse.train.tokenizer import ByteTokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [2, 8, 9, 10, 24, 25, 60])
def test_every_token_is_predicted_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass has 3 windows of 8 tokens."""
    monkeypatch.setattr(evaluate, "_TOKENS", 24)
    ranks = ModelRanks(options_of(LayoutOptions(), CommOptions(), None), None, CPU)
    ranks.model = language_model(GPTConfig(61, 8, 16, 2, 4), ranks.options, None, CPU, torch.float64)
    ranks.model.draw(1)
    tokens = np.random.default_rng(count).integers(0, 61, count).astype(np.uint16)
    expected = 0.0
    for target in range(1, count):
        start = (target - 1) // 8 * 8
        ids = torch.from_numpy(tokens[start:target].astype(np.int64))
        with torch.no_grad():
            logits = ranks.model.module(ids[None])[0, -1]
        expected += F.cross_entropy(logits, torch.tensor(int(tokens[target]))).item()
    assert evaluate.loss_sum(ranks, tokens, count, 8) == pytest.approx(expected, rel=1e-10)


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Return a folder for `model`. Its file "text" has 17 windows of 20 tokens and one more token."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "text").write_text(text.read_text()[: 17 * 20 + 2])
    return folder


def model(models: Path, name: str) -> Path:
    """Return a Hugging Face "folder", a "run" of it in float64, or a run of a GPT in float64, which are made once."""
    if name != "gpt" and not (models / "folder").exists():
        decoder("gpt2", torch.float32, vocab_size=256, num_hidden_layers=3).save_pretrained(models / "folder")
    if not (models / name).exists():
        flags = "--model.n-layer 3 --model.n-embd 48 --model.n-head 12 --model.dropout 0.1"
        flags = f"--model.from {models / 'folder'}" if name == "run" else flags
        flags += f" --data.path {models / 'text'} --data.val-fraction 0.2 --train.dtype float64"
        flags += " --model.n-positions 20 --train.batch 8 --train.eval-every 0 --train.steps 2"
        assert cli.run(["train", *flags.split(), "--out", str(models / name)]) == 0
    return models / name


def computed(folder: Path, layout: LayoutOptions, world: int) -> tuple[float, str, float]:
    """Return the loss, several texts, and the share of the model's elements that this rank of a pool holds."""
    options = options_of(layout, CommOptions(), world)
    parallel = options.parallel
    mesh = None if world == 1 else mesh_of(parallel.data_ranks, parallel.tp, parallel.cp, 1, parallel.pp)
    ranks = ModelRanks(options, mesh, CPU)
    text = EvaluateDataOptions(path=folder.parent / "text")
    with mock.patch.object(evaluate, "_TOKENS", 60):  # 3 windows of a row
        loss, task = evaluate.mean_loss(ranks, folder, EvaluateCommand(data=text, length=20))
    held = sum(local_tensor(parameter).numel() for parameter in ranks.model.module.parameters())
    whole = sum(prod(parameter.shape) for parameter in outlined(task.saved.config, None, torch.float32).parameters())
    drawing = SampleCommand(prompt="the d", tokens=25, samples=3, top_p=0.9, seed=5)
    return loss, sample.texts(ranks, folder, drawing), held / whole


@pytest.mark.parametrize(
    ("name", "layout", "most"),
    [
        ("gpt", {"cp": 2, "dp": 2}, 1.0),
        ("folder", {"tp": 2}, 0.6),
        *exhaustive(
            ("gpt", {"tp": 2, "pp": 2}, 0.4),
            ("gpt", {"cp": 2, "pp": 2}, 0.75),
            ("run", {"tp": 2, "cp": 2}, 0.6),
            ("folder", {"dp": 2, "pp": 2}, 0.75),
        ),
    ],
    ids=str,
)
def test_every_layout_has_the_loss_and_the_texts_of_one_rank(
    models: Path, name: str, layout: dict[str, int], most: float
) -> None:
    """The texts are longer than the context of the GPT."""
    loss, texts, _ = computed(model(models, name), LayoutOptions(), 1)
    assert len(set(texts.split(sample.BETWEEN))) == 3
    world = prod(layout.values())
    for found, its, share in pool(world).run(computed, models / name, LayoutOptions(**layout), world):
        assert found == pytest.approx(loss, rel=1e-6 if name == "folder" else 1e-9)
        assert its == texts
        assert share <= most


def refused(folder: Path, layout: LayoutOptions, damaged: bool) -> tuple[str, int]:
    """Return the error and the status on this rank of a pool. damaged: whether only rank 1 finds a damaged file."""
    options = options_of(layout, CommOptions(), 2)
    ranks = ModelRanks(options, mesh_of(options.parallel.data_ranks, options.parallel.tp), CPU)
    load = SavedModel.load

    def wrong(saved: SavedModel, shards: Any, *, verified: bool) -> None:
        if not ranks.first:
            raise CheckpointError(folder, "peace", "a war")
        load(saved, shards, verified=verified)

    with mock.patch.object(SavedModel, "load", wrong if damaged else load), pytest.raises(RunError) as error:
        evaluate.mean_loss(ranks, folder, EvaluateCommand())
    return str(error.value), error.value.status


def full() -> tuple[str, int]:
    """Return the error and the status on this rank of a pool if the first one's disk is full."""
    ranks = ModelRanks(options_of(LayoutOptions(), CommOptions(), 2), mesh_of(2, 1), CPU)
    with pytest.raises(RunError) as error:
        ranks.from_first(mock.Mock(side_effect=OSError(28, "No space left on device", "tokens.bin")))
    return str(error.value), error.value.status


def test_what_one_rank_refuses_ends_all_ranks(models: Path, tmp_path: Path) -> None:
    assert pool(2).run(full) == [("tokens.bin: No space left on device", 1)] * 2
    for said, status in pool(2).run(refused, tmp_path, LayoutOptions(), False):
        assert f"{tmp_path} holds no checkpoint" in said and status == 2
    for said, status in pool(2).run(refused, model(models, "gpt"), LayoutOptions(tp=2), True):
        assert "expected peace, found a war" in said and status == 3


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            {"tp": 5},
            "n_head 12: it can be one of [1, 2, 3, 4, 6, 12]; with --parallel.dp alone each rank has the whole model",
        ),
        ({"cp": 21}, "F: cp 21 is more than the 20 tokens of a sequence; with --parallel.dp alone"),
        ({"pp": 4}, "--parallel.pp 4: 3 layers cannot be cut into 4 pipeline stages"),
        ({"tp": 0}, "--parallel.tp 0: expected at least 1"),
    ],
    ids=str,
)
def test_a_layout_that_the_model_cannot_have_is_refused(layout: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        options = options_of(LayoutOptions(**layout), CommOptions(), None)
        check_layout(options, GPTConfig(61, 20, 48, 3, 12), Path("F"))


@pytest.mark.parametrize("family", ["mpt", "trocr"])
def test_a_model_that_tpfuse_does_not_know_is_computed_by_transformers(
    tmp_path: Path, commands: Commands, family: str
) -> None:
    """tpfuse knows no layers of MPT. The forward of TrOCR returns a mean loss for labels that are not shifted."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if family == "mpt":
        config = AutoConfig.for_model("mpt", d_model=16, n_heads=2, n_layers=2, max_seq_len=32, vocab_size=256)
    else:
        sizes = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 256}
        config = AutoConfig.for_model("trocr", d_model=16, max_position_embeddings=32, **sizes)
    whole = AutoModelForCausalLM.from_config(config).eval()
    whole.save_pretrained(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text()) | {"max_position_embeddings": 32}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    ids = torch.randint(97, 123, (1, 12))
    (tmp_path / "text").write_bytes(bytes(ids[0].tolist()))
    with torch.no_grad():
        logits = whole(input_ids=ids[:, :-1].contiguous()).logits[0]
        text = whole.generate(ids, do_sample=False, max_new_tokens=4)[0].tolist()
    said = commands.do("evaluate", tmp_path / "model", "--data.path", tmp_path / "text")
    assert printed_loss(said) == pytest.approx(F.cross_entropy(logits, ids[0, 1:]).item(), abs=1e-4)
    prompt = ("--prompt-file", tmp_path / "text", "--tokens", "4", "--temperature", "0")
    assert commands.do("sample", tmp_path / "model", *prompt) == bytes(text).decode(errors="replace") + "\n"


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m tpfuse"


@pytest.mark.processes
def test_one_rank_prints(models: Path, commands: Commands) -> None:
    run, words = model(models, "gpt"), ("--prompt", "the d", "--tokens", "9", "--samples", "3")
    evaluated, texts = commands.do("evaluate", run), commands.do("sample", run, *words)
    out, errors = Command(["-m", "tpfuse", "evaluate", str(run), "--parallel.tp", "2"]).end()
    (*numbers, tokens, source, length), *others = (re.fullmatch(LINE, said).groups() for said in (evaluated, out))  # type: ignore[union-attr]
    assert others[0][3:] == (tokens, source, length) and not errors
    assert [float(x) for x in others[0][:3]] == pytest.approx([float(x) for x in numbers], rel=1e-3)
    out, _ = Command([*TORCHRUN.split(), "sample", str(run), *words]).end()
    assert out == texts


def test_a_disk_that_is_full_takes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(encoding="utf-8", write=mock.Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(sys, "stdout", full)
    options = options_of(LayoutOptions(), CommOptions(), None)
    with pytest.raises(RunError, match=r"^No space left on device$"):
        _print_result(RankInfo(0, 1, 0, 1, None), lambda _: "text", options, ())


def joined(process: int) -> bool:
    """Return whether a rank has connections to others, as it has shortly before the computation."""
    with contextlib.suppress(OSError):
        return any(str(file.readlink()).startswith("socket:") for file in Path(f"/proc/{process}/fd").iterdir())
    return False


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "tpfuse: interrupted\n"),
        (signal.SIGKILL, 1, r"tpfuse sample: error: rank 1 \(process \d+\) was killed by SIGKILL: .*\n"),
    ],
)
def test_a_signal_ends_all_ranks(models: Path, number: signal.Signals, status: int, said: str) -> None:
    """Ctrl-C goes to all processes of a terminal, SIGKILL to rank 1."""
    words = ["sample", str(model(models, "gpt")), "--tokens", "1000000", "--parallel.tp", "2"]
    command = Command(["-m", "tpfuse", *words])
    wait_until(lambda: [joined(rank) for rank in command.ranks()] == [True] * 2, "both ranks have joined", 120.0)
    command.send(number, command.processes() if number == signal.SIGINT else command.ranks()[1:])
    _, err = command.end(status)
    assert re.fullmatch(said, err), err
