"""Symmetric memory of the CPU ranks of one host, and of one rank alone.

Every rank allocates its part of a buffer as anonymous shared memory (`tpfuse.comm.rank_state` gives the reason) and
maps the parts of the others. Interpreted kernels and torch operations access all parts as ordinary memory.
"""

import contextlib

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tpfuse.comm import trace
from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.errors import Unavailable
from tpfuse.comm.futex import Backoff, load_acquire, store_release
from tpfuse.comm.host_coordinated_memory import HostCoordinatedMemory
from tpfuse.comm.limits import available_memory
from tpfuse.comm.rank_state import Mapping
from tpfuse.comm.settings import settings
from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory, wrapped

_ZERO = np.zeros(1, np.int32)
_LARGE = 2**24  # bytes on all ranks together: for a buffer of this size the available memory is checked first


class SharedMemory(HostCoordinatedMemory):
    """The symmetric memory of CPU ranks, see `SymmetricMemory`. Raise Unavailable if they do not share a host."""

    backend = "shm"

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        super().__init__(group, torch.device("cpu"), timeout)
        self._abort = torch.frombuffer(self.control.local.abort, dtype=torch.int32, count=1)
        self._words: dict[tuple[SymmetricBuffer, int, int], tuple[NDArray[np.int32], NDArray[np.uint64]]] = {}

    @property
    def abort(self) -> Tensor:
        return self._abort

    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer:
        self._meet(f"buffer {key!r} {dtype} {tuple(shape)}", f"buffer {key}")
        size = max(1, shape.numel() * dtype.itemsize)
        op, mapping = f"buffer {key}", None
        try:
            with agreement(op, self, alike=Unavailable, by_rank=True):
                _check_available(key, size, self.world)
                mapping = Mapping(key, size)
            assert mapping is not None
            locations, mappings = exchange((self.control.pids[self.rank], mapping.descriptor), self, op=op), []
            with agreement(op, self, alike=Unavailable, by_rank=True):
                try:
                    for rank, (pid, descriptor) in enumerate(locations):
                        mappings.append(mapping if rank == self.rank else Mapping(key, size, (pid, descriptor)))
                except Unavailable:
                    # That rank had reported success and was killed before this rank opened its memory: the kernel
                    # closes a process's files before it ends the process.
                    if self.control.has_ended(rank, within=1.0):
                        raise self.control.fail(op, rank, 0.0) from None
                    raise
        finally:
            if mapping is not None:
                mapping.close_descriptor()
        peers = [torch.frombuffer(x.memory, dtype=torch.uint8, count=size) for x in mappings]
        views = [peer[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for peer in peers]
        return SymmetricBuffer(key, views, self.rank, torch.tensor([x.data_ptr() for x in peers]))

    def _release(self, buffer: SymmetricBuffer) -> None:
        self._words = {key: word for key, word in self._words.items() if key[0] is not buffer}

    def _word(self, flags: SymmetricBuffer, owner: int, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        word = self._words.get((flags, owner, index))
        if word is None:
            flags.check_signal(owner, index)
            view = flags.peers[owner].numpy()[index : index + 1]
            word = self._words[flags, owner, index] = view, np.array([view.ctypes.data], np.uint64)
        return word

    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        if trace.is_observed():
            trace.signal(self._flow(flags, owner, index, int(value)))
        store_release(self._word(flags, owner, index)[1], np.array([wrapped(int(value))], np.int32))

    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        view, address = self._word(flags, owner, index)
        peer = owner if peer is None else peer
        if self.control.aborted or wrapped(int(view[0]) - value) < 0:
            flow = self._flow(flags, owner, index, value)
            with trace.span("wait", op, peer=self.control.ranks[peer], flow=flow):
                self._wait(view, address, value, peer, op)
        elif trace.is_observed():  # the signal has come before the wait
            with trace.span("wait", op, "", self.control.ranks[peer], self._flow(flags, owner, index, value)):
                pass
        load_acquire(address, _ZERO)
        self.control.compare_with(peer)

    def _flow(self, flags: SymmetricBuffer, owner: int, index: int, value: int) -> str:
        """Return the text that a signal shares with the waits for it; empty if nobody observes them."""
        if not trace.is_observed():
            return ""
        return f"{self.control.ranks}: {flags.key} {owner} {index} = {value}"

    def _wait(self, view: NDArray[np.int32], address: NDArray[np.uint64], value: int, peer: int, op: str) -> None:
        backoff = Backoff()
        while True:
            aborted, seen = self.control.aborted, int(view[0])
            if not aborted and wrapped(seen - value) >= 0:
                return
            late = False
            if not aborted and backoff.rest(address, seen):
                self.control.compare()  # A rank in another operation may never signal.
                self.control.note_wait(peer)
                late = backoff.waited > self.timeout or self.control.has_left(peer)
            # The peer may have written the word before it left, so the word is read after the check that it has left.
            if aborted or (late and wrapped(int(view[0]) - value) < 0):
                raise self.control.fail(op, peer, backoff.waited)


def _check_available(key: str, size: int, world: int) -> None:
    """Raise Unavailable if the machine has too little memory: the kernel would kill a process and refuse nothing."""
    if size * world < _LARGE:
        return
    available = available_memory()
    if available is not None and size * world > available:
        raise Unavailable(
            f"symmetric buffer {key!r} takes {size} bytes on each of {world} ranks; this machine has {available} left"
        )


class LocalMemory(SymmetricMemory):
    """The symmetric memory of one rank alone: the same code runs, and no wait blocks."""

    backend = "local"

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 1, device, settings().timeout)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def abort(self) -> Tensor:
        return self._abort

    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer:
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        return SymmetricBuffer(key, [tensor], 0, torch.tensor([tensor.data_ptr()], device=self.device))

    def _release(self, buffer: SymmetricBuffer) -> None:
        pass

    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        flags.check_signal(owner, index)
        flags.peers[owner][index] = value if isinstance(value, Tensor) else wrapped(value)

    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        flags.check_signal(owner, index)
        assert wrapped(int(flags.peers[owner][index]) - value) >= 0, f"{op}: one rank waits for itself"

    def barrier(self, op: str = "barrier") -> None:
        pass

    def guard(self, op: str, *, kernel: bool = False, peer: int | None = None) -> contextlib.nullcontext[None]:
        return _NOTHING

    def reset(self) -> None:
        self.generation += 1
        self.clear_signals()


_NOTHING = contextlib.nullcontext()
