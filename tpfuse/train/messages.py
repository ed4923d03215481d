"""Lines for people on stderr; results go to stdout."""

import sys


def warn(message: str) -> None:
    """One line that does not end the command."""
    print(f"tpfuse: warning: {message}", file=sys.stderr, flush=True)


def fail(command: str, message: str) -> None:
    """The one line that says why a command ends."""
    print(f"tpfuse {command}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
