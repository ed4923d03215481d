"""Run the tests that reach a fault, the first tier first, until one of them fails."""

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from tpfuse.testing.faults.plant import Fault, sample
from tpfuse.testing.faults.record import Record, RecordedTest, environment

SERVER = Path(__file__).with_name("server.py")
TIME_OUT = "time-out"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?: \S+\])?)", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The result of one fault.

    tier: the tier that caught it, "first" or "second", or "" if it survived. test: the test that failed, or the event
    that ended the run instead. reached: the number of tests of each tier that call the function. left: the number of
    these tests, of each tier, that were left out because they would take longer than the limit.
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

    def failing(self, tests: Sequence[RecordedTest], limit: float = inf) -> str:
        """Return the first of these tests that fails, or what else ended the run; "" if all pass or there are none.

        It is "time-out" if they take more than `limit` seconds.
        """
        if not tests:
            return ""
        status = self._pytest([test.name for test in tests], limit)
        if status == 4:  # the fault changes the tests' parameters: run all rows of the same functions
            status = self._pytest(sorted({test.name.partition("[")[0] for test in tests}), limit)
        if status == 0:
            return ""
        if status is None:
            return TIME_OUT
        match = _FAILED.search(self._output.read_text(errors="replace"))
        return match.group(1) if match else f"exit status {status}"

    def failing_with(self, fault: Fault, tests: Sequence[RecordedTest]) -> str:
        """Return `failing` with the fault planted; a time-out counts only if there is none without the fault."""
        limit = 15 + 4 * sum(test.seconds for test in tests)
        while True:
            self._write(fault.file, fault.planted((self._root / fault.file).read_text()))
            failed = self.failing(tests, limit)
            self._write(fault.file, (self._root / fault.file).read_text())
            if failed != TIME_OUT or self.failing(tests, limit) != TIME_OUT:
                return failed
            limit *= 2  # the machine is busy

    def _write(self, file: str, source: str) -> None:
        path = self.folder / file
        path.write_text(source)
        self._times += 1
        os.utime(path, (self._times, self._times))  # a new time, so that Python does not use an older .pyc file

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
        """End the server and remove the folder."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def portions(tests: Sequence[RecordedTest], stem: str, limit: float) -> tuple[list[list[RecordedTest]], int]:
    """Return the tests in the order in which they are tried, in portions, and the number of tests that are left out.

    Tests whose file's name contains the faulty file's come first, then quick ones. The first portions have few rows of
    a test function, since rows tend to fail together. A test that would make their total time longer than `limit`
    seconds is left out.
    """
    ordered = sorted(tests, key=lambda test: (stem not in test.name.partition("::")[0], test.seconds))
    rows: Counter[str] = Counter()
    few: list[RecordedTest] = []
    many: list[RecordedTest] = []
    for test in ordered:
        function = test.name.partition("[")[0]
        rows[function] += 1
        (few if rows[function] <= 2 else many).append(test)
    portions: list[list[RecordedTest]] = []
    seconds, size, left = 0.0, 5.0, 0
    for test in few + many:
        if portions and seconds + test.seconds > limit:
            left += 1
            continue
        seconds += test.seconds
        last = portions[-1] if portions else []
        if last and sum(other.seconds for other in last) + test.seconds < size and len(last) < 40 * size:
            last.append(test)
        else:
            size *= 2 if portions else 1
            portions.append([test])
    return portions, left


def try_fault(copy: Copy, record: Record, fault: Fault, limit: float, flaky: set[str]) -> Result:
    """Return the result of a fault, after the tests that reach it have run, except the flaky ones."""
    tests = [test for test in record.tests_of(fault.file, fault.function) if test.name not in flaky]
    tiers = [[test for test in tests if test.first is first] for first in (True, False)]
    left = [0, 0]
    caught, failed = "", ""
    for index, tier in enumerate(("first", "second")):
        ordered, left[index] = portions(tiers[index], Path(fault.file).stem, limit)
        failed = next(filter(None, (copy.failing_with(fault, portion) for portion in ordered)), "")
        if failed:
            caught = tier
            break
    return Result(fault.name, fault.area, caught, failed, (len(tiers[0]), len(tiers[1])), (left[0], left[1]))


def results_of(folder: Path) -> list[Result]:
    """Return the results in a folder, the last one of each fault."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return list({result.fault: result for result in results}.values())


def run(root: Path, folder: Path, count: int, seed: int, workers: int, limit: float) -> None:
    """Try the faults that have no result in `folder`; append each result to its results.jsonl at once.

    At the end the tests that caught a fault run once without a fault. Tests that fail then are flaky, and the faults
    that they caught are tried again without them.
    """
    record, flaky, proved = Record(folder), set[str](), set[str]()
    faults = sample(root, count, seed)
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    lock = threading.Lock()

    def work(fault: Fault) -> None:
        copy = copies.get()
        result = try_fault(copy, record, fault, limit, flaky)
        copies.put(copy)
        with lock, (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            print(f"{result.tier or 'survived':8} {result.fault}  [{result.test}]", flush=True)

    all_copies = [Copy(root) for _ in range(workers)]
    try:
        for copy in all_copies:
            copies.put(copy)
        while True:
            settled = {result.fault for result in results_of(folder) if result.test not in flaky}
            waiting = [fault for fault in faults if fault.name not in settled]
            if not waiting:
                return
            with ThreadPoolExecutor(workers) as executor:
                list(executor.map(work, waiting))
            names = {test for result in results_of(folder) if (test := result.test)} - proved
            flaky |= _flaky(all_copies[0], [test for test in record.tests if test.name in names])
            proved |= names
    finally:
        for copy in all_copies:
            copy.close()


def _flaky(copy: Copy, tests: Sequence[RecordedTest]) -> set[str]:
    """Return the names of the tests that fail without a fault."""
    flaky: set[str] = set()
    while failed := copy.failing([test for test in tests if test.name not in flaky]):
        if failed not in {test.name for test in tests} - flaky:
            raise RuntimeError(f"the tests that caught faults cannot be run without a fault: {failed}")
        flaky.add(failed)
    return flaky
