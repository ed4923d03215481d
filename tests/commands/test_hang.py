"""`tpfuse hang` says who waited for whom."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Commands

STACK = """Thread 0x01 (most recent call first):
  File "watchdog.py", line 3 in check

Current thread 0x02 [python] (most recent call first):
  File "loader.py", line 7 in read
  File "train.py", line 9 in main
"""


def _operation(number: int, text: str, begun: float, ended: float = 0.0) -> dict[str, Any]:
    return {"number": number, "operation": text, "begun_ns": int(begun * 1e9), "ended_ns": int(ended * 1e9)}


def _entry(rank: int, *operations: dict[str, Any], **changes: Any) -> dict[str, Any]:
    entry = {"rank": rank, "pid": 70 + rank, "ended": False, "state": "S (sleeping)", "stack": STACK}
    return entry | {"operations": list(operations)} | changes


def _write(
    folder: Path,
    rank: int,
    missing: int | None,
    *ranks: dict[str, Any],
    written: float = 200.0,
    waited: float = 60.0,
    step: int = 41,
) -> None:
    record: dict[str, Any] = {"op": "all_gather", "step": step, "rank": rank, "missing": missing, "waited_s": waited}
    record |= {"written_ns": int(written * 1e9), "ranks": list(ranks)}
    (folder / f"flight_record_rank{rank}.json").write_text(json.dumps(record))


GATHER, SCATTER = "all_gather float32 [2]", "reduce_scatter float32 [4]"
MINE = _entry(
    0, _operation(8, SCATTER, 130, 131), _operation(-1, "send x, message 0", 132, 133), _operation(9, GATHER, 140)
)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (
            _entry(1, _operation(8, SCATTER, 130, 131)),
            "Rank 1 (process 71) had ended its last operation, reduce_scatter float32 [4], 69.0 s before.",
        ),
        (
            _entry(1, _operation(8, SCATTER, 130)),
            "Rank 1 (process 71) had begun reduce_scatter float32 [4] 70.0 s before and had not ended it.",
        ),
        (_entry(1, ended=True, state="", stack=""), "Rank 1 (process 71) had ended: read its own error."),
        (
            _entry(1, state="T (stopped)", stack=""),
            "Rank 1 (process 71) was stopped by a signal, and has no recorded operation.",
        ),
        (
            _entry(1, _operation(8, "send", 130, 131), _operation(9, "send", 132)),
            "Operation 8 was reduce_scatter float32 [4] on rank 0, but send on rank 1: the ranks took different",
        ),
        (
            _entry(1, _operation(9, GATHER, 140, 141), _operation(-1, "receive x, message 0", 150)),
            "Rank 1 (process 71) had begun receive x, message 0 50.0 s before and had not ended it.\n\n",
        ),
    ],
)
def test_the_missing_rank_is_described(tmp_path: Path, commands: Commands, missing: dict[str, Any], said: str) -> None:
    for rank in (0, 2):
        _write(tmp_path, rank, 1, MINE, missing, MINE | {"rank": 2})
    out = commands.do("hang", tmp_path)
    assert out.startswith("In all_gather of step 41, ranks 0, 2 waited 60.0 s for rank 1.\n")
    assert said in out
    assert 'rank 0:\n  File "loader.py", line 7 in read\n  File "train.py", line 9 in main\n' in out
    assert "watchdog.py" not in out
    silent = f"the process did not answer (its state was {missing['state'] or 'unknown'})"
    assert (silent in out) == (not missing["stack"])


@pytest.mark.parametrize("other", [0, 2])
def test_the_stack_of_each_rank_is_shown_from_the_record_that_has_it(
    other: int, tmp_path: Path, commands: Commands
) -> None:
    _write(tmp_path, other, 1, _entry(1, stack=""), MINE | {"rank": other})
    _write(tmp_path, 2 - other, 1, _entry(1), MINE | {"rank": 2 - other, "stack": ""})
    found = re.findall(r"Python stack of rank (\d):\n  (\w+)", commands.do("hang", tmp_path))
    assert found == [(str(rank), "unknown" if rank == 2 - other else "File") for rank in range(3)]


STEP = "In all_gather of step 41"
LATE = {"waited": 0.0}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([(0, 1, {"step": -1})], "In all_gather, rank 0 waited 60.0 s for rank 1.\n"),
        ([(0, None, {})], f"{STEP}, rank 0 waited 60.0 s, but no single rank was late."),
        # Rank 0 waits for rank 1, which waits for rank 2. The record of an earlier failure is left out.
        (
            [(0, 1, {}), (1, 2, {}), (3, 9, {"written": -300.0, "waited": 99.0})],
            f"{STEP}, rank 1 waited 60.0 s for rank 2.\n",
        ),
        # Rank 0 was missing, and comes when the others have given up.
        ([(0, 0, LATE)], f"{STEP}, rank 0 came too late: the other ranks had stopped waiting for it."),
        ([(0, 0, LATE), (1, 0, {"waited": 2.0}), (2, 0, {})], f"{STEP}, ranks 1, 2 waited 60.0 s for rank 0.\n"),
        # Ranks wait for each other; rank 2 came too late, which the others did not wait for.
        (
            [(0, 1, {}), (1, 0, {"waited": 50.0}), (2, 2, {"waited": 90.0})],
            f"{STEP}, rank 0 waited 60.0 s for rank 1.\n",
        ),
        # A rank that is named is a cause before a stopped one.
        ([(0, None, {"waited": 90.0}), (2, 3, {})], f"{STEP}, rank 2 waited 60.0 s for rank 3.\n"),
    ],
)
def test_the_first_line_names_the_cause(tmp_path: Path, commands: Commands, records: list[Any], said: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("no record")
    for rank, missing, more in records:
        _write(tmp_path, rank, missing, MINE, _entry(1, state="T (stopped)"), _entry(2), _entry(3), **more)
    assert commands.do("hang", tmp_path).startswith(said)


def test_a_stopped_rank_is_described_although_no_rank_was_late(tmp_path: Path, commands: Commands) -> None:
    """Rank 1 was stopped inside the operation, and gives up too when it goes on."""
    _write(tmp_path, 0, None, MINE, _entry(1, _operation(9, GATHER, 140), state="T (stopped)"), _entry(2, ended=True))
    described = (
        f"Rank 1 (process 71) was stopped by a signal, and had begun {GATHER} 60.0 s before and had not ended it."
    )
    for missing in (0, None):
        _write(tmp_path, 1, missing, MINE, _entry(1), waited=90.0)
        said = commands.do("hang", tmp_path).splitlines()
        assert said[:4] == [
            "In all_gather of step 41, rank 0 waited 60.0 s, but no single rank was late.",
            described,
            "Rank 2 (process 72) had ended: read its own error.",
            "",
        ]


def test_a_run_without_readable_records_is_refused(tmp_path: Path, commands: Commands) -> None:
    assert "has no flight records" in commands.fail("hang", tmp_path)
    assert "expected the folder of a run: tpfuse hang RUN" in commands.fail("hang")
    for damaged in ("{", "[]", '{"op": 3}'):
        (tmp_path / "flight_record_rank0.json").write_text(damaged)
        assert "cannot read" in commands.fail("hang", tmp_path)
    _write(tmp_path, 0, "1", MINE)  # type: ignore[arg-type]
    assert "missing is '1': expected the number of a rank" in commands.fail("hang", tmp_path)
    _write(tmp_path, 0, 1, MINE | {"operations": [{"number": "x"}]})
    assert "cannot read" in commands.fail("hang", tmp_path)
    shutil.rmtree(tmp_path)
    assert "has no flight records" in commands.fail("hang", tmp_path)
