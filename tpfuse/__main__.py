"""The entry point of `tpfuse` and `python -m tpfuse`."""

import sys

_EXTRA = ("tyro", "rich", "matplotlib", "tensorboard", "tokenizers", "huggingface_hub", "tomli_w", "tqdm")


def main() -> None:
    """Run the command of sys.argv and exit with its status."""
    try:
        from tpfuse.cli import run

        sys.exit(run(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(
            f"tpfuse: error: {error.name} is not installed: in the folder of tpfuse's source, run"
            " pip install '.[train]'"
        )
    except KeyboardInterrupt:  # It came before training, which has its own handlers.
        print("tpfuse: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
