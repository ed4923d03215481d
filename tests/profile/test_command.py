"""`tpfuse profile` runs a command with what it needs, and explains the result."""

import contextlib
import gzip
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tpfuse.cli import run
from tpfuse.comm import trace
from tpfuse.commands.profile import commands_of
from tpfuse.profile.trace_files import read_traces
from tpfuse.tools import doctor
from tpfuse.train import step_profile
from tpfuse.train.options import ProfileCommand, ProfileOptions

TPFUSE = [sys.executable, "-m", "tpfuse"]
ENDS = "--train.steps 5 --train.eval-every 0 --out P/run"
RECORDED = f"--profile.steps 3:5 --profile.trace P/trace {ENDS}"


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Return the words of a small training on two ranks."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and saw that the dog was at the door of the house " * 80)
    flags = f"--data.path {text} --model.n-layer 2 --model.n-embd 32 --model.n-head 4 --model.n-positions 16"
    return ["tiny", *flags.split(), "--train.batch", "8", "--parallel.tp", "2"]


@pytest.mark.processes
def test_a_profile_explains_a_run(small: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile"
    assert run(["profile", "--steps", "2:4", "--out", str(out), "--", *small]) == 0
    said = capfd.readouterr().out
    document = json.loads((out / "summary.json").read_text())
    assert document["steps"] == ["step 2", "step 3", "step 4"]
    assert document["layout"]["tp"] == 2 and len(document["ranks"]) == 2
    assert said.index(document["sentences"][0]) > said.index("trained 4 steps")
    for row in document["ranks"]:
        parts = {found["operator"] for found in row["operators"] if not found["implementation"]}
        assert {"forward", "backward", "gradients", "update"} <= parts
        layers = {found["layer"] for found in row["operators"] if found["operator"] == "linear_reduce_scatter backward"}
        assert layers == {f"transformer.h.{layer}.{name}.c_proj" for layer in (0, 1) for name in ("attn", "mlp")}
    written = {path.name for path in out.iterdir()}
    assert {"summary.json", "trace.json", "profile.png", "trace", "run"} == written
    assert not list((out / "run").glob("step-*")) and (out / "run" / "metrics.jsonl").exists()
    assert "[profile]" not in (out / "run" / "config.toml").read_text()
    (out / "summary.json").unlink()
    assert run(["profile", "summary", str(out)]) == 0
    assert json.loads((out / "summary.json").read_text()) == document


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gpt2-124m --parallel.tp 2", f"tpfuse train --model.preset gpt2-124m --parallel.tp 2 {RECORDED}"),
        ("FILE.toml", f"tpfuse train --config FILE.toml {RECORDED}"),
        ("tpfuse train --out mine", f"tpfuse train --out mine {RECORDED}"),
        (f"{sys.executable} -m tpfuse train", f"tpfuse train {RECORDED}"),
        (
            f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 -m tpfuse train --kernels torch",
            f"PYTHON -m torch.distributed.run --nproc-per-node 2 -m tpfuse train --kernels torch {RECORDED}",
        ),
    ],
)
def test_commands(words: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.touch()
    given = words.replace("FILE.toml", str(file)).split()
    (command,) = commands_of(ProfileCommand(), given, Path("P"), "trace")
    text = shlex.join(command).replace(shlex.join(TPFUSE), "tpfuse", 1)
    assert text == expected.replace("FILE.toml", str(file)).replace("PYTHON", sys.executable)


NSYS = (
    "nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none --cuda-graph-trace=node{} --force-overwrite=true"
    " --output=P/nsys-%h"
)
CAPTURE = " --capture-range=cudaProfilerApi --capture-range-end=stop"
NCU = "ncu --replay-mode kernel --target-processes all --set full{} --kernel-name {} --launch-count 5 --force-overwrite"
MARKED = f"--profile.steps 3:5 --profile.nvtx {ENDS}"


@pytest.mark.parametrize(
    ("options", "words", "expected"),
    [
        (
            ProfileCommand(with_="torch"),
            "tiny",
            f"tpfuse train --model.preset tiny --profile.steps 3:5 --profile.torch P/torch {ENDS}",
        ),
        (
            ProfileCommand(with_="nsys"),
            "tiny",
            f"{NSYS.format(CAPTURE)} tpfuse train --model.preset tiny {MARKED}",
        ),
        (ProfileCommand(with_="nsys"), f"{sys.executable} mine.py", f"{NSYS.format('')} PYTHON mine.py"),
        (
            ProfileCommand(with_="ncu", kernel="^gemm_forward"),
            "tiny",
            f"{NCU.format(' --profile-from-start off', 'regex:^gemm_forward')} --export P/ncu"
            f" tpfuse train --model.preset tiny {MARKED}",
        ),
        (
            ProfileCommand(with_="ncu", kernel="^gemm_forward"),
            f"{sys.executable} mine.py",
            f"{NCU.format('', 'regex:^gemm_forward')} --export P/ncu PYTHON mine.py",
        ),
        (
            ProfileCommand(with_="ncu", kernel="all_gather_gemm"),
            "",
            f"{NCU.format(' --profile-from-start off', 'regex:all_gather_gemm')} --export P/ncu-all_gather_gemm"
            " PYTHON -m tpfuse.tools.one_rank all_gather_gemm",
        ),
    ],
)
def test_commands_of_other_profilers(options: ProfileCommand, words: str, expected: str) -> None:
    (command,) = commands_of(options, words.split(), Path("P"), options.with_)
    ours = f"{sys.executable} -m tpfuse train"
    assert " ".join(command).replace(ours, "tpfuse train") == expected.replace("PYTHON", sys.executable)


STAND_IN = """#!/bin/sh
case "$1 $*" in
stats*) echo 'tpfuse:step 3' ;;
*--train.batch*) exit 3 ;;
*) for word; do case "$word" in --output=*) touch "${word#--output=}.nsys-rep";; esac; done ;;
esac
"""


def test_nsys_is_checked_then_run_then_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tool, out = tmp_path / "nsys", tmp_path / "profiles" / "first"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    arguments = ["profile", "--with", "nsys", "--out", str(out), "--", "tiny"]
    monkeypatch.setattr(doctor, "profiler", lambda machine, name: (name, f"{name} is too old"))
    assert run(arguments) == 2 and not out.exists()
    assert capfd.readouterr().err == "tpfuse profile: error: nsys is too old\n"
    monkeypatch.setattr(doctor, "profiler", lambda machine, name: (str(tool), ""))
    assert run([*arguments, "--train.batch", "0"]) == 3, "the status of the command"
    assert f"the command ended with exit status 3; what was recorded is in {out}" in capfd.readouterr().err
    assert run(arguments) == 0
    said = capfd.readouterr().out
    assert "tpfuse:step 3" in said and f"files in {out}: nsys-%h.nsys-rep" in said


@pytest.mark.processes
def test_torch_records_the_steps(small: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile"
    words = [*small, "--parallel.tp", "1"]
    assert run(["profile", "--with", "torch", "--steps", "2:3", "--out", str(out), "--", *words]) == 0
    assert f"files in {out}: torch/rank0.json.gz" in capfd.readouterr().out
    found = json.loads(gzip.decompress((out / "torch" / "rank0.json.gz").read_bytes()))
    steps = {event["name"] for event in found["traceEvents"] if event["name"].startswith("ProfilerStep#")}
    assert len(steps) == 2


def test_commands_can_be_printed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["profile", "--print", "--", "tiny"]) == 0
    assert shlex.split(capsys.readouterr().out)[:6] == [*TPFUSE, "train", "--model.preset", "tiny"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "expected a configuration or a command after --"),
        ("-- no-such-program", "neither a preset (tiny"),
        ("-- missing.toml", "there is no file missing.toml"),
        (f"-- {sys.executable} train.py", "use tpfuse.profile.record"),
        (f"-- {sys.executable} tpfuse.py train", "use tpfuse.profile.record"),
        ("-- tpfuse train --resume --out run", "leave out --resume"),
        ("-- tpfuse train --resume=yes --out run", "leave out --resume"),
        ("--steps 5:3 -- tiny", "steps '5:3'"),
        ("--steps 0 -- tiny", "steps '0'"),
        ("--out FULL -- tiny", "expected a new or an empty folder"),
        ("--with perf -- tiny", "perf"),
        ("--kernel gemm -- tiny", "--kernel is for --with ncu"),
        ("--with ncu -- tiny", "needs --kernel"),
        ("--with ncu --kernel all_gather_gemm --print -- tiny", "tpfuse.tools.one_rank all_gather_gemm"),
        ("summary", "tpfuse profile summary --help"),
        ("summary FULL", "has no traces"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["profile", *words.replace("FULL", str(tmp_path)).split()]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_ends_early_writes_what_it_has_or_warns(
    small: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(steps: str, name: str, traces: Path) -> int:
        flags = f"--train.steps 3 --train.eval-every 0 --parallel.tp 1 --out {tmp_path / name}"
        return run(["train", *small[1:], *flags.split(), "--profile.steps", steps, "--profile.trace", str(traces)])

    traces, file = tmp_path / "trace", tmp_path / "file"
    assert train("2:9", "run", traces) == 0
    warning = "--profile.steps 2:9: 2 of 8 steps are recorded, since this start trains the run from step 0 to step 3\n"
    assert warning in capfd.readouterr().err
    assert run(["profile", "summary", str(traces)]) == 0
    document = json.loads((traces / "summary.json").read_text())
    assert document["steps"] == ["step 2", "step 3"]
    assert {"forward", "backward", "gradients", "update"} <= {x["operator"] for x in document["ranks"][0]["operators"]}
    assert {path.name for path in traces.iterdir()} == {"rank0.json", "summary.json", "trace.json", "profile.png"}
    file.touch()
    capfd.readouterr()
    assert train("2", "other", file / "x") == 0
    assert "warning: cannot write the profile" in capfd.readouterr().err
    assert train("two", "third", traces) == 2 and not (tmp_path / "third").exists()


def _step_profile(options: ProfileOptions, trained: range) -> step_profile.StepProfile:
    return step_profile.StepProfile(options, nn.Linear(2, 2), {}, None, torch.device("cpu"), False, trained)


@pytest.mark.parametrize(
    ("trained", "recorded"),
    [(range(1, 6), [3, 4]), (range(4, 6), [4]), (range(1, 3), []), (range(5, 7), []), (range(7, 6), [])],
)
def test_steps_that_do_not_come_are_not_recorded_and_a_warning_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trained: range, recorded: list[int]
) -> None:
    profile = _step_profile(ProfileOptions(steps="3:4", trace=tmp_path), trained)
    with profile:
        for number in trained:
            with profile.step(number):
                pass
    found = read_traces(tmp_path)[0].steps if any(tmp_path.iterdir()) else []
    assert [step.span.name for step in found] == [f"step {number}" for number in recorded]
    warning = f"warning: --profile.steps 3:4: {len(recorded)} of 2 steps are recorded, since this start trains the run"
    assert (warning in capfd.readouterr().err) == (len(recorded) < 2)


def test_kernels_are_compiled_for_traces_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before those to record launches kernels as they do, and nothing of it is recorded."""
    compiled = []

    @contextlib.contextmanager
    def prepared() -> Iterator[None]:
        compiled.append(len(compiled))
        yield

    monkeypatch.setattr(step_profile, "kernels_compiled_for_traces", prepared)
    options = ProfileOptions(steps="3:4", trace=tmp_path)
    profile = _step_profile(options, range(1, 6))
    seen = []
    with profile:
        for number in range(1, 6):
            with profile.step(number):
                seen.append((number, len(compiled), trace.is_observed()))
    assert seen == [(1, 0, False), (2, 1, False), (3, 1, True), (4, 1, True), (5, 1, False)]
    assert [step.span.name for step in read_traces(tmp_path)[0].steps] == ["step 3", "step 4"]
