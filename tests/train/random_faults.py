"""Runs `tpfuse train` under random faults, and checks the properties that must hold under each of them.

    python tests/train/random_faults.py --count 200 --seed 1

Each case draws a layout and a fault: a signal to any process in any phase, a limit of the system, a full disk, a closed
standard output, a damaged or crafted file. The command must end in time with a documented status, leave no process and
no traceback, and say in a few lines what was wrong. Afterwards the run must continue to exactly the bytes of an
undisturbed run, or be refused in one line. The full disk needs root.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tpfuse.testing.command import Command
from tpfuse.testing.patience import patient

STEPS, LIMIT = 120, 90.0  # seconds that a command may take on an idle machine, deadlines included
MODEL = "--model.n-layer 1 --model.n-head 4 --model.n-embd 32 --model.n-positions 16 --train.batch 4"
RUN = (
    f"{MODEL} --train.steps {STEPS} --train.save-every 20 --train.eval-every 50 --train.eval-batches 1 --comm.timeout 8"
)
LAYOUTS = ("", "--parallel.tp 2", "--parallel.dp 2 --zero.stage 2")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGHUP")
DEEP = b"[" * 50_000
CRAFTED = (
    b"",
    b"\xff\xfe",
    b"5",
    b"[]",
    b"{}",
    b'{"kind": 5}',
    DEEP,
    b'{"step": ' + b"9" * 5001 + b"}",
    b"a = " + DEEP,
)


class Watched(Command):
    """A run of tpfuse that must end in time, without a process or a traceback that is left."""

    def __init__(
        self, arguments: list[str], limits: dict[int, int] | None = None, stdout: int | IO[str] = subprocess.PIPE
    ) -> None:
        super().__init__(["-m", "tpfuse", *arguments], limits=limits, stdout=stdout)

    def ended(self) -> tuple[int | None, str, list[str]]:
        """Waits for the end and returns (status, stderr, the errors in how it ended)."""
        wrong = []
        try:
            _, err = self.process.communicate(timeout=patient(LIMIT))
        except subprocess.TimeoutExpired:
            wrong.append(f"did not end within {patient(LIMIT):.0f} s")
            self.send(signal.SIGKILL, self.processes())
            _, err = self.process.communicate()
        deadline = time.monotonic() + patient(20.0)
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        if left := self.processes():
            wrong.append(f"{len(left)} processes are left")
            self.send(signal.SIGKILL, left)
        if "Traceback" in err:
            wrong.append("a traceback")
        if other := [line for line in err.splitlines() if not line.startswith("tpfuse")]:
            wrong.append(f"{len(other)} lines on stderr that are not a message of tpfuse")
        if err.count("error:") > 1:
            wrong.append(f"{err.count('error:')} errors")
        return self.process.returncode, err, wrong


class Undisturbed:
    """Runs without a fault, one for each layout, which are made at their first use."""

    def __init__(self, root: Path) -> None:
        self._root, self._runs = root, dict[str, Path]()
        self.text = root / "text.txt"
        self.text.write_text("the cat sat on the mat and saw that the dog was at the door of the house. " * 80)

    def arguments(self, layout: str, out: Path) -> list[str]:
        """Returns the arguments of the command that makes such a run."""
        return f"train --data.path {self.text} {RUN} {layout} --out {out}".split()

    def run(self, layout: str) -> Path:
        """Returns the folder of the run."""
        if layout not in self._runs:
            folder = self._root / f"undisturbed-{len(self._runs)}"
            status, err, wrong = Watched(self.arguments(layout, folder)).ended()
            if status or wrong:
                sys.exit(f"the undisturbed run {layout!r} ends with status {status}: {wrong} {err}")
            self._runs[layout] = folder
        return self._runs[layout]


class Case:
    """A random fault in a folder of its own. told: a description of the fault; wrong: the properties that failed."""

    def __init__(self, seed: str, root: Path, undisturbed: Undisturbed) -> None:
        self.random = random.Random(seed)
        self.folder = root / seed.replace(" ", "-")
        self.undisturbed = undisturbed
        self.layout = self.random.choice(LAYOUTS)
        self.told, self.wrong = "", list[str]()

    def run(self) -> str:
        """Runs one kind of fault, and returns the kind."""
        kinds: dict[str, Callable[[], None]] = {
            "signal": self.signals, "limit": self.limit, "disk": self.full_disk, "output": self.output,
            "damage": self.damage, "removed": self.removed,
        }  # fmt: skip
        kind = self.random.choices(list(kinds), weights=(8, 3, 2, 1, 8, 1))[0]
        self.folder.mkdir()
        try:
            kinds[kind]()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return kind

    def arguments(self, out: Path, *, resume: bool = False) -> list[str]:
        """Returns the arguments of the command. A resumed run takes all options but its folder from its config.toml."""
        return f"train --resume --out {out}".split() if resume else self.undisturbed.arguments(self.layout, out)

    def ended(self, command: Watched, statuses: tuple[int, ...], disturbed: str) -> int | None:
        """Records the errors in how a command ended, and returns its status."""
        status, err, wrong = command.ended()
        if status not in statuses:
            wrong.append(f"status {status}, expected one of {statuses}")
        self.wrong += [f"{disturbed}: {each}: {err.strip()[-400:]!r}" for each in wrong]
        return status

    def goes_on(self, out: Path) -> None:
        """Checks that the run can be resumed, or started again if it has no files, and ends in the same bytes."""
        status = self.ended(Watched(self.arguments(out, resume=True)), (0, 2), "resumed")
        if status == 2:
            self.ended(Watched(self.arguments(out)), (0,), "begun again")
        self.same(out)

    def same(self, out: Path) -> None:
        """Checks that the last checkpoint is that of an undisturbed run."""
        if digest(out) != digest(self.undisturbed.run(self.layout)):
            self.wrong.append(f"the last checkpoint differs from that of an undisturbed run: {digest(out)}")

    def signals(self) -> None:
        """Sends one or two signals to the command or a rank."""
        out = self.folder / "run"
        command = Watched(self.arguments(out))
        fatal = False
        for _ in range(self.random.choice((1, 1, 2))):
            delay, name = self.random.uniform(0.0, 8.0), self.random.choice(SIGNALS)
            time.sleep(delay)
            processes = command.processes()
            if not processes:
                break
            index = self.random.randrange(len(processes))
            if index == 0 and name == "SIGSTOP":  # such a process could not be ended
                name = "SIGKILL"
            self.told += f"{name} to process {index} after {delay:.1f} s; "
            fatal = fatal or (index == 0 and name not in ("SIGTERM", "SIGINT"))
            command.send(getattr(signal, name), [processes[index]])
            if name == "SIGSTOP":  # a process that is stopped cannot end with its parent
                break
        negative = tuple(-getattr(signal, name) for name in SIGNALS) if fatal or not self.layout else ()
        # A signal that comes before Python has installed a handler ends the command as it ends any other process.
        early = (-signal.SIGTERM, -signal.SIGINT, 130, 128 + signal.SIGTERM)
        self.ended(command, (0, 1, *negative, *early), "disturbed")
        self.goes_on(out)

    def limit(self) -> None:
        """Sets a limit of the system on files or memory."""
        out = self.folder / "run"
        limits = (
            (resource.RLIMIT_FSIZE, self.random.randrange(0, 200_000)),
            (resource.RLIMIT_NOFILE, self.random.randrange(20, 200)),
            (resource.RLIMIT_DATA, self.random.randrange(200, 3000) << 20),
        )
        kind, value = self.random.choice(limits)
        self.told = f"limit {kind} of {value}"
        self.ended(Watched(self.arguments(out), {kind: value}), (0, 1, 2), "disturbed")
        self.goes_on(out)

    def full_disk(self) -> None:
        """Places the run's folder on a disk that is soon full."""
        disk, size = self.folder / "disk", self.random.randrange(8, 1500) * 1024
        disk.mkdir()
        self.told = f"a disk of {size} bytes"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            self.told += " (not root: left out)"
            return
        try:
            self.ended(Watched(self.arguments(disk / "run")), (0, 1, 2), "disturbed")
            subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
            self.goes_on(disk / "run")
        finally:
            subprocess.run(["umount", str(disk)], check=False)

    def output(self) -> None:
        """Closes or fills the standard output, so that the command cannot print."""
        self.told = "standard output is full"
        out = self.folder / "run"
        with Path("/dev/full").open("w") as full:
            self.ended(Watched(self.arguments(out), stdout=full), (0,), "disturbed")
        self.same(out)

    def removed(self) -> None:
        """Removes the run's folder while it trains."""
        delay, out = self.random.uniform(0.0, 8.0), self.folder / "run"
        self.told = f"the folder is removed after {delay:.1f} s"
        command = Watched(self.arguments(out))
        time.sleep(delay)
        there = out.exists()
        shutil.rmtree(out, ignore_errors=True)
        self.ended(command, (0, 1, 2), "disturbed")
        if not out.exists() or not there:
            self.goes_on(out)

    def damage(self) -> None:
        """Damages a file of a run that has ended, and checks that the run continues or reports an error."""
        out = self.folder / "run"
        shutil.copytree(self.undisturbed.run(self.layout), out)
        shutil.rmtree(out / f"step-{STEPS}")
        files = [path for path in sorted(out.rglob("*")) if path.is_file() and "tensorboard" not in path.parts]
        file = self.random.choice(files)
        how = self.random.choice(("flipped", "cut", "crafted", "pipe", "folder", "endless"))
        if file.name == "config.toml" and how == "flipped":
            how = "cut"  # a changed digit gives another valid configuration
        self.told = f"{file.relative_to(out)} {how}"
        content = bytearray(file.read_bytes())
        file.unlink()
        if how == "flipped":
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            file.write_bytes(content)
        elif how == "cut":
            file.write_bytes(content[: self.random.randrange(len(content)) if file.name != "config.toml" else 0])
        elif how == "crafted":
            file.write_bytes(self.random.choice(CRAFTED))
        elif how == "pipe":
            os.mkfifo(file)
        elif how == "folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero")
        sample = ["sample", str(out), "--tokens", "2"]
        self.ended(Watched(sample), (0, 2, 3), "sampled")
        status = self.ended(Watched(self.arguments(out, resume=True)), (0, 2, 3), "resumed")
        if status == 0:
            self.same(out)


def digest(run: Path) -> str:
    """Returns the checksums of the last checkpoint's files."""
    try:
        return json.dumps(json.loads((run / f"step-{STEPS}" / "manifest.json").read_text())["files"], sort_keys=True)
    except (OSError, ValueError) as error:
        return str(error)


def main(arguments: list[str]) -> int:
    """Runs the cases of the command line and prints the counts. Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to run one again")
    options = parser.parse_args(arguments)
    good, bad = collections.Counter[str](), collections.Counter[str]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    # Ctrl-C ends the loop, and the counts so far are printed.
    with tempfile.TemporaryDirectory(prefix="random-faults-") as name, contextlib.suppress(KeyboardInterrupt):
        root = Path(name)
        undisturbed = Undisturbed(root)
        for number in range(options.first, options.first + options.count):
            case = Case(f"{options.seed} {number}", root, undisturbed)
            kind = case.run()
            (bad if case.wrong else good)[kind] += 1
            for wrong in case.wrong:
                print(f"case {number}, {case.layout or 'one rank'}, {kind}, {case.told}: {wrong}", flush=True)
    for kind in sorted(good | bad):
        print(f"{kind:10}{good[kind]:5} good {bad[kind]:5} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
