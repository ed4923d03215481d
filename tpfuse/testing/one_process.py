"""Run all ranks of a group in one process and on one device, where their kernels run side by side.

    ranks = OneProcess(4, torch.device("cuda", 0))
    with ranks.aborted():
        ranks.in_turn(program)  # no kernel waits or does anything: kernels are compiled and loaded, buffers are made
    ranks.at_once(program)      # program(memory) on every rank

On a GPU each rank has a thread and a stream of its own; processes that share a GPU would be time-sliced. Buffers
are plain tensors, and launches that wait for peers have so few programs that the grids of all ranks fit on the device
at the same time.

Two properties of CUDA could make ranks wait for ever. Work that follows a waiting kernel in a queue that streams share
waits with it. And CUDA may wait until the device is idle before it loads code, at its first launch. `ENVIRONMENT` must
be set before the process begins to use CUDA: it gives each stream its own queue and loads torch's code at the start.
Triton's code is loaded under `aborted`. Each thread makes its handle of cuBLAS before any program begins.

`signal_ahead` makes one rank's launches wait for no peer, so that this rank can be run alone, by a profiler or on a
CPU. Its results then lack what the other ranks would have sent.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import TypeVar

import torch
from torch import Tensor

from tpfuse.comm.cuda_calls import CudaCalls
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory, wrapped

Result = TypeVar("Result")

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
_FROM_PEERS = ("flags", "ready, stamp", "ready, stamp, stored")  # the signals of a channel that other ranks set
_FREE = 4  # multiprocessors for kernels that run beside the grids that wait: copies, sums, delays
# Bytes reserved for a rank: one large allocation, and many from torch's small pool.
_LARGE, _SMALL = 2**31, [2**19] * 32
_GRACE = 10.0  # seconds in which ranks must end once their waits were ended


class OneProcess:
    """The `world` ranks of a group, in this process and on `device`.

    timeout: seconds for one call of `at_once`, and for each rank of `in_turn` and `alone`, after which every wait ends.
    shared: whether the kernels of all ranks run side by side; otherwise those of one rank may fill the device.
    """

    def __init__(self, world: int, device: torch.device, timeout: float = 60.0, *, shared: bool = True) -> None:
        self.world, self.device, self.timeout = world, device, timeout
        self.late = False
        self.calls = CudaCalls(device) if device.type == "cuda" else None
        self.aborts = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(world)]
        self._alarms = [self.calls.alarm(word) for word in self.aborts] if self.calls else []
        self._parts: dict[str, list[Tensor]] = {}
        self._lock, self._meeting = threading.Lock(), threading.Barrier(world)
        self._streams = [torch.cuda.Stream(device) for _ in range(world)] if self.calls else []  # type: ignore[no-untyped-call]
        self.resident_programs = None
        if self.calls and shared:
            torch.cuda.empty_cache()
            for rank in range(world):  # memory for its stream later: CUDA may wait for kernels before it gives more
                with self._on_stream(rank):
                    blocks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in (_LARGE, *_SMALL)]
                    del blocks
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.resident_programs = max((processors - _FREE) // world, 2)
        self.memories = [OneProcessMemory(self, rank) for rank in range(world)]

    def at_once(self, program: Callable[["OneProcessMemory"], Result]) -> list[Result]:
        """Run program(memory) for every rank, each in a thread of its own; return the results in rank order.

        On a CPU programs must not launch kernels, since Triton's interpreter serves one thread. Raise the first
        exception of a rank, or PeerTimeout if the ranks did not end in time.
        """
        results: dict[int, Result] = {}
        failures: dict[int, BaseException] = {}

        def live(rank: int) -> None:
            try:
                with self._on_stream(rank):
                    x = torch.ones(16, 16, device=self.device)
                    torch.mm(x, x)  # makes this thread's handle of cuBLAS and its workspace
                    self.synchronize()
                    self.meet("handles", rank)
                    results[rank] = program(self.memories[rank])
            except BaseException as error:
                error.add_note(f"rank {rank} of {self.world}")
                failures[rank] = error
                self.abort()  # so that no other rank waits for this one

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(self.world)]
        with self._deadline():
            for thread in threads:
                thread.start()
            end = monotonic() + self.timeout + _GRACE
            for thread in threads:
                thread.join(max(end - monotonic(), 0.0))
        running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if running:
            raise self._timeout(f"ranks {running} of {self.world} still run after their waits ended", running[0])
        causes = [error for error in failures.values() if not isinstance(error, PeerTimeout)]
        for error in [*causes, *failures.values()]:
            raise error
        if self.late:
            raise self._timeout("ranks at once", 0)
        return [results[rank] for rank in range(self.world)]

    def in_turn(self, program: Callable[["OneProcessMemory"], Result]) -> list[Result]:
        """Run program(memory) for one rank after another in this thread; return the results in rank order.

        Every wait in the program must be satisfied already, or aborted.
        """
        return [self.alone(rank, program) for rank in range(self.world)]

    def alone(self, rank: int, program: Callable[["OneProcessMemory"], Result]) -> Result:
        """Run program(memory) for one rank in this thread; return its result.

        Raise PeerTimeout if one of its waits did not end in time.
        """
        with self._deadline(), self._on_stream(rank):
            result = program(self.memories[rank])
        if self.late:
            raise self._timeout("alone", rank)
        return result

    @contextlib.contextmanager
    def aborted(self) -> Iterator[None]:
        """Set all abort words within the block: launches do nothing, and `guard` does not raise."""
        self._set_aborts(1)
        try:
            yield
        finally:
            self._set_aborts(0)

    def reset(self) -> None:
        """Set all signals and abort words to 0 again. No rank may be inside an operation."""
        for memory in self.memories:
            memory.clear()
        self._set_aborts(0)
        self._meeting.reset()
        self.late = False

    def signal_ahead(self, rank: int) -> None:
        """Set, in stream order, the signals that peers would give a rank for its next 1000 launches on each channel."""
        for key, parts in self._parts.items():
            name, _, kind = key.rpartition(": ")
            if kind in _FROM_PEERS:
                state = self._parts[f"{name}: state"][rank]
                parts[rank].copy_((state[:1] + 1000).expand_as(parts[rank]))

    def abort(self) -> None:
        """End every wait of kernels, and of threads for each other."""
        self.late = True
        for alarm in self._alarms:
            alarm()
        if not self._alarms:
            self._set_aborts(1)
        self._meeting.abort()

    def meet(self, op: str, rank: int) -> None:
        """Wait until all ranks have called it. Raise PeerTimeout once `abort` has been called."""
        try:
            self._meeting.wait()
        except threading.BrokenBarrierError:
            raise self._timeout(op, rank) from None

    def parts(self, key: str, shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
        """Return each rank's part of a buffer. The rank that asks first makes the parts, filled with zeros."""
        with self._lock:
            if key not in self._parts:
                self._parts[key] = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.world)]
                self.synchronize()
            return self._parts[key]

    def forget(self, key: str) -> None:
        """Drop a buffer."""
        del self._parts[key]

    def synchronize(self) -> None:
        """Wait until the current stream has run all its work."""
        if self.calls:
            torch.cuda.current_stream(self.device).synchronize()

    def _timeout(self, op: str, rank: int) -> PeerTimeout:
        return PeerTimeout(op, step=-1, rank=rank, peer=None, waited=self.timeout, detail="in one process")

    def _set_aborts(self, value: int) -> None:
        for word in self.aborts:
            word.fill_(value)
        if self.calls:
            self.calls.synchronize()

    @contextlib.contextmanager
    def _on_stream(self, rank: int) -> Iterator[None]:
        if not self.calls:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[rank]):
            yield
            torch.cuda.current_stream(self.device).synchronize()

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        timer = threading.Timer(self.timeout, self.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class OneProcessMemory(SymmetricMemory):
    """The symmetric memory of one rank of `OneProcess`. `guard` raises PeerTimeout once all waits were ended."""

    backend = "one process"

    def __init__(self, ranks: OneProcess, rank: int) -> None:
        super().__init__(rank, ranks.world, ranks.device, ranks.timeout)
        self._ranks = ranks
        self.resident_programs = ranks.resident_programs

    @property
    def abort(self) -> Tensor:
        return self._ranks.aborts[self.rank]

    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer:
        parts = self._ranks.parts(key, shape, dtype)
        if (parts[0].shape, parts[0].dtype) != (shape, dtype):
            raise ValueError(
                f"symmetric buffer {key!r}: rank {self.rank} asks for {dtype} {tuple(shape)}, "
                f"another rank for {parts[0].dtype} {tuple(parts[0].shape)}"
            )
        addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=self.device)
        return SymmetricBuffer(key, parts, self.rank, addresses)

    def _release(self, buffer: SymmetricBuffer) -> None:
        self._ranks.meet(f"free {buffer.key}", self.rank)
        if self.rank == 0:
            self._ranks.forget(buffer.key)
        self._ranks.meet(f"free {buffer.key}", self.rank)

    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        """See `SymmetricMemory`. On a GPU it is done in stream order, and `value` may be an int32 word [1] there."""
        flags.check_signal(owner, index)
        if isinstance(value, Tensor):
            flags.peers[owner][index : index + 1].copy_(value, non_blocking=True)
        elif self._ranks.calls:
            self._ranks.calls.set_word(flags.addresses, owner, index, value)
        else:
            flags.peers[owner][index] = wrapped(value)

    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        """See `SymmetricMemory`. On a GPU it is done in stream order, and ends early if the abort word is set."""
        flags.check_signal(owner, index)
        word = flags.peers[owner][index : index + 1]
        if self._ranks.calls:
            self._ranks.calls.wait_for_word(word, value, self.abort)
            return
        while wrapped(int(word) - value) < 0 and not int(self.abort):
            sleep(1e-4)
        self._check(op)

    def barrier(self, op: str = "barrier") -> None:
        """Wait until every rank has called it and has run all work on its stream."""
        self._ranks.synchronize()
        self._check(op)
        self._ranks.meet(op, self.rank)

    @contextlib.contextmanager
    def guard(self, op: str, *, kernel: bool = False, peer: int | None = None) -> Iterator[None]:
        self._check(op)
        yield
        self._check(op)

    def _check(self, op: str) -> None:
        if self._ranks.late:
            waited = self._ranks.timeout
            raise PeerTimeout(op, step=self.step, rank=self.rank, peer=None, waited=waited, detail="ended")

    def clear(self) -> None:
        """Set this rank's signals to 0 again."""
        self.clear_signals()
        self._ranks.synchronize()
        self.generation += 1

    def reset(self) -> None:
        """Set the signals of all ranks to 0 again. Raise PeerTimeout once all waits were ended.

        In that case `OneProcess.reset` must be called instead.
        """
        self.barrier("reset")
        self.clear()
        self.barrier("reset")


def set_epochs(memory: SymmetricMemory, epoch: int) -> None:
    """Give the next launch of every channel of this rank the epoch `epoch` + 1, which may wrap around as an int32.

    Every rank must call it, between two barriers.
    """
    for key, buffer in memory._buffers.items():
        if key.endswith(": state"):
            buffer.local[0] = wrapped(epoch)
