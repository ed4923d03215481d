"""Symmetric memory: tensors that every rank of a group can address, and signals that order the writes to them.

One interface has four backends: `cuda` (peer access over NVLink or PCIe), `shm` (shared by the CPU ranks of a host),
`local` (one rank alone) and `simulated` (`tpfuse.explore`: all ranks in one process, every access checked).

Kernels take `buffer.local`, `buffer.addresses` and the like as plain tensors, and signal by `tpfuse.kernels.signals`.

Signals are int32 words that only grow: an epoch says "what belongs to epoch e is here". They are compared by their
difference, so that they may wrap around. Every wait ends: with the signal, or with PeerTimeout on every rank that
still runs, after `timeout` seconds or as soon as the peer's process has ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tpfuse.kernels.signals import wrapped as wrapped

_Channel = TypeVar("_Channel")


class SymmetricBuffer:
    """A tensor on each rank, all of the same shape and dtype. Every rank can read and write each of them.

    key: the buffer's name in its memory. peers: the tensors of all ranks, which are zero at first; local: this rank's;
    addresses: of all of them for this rank's kernels, int64 [world] on the memory's device. After
    `SymmetricMemory.free` these three raise ValueError.
    """

    def __init__(self, key: str, peers: Sequence[Tensor], rank: int, addresses: Tensor) -> None:
        self.key, self.shape, self.dtype = key, peers[rank].shape, peers[rank].dtype
        self.local, self.peers, self.addresses = peers[rank], peers, addresses

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("local", "peers", "addresses"):  # `forget` has deleted them
            raise ValueError(f"symmetric buffer {self.key!r} was freed")
        raise AttributeError(name)

    def check_signal(self, owner: int, index: int) -> None:
        """Raise ValueError unless these are signals, and rank `owner` has a word `index`. Backends call this."""
        if (self.dtype, len(self.shape)) != (torch.int32, 1):
            made = f"{self.dtype} {tuple(self.shape)}"
            raise ValueError(f"signal in {self.key!r}, which is {made}: expected a buffer that `signals` has made")
        words, world = self.shape.numel(), len(self.peers)
        if not (0 <= owner < world and 0 <= index < words):
            raise ValueError(
                f"signal {index} of rank {owner} in {self.key!r}: there are {words} on each of {world} ranks"
            )

    def forget(self) -> None:
        """Drop the tensors. Backends call this."""
        del self.local, self.peers, self.addresses


class SymmetricMemory(ABC):
    """The symmetric memory of one group of ranks, as one of them sees it.

    rank, world: this rank's number in the group and the group's size; device: the device of the tensors; timeout: the
    seconds that a wait may take; step: the caller's step, for messages; generation: the number of resets. All methods
    but `signal`, `wait_signal`, `guard` and `check` are collective: every rank calls them in one order. Only one thread
    at a time may use a memory.
    """

    backend: str
    # The most programs of a launch that waits, if ranks share a device; None: no limit.
    resident_programs: int | None = None
    # `beside` runs work on a second stream if this is true.
    has_second_stream = False

    def __init__(self, rank: int, world: int, device: torch.device, timeout: float) -> None:
        self.rank, self.world, self.device, self.timeout = rank, world, device, timeout
        self.step, self.generation = -1, 0
        self.global_rank = rank  # the rank's number in the world, if the backend knows it
        self._buffers: dict[str, SymmetricBuffer] = {}
        self._signals: set[str] = set()
        self._channels: dict[tuple[str, int], Any] = {}
        # The buffers of each channel, and the channels that were requested outside of a trial.
        self._buffers_of: dict[tuple[str, int], list[str]] = {}
        self._used: set[tuple[str, int]] = set()
        self._trying = False

    @torch.inference_mode(False)  # The buffers are kept, also for calls that need gradients.
    def buffer(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricBuffer:
        """Return the buffer `key`; the first call allocates it and fills it with zeros.

        Raise ValueError if it exists with another shape or dtype, Disagreement if ranks request different buffers, and
        Unavailable if there is not enough memory.
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
        """Return the buffer `key` of `count` int32 words on each rank, for `signal`. `reset` sets them to 0."""
        buffer = self.buffer(key, (count,), torch.int32)
        self._signals.add(key)
        return buffer

    def channel(self, make: Callable[["SymmetricMemory", str, int], _Channel], name: str, nbytes: int) -> _Channel:
        """Return the channel `name` with slots of `nbytes`. The first call opens it and is collective.

        make: opens the channel; it is called with the memory, the name of the channel's buffers and nbytes, and must be
        the same in each call for one name. The memory keeps the channel.
        """
        key = name, nbytes
        if not self._trying:
            self._used.add(key)
        channel = self._channels.get(key)
        if channel is None:
            before = set(self._buffers)
            try:
                channel = self._channels[key] = make(self, f"{name}, {nbytes} bytes", nbytes)
            finally:  # A channel that cannot be opened may have allocated some of its buffers.
                self._buffers_of.setdefault(key, []).extend(each for each in self._buffers if each not in before)
        return channel

    @property
    def has_channels(self) -> bool:
        """Return whether `channel` has opened one."""
        return bool(self._channels)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Return a context in which operations are only tried: a channel that they request is not used by that."""
        self._trying = True
        try:
            yield
        finally:
            self._trying = False

    def close_unused_channels(self) -> None:
        """Free the buffers of the channels that were only requested in trials."""
        for key in [key for key in self._buffers_of if key not in self._used]:
            self._channels.pop(key, None)
            for buffer in self._buffers_of.pop(key):
                self.free(buffer)

    def free(self, key: str) -> None:
        """Free the buffer after every rank has called this. Raise ValueError if there is no buffer of this name."""
        if key not in self._buffers:
            raise ValueError(f"there is no symmetric buffer {key!r}")
        self.barrier(f"free {key}")
        self._signals.discard(key)
        buffer = self._buffers.pop(key)
        self._release(buffer)
        buffer.forget()

    def clear_signals(self) -> None:
        """Set this rank's signals to 0. Backends call this in a reset."""
        for key in self._signals & self._buffers.keys():
            self._buffers[key].local.zero_()

    @property
    @abstractmethod
    def abort(self) -> Tensor:
        """The abort word, int32 [1] on the device: it is not 0 if this rank must stop waiting. Kernels poll it."""

    @abstractmethod
    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer: ...

    @abstractmethod
    def _release(self, buffer: SymmetricBuffer) -> None: ...

    @abstractmethod
    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        """Set word `index` of `owner`'s signals to `value`, after everything that this rank has written (release).

        value: an int, or a tensor, int32 [1] on the device, which is read when the current stream comes to this call.
        """

    @abstractmethod
    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        """Wait until word `index` of `owner`'s signals is at least `value`.

        Everything that was written before the signal is then visible (acquire). peer: the rank that sets the word
        (default: `owner`). Raise PeerTimeout.
        """

    @abstractmethod
    def barrier(self, op: str = "barrier") -> None:
        """Wait until every rank has called this. Raise PeerTimeout."""

    @abstractmethod
    def guard(self, op: str, *, kernel: bool = False, peer: int | None = None) -> AbstractContextManager[None]:
        """Return a context for one operation: it records the operation, and raises PeerTimeout at its end if aborted.

        op: name, shapes and dtypes, the same on every rank: if they differ, Disagreement is raised on every rank before
        it reads anything that another operation has written. kernel: whether the operation waits in a kernel, which
        needs a watchdog. peer: the only other rank that takes part, as in a message; such an operation is not compared
        with those of other ranks, which need not do the same, and a time-out names the peer. Raise RuntimeError if
        another thread is inside a guard of this memory.
        """

    def beside(self, work: Callable[[], None]) -> object | None:
        """Run `work` on a second stream, after everything that is on the current one; return its end, for `join`.

        Return None, and do not call `work`, if there is no second stream: on CPUs, where ranks share a GPU, and while a
        graph is captured. The second streams of all memories of a process are one, so that works run one after another.
        Memory that `work` uses must be kept until the current stream has joined.
        """
        return None

    def join(self, end: object) -> None:
        """Make what follows on the current stream wait for the end of a work that ran beside it."""
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027 - most backends have nothing left to raise
        """Raise the errors that are still pending. Call it at the end of each step.

        It raises PeerTimeout if an operation on a stream was aborted, and Disagreement if one of the last operations
        was another one, or had another shape, on another rank.
        """

    @abstractmethod
    def reset(self) -> None:
        """Set all signals and abort words to 0. Call it on every rank after PeerTimeout or after a rank's own error.

        The waits of ranks that are still in an operation end with PeerTimeout. Raise PeerTimeout if a rank does not
        call this.
        """
