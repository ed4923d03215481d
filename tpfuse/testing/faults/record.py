"""The record of which tests reach which functions, which running every test once makes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTUP = Path(__file__).parent / "startup"
DEFERRING = ("exhaustive", "compile", "processes", "nodes", "gpu")  # as the Makefile's FIRST_TIER


@dataclass(frozen=True)
class RecordedTest:
    """A test that passed. name: pytest's node id; seconds: with its set-up; first: whether it is in the first tier."""

    name: str
    seconds: float
    first: bool


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return the environment of a test run of the checkout in `root`."""
    path = os.pathsep.join([str(STARTUP), str(root)])
    return {**os.environ, "PYTHONPATH": path, "TPFUSE_CHECKOUT": str(root), **more}


def record(root: Path, folder: Path, arguments: Sequence[str]) -> int:
    """Run pytest with these arguments and add its tests to the record in `folder`; return pytest's exit status."""
    if not hasattr(sys, "monitoring"):
        raise SystemExit("record needs Python 3.12 or newer, for sys.monitoring; the other commands do not")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "current").write_bytes(bytes(8))
    command = [sys.executable, "-m", "pytest", "-p", "tpfuse.testing.faults.recording", *arguments]
    return subprocess.run(command, cwd=root, env=environment(root, TPFUSE_RECORD=str(folder))).returncode


class Record:
    """The tests and their functions, read from a folder that `record` wrote."""

    def __init__(self, folder: Path) -> None:
        entries = [json.loads(line) for line in (folder / "tests.jsonl").read_text().splitlines()]
        self._tests = {
            entry["number"]: RecordedTest(entry["name"], entry["seconds"], not set(entry["markers"]) & set(DEFERRING))
            for entry in entries
            if entry["outcome"] == "passed"
        }
        self._reach: dict[tuple[str, str], set[int]] = {}
        for number, file, function in _calls(folder):
            if number in self._tests:
                self._reach.setdefault((file, function), set()).add(number)

    @property
    def tests(self) -> list[RecordedTest]:
        """Return all tests that passed."""
        return list(self._tests.values())

    def tests_of(self, file: str, function: str) -> list[RecordedTest]:
        """Return the tests that call a function, in the order of the run."""
        return [self._tests[number] for number in sorted(self._reach.get((file, function), ()))]


def _calls(folder: Path) -> Iterator[tuple[int, str, str]]:
    for path in folder.glob("calls-*"):
        for line in path.read_text().splitlines():
            parts = line.split("\t")
            if len(parts) == 3:  # the last line is incomplete if a test limits the sizes of files
                yield int(parts[0]), parts[1], parts[2].replace(".<locals>", "")


class Plugin:
    """Tells all processes which test runs, and writes a row for each test; pytest loads it by `recording.py`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, dict[str, Any]()
        rows = folder / "tests.jsonl"
        self._number = len(rows.read_text().splitlines()) if rows.exists() else 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins."""
        self._number += 1
        with (self._folder / "current").open("r+b") as file:
            file.write(self._number.to_bytes(8, "little"))
        self._rows = {"number": self._number, "name": nodeid, "seconds": 0.0, "outcome": "passed", "markers": []}
        sys.monitoring.restart_events()  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of a phase of a test."""
        self._rows["seconds"] += report.duration
        if report.outcome != "passed":
            self._rows["outcome"] = report.outcome
        self._rows["markers"] = [name for name in report.keywords if name in DEFERRING]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the row of a test that has ended."""
        with (self._folder / "tests.jsonl").open("a") as file:
            file.write(json.dumps(self._rows) + "\n")


def plugin(settings: Mapping[str, str]) -> Plugin:
    """Return the plugin of a run that `record` started."""
    return Plugin(Path(settings["TPFUSE_RECORD"]))
