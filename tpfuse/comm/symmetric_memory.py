"""Symmetric memory: tensors that every rank of a group can address, and signals that order what is written to them.

One interface, four backends: `cuda` (peer access over NVLink or PCIe), `shm` (shared by the CPU ranks of a host),
`local` (one rank alone) and `simulated` (`tpfuse.testing.explore`: all ranks in one process, every access checked).

    memory = connect(group, device)
    buffer = memory.buffer("halo", (1024,), torch.float32)    # the same on every rank; collective when first asked for
    flags = memory.signals("halo flags", 1)
    buffer.local.copy_(x)
    memory.signal(flags, memory.rank, 0, 1)                   # "my part is written", after everything before it
    memory.wait_signal(flags, right, 0, 1, op="halo")         # until the right neighbour has said so
    y = buffer.peers[right].clone()

Kernels take `buffer.local`, `buffer.addresses` and the like as plain tensors, and signal by `tpfuse.kernels.signals`.

Signals are int32 words that only grow: an epoch says "what belongs to epoch e is here". They are compared by their
difference, so that they may wrap around. Every wait ends: with the signal, or with PeerTimeout on every rank that is
still there, after `timeout` seconds or as soon as the peer's process has ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tpfuse.kernels.signals import wrapped as wrapped


class SymmetricBuffer:
    """One tensor per rank, of the same shape and dtype, each of which every rank can read and write.

    key: its name in its memory. Zero at first. After `SymmetricMemory.free` every attribute raises ValueError.
    """

    def __init__(self, key: str, peers: Sequence[Tensor], rank: int, addresses: Tensor) -> None:
        self.key, self.shape, self.dtype = key, peers[rank].shape, peers[rank].dtype
        self._rank = rank
        self._tensors: tuple[Sequence[Tensor], Tensor] | None = (peers, addresses)

    def _alive(self) -> tuple[Sequence[Tensor], Tensor]:
        if self._tensors is None:
            raise ValueError(f"symmetric buffer {self.key!r} was freed")
        return self._tensors

    @property
    def local(self) -> Tensor:
        """This rank's tensor."""
        return self._alive()[0][self._rank]

    @property
    def peers(self) -> Sequence[Tensor]:
        """Every rank's tensor, in rank order; peers[rank] is `local`."""
        return self._alive()[0]

    @property
    def addresses(self) -> Tensor:
        """int64 [world] on the memory's device: where each rank's tensor begins, as this rank's kernels see it."""
        return self._alive()[1]

    def check_signal(self, owner: int, index: int) -> None:
        """Raises ValueError unless there is a word `index` of rank `owner`; for backends."""
        words, world = self.shape.numel(), len(self.peers)
        if not (0 <= owner < world and 0 <= index < words):
            raise ValueError(
                f"signal {index} of rank {owner} in {self.key!r}: there are {words} on each of {world} ranks"
            )

    def forget(self) -> None:
        """Drops the tensors; for backends."""
        self._tensors = None


class SymmetricMemory(ABC):
    """The symmetric memory of one group of ranks, as one of them sees it.

    rank, world: of the group; device: where the tensors are; timeout: seconds that a wait may take; step: the caller's
    step, for messages; generation: how often it was reset. All methods but `signal`, `wait_signal`, `guard` and
    `check` are collective: every rank calls them in one order. One thread at a time may use a memory.
    """

    backend: str
    resident_programs: int | None = None  # the most of a launch that waits, where ranks share a device; None: no limit

    def __init__(self, rank: int, world: int, device: torch.device, timeout: float) -> None:
        self.rank, self.world, self.device, self.timeout = rank, world, device, timeout
        self.step, self.generation = -1, 0
        self.global_rank = rank  # its number in the world, where a backend knows it
        self._buffers: dict[str, SymmetricBuffer] = {}
        self._signals: set[str] = set()

    @torch.inference_mode(False)  # what is kept serves calls that need gradients too
    def buffer(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricBuffer:
        """The buffer `key`, made and zeroed when it is first asked for.

        Raises ValueError where it was made with another shape or dtype, Disagreement where ranks ask for different
        ones, Unavailable where there is not enough memory.
        """
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._allocate(key, torch.Size(shape), dtype)
        elif (buffer.shape, buffer.dtype) != (torch.Size(shape), dtype):
            raise ValueError(
                f"symmetric buffer {key!r} is {buffer.dtype} {tuple(buffer.shape)},"
                f" not {dtype} {tuple(shape)}: free it first"
            )
        return buffer

    def signals(self, key: str, count: int) -> SymmetricBuffer:
        """`count` int32 words on every rank for `signal` and `wait_signal`; `reset` makes them 0 again."""
        buffer = self.buffer(key, (count,), torch.int32)
        self._signals.add(key)
        return buffer

    def free(self, key: str) -> None:
        """Gives the buffer back once every rank is here. Raises ValueError where there is none of this name."""
        if key not in self._buffers:
            raise ValueError(f"there is no symmetric buffer {key!r}")
        self.barrier(f"free {key}")
        self._signals.discard(key)
        buffer = self._buffers.pop(key)
        self._release(buffer)
        buffer.forget()

    @property
    @abstractmethod
    def abort(self) -> Tensor:
        """int32 [1] on the device: not 0 when this rank must stop waiting. Kernels poll it."""

    @abstractmethod
    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer: ...

    @abstractmethod
    def _release(self, buffer: SymmetricBuffer) -> None: ...

    @abstractmethod
    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        """Sets word `index` of `owner`'s signals to `value`, after everything that this rank has written (release).

        A tensor, int32 [1] on the device, is read where the current stream comes to it.
        """

    @abstractmethod
    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        """Until word `index` of `owner`'s signals is at least `value`; what was written before it is seen (acquire).

        peer: who is to set it (default: `owner`). Raises PeerTimeout.
        """

    @abstractmethod
    def barrier(self, op: str = "barrier") -> None:
        """Until every rank has come here. Raises PeerTimeout."""

    @abstractmethod
    def guard(self, op: str, *, kernel: bool = False) -> AbstractContextManager[None]:
        """Around an operation: it is recorded, and PeerTimeout is raised at its end if it was aborted.

        op: name, shapes and dtypes, the same on every rank: Disagreement is raised on every rank where they are not,
        before anything is read that another operation has written. kernel: it waits in a kernel, which needs a
        watchdog. Raises RuntimeError where another thread is inside.
        """

    def check(self) -> None:  # noqa: B027 - most backends have nothing left to raise
        """At the end of each step. Raises PeerTimeout where an operation that is done on a stream has met it, and
        Disagreement where one of the last operations was another one, or of another shape, on another rank.
        """

    @abstractmethod
    def reset(self) -> None:
        """After PeerTimeout, or a rank's own error, on every rank: all signals and aborts are 0 again.

        The waits of ranks that are still in an operation end with PeerTimeout. Raises PeerTimeout where a rank does not
        come.
        """
