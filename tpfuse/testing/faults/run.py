"""Runs the tests that reach a fault, first tier first, until one of them fails."""

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpfuse.testing.faults.plant import Fault, sample
from tpfuse.testing.faults.record import Record, RecordedTest, environment

SERVER = Path(__file__).with_name("server.py")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: \S+\])?)", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    tier: "first" or "second", which caught it, or "" where it survived; test: that failed, or what happened instead
    of a failure; reached: how many tests call the function, of each tier; left: how many of them were left out because
    they would take longer than the limit, of each tier.
    """

    fault: str
    area: str
    tier: str
    test: str
    reached: tuple[int, int]
    left: tuple[int, int]


class Copy:
    """A copy of the checkout in a folder of its own, with a server that runs pytest in it."""

    def __init__(self, root: Path) -> None:
        self._root, self._times = root, 0
        self.folder = Path(tempfile.mkdtemp(prefix="tpfuse-faults-"))
        ignored = shutil.ignore_patterns(".*", "build", "runs", "__pycache__", "*.egg-info")
        shutil.copytree(root, self.folder, ignore=ignored, dirs_exist_ok=True)
        if (root / "build").is_dir():
            (self.folder / "build").symlink_to(root / "build")  # the compilers
        self._output = self.folder / "output.txt"
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER)],
            cwd=self.folder,
            env=environment(self.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def plant(self, fault: Fault) -> None:
        """Changes the fault's file."""
        self._write(fault.file, fault.planted((self._root / fault.file).read_text()))

    def restore(self, file: str) -> None:
        """Makes the file the checkout's again."""
        self._write(file, (self._root / file).read_text())

    def _write(self, file: str, source: str) -> None:
        path = self.folder / file
        path.write_text(source)
        self._times += 1
        os.utime(path, (self._times, self._times))  # a new time, so that no compiled file of Python's fits it

    def failing(self, tests: Sequence[RecordedTest]) -> str:
        """The first of these tests that fails, or what ended the run otherwise; "" where all pass."""
        limit = 40 + 8 * sum(test.seconds for test in tests)
        status = self._pytest([test.name for test in tests], limit)
        if status == 4:  # the fault changes the tests' parameters: all rows of the same functions
            status = self._pytest(sorted({test.name.partition("[")[0] for test in tests}), limit)
        if status == 0:
            return ""
        if status is None:
            return "time-out"
        found = _FAILED.search(self._output.read_text(errors="replace"))
        return found.group(1) if found else f"exit status {status}"

    def _pytest(self, names: list[str], limit: float) -> int | None:
        chosen = self.folder / "chosen.txt"
        chosen.write_text("\n".join(names))
        arguments = ["-x", "-rfE", "--tb=line", "-p", "no:cacheprovider", f"@{chosen}"]
        job = {"arguments": arguments, "limit": limit, "output": str(self._output)}
        assert self._server.stdin is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._answer())
        status = answer["status"]
        return None if status is None else int(status)

    def close(self) -> None:
        """Ends the server and removes the folder."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def portions(tests: Sequence[RecordedTest], stem: str, limit: float) -> tuple[list[list[RecordedTest]], int]:
    """The tests in the order in which they are tried, in portions, and how many are left out.

    Tests whose names hold the faulty file's come first, then quick ones; the first portions hold few rows of a test
    function, for rows tend to fail together. A test that would bring their time over `limit` seconds is left out.
    """
    ordered = sorted(tests, key=lambda test: (stem not in test.name.partition("::")[0], test.seconds))
    rows: Counter[str] = Counter()
    few: list[RecordedTest] = []
    many: list[RecordedTest] = []
    for test in ordered:
        function = test.name.partition("[")[0]
        rows[function] += 1
        (few if rows[function] <= 2 else many).append(test)
    found: list[list[RecordedTest]] = []
    seconds, size, left = 0.0, 5.0, 0
    for test in few + many:
        if found and seconds + test.seconds > limit:
            left += 1
            continue
        seconds += test.seconds
        if found and sum(other.seconds for other in found[-1]) + test.seconds < size and len(found[-1]) < 40 * size:
            found[-1].append(test)
        else:
            size *= 2 if found else 1
            found.append([test])
    return found, left


def try_fault(copy: Copy, record: Record, fault: Fault, limit: float, sound: dict[str, bool]) -> Result:
    """Runs the tests that reach the fault. sound: of tests that failed once, whether they pass without any fault."""
    tests = [test for test in record.tests_of(fault.file, fault.function) if sound.get(test.name, True)]
    tiers = [[test for test in tests if test.first is first] for first in (True, False)]
    left = [0, 0]
    caught, failed = "", ""
    for index, tier in enumerate(("first", "second")):
        ordered, left[index] = portions(tiers[index], Path(fault.file).stem, limit)
        failed = next(_failures(copy, fault, ordered, sound), "")
        if failed:
            caught = tier
            break
    return Result(fault.name, fault.area, caught, failed, (len(tiers[0]), len(tiers[1])), (left[0], left[1]))


def _failures(
    copy: Copy, fault: Fault, ordered: Sequence[Sequence[RecordedTest]], sound: dict[str, bool]
) -> Iterator[str]:
    """The tests that fail with the fault and pass without it."""
    named = {test.name: test for portion in ordered for test in portion}
    for portion in ordered:
        rest = list(portion)
        while rest:
            copy.plant(fault)
            failed = copy.failing(rest)
            copy.restore(fault.file)
            if not failed:
                break
            suspects = [named[failed]] if failed in named else rest
            key = failed if failed in named else " ".join(test.name for test in rest)
            if key not in sound:
                sound[key] = not copy.failing(suspects)
            if sound[key]:
                yield failed
                return
            rest = [test for test in rest if test not in suspects]


def run(root: Path, folder: Path, count: int, seed: int, workers: int, limit: float) -> None:
    """Tries the faults that `folder` has no result of; each result is a line of its results.jsonl as it comes."""
    record, path = Record(folder), folder / "results.jsonl"
    known = {json.loads(line)["fault"] for line in path.read_text().splitlines()} if path.exists() else set()
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in sample(root, count, seed):
        if fault.name not in known:
            waiting.put(fault)
    sound: dict[str, bool] = {}
    lock = threading.Lock()

    def work() -> None:
        copy = Copy(root)
        try:
            while True:
                try:
                    fault = waiting.get_nowait()
                except queue.Empty:
                    return
                result = try_fault(copy, record, fault, limit, sound)
                with lock, path.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                    print(f"{result.tier or 'survived':8} {result.fault}  [{result.test}]", flush=True)
        finally:
            copy.close()

    with ThreadPoolExecutor(workers) as executor:
        for future in [executor.submit(work) for _ in range(workers)]:
            future.result()
