"""Files and folders that are on the disk, not in a cache, when a call returns.

A file is durable after fsync of it *and* of the folder that names it; a rename is atomic at once and durable
after fsync of the parent (fsync(2); Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Every
system call is one call of the os module (pathlib's and shutil's are, too), so that a test can count it and make
it fail. An OSError always carries the path it is about; os.write and os.fsync alone would not say.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class DurableFile:
    """A new file, hashed while it is written; leaving the `with` block without an error makes it durable.

    Its folder has to be synced by `sync_folder` once all files are in it. size: bytes so far. Raises OSError,
    FileExistsError where the file is there already.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._hash = hashlib.sha256()
        with _naming(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def sha256(self) -> str:
        """Of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of `data`, however many calls the system makes of it. Raises OSError."""
        rest = memoryview(data).cast("B")
        self._hash.update(rest)
        self.size += len(rest)
        while rest:
            with _naming(self.path):
                written = os.write(self._descriptor, rest)
                if written == 0:  # would repeat for ever
                    raise OSError(errno.EIO, "the system wrote 0 bytes")
            rest = rest[written:]

    def __enter__(self) -> "DurableFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _naming(self.path):
            try:
                if kind is None:
                    os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)


def replace_file(path: Path, text: str) -> None:
    """Writes a text file whole, or leaves the one that was there as it was. Raises OSError."""
    staging = path.with_name(f".staging-{path.name}")
    staging.unlink(missing_ok=True)
    with DurableFile(staging) as file:
        file.write(text.encode())
    staging.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """A new folder, and its parents where they are missing, all durable. Raises OSError."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    path.mkdir()
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it, in no durable order. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sha256_of(path: Path) -> str:
    """Of the file's bytes, in hexadecimal, in constant memory. Raises OSError."""
    with _naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
