"""Text from a file, a folder, or the Python standard library of this machine."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tpfuse.train.errors import UserError
from tpfuse.train.untrusted import Unreadable, read_bytes

STANDARD_LIBRARY = "the source of the Python standard library"


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(folders):
            yield path


def _folder(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            yield path


def _decoded(path: Path) -> str | None:
    """Returns the file as UTF-8 text, or None if it is not UTF-8 text."""
    data = read_bytes(path, None)
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def read_text(path: Path | None) -> tuple[str, str]:
    """Returns (text, its description) of a file, of all UTF-8 files below a folder, or of the standard library.

    path: a file or a folder; None for the source of the Python standard library. Files of a folder are concatenated in
    the order of their names, without hidden files and files that are not UTF-8. The text is held in memory. Raises
    UserError if there is no text, or if it cannot be read.
    """
    try:
        if path is None:
            texts = [text for file in _standard_library() if (text := _decoded(file)) is not None]
            source = STANDARD_LIBRARY
            if not texts:
                raise UserError("this Python has no source of its standard library: give a text with --data.path")
        elif path.is_dir():
            texts = [text for file in _folder(path) if (text := _decoded(file)) is not None]
            source = str(path)
            if not texts:
                raise UserError(f"{path} holds no UTF-8 text files")
        elif path.exists():
            text = _decoded(path)
            source = str(path)
            if text is None:
                raise UserError(f"{path} is not UTF-8 text")
            texts = [text]
        else:
            raise UserError(f"{path} does not exist: expected a file, a folder or a pattern")
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    except Unreadable as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return "".join(texts), source
