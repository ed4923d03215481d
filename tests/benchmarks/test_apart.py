"""Steps run in processes of their own: rows that hang, die, raise or are cut off, and rows of a later run."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import apart
from benchmarks.apart import ALL, Later, Row, Rows, Step, finished, lines, read, run_steps
from tpfuse.testing import ranks
from tpfuse.testing.patience import patient


@pytest.fixture(autouse=True)
def _one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preload the modules of the pools of ranks: later pools share the server of processes and its imports."""
    monkeypatch.setattr(apart, "_PRELOADED", ranks.PRELOADED)
    ranks.run_apart(nothing)  # now the server has started


def soon(seconds: float = 60.0) -> float:
    """Return a deadline."""
    return time.monotonic() + seconds


def made(folder: Path) -> list[str]:
    """Return the rows that were really made, in order; a repeated row is in the list again."""
    path = folder / "made.txt"
    return path.read_text().split() if path.exists() else []


def make(folder: Path, name: str, what: Callable[[], object] = lambda: None) -> Row:
    with (folder / "made.txt").open("a") as file:
        file.write(f"{name}\n")
    what()
    return {"value": name.upper()}


def rows_of(whats: dict[str, Callable[[], object]], rows: Rows) -> None:
    """Make these rows of a step; each row runs a function."""
    for name, what in whats.items():
        rows.each(name, partial(make, rows.folder, name, what))


def step(name: str, /, patience: float = 60.0, **whats: Callable[[], object]) -> Step:
    return Step(name, partial(rows_of, whats), patience, least=0.0)


def nothing() -> None:
    pass


def fail() -> None:
    raise KeyError("a message of its own")


def hang_with_a_child() -> None:
    """Hang, with a child in a session of its own, which would outlive this process."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(os.environ["TPFUSE_PLACE"], "child.txt").write_text(str(child.pid))
    time.sleep(1000)


@pytest.mark.processes
def test_a_row_that_raises_hangs_or_dies_does_not_affect_others(tmp_path: Path) -> None:
    first = step("first", a=fail, b=nothing)
    whats = {"a": nothing, "b": hang_with_a_child, "c": nothing}
    second = Step("second", partial(rows_of, whats), patient(1.0), environment={"TPFUSE_PLACE": str(tmp_path)})
    third = step("third", a=partial(signal.raise_signal, signal.SIGSEGV), b=partial(os._exit, 3), c=nothing)
    fourth = Step("fourth", partial(int, "seven"), least=0.0)  # type: ignore[arg-type]
    shown: list[Row] = []
    assert run_steps([first, second, third, fourth], tmp_path, soon(), shown.append) == []
    assert shown == read(tmp_path)
    errors = {(row["step"], row["row"]): row.get("error", "") for row in shown if "row" in row}
    assert [key for key, error in errors.items() if not error] == [
        ("first", "b"), ("second", "a"), ("second", "c"), ("third", "c")
    ]  # fmt: skip
    assert errors["first", "a"].endswith("KeyError: 'a message of its own'") and "in fail" in errors["first", "a"]
    assert errors["second", "b"].startswith("ended: not done after ")
    assert errors["third", "a"].endswith("the process ended with SIGSEGV")
    assert errors["third", "b"].endswith("the process ended with exit status 3")
    assert errors["fourth", ALL].splitlines()[-1].startswith("TypeError: ")
    assert finished(tmp_path) == {"first", "second", "third", "fourth"}
    child = int((tmp_path / "child.txt").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "what it started has ended"


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


@pytest.mark.processes
def test_an_interrupted_run_continues_where_it_ended(tmp_path: Path) -> None:
    """Rows exist before the end of their step; only the row that was in progress is made again."""
    steps = [step("one", a=nothing, b=partial(wait_for, str(tmp_path / "go")), c=nothing), step("two", a=nothing)]
    shown: list[Row] = []
    assert run_steps(steps, tmp_path, soon(patient(3.0)), shown.append) == ["one", "two"]
    assert [row["row"] for row in shown] == ["a"] and read(tmp_path) == shown and shown[0]["value"] == "A"
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"step": "one", "ro')  # a machine that fails leaves such a line
    (tmp_path / "go").touch()
    assert run_steps(steps, tmp_path, soon()) == []
    assert made(tmp_path) == ["a", "b", "b", "c", "a"]
    names = [(row["step"], row.get("row", "finished")) for row in read(tmp_path)]
    assert names == [("one", x) for x in ("a", "b", "c", "finished")] + [("two", "a"), ("two", "finished")]
    before = (tmp_path / "rows.jsonl").read_text()
    assert run_steps(steps, tmp_path, soon()) == [] and (tmp_path / "rows.jsonl").read_text() == before


def slow() -> None:
    time.sleep(0.3)


@pytest.mark.processes
def test_steps_take_turns_repeat_or_do_not_fit(tmp_path: Path) -> None:
    long = Step("long", partial(rows_of, {"a": slow, "b": slow}), most=0.1, least=0.0)
    repeated = Step("repeated", partial(rows_of, {"x": nothing}), least=0.0, again=True)
    large = Step("large", partial(rows_of, {"l": nothing}), least=1000.0)
    patience = patient(2.0)
    pause = partial(time.sleep, 0.7 * patience)
    steady = step("steady", patience=patience, p=pause, q=pause)  # together they take longer than its patience
    steps = [repeated, large, long, steady, step("short", c=nothing)]
    assert run_steps(steps, tmp_path, soon()) == ["large"]
    order = ["x", "a", "p", "q", "c", "b"]
    assert made(tmp_path) == order, "a long step has its next turn after every other step has had one"
    assert finished(tmp_path) == {"repeated", "long", "steady", "short"} and not any(
        "error" in x for x in read(tmp_path)
    )
    assert run_steps(steps, tmp_path, soon()) == ["large"] and made(tmp_path)[len(order) :] == ["x"]


def test_a_row_is_written_before_the_next_one_begins(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "step", soon())
    rows.each("a", lambda: {"value": 1})

    def look() -> Row:
        assert lines(tmp_path)[-1] == {"step": "step", "begun": "b"}
        return {"seen": [row["row"] for row in read(tmp_path)]}

    rows.each("b", look)
    rows.each("b", fail)  # type: ignore[arg-type]
    assert [row.get("seen") for row in read(tmp_path)] == [None, ["a"]]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"step": "step"')
        file.flush()
        assert len(read(tmp_path)) == 2, "what is being written is no row yet"
        file.write(', "row": "x"}\n')
    assert read(tmp_path)[2] == {"step": "step", "row": "x"}
    late = Rows(tmp_path, "step", soon(-1))
    late.each("c", dict)
    with pytest.raises(Later):
        late.each("d", dict)
    assert Rows(tmp_path, "step", soon()).done == {"a", "b", "c", "x"}
    assert Rows(tmp_path, "step", 0.0, since=len(lines(tmp_path)) - 1).done == {"c"}


def test_a_process_that_lost_cuda_makes_no_further_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rows = Rows(tmp_path, "step", soon())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows.each("a", fail)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(SystemExit):
        rows.each("b", dict)  # another operation has failed in this row
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(SystemExit):
        rows.each("c", fail, fatal=True)  # type: ignore[arg-type]
    assert [row["row"] for row in read(tmp_path)] == ["a", "b", "c"]
