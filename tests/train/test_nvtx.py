"""NVTX ranges of training, as a tool receives them that NVTX loads instead of Nsight Systems. No GPU is needed."""

import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.support.command import Commands
from tpfuse.testing.patience import patient
from tpfuse.train.options import ProfileOptions
from tpfuse.train.step_profile import StepProfile

MISSING = "--profile.nvtx needs the package nvtx: pip install 'tpfuse[profile]'"
SHORT = "--train.steps 2 --train.eval-every 0 --train.save-every 0".split()


class Call(NamedTuple):
    """A call of NVTX, as nvtx_recorder.c writes it."""

    process: str
    thread: str
    kind: str
    range: str
    domain: str
    category: str
    message: str


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let NVTX load the recorder in the processes that the test starts, and return the file that it writes."""
    pytest.importorskip("nvtx")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library, source = tmp_path / "recorder.so", Path(__file__).with_name("nvtx_recorder.c")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=patient(60))
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(library))
    monkeypatch.setenv("NVTX_RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def train(flags: list[str], out: Path, *more: str) -> None:
    arguments = [sys.executable, "-m", "tpfuse", "train", *flags, *SHORT, "--out", str(out), *more]
    subprocess.run(arguments, check=True, timeout=patient(120), stdout=subprocess.DEVNULL)


@pytest.mark.processes
def test_ranks_show_their_spans(flags: list[str], record: Path, tmp_path: Path) -> None:
    """The ranges of each thread are balanced, and the first and last range of each rank names rank and layout."""
    train(flags, tmp_path / "run", "--profile.nvtx", "--parallel.tp", "2", "--parallel.impl", "direct")
    calls = [Call(*line.split("\t")) for line in record.read_text().splitlines()]
    assert {call.domain for call in calls} == {"tpfuse"}
    strings = Counter((call.process, call.message) for call in calls if call.kind == "string")
    assert max(strings.values()) == 1
    ranks = defaultdict(list)
    for call in calls:
        if call.kind in ("push", "pop", "start", "end"):
            ranks[call.process].append(call)
    assert {of[0].message for of in ranks.values()} == {f"rank {rank} of 2: tp 2 x cp 1 x dp 1" for rank in range(2)}
    for of in ranks.values():
        whole = of[0]
        assert (whole.kind, whole.category) == ("start", "rank")
        assert (of[-1].kind, of[-1].range) == ("end", whole.range)
        found = _spans(of)
        last, kind = "transformer.h.0.mlp.c_proj", "linear_reduce_scatter"
        for step in ("step 1", "step 2"):
            around = step, "micro-batch 0"
            assert found[*around, "forward", f"{kind} (direct) in {last}"] == "operator"
            assert found[*around, "backward", f"{kind} backward (direct) in {last}"] == "operator"
        layers = Counter(call.message for call in of if call.category == "layer")
        assert layers[last] == 4  # in the forward and the backward pass of two steps
        assert not [call for call in of if " torch." in call.message]
        assert {call.category for call in of if call.category} >= {"step", "phase", "operator", "communication", "wait"}


def _spans(calls: list[Call]) -> dict[tuple[str, ...], str]:
    """Return the kind of each push by the messages around it. Fails unless ranges are balanced on each thread."""
    stacks: dict[str, list[str]] = defaultdict(list)
    found, started = {}, set()
    for call in calls:
        stack = stacks[call.thread]
        if call.kind == "push":
            stack.append(call.message)
            found[tuple(stack)] = call.category
        elif call.kind == "pop":
            stack.pop()
        elif call.kind == "start":
            started.add(call.range)
        else:
            started.remove(call.range)
    assert not started
    assert not any(stacks.values())
    return found


@pytest.mark.processes
def test_nothing_calls_nvtx_without_the_option(flags: list[str], record: Path, tmp_path: Path) -> None:
    train(flags, tmp_path / "run")
    assert not record.exists()


def test_the_missing_package_is_named_before_a_rank_starts(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert commands.fail_to_train("--profile.nvtx", "--parallel.tp", "2").endswith(MISSING)
    assert not commands.out.exists()


@pytest.mark.parametrize(
    ("last", "expected"),
    [(4, ["start", "step 2", "step 3", "stop", "step 4"]), (2, ["start", "step 2", "stop"])],
    ids=["all", "ended early"],
)
def test_tools_of_nvidia_are_told_which_steps_to_record(
    last: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends before the last step to profile ends the recording too."""
    pytest.importorskip("nvtx")
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    options, layout = ProfileOptions(steps="2:3", nvtx=True), {"tp": 1, "cp": 1, "dp": 1}
    profile = StepProfile(options, nn.Linear(2, 2), layout, None, torch.device("cuda"), compiled=False)
    with profile:
        for number in range(1, last + 1):
            with profile.step(number):
                said.append(f"step {number}")
    assert said == ["step 1", *expected]
