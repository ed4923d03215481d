"""Symmetric memory of ranks that run one at a time in one process, in which every access and every wait is checked."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from tpfuse.comm.errors import Disagreement, PeerTimeout
from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory, wrapped
from tpfuse.explore.memory import HOST_SIGNAL, Semantics
from tpfuse.explore.run import ExploredRun
from tpfuse.explore.shadow import Region
from tpfuse.explore.streams import Stream, StreamEvent, current_stream, here, on_stream, stream


class SimulatedMemory(SymmetricMemory):
    """The symmetric memory of one rank of an explored program.

    The host's `signal` and `wait_signal` order everything that the signalling rank has done before; `barrier` orders
    everything that all ranks have done before. A wait ends by itself only under `explore(..., timeouts=True)` and only
    if no rank can continue: then every rank's abort word is set, kernels return, and `wait_signal`, `barrier` and
    `guard` raise PeerTimeout, until all ranks call `reset`.

    `signal`, `wait_signal` and `exchange` belong to the current stream of `tpfuse.explore.streams`. A program may set
    `has_second_stream`: then work that runs `beside` is on another one.
    """

    backend = "simulated"

    def __init__(self, run: ExploredRun, rank: int) -> None:
        super().__init__(rank, run.world, torch.device("cpu"), 60.0)
        self._run = run
        self._made: dict[str, int] = {}
        self._regions: dict[str, list[Region]] = {}
        self._second: Stream | None = None

    @property
    def abort(self) -> Tensor:
        return self._run.aborts[self.rank].tensor

    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer:
        here().check_wait(f"buffer {key!r}")
        generation = self._made[key] = self._made.get(key, 0) + 1
        parts = self._run.parts.get((key, generation))
        if parts is None:
            parts = [Region(key, rank, shape, dtype, generation=generation) for rank in range(self.world)]
            self._run.parts[key, generation] = parts
            self._run.memory.regions += parts
        elif (parts[0].shape, parts[0].dtype) != (shape, dtype):
            raise Disagreement(
                f"symmetric buffer {key!r}: rank {self.rank} asks for {dtype} {tuple(shape)}, "
                f"another rank for {parts[0].dtype} {tuple(parts[0].shape)}"
            )
        self._regions[key] = parts
        self._meet(f"buffer {key!r}", joins=False)
        addresses = torch.tensor([part.base for part in parts], dtype=torch.int64)
        self._run.tables.append(addresses)
        return SymmetricBuffer(key, [part.tensor for part in parts], self.rank, addresses)

    def _release(self, buffer: SymmetricBuffer) -> None:
        self._regions.pop(buffer.key)[self.rank].freed = True  # the memory stays, so that later accesses are reported

    @on_stream
    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        new = int(value.clone().numpy()[0]) if isinstance(value, Tensor) else value  # the host does not wait for it
        self._run.memory.host_word("signal", self._word(flags, owner, index), index, HOST_SIGNAL, lambda old: new)

    @on_stream
    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        region, peer = self._word(flags, owner, index), owner if peer is None else peer

        def ends(word: int) -> bool:
            return wrapped(word - value) >= 0

        done = lambda: ends(self._run.memory.host_word("wait_signal", region, index, ends=ends))  # noqa: E731
        self._repeat(done, op, peer)

    @on_stream
    def exchange(
        self,
        flags: SymmetricBuffer,
        owner: int,
        index: int,
        expected: int,
        value: int,
        *,
        releases: bool,
        peer: int,
        op: str,
    ) -> None:
        """Wait until a word is `expected`, and set it to `value` in the same step, as torch's signals do.

        releases: whether this is a release, and not an acquire. Raise PeerTimeout as `wait_signal` does.
        """
        region = self._word(flags, owner, index)
        semantics = Semantics(acquires=not releases, releases=releases, scope=2, host=True)
        change = lambda old: value if old == expected else None  # noqa: E731

        def ends(word: int) -> bool:
            return word == expected

        done = lambda: ends(self._run.memory.host_word(op, region, index, semantics, change, ends))  # noqa: E731
        self._repeat(done, op, peer)

    @on_stream
    def write_word(self, words: Tensor, index: int, value: int) -> None:
        """Set a word of a tensor in symmetric memory, as `signal` does. Raise ValueError for another tensor."""
        address = words.data_ptr() + 4 * index
        parts = [x for x in self._run.memory.regions if x.base <= address < x.end and x.words.size]
        if not parts:
            raise ValueError(f"word {index} of a tensor: the explorer writes words of 32 bits in symmetric memory only")
        self._run.memory.host_word("write", parts[0], (address - parts[0].base) // 4, HOST_SIGNAL, lambda old: value)

    def _repeat(self, done: Callable[[], bool], op: str, peer: int) -> None:
        while not done():
            if self._run.aborted(self.rank):
                raise self._timeout(op, peer)
            self._run.scheduler.went_round(self._run.scheduler.current)

    def _word(self, flags: SymmetricBuffer, owner: int, index: int) -> Region:
        flags.check_signal(owner, index)
        return self._regions[flags.key][owner]

    def barrier(self, op: str = "barrier") -> None:
        self._check_abort(op)
        self._meet(op, joins=True)

    @on_stream
    def stream_barrier(self, op: str) -> None:
        """Wait on the current stream until the same call on every rank, as `TorchHandle.barrier` does."""
        self._check_abort(op)
        self._arrive(op, joins=True)

    def _meet(self, what: str, *, joins: bool) -> None:
        if joins:
            here().host_waits(what)
        self._arrive(what, joins=joins)
        if joins:
            here().host_waits(what, current_stream())

    def _arrive(self, what: str, *, joins: bool) -> None:
        missing = self._run.meet(what if what == "barrier" else f"barrier {what!r}", joins=joins)
        if missing is not None:
            raise self._timeout(what, missing)

    def _timeout(self, op: str, peer: int | None) -> PeerTimeout:
        return PeerTimeout(op, step=self.step, rank=self.rank, peer=peer, waited=self.timeout, detail="simulated")

    @contextlib.contextmanager
    def guard(self, op: str, *, kernel: bool = False, peer: int | None = None) -> Iterator[None]:
        self._check_abort(op)
        yield
        self._check_abort(op)

    def end_round(self, yielded: Any) -> None:
        """Come to the end of a round of a program that yields there; see `explore_all`."""
        epochs, rest = yielded if isinstance(yielded, tuple) else (yielded or 0, None)
        self._run.end_round(epochs if isinstance(epochs, tuple) else (epochs,), rest, here().chains())

    def beside(self, work: Callable[[], None]) -> object | None:
        if not self.has_second_stream or current_stream().graph is not None:
            return None
        self._second = self._second or Stream()
        self._second.wait_stream(current_stream())
        with stream(self._second):
            work()
        return self._second.record_event()

    def join(self, end: object) -> None:
        current_stream().wait_event(cast(StreamEvent, end))

    def _check_abort(self, op: str) -> None:
        if self._run.aborted(self.rank):
            raise self._timeout(op, None)

    def reset(self) -> None:
        self._meet("reset", joins=True)
        for key in self._signals & self._buffers.keys():
            # No rank accesses them now: the barriers before and after are those of all ranks.
            self._regions[key][self.rank].words[:] = 0
        self._run.end_abort(self.rank)
        self.generation += 1
        self._meet("reset", joins=True)
