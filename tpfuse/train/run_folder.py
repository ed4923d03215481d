"""The folder of a run: whether it may be used, its lock, and where its tokens are until all checks have passed."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from tpfuse.checkpoint.durable import replace_file
from tpfuse.comm.stacks import remove_stacks
from tpfuse.errors import UserError
from tpfuse.train.data import RunData, store
from tpfuse.train.token_file import DamagedTokens
from tpfuse.train.tokenizer import Tokenizer

_STAGING = ".tpfuse-tokens-"  # begins the names of folders of tokens that no run has yet


def run_folder(out: Path | None, *, resumes: bool) -> Path:
    """Return the folder of a run: a new one, or that of the run to continue, locked until this process ends.

    Raise UserError for one that holds another run or other files, or that another run uses.
    """
    folder = out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    _remove_left(_place(folder))
    if resumes:
        _lock(folder)
    elif os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        is_run = (folder / "config.toml").is_file()
        way = "add --resume to continue its run, or choose" if is_run else "it holds no run: choose"
        raise UserError(f"{folder} exists: {way} another --out")
    return folder


@contextlib.contextmanager
def staging(folder: Path, *, resumes: bool) -> Iterator[Path]:
    """Yield a hidden folder for tokens beside that of a run, which is locked, and removed with what is in it then.

    If the block fails, nothing is left of a new run, also after SIGTERM. Raise UserError for a folder that cannot be
    written, and where the block finds damaged tokens.
    """
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that no tokens are left
    try:
        hidden = Path(tempfile.mkdtemp(prefix=_STAGING, dir=_place(folder)))
        descriptor = _flock(hidden)
        try:
            yield hidden
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)
    except DamagedTokens as error:
        raise UserError(str(error)) from None
    except OSError as error:
        if not resumes:
            shutil.rmtree(folder / "data", ignore_errors=True)  # so that the next run may use the folder
        raise UserError(f"cannot write the run folder {folder}: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def store_tokens(folder: Path, data: RunData, staging: Path) -> RunData:
    """Make the folder of a run, lock it, and move the tokens there. Raise UserError and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    return store(folder / "data", data, staging)


def _place(folder: Path) -> Path:
    """Return the folder, on the disk of a run folder, in which its tokens are until all checks have passed."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _remove_left(place: Path) -> None:
    """Remove the folders of `staging` whose process was killed, if the file system tells by its locks."""
    for folder in place.glob(f"{_STAGING}*"):
        with contextlib.suppress(UserError, OSError):
            if (descriptor := _flock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


_locked: dict[tuple[int, int], int] = {}  # descriptors of run folders, by device and inode, until this process ends


def _lock(folder: Path) -> None:
    """Lock a run folder until this process ends. Raise UserError if another run has locked it."""
    status = folder.stat()
    key = status.st_dev, status.st_ino
    if key not in _locked and (descriptor := _flock(folder)) is not None:
        _locked[key] = descriptor


def _flock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed; return None if its file system has no locks.

    Raise UserError if another process has locked it, and OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{folder} is in use by another run: wait until it has ended, or choose another --out"
        ) from None
    except OSError:
        os.close(descriptor)
        return None


def write_run(folder: Path, options: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write what a run has beside its tokens and checkpoints: its resolved options too. Raise UserError."""
    try:
        remove_stacks(folder)
        replace_file(folder / "config.toml", tomli_w.dumps(options))
        replace_file(folder / "tokenizer.json", json.dumps(tokenizer.as_json()))
    except OSError as error:
        raise UserError(f"cannot write the run folder {folder}: {error.strerror}") from None
