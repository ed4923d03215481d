"""The files and folders that a path of the command line names: by a pattern, or below a folder."""

import glob
from collections.abc import Iterator
from pathlib import Path

from tpfuse.errors import UserError


def is_pattern(path: Path) -> bool:
    """Return whether a path names the files that match it. Raise OSError."""
    return glob.has_magic(str(path)) and not path.exists()


def matches(pattern: Path) -> list[Path]:
    """Return what matches a pattern, in the order of names. Raise UserError if nothing does, and OSError.

    The part ** stands for any number of folders. A folder of which files match as well is left out.
    """
    found = _matches(pattern)
    if not found:
        raise UserError(f"no file matches {pattern}")
    return sorted(found - {file.parent for file in found})


def _matches(pattern: Path) -> set[Path]:
    if "**" not in pattern.parts:
        return set(map(Path, glob.glob(str(pattern))))  # noqa: PTH207 - Path.glob would match hidden files
    place = pattern.parts.index("**")
    above, below = Path(*pattern.parts[:place]), Path(*pattern.parts[place + 1 :] or ["*"])
    roots = [root for root in _matches(above) if root.is_dir()]
    folders = [folder for root in roots for folder in folders_of(root)]
    return {file for folder in folders for file in _matches(Path(glob.escape(str(folder)), below))}


def folders_of(root: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield a folder and all folders below it, without hidden ones. Raise OSError.

    Links are followed, but not to a folder of `above` or on the way from `root`, whose files would be read for ever.
    """
    yield root
    above |= {root.resolve()}
    for path in root.iterdir():
        if not path.name.startswith(".") and path.is_dir() and path.resolve() not in above:
            yield from folders_of(path, above)
