"""Where AdamW's master and moments live: on the device, in the host's memory, or in a file on disk.

They are read and written once in a step, block after block, and by nothing else; so they need not be where the model
is. The update then runs on the host: a block of the gradient goes there, and the new parameters come back. The idea is
ZeRO-Infinity's (arXiv:2104.07857); mapped memory takes the place of its engine for reading and writing, because the
kernel's page cache does the same and uses all memory that nobody else wants.

    for part in store.blocks(tensors, following=tensors_of_the_next):
        with staging.host(gradient[part], parameter[part]) as (on_host, new):
            adamw_([master[part]], [on_host], …, [new], …)

A file of state is scratch: it has no name, so that it is gone with the process whatever ends it. State that is to
survive is in checkpoints.
"""

import contextlib
import errno
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tpfuse.choices import Offload
from tpfuse.comm.rank_order import HALF
from tpfuse.zero.bucket_layout import ALIGNMENT, BucketLayout

BLOCK = 4 * 2**20  # elements, 16 MiB in float32: long enough for a disk, and a few of them are little memory
_IN_MEMORY = ("tmpfs", "ramfs")
_MADV_POPULATE_WRITE = 23  # which Python's mmap has no name for


class StateStore(ABC):
    """Gives out tensors of state, and says in which blocks to go over them."""

    @abstractmethod
    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros [size], which are the caller's for as long as the store lives. key: for messages."""

    @abstractmethod
    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """Parts that together are the whole of `tensors` [n], one after the other.

        tensors: of this store, or parts of those; others of the same length may be among them. A part is to be used
        until the next one is asked for. then: what the walk after this one goes over, if that is known.
        """

    def release(self) -> None:
        """After all state was read or written other than by `blocks`, for a checkpoint: lets go of what need not stay."""
        return


class DeviceStore(StateStore):
    """Memory of the device, gone over at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        """See `StateStore`."""
        return torch.zeros(size, dtype=dtype, device=self._device)

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """See `StateStore`."""
        yield slice(0, _length(tensors))


class HostStore(StateStore):
    """Memory of the host, in blocks of `block` elements: what `Staging` has room for.

    pinned: so that the device may copy to and from it directly. Torch rounds each pinned tensor up to a power of two.
    """

    def __init__(self, block: int = BLOCK, *, pinned: bool = False) -> None:
        self._block, self._pinned = block, pinned

    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        """See `StateStore`."""
        return torch.zeros(size, dtype=dtype, pin_memory=self._pinned)

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """See `StateStore`."""
        yield from _parts(_length(tensors), self._block)


class FileStore(StateStore):
    """A file of `nbytes` in `folder`, mapped into memory; while a block is updated the next one is read ahead.

    After a block was updated its pages leave this process: what is resident is a few blocks, however much state there
    is. The kernel keeps them in its cache as long as nobody needs that memory, and writes them to disk when it likes
    (made to begin at once, it took twice as long over a state that the cache could hold).
    Raises ValueError where the folder does not have the space, before any is taken; all of it is taken at once, so that
    the disk cannot be full later.
    """

    def __init__(self, folder: Path, nbytes: int, block: int = BLOCK) -> None:
        check_space(folder, nbytes)
        self._block, self._used = block, 0
        nbytes = max(nbytes, 1)  # nothing cannot be mapped
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the store is
        try:
            _allocate(self._file.fileno(), nbytes)
            self._map = mmap.mmap(self._file.fileno(), nbytes)
        except OSError as error:
            self._file.close()
            raise ValueError(f"offload path {folder}: cannot take {_size(nbytes)} there: {error.strerror}") from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        """See `StateStore`. Raises ValueError where the file is full."""
        start = -(-self._used // dtype.itemsize) * dtype.itemsize
        stop = start + size * dtype.itemsize
        if stop > len(self._bytes):
            raise ValueError(f"{key}: {stop} bytes of state do not fit the {len(self._bytes)} that were asked for")
        self._used = stop
        return self._bytes[start:stop].view(dtype)

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """See `StateStore`."""
        parts = _parts(_length(tensors), self._block)
        for part in parts[:1]:
            self._read_ahead(tensors, part)
        for index, part in enumerate(parts, 1):
            if index < len(parts):
                self._read_ahead(tensors, parts[index])
            elif following:
                self._read_ahead(following, slice(0, min(self._block, _length(following))))
            self._populate(tensors, part)
            try:
                yield part
            finally:
                self._release_pages(tensors, part)

    def release(self) -> None:
        """See `StateStore`."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _read_ahead(self, tensors: Sequence[Tensor], part: slice) -> None:
        for start, length in self._pages(tensors, part):
            self._map.madvise(mmap.MADV_WILLNEED, start, length)

    def _populate(self, tensors: Sequence[Tensor], part: slice) -> None:
        """All pages of a part by one call, not one by one as they are touched; a disk that fails then raises OSError,
        where touching the page would end the process. Linux before 5.14 cannot."""
        for start, length in self._pages(tensors, part):
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, length)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise

    def _release_pages(self, tensors: Sequence[Tensor], part: slice) -> None:
        """Loses nothing: pages of a shared mapping are the file's. A page that two blocks share just comes again."""
        for start, length in self._pages(tensors, part):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def _pages(self, tensors: Sequence[Tensor], part: slice) -> Iterator[tuple[int, int]]:
        """(offset, bytes) in the file of the pages that hold a part of each tensor that lies there."""
        base = self._bytes.data_ptr()
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() != base or part.start == part.stop:
                continue
            start = tensor.data_ptr() - base + part.start * tensor.element_size()
            stop = start + (part.stop - part.start) * tensor.element_size()
            start -= start % mmap.PAGESIZE
            yield start, stop - start


