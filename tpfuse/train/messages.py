"""Lines for people on stderr; results go to stdout."""

import contextlib
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def warn(message: str) -> None:
    """One line that does not end the command."""
    print(f"tpfuse: warning: {message}", file=sys.stderr, flush=True)


def say(line: str = "") -> None:
    """One line on stdout. Where stdout is closed or its disk is full, a warning, once, and nothing more is said."""
    try:
        print(line, flush=True)
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # and there goes what sys.stdout still holds
        os.close(nowhere)
        with contextlib.suppress(OSError):
            warn(f"cannot write to standard output: {error.strerror}; training continues without it")


def program() -> str:
    """How this command was called, for lines that tell people what to call next."""
    name = Path(sys.argv[0])
    return os.path.relpath(name) if name.name == "tpfuse" else "python -m tpfuse"


def nearest(word: str, known: Sequence[str]) -> str:
    """ "; did you mean …?" with the known word that is most like `word`; empty where none is like it."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def is_first_rank() -> bool:
    """Whether this is the only process, or the first rank of torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


def fail(command: str, message: str, missing: tuple[int, ...] = ()) -> None:
    """The one line that says why a command ends; under torchrun the first rank that is not missing says it for all."""
    ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
    if int(os.environ.get("RANK", "0")) != next((rank for rank in ranks if rank not in missing), 0):
        return
    print(f"tpfuse {command}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def show_cursor() -> None:
    """Shows a terminal's cursor again that a progress bar has hidden, where the process of the bar was killed."""
    if sys.stdout.isatty():
        sys.stdout.write("\033[?25h")
        sys.stdout.flush()
