"""The entry point of `tpfuse` and `python -m tpfuse`."""

import sys


def main() -> None:
    """Run the command of sys.argv and exit with its status."""
    try:
        from tpfuse.cli import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # It came before training, which has its own handlers.
        print("tpfuse: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
