"""The commands in this process: their output, files and status. test_launch.py runs them with several ranks."""

import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tpfuse
from tests.support.command import Commands, printed_loss
from tpfuse import switches
from tpfuse.checkpoint import durable
from tpfuse.checkpoint.checkpoint import newest_good
from tpfuse.cli import COMMANDS, run
from tpfuse.commands.sample import BETWEEN
from tpfuse.train import hardware, loop, metrics, options
from tpfuse.train.check_options import with_layout
from tpfuse.train.child import quick_imports
from tpfuse.train.config import parse_train
from tpfuse.train.flags import flags_of
from tpfuse.train.launch import STOP_SIGNALS, StopRequest
from tpfuse.train.messages import say
from tpfuse.train.metrics import Reporter, Row, described, draw_losses, read_metrics
from tpfuse.train.setup import prepare_run
from tpfuse.train.token_file import write_token_file
from tpfuse.train.tokenizer import ByteTokenizer
from tpfuse.train.trainer import Trainer

NO_SPACE = "No space left on device"


def steps(run: Path) -> list[int]:
    """Return the steps of the run's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))


def times(folder: Path) -> dict[Path, int]:
    """Return when each file in the folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_writes_its_files(trained: Path) -> None:
    rows = read_metrics(trained / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 3, 6, 9, 12]
    names = {"step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "seconds"}
    names |= {"sent_bytes", "received_bytes", "mean_loss", "pipeline_idle", "predicted_idle", "wall_seconds", "goodput"}
    names |= {"time"}
    assert all(set(row) == names for row in rows)
    assert all(row["sent_bytes"] == row["received_bytes"] == 0 for row in rows[1:]), "one rank"
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [0, 6, 12]
    assert all(0 < row["mfu"] <= 1 and row["tokens_per_second"] > 0 and row["memory_bytes"] > 2**26 for row in rows[1:])
    assert steps(trained) == [10, 12], "keeps two"
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    board = EventAccumulator(str(trained / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [3, 6, 9, 12]
    assert (trained / "config.toml").read_text().count("[") == 8


def test_a_run_prints_its_first_and_last_lines(trained: Path, text: Path) -> None:
    out = (trained.parent / "said").read_text()
    assert out.startswith(f"reading  {text}\nmodel    2 layers"), "before torch is imported"
    first, last = (row["val_loss"] for row in read_metrics(trained / "metrics.jsonl") if row["step"] in (0, 12))
    assert f"\nvalidation loss {first:.4f} -> {last:.4f} nats per token\n" in out
    assert re.search(r"^step 12/12  loss .*  process \d+ MiB  0:00 left$", out, re.M)
    assert re.search(r"^memory   ZeRO stage 0, counted [\d.]+ MiB a rank: parameters [\d.]+, gradients ", out, re.M)


def test_a_resumed_run_ends_with_the_same_bits(trained: Path, copied: Path, commands: Commands) -> None:
    shutil.rmtree(copied / "step-12")
    rows = read_metrics(copied / "metrics.jsonl")
    commands.resume()
    again = read_metrics(copied / "metrics.jsonl")
    assert [row["step"] for row in again] == [row["step"] for row in rows], "no row is written twice"
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    first, second = (newest_good(folder, warn=pytest.fail) for folder in (trained, copied))
    assert first is not None
    assert second is not None
    assert first.manifest["files"] == second.manifest["files"], "to the last byte"


def test_sample_prints_the_prompt_and_its_continuation(trained: Path, tmp_path: Path, commands: Commands) -> None:
    ways = ("--temperature 0", "--temperature 0", "--seed 1", "--seed 2", "--top-k 1")
    texts = [commands.do("sample", trained, "--prompt", "the c", "--tokens", "40", *way.split()) for way in ways]
    assert all(text.startswith("the c") and len(text) == 5 + 40 + 1 for text in texts)
    assert texts[0] == texts[1] == texts[4]
    assert texts[2] != texts[3]
    (tmp_path / "prompt.txt").write_text("the c")
    several = ["--samples", "2", "--top-p", "0.9", "--prompt-file", tmp_path / "prompt.txt", "--tokens", "40"]
    texts = commands.do("sample", trained, *several, "--seed", "1").removesuffix("\n").split(BETWEEN)
    assert len(texts) == 2 and texts[0] != texts[1]
    second = ("sample", trained, "--prompt", "the c", "--tokens", "40", "--seed", "2")
    assert commands.do(*second, "--top-p", "0.9") == texts[1] + "\n", "the first sample of the next seed"
    assert commands.do(*second) != texts[1] + "\n", "without top-p other tokens are drawn"


def test_prepare_and_train_on_its_file(tmp_path: Path, text: Path, commands: Commands) -> None:
    prepare = ("prepare", "--out", tmp_path / "data", "--data.path", text, "--data.tokenizer", "chars")
    commands.do(*prepare)
    commands.fail(*prepare)  # never over an existing file
    description = json.loads((tmp_path / "data" / "tokens.json").read_text())
    assert description["tokens"] == len(text.read_text())
    commands.train("--data.path", tmp_path / "data" / "tokens.bin")
    assert not (commands.out / "data").exists(), "a prepared file is read where it is"
    assert 'tokenizer = "chars"' in (commands.out / "config.toml").read_text(), "the one that was used"
    commands.do("sample", commands.out, "--prompt", "the", "--tokens", "5")
    (tmp_path / "data" / "tokens.bin").unlink()  # as if it had been interrupted just before
    commands.do(*prepare)
    (tmp_path / "data" / "tokens.bin").unlink()
    (tmp_path / "data" / "tokens.json").write_text('["one text", "two"]')
    for source in (text, tmp_path / "data" / "tokens.json"):
        error = commands.fail("prepare", "--out", tmp_path / "data", "--data.path", source)
        assert "tokens.json is not what `tpfuse prepare` writes" in error and error.endswith(": choose another --out")
    assert (tmp_path / "data" / "tokens.json").read_text() == '["one text", "two"]'


def test_kernels_that_cannot_run_are_refused(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "INTERPRETED", False)
    for option, verb in (("--kernels triton", "are"), ("--parallel.impl fused", "is")):
        expected = f"{option} on a CPU {verb} interpreted: set TRITON_INTERPRET=1"
        assert expected in commands.fail_to_train("--parallel.tp", "2", *option.split())
    assert not commands.out.exists()


def test_the_gpt2_tokenizer_without_a_network_is_an_error(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    assert "pass --data.tokenizer tokenizer.json" in commands.fail_to_train("--data.tokenizer", "gpt2")
    assert not commands.out.exists()


def test_options_that_do_not_fit_a_run_change_nothing(copied: Path, text: Path, commands: Commands) -> None:
    other, data = copied.parent / "other.txt", copied.parent / "data"
    other.write_text(text.read_text()[::-1])
    commands.do("prepare", "--out", data, "--data.path", other, "--data.tokenizer", "chars")
    before = times(copied)
    assert "add --resume" in commands.fail_to_train()
    for other_options, message in (
        (
            ("--optim.state-dtype", "bfloat16"),
            "--optim.state-dtype bfloat16: the run has moments in float32, which",
        ),
        (("--model.n-layer", "3"), "different model: n_layer is 2 in the checkpoint and 3 in the options"),
        (("--train.dtype", "float64"), "trained in float32"),
        (("--data.path", data / "tokens.bin"), "different data"),
        (("--data.path", other), f"was trained on {text}, not on {other}"),
    ):
        assert message in commands.fail_to_resume(*other_options)
    assert times(copied) == before


def test_a_schedule_in_tokens_continues_with_another_batch(copied: Path, commands: Commands) -> None:
    """12 steps of 128 tokens are followed by one of 64."""
    commands.out = copied
    batch = ("--train.steps", "13", "--train.batch", "4", "--optim.decay-steps", "20000tokens")
    error = commands.fail_to_resume(*batch)
    assert (
        "--optim.decay-steps counts tokens and --optim.warmup steps; count both in tokens (--optim.warmup 6400" in error
    )
    commands.resume(*batch, "--optim.warmup", "6400tokens")
    rate = 2e-3 * (12 * 128 + 64) / (6400 + 64)
    assert read_metrics(copied / "metrics.jsonl")[-1]["lr"] == pytest.approx(rate, rel=1e-9)


SHORT = "--train.steps 4 --train.eval-every 4 --train.save-every 0".split()


def test_validation_may_have_its_own_text(
    text: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank takes as many threads as OMP_NUM_THREADS says."""
    out, val = commands.out, tmp_path / "val.txt"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    val.write_text("#" * (31 * 16 + 1))  # each window of 16 tokens has the same loss
    said = commands.train(*SHORT, "--data.val-path", val)
    assert f"text     {text}: {len(text.read_text()):,} tokens, each read 0.07 times in 4 steps" in said
    assert f"; validation on 497 tokens of {val}, vocabulary 256" in said
    assert re.search(r"^ranks    .* on cpu, 2 threads each, ", said, re.M)
    torch.set_num_threads(1)
    assert f'val_path = "{val}"' in (out / "config.toml").read_text()
    val.write_text("changed since")
    again = prepare_run(with_layout(parse_train(["--resume", "--out", str(out)]), 1))
    assert again.checkpoint is not None and again.data.val is not None
    assert set(again.data.val.open().sources[0][:].tolist()) == {ord("#")}, "the run has kept the tokens"
    evaluated, loss = commands.do("evaluate", out), read_metrics(out / "metrics.jsonl")[-1]["val_loss"]
    assert printed_loss(evaluated) == pytest.approx(loss, abs=1e-4) and torch.get_num_threads() == 2
    assert f"(496 tokens of {val}, in windows of 16)" in evaluated
    assert f"was validated on {val}, not on {text}" in commands.fail_to_resume("--data.val-path", text)
    error = commands.fail_to_resume("--data.val-path", out / "data" / "tokens.bin")
    assert "was validated on tokens with SHA-256" in error


def test_a_run_whose_only_listed_source_is_a_token_file_resumes(text: Path, tmp_path: Path, commands: Commands) -> None:
    tokens = write_token_file(tmp_path, [np.frombuffer(text.read_bytes(), np.uint8)], ByteTokenizer(), "x").paths[0]
    (sources := tmp_path / "sources.toml").write_text(f"'{tokens}' = 1\n")
    commands.train(*SHORT, "--data.path", sources)
    assert "trained 5 steps" in commands.resume("--train.steps", "5")


def test_a_run_reads_several_sources_with_weights(text: Path, tmp_path: Path, commands: Commands) -> None:
    out, sources, code = commands.out, tmp_path / "sources.toml", tmp_path / "cod?.jsonl"
    (file := tmp_path / "code.jsonl").write_text('{"text": "%s"}\n' % ("#" * 600))
    sources.write_text(f"'{text}' = 3\n'{code}' = 1\n")
    said = commands.train(*SHORT, "--data.path", sources)
    assert f"75% of the sequences from {text}: " in said and f"25% of the sequences from {code}: 541 tokens" in said
    run = prepare_run(with_layout(parse_train(["--resume", "--out", str(out)]), 1))
    ends = [part[:] for part in run.data.open(0.1)[1].sources]
    assert set(ends[1].tolist()) <= {ord("#"), ord("\n")} and len(ends[1]) == 60
    losses = []
    for index, end in enumerate(ends):
        tokens = write_token_file(tmp_path / f"end-{index}", [end], ByteTokenizer(), "end").paths[0]
        losses.append(float(commands.do("evaluate", out, "--data.path", tokens).partition("loss ")[2].split()[0]))
    whole = float(commands.do("evaluate", out).partition("loss ")[2].split()[0])
    assert whole == pytest.approx(0.75 * losses[0] + 0.25 * losses[1], abs=2e-4)
    file.write_text("changed since")
    run = prepare_run(with_layout(parse_train(["--resume", "--out", str(out)]), 1))
    assert [files.count for files in run.data.train.files][1] == 601, "the run has kept the tokens"
    file.unlink()
    assert "trained 5 steps" in commands.resume("--train.steps", "5")
    sources.write_text(f"'{text}' = 2\n'{code}' = 1\n")
    assert "--resume with different data" in commands.fail_to_resume("--train.steps", "6")
    sources.write_text(f"'{code}' = 3\n'{text}' = 1\n")
    error = commands.fail_to_resume("--train.steps", "6")
    assert f"tokens-1.bin has the tokens of {text}, not of {code}" in error


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Return at_step(step, action), which lets the action happen before the evaluation of that step."""

    def arrange(step: int, action: Callable[[], object]) -> None:
        real = Trainer.evaluate

        def evaluate(self: Trainer, *arguments: Any) -> float:
            if self.step == step:
                action()
            return real(self, *arguments)

        monkeypatch.setattr(Trainer, "evaluate", evaluate)

    return arrange


def test_a_token_file_that_changes_during_the_run_is_found(commands: Commands, at_step: Callable[..., None]) -> None:
    at_step(5, lambda: os.truncate(commands.out / "data" / "tokens.bin", 2000))
    error = commands.fail_to_train(status=1)
    assert "step 5: rank 0: " in error and "tokens.bin has become shorter: expected" in error


def test_a_removed_run_folder_ends_the_run_with_an_error(commands: Commands, at_step: Callable[..., None]) -> None:
    at_step(6, lambda: shutil.rmtree(commands.out))
    error = commands.fail_to_train("--train.eval-every", "6", status=1)
    assert f"step 10 was not saved: the run's folder {commands.out} has been removed" in error


def test_too_little_memory_is_one_line(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "train_step", lambda *arguments: torch.empty(2**50))
    error = commands.fail_to_train(status=1)
    assert "step 0: rank 0 has too little memory (" in error and "a smaller --train.micro-batch" in error


def test_options_that_a_full_disk_has_emptied(copied: Path, commands: Commands) -> None:
    """An empty file must not mean default options, and resuming does not empty the file."""
    (copied / "config.toml").write_text("")
    assert "config.toml is empty: write the run's options into it" in commands.fail_to_resume()


def test_a_disk_that_is_full_leaves_the_options_as_they_were(
    copied: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, NO_SPACE)

    before = (copied / "config.toml").read_text()
    monkeypatch.setattr(durable.os, "write", full)
    assert NO_SPACE in commands.fail_to_resume("--train.steps", "15")
    assert (copied / "config.toml").read_text() == before


def test_a_folder_has_one_run_at_a_time(copied: Path, commands: Commands) -> None:
    """A finished run resumes with more steps, but not while another process has its folder."""
    holder = os.open(copied, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    before = times(copied)
    assert f"{copied} is in use by another run" in commands.fail_to_resume("--train.steps", "15")
    assert times(copied) == before
    os.close(holder)
    commands.resume("--train.steps", "15")
    assert 15 in steps(copied)


def test_a_stopped_run_saves_and_can_be_resumed(commands: Commands, at_step: Callable[..., None]) -> None:
    at_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    same = "--resume", "auto", "--train.eval-every", "1"
    said = commands.train(*same)
    assert f"stopped at step 7 of 12; continue with: python -m tpfuse train --resume --out {commands.out}" in said
    assert steps(commands.out) == [5, 7]
    assert read_metrics(commands.out / "metrics.jsonl")[-1]["val_loss"] is None, "step 7 was not evaluated"
    assert "trained 12 steps" in commands.train(*same), "the same command continues the run"


def test_the_goodput_is_that_of_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run is killed after 16 s and resumes from step 2 at 40 s; then before a checkpoint, which drops all."""
    now = 1000.0
    monkeypatch.setattr("tpfuse.train.metrics.time.time", lambda: now)

    def trains(start: int, *rows: tuple[int, float, float]) -> list[float]:
        nonlocal now
        reporter = Reporter(tmp_path, 9, start, "process")
        for step, written, trained in rows:
            now = written
            reporter.add(Row(step, grad_norm=inf), None, trained)
        reporter.close()
        rows = read_metrics(tmp_path / "metrics.jsonl")
        assert all(row["grad_norm"] is None for row in rows), "JSON has no infinity"
        return [row["goodput"] for row in rows]

    assert trains(0, (2, 1010.0, 8.0), (4, 1016.0, 12.0)) == [0.8, 0.75]
    now = 1040.0
    assert trains(2, (4, 1050.0, 5.0)) == [0.8, (8 + 5) / 50]
    now = 1060.0
    assert trains(0, (1, 1080.0, 20.0)) == [0.25]
    lost = [line for line in capfd.readouterr().out.splitlines() if line.startswith("lost")]
    assert lost == ["lost     steps 3 to 4 and 30 s since step 2", "lost     steps 1 to 4 and 60 s since step 0"]


def test_a_ruined_model_does_not_replace_a_good_checkpoint(commands: Commands) -> None:
    """The update of step 4 overflows, although its loss was still finite."""
    commands.train(*"--train.save-every 1 --train.keep 1 --train.steps 3".split())
    explosion = "--optim.lr 1e38 --optim.clip 0 --train.steps 6 --optim.decay-steps 6 --optim.weight-decay 10".split()
    assert "step 4: after the update the loss is nan; not saved" in commands.fail_to_resume(*explosion, status=1)
    assert steps(commands.out) == [3]


@contextlib.contextmanager
def nobody_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let stdout be a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        yield


def test_a_command_ends_without_a_word_if_nobody_reads_its_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobody_reads(monkeypatch):
        assert run(["--help"]) == 1
    assert not capsys.readouterr().err


def test_a_command_fails_if_the_disk_takes_no_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpfuse.tools.doctor.examine", lambda machine: [])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(["doctor", "--json"]) == 1
    assert capsys.readouterr().err == "tpfuse doctor: error: No space left on device\n"


def test_training_continues_without_a_reader_of_its_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with nobody_reads(monkeypatch):
        for line in ("one", "two", "three"):
            say(line)
    warned = "tpfuse: warning: cannot write to standard output: Broken pipe; training continues without it\n"
    assert capsys.readouterr().err == warned


def test_standard_output_takes_what_it_cannot_express_and_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    monkeypatch.setattr("tpfuse.tools.verify.run", lambda *_: sys.stdout.isatty() or print("déjà ☃", flush=True))
    assert run(["verify"]) == 0
    say("\udcff☃")
    assert printed.getvalue() == "déjà ?\n??\n".encode("latin-1")
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["verify"]) == 0


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_resume_skips_damaged_checkpoints_and_fails_if_all_are_damaged(copied: Path, commands: Commands) -> None:
    damage(copied / "step-12" / "rank-00000.safetensors")
    assert run(["sample", str(copied), "--prompt", "the"]) == 0
    warning = commands.printed.readouterr().err
    assert "step-12/rank-00000.safetensors" in warning
    assert "SHA-256" in warning
    damage(copied / "step-10" / "rank-00000.safetensors")
    for command in (("sample", copied), ("train", "--resume", "--out", copied)):
        assert "only damaged ones" in commands.fail(*command, status=3)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return full_disk(times), which lets the next `times` attempts to make a file of a checkpoint durable fail."""
    real = durable.os.fsync

    def arrange(times: int) -> None:
        failures = iter(range(times))

        def fsync(descriptor: int) -> None:
            if "step-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and next(failures, None) is not None:
                raise OSError(errno.ENOSPC, NO_SPACE)
            real(descriptor)

        monkeypatch.setattr(durable.os, "fsync", fsync)

    return arrange


def test_a_failed_save_warns_and_is_tried_again(commands: Commands, full_disk: Callable[[int], None]) -> None:
    full_disk(3)
    assert run(["train", *commands.flags, "--train.log-every", "1", "--out", str(commands.out)]) == 0
    err = commands.printed.readouterr().err
    assert err.count(NO_SPACE) == 3
    assert "Traceback" not in err
    assert steps(commands.out) == [10, 12]


def test_a_full_disk_at_the_end_is_an_error(commands: Commands, full_disk: Callable[[int], None]) -> None:
    full_disk(10**9)
    short = "--train.steps 2 --train.eval-every 0".split()
    assert run(["train", *commands.flags, *short, "--out", str(commands.out)]) == 1
    captured = commands.printed.readouterr()
    assert "no checkpoint" in captured.out
    assert "the checkpoint of step 2 could not be written; there is none" in captured.err


def test_metrics_survive_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Full:
        def __init__(self, file: io.RawIOBase) -> None:
            self.file, self.broken = file, False

        def write(self, data: bytes) -> int | None:
            if self.broken:
                self.file.write(data[:20])
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def close(self) -> None:
            self.file.close()

    reporter = Reporter(tmp_path, 5, 0, "process")
    file = Full(reporter._file)  # type: ignore[arg-type]
    reporter._file = file  # type: ignore[assignment]
    for step in range(1, 6):
        file.broken = step in (2, 3)
        idle = [0.25, 0.5] if step == 5 else None
        reporter.add(Row(step, 1.0, None, 0.1, 0.5, 100.0, 0.1, 1000, float(step), pipeline_idle=idle), None)
    reporter.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4, 5]
    assert capfd.readouterr().err.count("cannot write metrics of step 2: No space left on device") == 1
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    curves = {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"] if "idle" in tag}
    assert curves == {"pipeline_idle/0": 0.25, "pipeline_idle/1": 0.5}, "a curve for each rank"


def test_loss_png_shows_both_losses_and_the_unigram_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    draw_losses(tmp_path, None)
    assert not drawn.pop().axes[0].lines, "of a run that could write no rows"
    values = ((0, None, 5.5), (10, 4.0, None), (20, 3.0, 3.2))
    rows = [{"step": step, "mean_loss": mean, "loss": 9.9, "val_loss": val} for step, mean, val in values]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_losses(tmp_path, 3.5)
    (axes,) = drawn.pop().axes
    training, validation, unigram = axes.lines
    assert training.get_xydata().tolist() == [[5.5, 4.0], [15.5, 3.0]], "a mean is that of its steps' middle"
    assert validation.get_xydata().tolist() == [[0, 5.5], [20, 3.2]] and validation.get_linestyle() == "None"
    assert list(unigram.get_ydata()) == [3.5, 3.5]
    assert unigram.get_label() == "unigram model, 3.50: knows only how often each token occurs"
    assert axes.get_title() == f"Loss of {tmp_path}"


def test_a_narrow_terminal_omits_the_least_important_values() -> None:
    row = Row(40, 3.3073, 3.1, 1.6e-3, 1.13, 1000.0, 0.03, 2**29, 1.0)
    whole = "step 40/400  loss 3.3073  grad norm 1.13  lr 1.6e-03  val loss 3.1000  1.0k tokens/s  MFU 3%  GPU 512 MiB"

    def words(width: int | None = None) -> str:
        return described(row, 400, "GPU", width)

    assert words() == words(200) == words(len(whole)) == whole
    assert words(80) == "step 40/400  loss 3.3073  lr 1.6e-03  val loss 3.1000  1.0k tokens/s  MFU 3%"
    assert words(50) == words(1) == "step 40/400  loss 3.3073  val loss 3.1000"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_the_evaluations_above_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(metrics, "Console", lambda: Console(file=screen, force_terminal=True, width=80))
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(tmp_path, 900, 0, "process")
    for step, val in ((10, 3.5), (20, None), (30, None)):
        reporter.add(Row(step, 3.4, val, 1e-3, 1.0, 1000.0, 0.03, 2**29, 1.0), 4000.0 - step)
    reporter.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    evaluated = "step 10/900  loss 3.4000  lr 1.0e-03  val loss 3.5000  1.0k tokens/s  MFU 3%"
    assert [line.rstrip() for line in lines].count(evaluated) == 1
    assert lines[-1].split(maxsplit=1)[1].rstrip() == "1:06:10 left  step 30/900  loss 3.4000  1.0k tokens/s", lines
    assert all(len(line) <= 80 for line in lines)


def test_time_left_and_mfu_are_those_of_the_recent_steps(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 60 s on this clock and an evaluation an hour, and another process has slowed down the probe."""
    monkeypatch.setattr(loop, "peak_flops", lambda *_: (1.0, "measured"))
    now = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])

    def taking(seconds: float, real: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            now[0] += seconds
            return real(*arguments)

        return timed

    monkeypatch.setattr(Trainer, "train_step", taking(60.0, Trainer.train_step))
    monkeypatch.setattr(Trainer, "evaluate", taking(3600.0, Trainer.evaluate))
    lines = commands.train().splitlines()
    left = [line.split()[-2] for line in lines if line.startswith("step ") and line.endswith("left")]
    assert left == ["9:00", "6:00", "3:00", "0:00"]
    rows = read_metrics(commands.out / "metrics.jsonl")[1:]
    assert [row["mfu"] for row in rows] == [1.0] * 4, "the steps themselves are the best rate there was"
    assert rows[0]["tokens_per_second"] == 8 * 16 / 60


def test_the_mean_loss_is_that_of_the_steps_since_the_last_row(trained: Path, tmp_path: Path) -> None:
    """The expected means come from a run of the same steps that writes a row for each step."""
    every = "--train.log-every 1 --train.steps 6 --optim.decay-steps 12 --train.eval-every 0"
    assert run(["train", "--config", str(trained / "config.toml"), *every.split(), "--out", str(tmp_path / "run")]) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    means = [row["mean_loss"] for row in read_metrics(trained / "metrics.jsonl")[1:3]]
    assert means == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3], rel=1e-12)


def test_the_probe_of_the_peak_rate_takes_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "PROBE_SECONDS", 0.2)
    start = time.perf_counter()
    rate, source = hardware.peak_flops(torch.device("cpu"), torch.float32)
    assert time.perf_counter() - start > 0.2
    assert rate > 0 and source == "measured, 512x512 products"


def test_deterministic_algorithms_on_demand(commands: Commands) -> None:
    short = "--train.steps 1 --train.eval-every 0".split()
    torch.use_deterministic_algorithms(False)
    try:
        commands.train(*short, "--train.deterministic")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(True)


def test_a_second_signal_ends_a_single_rank_at_once() -> None:
    stop = StopRequest(insistent=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    patient = StopRequest(insistent=False)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert patient()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_two_signals_at_once_are_one_request() -> None:
    """Ctrl-C sends SIGINT to all ranks while their parent passes SIGTERM on."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for number in STOP_SIGNALS:
            signal.pthread_kill(threading.get_ident(), number)  # another thread would receive it at once
        assert StopRequest(insistent=False)(), "it unblocks both signals"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_loss_that_is_not_finite_stops_the_run(commands: Commands) -> None:
    error = commands.fail_to_train(*"--optim.lr 1e30 --optim.clip 0 --optim.warmup 0".split(), status=1)
    assert "step 1: loss nan" in error
    assert "transformer.h.0." in error or "transformer.wte" in error


def test_usage_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert run(["--help"]) == 0
    assert run(["trian"]) == 2
    captured = capsys.readouterr()
    assert "usage: tpfuse COMMAND" in captured.out
    known = ", ".join(COMMANDS)
    assert captured.err == f"tpfuse trian: error: there is no such command; did you mean train? (one of {known})\n"
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tpfuse {tpfuse.__version__}\n"
    with pytest.raises(SystemExit) as stop:
        run(["train", "--help"])
    assert stop.value.code == 0
    assert "--parallel.tp" in capsys.readouterr().out


_WITHOUT_TORCH = """
import contextlib, io, sys
from tpfuse.cli import COMMANDS, run
calls = [["--help"], ["--version"], ["trian"], ["train", "--train.stepz", "3"], ["train", "--model.n-layer", "x"]]
calls += [[name, "--help"] for name in COMMANDS] + [["sample"], ["memory"], ["prepare"]]
for call in calls:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            run(call)
    assert "torch" not in sys.modules, f"{call} imports torch"

class Reader(io.StringIO):
    def write(self, text):
        assert text.startswith("reading  ") and "torch" not in sys.modules, f"train imports torch, then says {text}"
        raise SystemExit

with contextlib.redirect_stdout(Reader()), contextlib.suppress(SystemExit):
    run(["train"])
"""


def test_help_and_mistakes_and_the_first_line_do_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_search_for_garbage_goes_on_after_an_import_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with contextlib.suppress(KeyboardInterrupt), quick_imports():
        assert not gc.isenabled()
        raise KeyboardInterrupt
    assert frozen == [False] and gc.isenabled()


_LOST = {
    "in a callback while modules are imported": """
import os, signal, weakref
from tpfuse.train.child import quick_imports

class Module:
    pass

with quick_imports():
    module = Module()
    seen = weakref.ref(module, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del module
print("the signal was lost")
""",
    "while a generator is closed": """
import os, signal
from tpfuse import __main__, cli

def numbers():
    try:
        yield 0
    finally:
        os.kill(os.getpid(), signal.SIGINT)

cli.run = lambda _: next(numbers())
__main__.main()
print("the signal was lost")
""",
}


@pytest.mark.parametrize("program", _LOST.values(), ids=list(_LOST))
def test_ctrl_c_is_not_lost_where_python_ignores_it(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tpfuse: interrupted\n")


def test_without_the_extra_a_command_says_at_once_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("docstring_parser", "tyro"):
        monkeypatch.setitem(sys.modules, package, None)
    needed = "error: this command needs the packages docstring_parser, tyro: pip install 'tpfuse[train]'\n"
    for name in COMMANDS:
        if name in ("doctor", "verify"):
            with pytest.raises(SystemExit, match="0"):
                run([name, "--help"])
        else:
            assert run([name, "--help"]) == 2
            assert capsys.readouterr().err == f"tpfuse {name}: {needed}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_shows_the_first_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    kind = getattr(options, f"{command.capitalize()}Command")
    every, shown = [f"--{flag}" for flag, _ in flags_of(kind)], options.FIRST.get(kind)
    assert (shown is not None) == (len(every) > 15)
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            run([command, word])
        text = capsys.readouterr().out
        assert "None" not in text and "(default: )" not in text
        assert max(map(len, text.splitlines()[1:])) <= 80, "but for the usage, which tyro writes on one line"
        words = set(text.replace(",", " ").split())
        if word == "--help-all" or shown is None:
            assert command in ("export", "tune") or set(every) <= words, "those two have positional ones"
        else:
            assert {f"--{flag}" for flag in shown} == set(every) & words
            assert f"tpfuse {command} --help-all lists all {len(every)} options." in text
