"""The first half hour on a GPU, rehearsed on a CPU: it takes the same steps, interpreted and with tiny shapes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import apart, contact_steps, first_contact
from benchmarks.apart import Row, Rows, Step, read
from benchmarks.contact_steps import (
    COMPILED,
    DTYPES,
    TIMED,
    Plan,
    compare_operator,
    kept_ceilings,
    run_program,
    run_ranks,
    steps,
    time_operator,
)
from benchmarks.figures import FIGURES
from benchmarks.first_contact import measurements
from benchmarks.harness import OURS
from tests.support.tiers import exhaustive
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels import configurations
from tpfuse.testing import ranks
from tpfuse.testing.patience import patient
from tpfuse.tools import operators, rank_programs
from tpfuse.tools.rank_programs import Sizes

ROOT = Path(__file__).resolve().parents[2]
FAR = float("inf")
FEW = ("gemm", "adamw")
QUICK = ("layer_norm", "adamw")


def plan(folder: Path, *operators: str) -> Plan:
    return Plan(folder, True, 0, operators)


@pytest.mark.parametrize("operator", [*QUICK, *exhaustive(*(x for x in TIMED if x not in QUICK))])
def test_a_benchmark_checks_and_times_everything(operator: str, tmp_path: Path) -> None:
    """The benchmark writes the names that figures look for, and torch.compile has a turn of its own."""
    for group in ("timings", "torch.compile"):
        time_operator(plan(tmp_path, operator), operator, group, Rows(tmp_path, f"{group}: {operator}", FAR))
    assert [row for row in read(tmp_path) if not row["passed"]] == []
    assert kept_ceilings(read(tmp_path))
    first = [x for row in read(tmp_path) if row["step"].startswith("timings") for x in row["measurements"]]
    assert first and not any("torch.compile" in x["candidate"] for x in first)
    assert any(row["step"].startswith("torch.compile") for row in read(tmp_path)) == (operator in COMPILED)
    rows = measurements(read(tmp_path))
    assert [row for row in rows if "median_us" not in row] == []
    assert {row["operator"] for row in rows} == {operator}
    assert {row["check"] for row in rows if row["candidate"] == OURS} == {"within the bound"}
    written = {(row["mode"], row["candidate"]) for row in rows}
    for figure in (figure for figure in FIGURES if figure.operator == operator):
        for candidate in (OURS, *figure.peers):
            if candidate not in ("SDPA flash", "SDPA cudnn"):  # only a GPU has these backends
                assert (figure.mode, candidate) in written, figure.name
        assert any(figure.case in row["case"] for row in rows), figure.name


def inline(step: Step, folder: Path, since: int, until: float, deadline: float, shown: Any) -> tuple[int, str]:
    """Run the step in this process; `test_apart` tests the process of a step."""
    step.call(Rows(folder, step.name, until, since))
    return 0, ""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["first_contact.py", *arguments])
    return first_contact.main()


def test_a_rehearsal_keeps_rows_and_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of the interpreter are in no figure. A second call has nothing left to do."""
    monkeypatch.setattr(apart, "_process", inline)
    monkeypatch.setattr(contact_steps, "TUNED", ("adamw",))
    groups = ["device", "host", "operators", "one process", "timings", "other timings", "tune"]
    arguments = ["--out", str(tmp_path), "--rehearse", "--steps", *groups, "--operators", "adamw"]
    assert run(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("not measured yet") == len(FIGURES)
    assert printed.endswith(f"nothing is left\nkept in {tmp_path}\n")
    assert "one process: 2 ranks | all_gather_gemm | ok" in printed
    document = json.loads((tmp_path / "first_contact.json").read_text())
    assert {"machine", "python", "torch", "triton", "commit", "command", "sources", "date"} <= document["device"].keys()
    assert document["failed"] == document["left"] == [] and document["rehearsed"]
    assert list(document["steps"]) == [
        "device", "host", "operators: adamw", "ceilings", "one process: 2 ranks", "timings: adamw", "tune: adamw"
    ]  # fmt: skip
    assert 'measured = "a rehearsal, ' in (tmp_path / "configurations-adamw.toml").read_text()
    before = read(tmp_path)
    assert run(monkeypatch, *arguments) == 0
    assert {row["step"] for row in read(tmp_path)[len(before) :]} == {"device"}


def test_a_failure_is_printed_and_gives_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    description = operators.load("adamw")
    (case,) = description.cases[:1]
    wrong = replace(case, name="wrong", function=lambda **inputs: case.function(**inputs) * 1.1)
    broken = replace(case, name="broken", function=lambda **inputs: inputs["nothing"])
    monkeypatch.setattr(apart, "_process", inline)
    for each in (wrong, broken):
        changed = replace(description, cases=(each,))
        monkeypatch.setattr(operators, "load", lambda name, changed=changed: changed)
        compare_operator(plan(tmp_path, "adamw"), "adamw", DTYPES, Rows(tmp_path, "operators: adamw", FAR))
    rows = read(tmp_path)
    assert [row["passed"] for row in rows] == [False] * 4
    assert rows[0]["largest"] > rows[0]["bound"] > 0 and rows[2]["error"] == "KeyError: 'nothing'"
    assert run(monkeypatch, "--out", str(tmp_path), "--rehearse", "--steps", "operators", "--operators", "adamw") == 1
    printed = capsys.readouterr().out
    assert "FAILED operators: adamw, wrong, bfloat16:\n" in printed
    assert "FAILED operators: adamw, broken, float32:\n    KeyError: 'nothing'\n" in printed


def test_a_failing_case_is_tried_without_each_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result that several stages cause is right without them; a row names the cause."""
    monkeypatch.setattr(contact_steps, "newer_ptxas", lambda: None)
    description = operators.load("adamw")
    (case,) = description.cases[:1]
    for cause, innocent in (("nothing known", lambda: False), ("one stage", lambda: bool(configurations._overriding))):
        factor = lambda innocent=innocent: 1.0 if innocent() else 1.1  # noqa: E731
        wrong = replace(case, function=lambda **inputs: case.function(**inputs) * factor())  # noqa: B023
        monkeypatch.setattr(operators, "load", lambda name, wrong=wrong: replace(description, cases=(wrong,)))
        here = plan(tmp_path / cause, "adamw")
        here.out.mkdir()
        compare_operator(here, "adamw", DTYPES[:1], Rows(here.out, "operators: adamw", FAR))
        for step in steps(here)["blame"]:
            with monkeypatch.context() as environment:
                for name, value in step.environment.items():
                    environment.setenv(name, value)
                step.call(Rows(here.out, step.name, FAR))
        first, none, *tried = read(here.out)
        assert not first["passed"] and none["note"].startswith("no newer ptxas is installed")
        (row,) = tried
        outcome = f"{'right' if cause == 'one stage' else 'fails too'} with one stage"
        assert (row["step"], row["outcome"]) == ("blame: one stage", outcome)
        assert row["row"] == f"adamw, {case.name}, bfloat16"


def test_a_wrong_program_of_ranks_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, world: int, rounds: int) -> list[list[int]]:
        raise AssertionError("out: 3 of 9 numbers are wrong")

    monkeypatch.setattr(contact_steps, "explored", wrong)
    with pytest.raises(SystemExit):  # the process must not be used any more
        run_ranks(plan(tmp_path), 2, Rows(tmp_path, "one process: 2 ranks", FAR))
    (row,) = read(tmp_path)
    assert row["row"] == "all_gather_gemm" and "numbers are wrong" in row["error"]


def test_a_row_has_the_lines_of_a_program_and_why_it_ended(tmp_path: Path) -> None:
    rows, python = Rows(tmp_path, "step", FAR), [sys.executable, "-c"]
    rows.begin("a row")
    (tmp_path / "log.txt").write_text("what it wrote to stderr\n")
    os.utime(tmp_path / "rows.jsonl", (0, 0))
    assert run_program(rows, [*python, "print(1); print(2)"]) == (["1", "2"], {})
    assert (tmp_path / "rows.jsonl").stat().st_mtime > 0, "each line shows that the row does not hang"
    assert run_program(rows, [*python, "print(1); exit(3)"]) == (["1"], {"error": "what it wrote to stderr"})
    lines, row = run_program(rows, [*python, "import time; print(1, flush=True); time.sleep(1000)"], until=0.0)
    assert lines == ["1"] and row["note"].startswith("ended")


class RankNumber:
    """A program whose result is the rank, wrong on rank 1 in the rounds `wrong`."""

    def __init__(self, memory: SymmetricMemory, sizes: Sizes, wrong: tuple[int, ...]) -> None:
        self.rank, self.wrong, self.round = memory.rank, wrong, 0

    def run(self, variant: int) -> dict[str, torch.Tensor]:
        self.round += 1
        return {"out": torch.tensor(-1 if self.rank == 1 and self.round in self.wrong else self.rank)}

    def check(self, variant: int, results: dict[str, torch.Tensor]) -> None:
        assert int(results["out"]) == self.rank


def test_ranks_at_once_are_delayed_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces a GPU's streams and delays."""
    slept: list[int] = []
    synchronized: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: synchronized.append(1))
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    # Wrong rounds come after the rounds of loading, and the first round of each set of inputs.
    for wrong in ((), (3 + 3 + 5, 3 + 3 + 40)):
        monkeypatch.setitem(rank_programs.PROGRAMS, "numbers", partial(RankNumber, wrong=wrong))
        results = contact_steps.at_once("numbers", 2, torch.device("cpu"), seed=1, rounds=40)
        assert results == ([[], []] if not wrong else [[], [4, 39]])
    assert 2 * 2 * 40 * 0.1 < len(slept) < 2 * 2 * 40 * 0.3 and max(slept) <= contact_steps._LONGEST
    assert len(synchronized) == 2 * 2 * (40 // contact_steps._AHEAD[2])


TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 1 == 2, "a message of its own"
@pytest.mark.skipif(True, reason="needs two GPUs")
def test_two(): pass
def test_hangs(): time.sleep(1000)
def test_dies(): os._exit(3)
def test_last(): pass
"""


@pytest.mark.processes
def test_each_test_of_several_processes_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_PRELOADED", ranks.PRELOADED)  # the pools of ranks share this server of processes
    file = tmp_path / "test_toys.py"
    file.write_text(TESTS)
    step = Step("processes: toys", partial(contact_steps.run_tests, str(file)), patience=patient(5.0), most=0.0)
    assert apart.run_steps([step], tmp_path, time.monotonic() + 300) == []
    rows = {row["row"].rpartition("::")[2]: row for row in read(tmp_path) if "row" in row}
    assert list(rows) == ["test_right", "test_wrong", "test_two", "test_hangs", "test_dies", "test_last"]
    assert [row.get("outcome") for row in rows.values()] == ["passed", "failed", "skipped", None, None, "passed"]
    assert "a message of its own" in rows["test_wrong"]["error"] and "needs two GPUs" in rows["test_two"]["why"]
    assert "ended: not done after" in rows["test_hangs"]["error"] and "exit status 3" in rows["test_dies"]["error"]
    assert [first_contact.failed(row) for row in rows.values()] == [False, True, False, True, True, False]


def _rehearsed(folder: Path, minutes: float) -> tuple[int, dict[str, Any], str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    flags = f"--out {folder} --minutes {minutes} --rehearse --operators {' '.join(FEW)}"
    command = [sys.executable, "-m", "benchmarks.first_contact", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads((folder / "first_contact.json").read_text()), done.stdout


@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_the_whole_program(tmp_path: Path) -> None:
    """Run it as on a GPU, in two calls, of which the first is cut off."""
    status, document, printed = _rehearsed(tmp_path, 0.3)
    assert status == 0 and document["left"] and f"left for another call: {', '.join(document['left'])}" in printed
    first: list[Row] = read(tmp_path)
    status, document, printed = _rehearsed(tmp_path, 25.0)
    assert status == 0 and document["left"] == document["failed"] == [], printed
    rows = read(tmp_path)
    assert rows[: len(first)] == first
    again = {step.name for group in steps(Plan(tmp_path, True, 0, FEW)).values() for step in group if step.again}
    names = [(row["step"], row["row"]) for row in rows if "row" in row and row["step"] not in again]
    assert len(names) == len(set(names)), "nothing is made twice"
    everything = steps(Plan(tmp_path, True, 0, FEW))
    assert {row["step"] for row in rows} == {step.name for group in everything.values() for step in group}
