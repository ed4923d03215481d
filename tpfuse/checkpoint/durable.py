"""Files and folders that are on the disk, not in a cache, when a call returns.

A file is durable after fsync of the file *and* of the folder that names it. A rename is atomic at once, and durable
after fsync of the parent folder (fsync(2); Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Every
system call is one call of the os module (also inside pathlib and shutil), so that a test can count it and make it fail.
An OSError always carries its path, which os.write and os.fsync alone would not add.
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
    """A new file that is hashed while it is written. Leaving the `with` block without an error makes it durable.

    The caller must call `sync_folder` on its folder once all files are in it. size: the number of bytes written so far.
    Raise OSError, and FileExistsError if the file exists already.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._hash = hashlib.sha256()
        with _naming(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`, in as many system calls as it takes. Raise OSError."""
        rest = memoryview(data).cast("B")
        self._hash.update(rest)
        self.size += len(rest)
        while rest:
            with _naming(self.path):
                written = os.write(self._descriptor, rest)
                if written == 0:  # the loop would never end
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
    """Write a text file as a whole, or leave an existing one unchanged. Raise OSError."""
    staging = path.with_name(f".staging-{path.name}")
    staging.unlink(missing_ok=True)
    with DurableFile(staging) as file:
        file.write(text.encode())
    staging.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Raise OSError."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a new folder, and its parents if they are missing, and make all of them durable. Raise OSError."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    path.mkdir()
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, in no durable order. Raise OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Takes constant memory. Raise OSError."""
    with _naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
