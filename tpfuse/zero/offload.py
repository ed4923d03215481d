"""The memory of AdamW's masters and moments: on the device, in the host's memory, or in a file on disk.

Only the update reads and writes them, once in a step, block after block, so they do not have to be on the model's
device. If they are on the host, the update runs there: a block of the gradient is copied to the host, and the new
parameters are copied back. The idea is ZeRO-Infinity's (arXiv:2104.07857). Mapped memory replaces its engine for
reading and writing, because the kernel's page cache does the same and uses all memory that is free. At stage 3 the
shards of the parameters, which are the masters, may be in the file too, and are read whenever they are gathered.

A file of state is temporary: it has no name, so it disappears with the process, however this ends. Checkpoints hold
the state that must survive.
"""

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from tpfuse.choices import MomentDtype
from tpfuse.comm.sum_order import HALF
from tpfuse.zero.bucket_layout import ALIGNMENT, BucketLayout
from tpfuse.zero.reducer.shard_update import StateStore

BLOCK = 4 * 2**20  # elements, 16 MiB in float32: large enough for a disk, and a few blocks take little memory
_IN_MEMORY = ("tmpfs", "ramfs")
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Python's mmap module does not define them


class MemoryStore(StateStore):
    """Memory of a device, which is updated as one block, or of the host, in blocks of the size of `Staging`'s buffers.

    block: elements; None for one block. pinned: whether the memory is pinned, so that the device can copy to and from
    it directly. Torch rounds the size of each pinned tensor up to a power of two.
    """

    def __init__(self, device: torch.device | str, block: int | None = None, *, pinned: bool = False) -> None:
        self._device, self._block, self._pinned = device, block, pinned

    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device, pin_memory=self._pinned)

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        length = _length(tensors)
        yield from [slice(0, length)] if self._block is None else _parts(length, self._block)


class FileStore(StateStore):
    """A file of `nbytes` in `folder`, mapped into memory; while a block is updated the next one is read ahead.

    After the update of a block its pages leave this process, so only a few blocks are resident, however much state
    there is. The kernel keeps the pages in its cache while the memory is free, and chooses when it writes them to disk
    (when it was made to begin at once, a state that fits the cache took twice as long).
    Raise ValueError if the folder does not have the space, before allocating any; all of it is allocated at once, so
    that the disk cannot be full later.
    """

    def __init__(self, folder: Path, nbytes: int, block: int = BLOCK) -> None:
        check_space(folder, nbytes)
        self._block, self._used = block, 0
        nbytes = max(nbytes, 1)  # an empty file cannot be mapped
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the store exists
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)  # if the file were sparse, a full disk would end the run
            self._map = mmap.mmap(self._file.fileno(), nbytes)
        except OSError as error:
            self._file.close()
            raise ValueError(f"offload {folder}: cannot allocate {_size(nbytes)} there: {error.strerror}") from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        """See `StateStore`. Raise ValueError if the file is full."""
        start = self._used
        stop = start + file_bytes(size * dtype.itemsize)
        if stop > len(self._bytes):
            raise ValueError(f"{key}: {stop} bytes of state do not fit in the {len(self._bytes)} bytes of the file")
        self._used = stop
        return self._bytes[start : start + size * dtype.itemsize].view(dtype)

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        parts = _parts(_length(tensors), self._block)
        for part in parts[:1]:
            self._advise(mmap.MADV_WILLNEED, tensors, part)
        for index, part in enumerate(parts, 1):
            if index < len(parts):
                self._advise(mmap.MADV_WILLNEED, tensors, parts[index])
            elif following:
                self._advise(mmap.MADV_WILLNEED, following, slice(0, min(self._block, _length(following))))
            self._advise(_MADV_POPULATE_WRITE, tensors, part)
            try:
                yield part
            finally:  # the file keeps the data; a page that two blocks share is loaded again
                self._advise(mmap.MADV_DONTNEED, tensors, part)

    def load(self, tensor: Tensor) -> None:
        whole = slice(0, tensor.numel())
        self._advise(mmap.MADV_WILLNEED, [tensor], whole)
        self._advise(_MADV_POPULATE_READ, [tensor], whole)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def _advise(self, advice: int, tensors: Sequence[Tensor], part: slice) -> None:
        """Advise the kernel on the file's pages with a part of each tensor; skip tensors of other memory.

        The advice to populate loads all pages with one call, not one by one when they are accessed. A disk that fails
        raises OSError here; an access to the page would end the process. Linux before 5.14 does not know that advice,
        and it is skipped there.
        """
        base = self._bytes.data_ptr()
        for tensor in tensors:
            if not 0 <= tensor.data_ptr() - base < len(self._bytes) or part.start == part.stop:
                continue
            start = tensor.data_ptr() - base + part.start * tensor.element_size()
            stop = start + (part.stop - part.start) * tensor.element_size()
            start -= start % mmap.PAGESIZE
            try:
                self._map.madvise(advice, start, stop - start)
            except OSError as error:
                if error.errno != errno.EINVAL or advice < _MADV_POPULATE_READ:
                    raise