def _length(tensors: Sequence[Tensor]) -> int:
    lengths = {tensor.numel() for tensor in tensors}
    assert len(lengths) == 1, f"tensors of {sorted(lengths)} elements: expected equal lengths"
    return lengths.pop()


def _parts(length: int, block: int) -> list[slice]:
    """Cut between the processor's vectors: torch rounds what it computes one by one, at the end, otherwise."""
    assert block % ALIGNMENT == 0, f"blocks of {block} elements: expected a multiple of {ALIGNMENT}"
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _allocate(descriptor: int, nbytes: int) -> None:
    """Takes the space of a file: one that only seems as long would end the process when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Staging:
    """Takes blocks of gradients from a device to the host, and new parameters back. On the CPU they just stay.

    Both pass through pinned memory. Its next use waits for the stream, and so for the copy out of it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def _buffer(self, name: str, block: Tensor) -> Tensor:
        """For a block, which may be larger than those before."""
        if name not in self._memory or self._memory[name].nbytes < block.nbytes:
            self._memory[name] = _pinned(block.nbytes)
        return self._memory[name][: block.nbytes].view(block.dtype)

    @contextlib.contextmanager
    def host(self, gradient: Tensor, parameter: Tensor, *, read: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Both blocks [n] on the host: the gradient to be read, the parameter to be written.

        read: whether the parameter's present values are wanted too, as where it is the master. What was written is in
        the device's parameter for whoever comes next on the current stream.
        """
        if _on_host(gradient):
            yield gradient, parameter
            return
        stream = torch.cuda.current_stream(gradient.device)
        on_host, new = self._buffer("gradient", gradient), self._buffer("parameter", parameter)
        on_host.copy_(gradient, non_blocking=True)
        if read:
            new.copy_(parameter, non_blocking=True)
        stream.synchronize()
        yield on_host, new
        parameter.copy_(new, non_blocking=True)


def state_bytes(layouts: Iterable[BucketLayout], stage: int) -> int:
    """Bytes of one rank's master (of half types), exp_avg and exp_avg_sq: the same on all ranks."""
    total = 0
    for layout in layouts:
        elements = len(layout.shard(0)) if stage else layout.size
        total += elements * layout.state_dtype.itemsize * (3 if layout.dtype in HALF else 2)
    return total


def state_store(offload: Offload, device: torch.device, folder: Path | None, nbytes: int) -> StateStore:
    """The store of this name. nbytes: of all tensors that will be asked of it. Raises ValueError."""
    if offload == "none":
        return DeviceStore(device)
    if offload == "optimizer":
        return HostStore(pinned=device.type == "cuda")
    if folder is None:
        raise ValueError("offload nvme: expected an offload path, a folder on a local disk")
    return FileStore(folder, nbytes)


def check_space(folder: Path, nbytes: int) -> None:
    """Raises ValueError where a file of `nbytes` cannot be made in a folder, or would be no gain there.

    nbytes: of all ranks that share the disk. Memory that is called a folder (tmpfs) is refused: what is put there to
    spare memory takes it, and the kernel may end the run for that.
    """
    if not folder.is_dir():
        raise ValueError(f"offload path {folder} is not a folder: expected one on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"offload path {folder} is not writable: expected a folder in which files can be made")
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise ValueError(f"offload path {folder} is in memory ({kind}): expected a folder on a local disk")
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < nbytes:
        raise ValueError(
            f"offload path {folder} has too little space: optimizer state needs {_size(nbytes)}, {_size(free)} are free"
        )


def _file_system(folder: Path) -> str:
    """The kind that Linux names for a folder's device, "" where it names none."""
    device = folder.stat().st_dev
    device_number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == device_number:
                return source.split()[0]
    return ""


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
