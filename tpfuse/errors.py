"""Errors that end a command with one line on stderr, and the exit status of each."""

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Bad input, exit status 2. The message says what was received and what to do."""

    status = 2


@contextlib.contextmanager
def refusing(before: str = "", after: str = "") -> Iterator[None]:
    """Raise UserError for a ValueError in the block, with its message between `before` and `after`."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{before}{error}{after}") from None


def check_at_least(options: Mapping[str, tuple[float | None, float]]) -> None:
    """Raise UserError for an option --NAME whose value is below the least one, or not finite. options: both by NAME."""
    for name, (value, least) in options.items():
        if value is not None and not least <= value < inf:
            raise UserError(f"--{name} {value}: expected at least {least}" + (", and finite" if value == inf else ""))


# The modules of the packages in the extra `train`, which every command needs but `doctor` and `verify`.
EXTRA = (
    "docstring_parser", "huggingface_hub", "matplotlib", "rich", "tensorboard", "tokenizers", "tomli_w", "tqdm", "tyro",
)  # fmt: skip


def check_extra() -> None:
    """Raise UserError, which says what to install, if a package of the extra `train` is not installed."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        packages = f"package{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise UserError(f"this command needs the {packages}: pip install 'tpfuse[train]'")


def optional_package(name: str, needed: str, extra: str = "data") -> Any:
    """Return a package of an extra. Raise UserError, which says what needs it, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{needed} needs the package {name}: pip install 'tpfuse[{extra}]'") from None


class CheckpointError(Exception):
    """A damaged checkpoint, exit status 3. The message names the file, what was expected and what was found."""

    status = 3

    def __init__(self, file: Path, expected: str, found: str) -> None:
        super().__init__(f"{file}: expected {expected}, found {found}")
        self.file, self.expected, self.found = file, expected, found


def of_disk(error: OSError) -> str:
    """Return the system's message, with the name of the file if the error has one."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def hub_hint(name: str, wanted: str = "") -> str:
    """Return how to get what `name` may be on the Hugging Face hub; "" if it cannot be a name there.

    wanted: what to download, if that is not all files of the model `name`.
    """
    if not re.fullmatch(r"(?!.*\.[a-z]\w*$)[\w.-]+/[\w.-]+", name):
        return ""
    return f"; if that is a name of the Hugging Face hub: hf download {wanted or name} --local-dir FOLDER"


def instead_of(folder: Path) -> str:
    """Return what a user can do about a folder that is no run and has no config.json; "" if nothing is known."""
    if not folder.exists():
        return hub_hint(str(folder))
    if (folder / "adapter_config.json").is_file():
        return "; it holds adapters: merge them by PEFT's merge_and_unload().save_pretrained(FOLDER), and give FOLDER"
    if folder.is_file():
        return "; give the folder that holds the model's config.json"
    for pattern, kind in (("params.json", "Meta's own format"), ("*.gguf", "GGUF")):
        if any(folder.glob(pattern)):
            return f"; it holds {kind}: fetch the model in the format of transformers, which has a config.json"
    return ""


class RunError(RuntimeError):
    """A run cannot continue (a loss that is not finite, a full disk); exit status 1, or 3 for a damaged checkpoint.

    alone: whether only the rank that raises it knows the reason.
    """

    def __init__(self, message: str, status: int = 1, alone: bool = False) -> None:
        super().__init__(message)
        self.status, self.alone = status, alone


@contextlib.contextmanager
def ending_run() -> Iterator[None]:
    """Raise RunError for bad input, a damaged checkpoint and a disk that fails in the block."""
    try:
        yield
    except (UserError, CheckpointError) as error:
        raise RunError(str(error), error.status) from error
    except OSError as error:
        raise RunError(of_disk(error)) from error


class PeerLost(RunError):
    """A rank cannot continue because other ranks do not answer.

    missing: the numbers of those ranks in the world; empty if this rank does not know them.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