def _length(tensors: Sequence[Tensor]) -> int:
    lengths = {tensor.numel() for tensor in tensors}
    assert len(lengths) == 1, f"tensors of {sorted(lengths)} elements: expected equal lengths"
    return lengths.pop()


def _parts(length: int, block: int) -> list[slice]:
    """Return slices that end between the processor's vectors: torch rounds elements after the last one differently."""
    assert block % ALIGNMENT == 0, f"blocks of {block} elements: expected a multiple of {ALIGNMENT}"
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def moment_dtype(chosen: MomentDtype, master: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments of masters: `chosen`, but float64 for float64. Raise ValueError for half ones."""
    if chosen not in get_args(MomentDtype):
        raise ValueError(f"state_dtype {chosen!r}: expected float32 or bfloat16")
    if chosen == "bfloat16" and master == torch.float64:
        raise ValueError("state_dtype bfloat16 is for parameters of float32 or a half type, not for float64")
    return master if chosen == "float32" else torch.bfloat16


def file_bytes(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes in a file: the next one may have any dtype."""
    return -(-nbytes // 8) * 8


def state_bytes(layouts: Iterable[BucketLayout], stage: int, state_dtype: MomentDtype = "float32") -> int:
    """Return the bytes of one rank's masters (for half types) and moments; all ranks have as many.

    state_dtype: that of AdamW's two moments; Muon has one, in the dtype of masters. At stage 3 the shards of all
    parameters are the masters. Raise ValueError as `moment_dtype` does.
    """
    total = 0
    for layout in layouts:
        elements, master = len(layout.shard(0)) if stage else layout.size, layout.state_dtype
        moments = master.itemsize if layout.muon else 2 * moment_dtype(state_dtype, master).itemsize
        total += elements * (moments + (master.itemsize if layout.dtype in HALF or stage == 3 else 0))
    return total


def state_store(offload: str | PathLike[str], device: torch.device, nbytes: int) -> StateStore:
    """Return the store of this name: "none" (the device), "host", or a folder for a file of `nbytes`.

    Raise ValueError if the folder cannot be used.
    """
    if offload == "none":
        return MemoryStore(device)
    if offload == "host":
        return MemoryStore("cpu", BLOCK, pinned=device.type == "cuda")
    return FileStore(Path(offload), nbytes)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise ValueError if a file of `nbytes` cannot be made in the folder, or would save no memory there.

    nbytes: the bytes of all ranks that share the disk. A folder in memory (tmpfs) is refused: its files take the memory
    that they should save, and the kernel may end the run because of that.
    """
    if not folder.is_dir():
        raise ValueError(f"offload {folder} is not a folder: expected none, host or a folder on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"offload {folder} is not writable: expected a folder in which files can be made")
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise ValueError(f"offload {folder} is in memory ({kind}): expected a folder on a local disk")
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < nbytes:
        raise ValueError(f"offload {folder} has too little space: {_size(nbytes)} are needed, {_size(free)} are free")


def _file_system(folder: Path) -> str:
    """Return the type of the folder's file system as Linux names it, or "" if it is unknown."""
    device = folder.stat().st_dev
    device_number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == device_number:
                return source.split()[0]
    return ""


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
