"""`tpfuse` and `python -m tpfuse`."""

import sys


def main() -> None:
    """Runs the command of sys.argv and exits with its status."""
    try:
        from tpfuse.train.command_line import run
    except ModuleNotFoundError as error:
        if error.name in ("tyro", "rich", "matplotlib", "tensorboard", "tokenizers", "huggingface_hub", "tomli_w"):
            sys.exit(f"tpfuse: error: {error.name} is not installed: pip install 'tpfuse[train]'")
        raise
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
