"""Print lines for people: warnings and errors on stderr, results and progress on stdout."""

import contextlib
import io
import os
import signal
import sys
from pathlib import Path

from tpfuse.train.launchers import place

_FOR_THE_FIRST = 30.0  # seconds; on a busy machine ranks start many seconds after one another


def warn(message: str) -> None:
    """Print one warning line. The command continues."""
    print(f"tpfuse: warning: {message}", file=sys.stderr, flush=True)


def accept_all_texts() -> None:
    """Let stdout take every text: with ? for what its encoding cannot express, and nowhere if it is closed."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def discard_output() -> None:
    """Discard what stdout has not written yet, and all that follows."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say(line: str = "") -> None:
    """Print one line on stdout. If stdout is closed or its disk is full, warn once and print nothing more."""
    try:
        print(line, flush=True)
    except OSError as error:
        discard_output()
        with contextlib.suppress(OSError):
            warn(f"cannot write to standard output: {error.strerror}; training continues without it")


def program() -> str:
    """Return how this command was called, for lines that say which command to call next."""
    name = Path(sys.argv[0])
    return os.path.relpath(name) if name.name == "tpfuse" else "python -m tpfuse"


def is_first_rank() -> bool:
    """Return whether this is the only process, or the first rank of a launcher."""
    return place()[0] == 0


def fail(command: str, message: str, missing: tuple[int, ...] = (), alone: bool = False) -> None:
    """Print why a command ends, in one line. Of a launcher's ranks the first one that is not missing prints it for all.

    alone: whether only this rank knows the reason, so that it prints it in any case.

    The other ranks wait until the launcher stops them, or for a while: when another one ends, torchrun kills the first
    one, which may not have come so far.
    """
    own, world = place()
    if not alone and own != next((rank for rank in range(world) if rank not in missing), 0):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.sigtimedwait({signal.SIGTERM}, _FOR_THE_FIRST)
        return
    print(f"tpfuse {command}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def show_cursor() -> None:
    """Show the terminal's cursor again, which a progress bar has hidden whose process was killed."""
    if sys.stdout.isatty():
        sys.stdout.write("\033[?25h")
        sys.stdout.flush()
