"""The entry point of `tpfuse` and `python -m tpfuse`."""

import sys
from typing import Any


def main() -> None:
    """Run the command of sys.argv and exit with its status."""
    sys.unraisablehook = _ignored
    try:
        from tpfuse.cli import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # It came before training, which has its own handlers.
        print("tpfuse: interrupted", file=sys.stderr)
        sys.exit(130)


def _ignored(found: Any) -> None:
    """End this process at a Ctrl-C that Python ignores: one that comes while it closes a generator or in a callback."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        from tpfuse.train.child import interrupted

        interrupted()
    sys.__unraisablehook__(found)


if __name__ == "__main__":
    main()
