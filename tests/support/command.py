"""Commands that run in this process, or in processes of their own with ranks that tests can stop and kill."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tpfuse.testing.patience import patient, wait_until
from tpfuse.train.metrics import read_metrics


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Let this process write at most this many bytes to a file, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def losses(run: Path) -> list[float]:
    """Return the losses in the metrics of a run, but for rows without one."""
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["loss"] is not None]


def printed_loss(said: str) -> float:
    """Return the loss that `tpfuse evaluate` has printed; the last of its four digits is rounded."""
    found = re.search(r": loss ([\d.]+) nats per token", said)
    assert found is not None, said
    return float(found[1])


class Command:
    """A running Python program. Every process that it starts has the command's mark in its environment.

    limits: limits of the system for the command, by kind (`resource.RLIMIT_...`).
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        limits: Mapping[int, int] | None = None,
        stdout: int | IO[str] = subprocess.PIPE,
    ) -> None:
        self._mark = f"TPFUSE_TEST={uuid.uuid4()}"

        def limit() -> None:
            for kind, value in (limits or {}).items():
                resource.setrlimit(kind, (value, value))

        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, name: value}, stdout=stdout, stderr=subprocess.PIPE,
            text=True, errors="replace", preexec_fn=limit if limits else None,
            process_group=0,  # no new session: the scheduler divides processors among sessions
        )  # fmt: skip

    def processes(self) -> list[int]:
        """Return all processes with the mark that still run, the command itself first."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return sorted(found, key=lambda pid: (pid != self.process.pid, pid))

    def ranks(self) -> list[int]:
        """Return the processes that the command has started to compute, in the order of their numbers."""
        return [pid for pid in self.processes() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def send(self, number: signal.Signals, processes: Sequence[int]) -> None:
        """Send a signal to these processes."""
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for(self, word: str) -> str:
        """Read stdout until a line contains `word`, and return what was read."""
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if word in line:
                return said
        raise AssertionError(f"ended without {word!r}: {self.process.communicate()[1]}")

    def wait_for_processes(self) -> None:
        """Return once no process with the mark is left."""
        wait_until(lambda: not self.processes(), "all processes have ended")

    def end(self, status: int = 0, seconds: float = 120.0) -> tuple[str, str]:
        """Wait for the end, check the status and that no process and no traceback is left; return (stdout, stderr)."""
        out, err = self.process.communicate(timeout=patient(seconds))
        assert self.process.returncode == status, err
        assert "Traceback" not in err, err
        self.wait_for_processes()
        return out, err


@dataclass
class Commands:
    """Runs commands in this process by `run`.

    `train` begins a run with `flags` in the folder `out`, and `resume` continues it. `printed` captures the output.
    """

    run: Callable[[Sequence[str]], int]
    flags: list[str]
    out: Path
    printed: pytest.CaptureFixture[str]

    def do(self, *words: str | Path, status: int = 0) -> str:
        """Run a command, check its status, and return what it printed."""
        self.printed.readouterr()
        assert self.run([*map(str, words)]) == status
        return self.printed.readouterr().out

    def fail(self, *words: str | Path, status: int = 2) -> str:
        """Run a command that must fail, and return its error of one line; other lines on stderr are warnings."""
        self.printed.readouterr()
        assert self.run([*map(str, words)]) == status
        *warnings, error = self.printed.readouterr().err.splitlines()
        assert error.startswith(f"tpfuse {words[0]}: error: ") and len(error) < 1000
        assert all(line.startswith("tpfuse: warning: ") for line in warnings)
        assert status != 2 or not warnings
        return error

    def train(self, *more: str | Path) -> str:
        """Begin the run with more options, and return what it printed."""
        return self.do("train", *self.flags, "--out", self.out, *more)

    def resume(self, *more: str | Path) -> str:
        """Continue the run with more options, and return what it printed."""
        return self.do("train", "--resume", "--out", self.out, *more)

    def fail_to_train(self, *more: str | Path, status: int = 2) -> str:
        """Begin the run with options by which it must fail, and return its error."""
        return self.fail("train", *self.flags, "--out", self.out, *more, status=status)

    def fail_to_resume(self, *more: str | Path, status: int = 2) -> str:
        """Continue the run with options by which it must fail, and return its error."""
        return self.fail("train", "--resume", "--out", self.out, *more, status=status)
