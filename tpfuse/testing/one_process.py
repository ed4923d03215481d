"""All ranks of a group in one process and on one device, whose kernels run side by side.

    ranks = OneProcess(4, torch.device("cuda", 0))
    with ranks.aborted():
        ranks.in_turn(program)  # nothing waits, and nothing is done: kernels are compiled and loaded, buffers made
    ranks.at_once(program)      # program(memory) on every rank

On a GPU each rank has a thread and a stream of its own; processes that share a GPU take turns instead. Buffers are
plain tensors, and launches that wait for peers have so few programs that the grids of all ranks fit on the device.

Streams share queues of the device, in which what is behind a waiting kernel waits with it; and code is loaded when it
is first launched, for which CUDA may wait until the device is idle. `ENVIRONMENT`, set before the process begins to use
CUDA, gives each stream a queue and loads torch's code at the start; Triton's is loaded under `aborted`.

`signal_ahead` makes one rank's launches wait for nobody: it can be looked at alone, by a profiler or on a CPU. What the
other ranks would have sent is then missing in its results.
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
_FROM_PEERS = ("flags", "ready, stamp")  # of a channel's signals: those that other ranks give
_FREE = 4  # multiprocessors for what is launched beside the grids that wait: copies, sums, delays
_LARGE, _SMALL = 2**31, [2**19] * 32  # bytes that a rank finds ready: one block, and pieces of the pool of small ones
_GRACE = 10.0  # seconds that ranks have to end in once they are told to


class OneProcess:
    """The ranks.

    timeout: seconds for one call of `at_once`, and for a rank of `in_turn` or `alone`, after which every wait ends.
    shared: whether kernels of all ranks are to run side by side; else those of one rank may fill the device.
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
            for rank in range(world):
                self._reserve(rank)
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.resident_programs = max((processors - _FREE) // world, 2)
        self.memories = [OneProcessMemory(self, rank) for rank in range(world)]

    def at_once(self, program: Callable[["OneProcessMemory"], Result]) -> list[Result]:
        """program(memory) in a thread for each rank; what each has returned.

        On a CPU programs must launch no kernels: Triton's interpreter serves one thread. Raises what the first rank has
        raised, PeerTimeout where they did not end in time.
        """
        found: dict[int, Result] = {}
        failures: dict[int, BaseException] = {}

        def live(rank: int) -> None:
            try:
                with self._on_stream(rank):
                    found[rank] = program(self.memories[rank])
            except BaseException as error:
                error.add_note(f"rank {rank} of {self.world}")
                failures[rank] = error
                self.abort()  # nobody waits for this rank

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(self.world)]
        with self._deadline():
            for thread in threads:
                thread.start()
            end = monotonic() + self.timeout + _GRACE
            for thread in threads:
                thread.join(max(end - monotonic(), 0.0))
        left = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if left:
            raise self._timeout(f"ranks {left} of {self.world} did not end when they were told to", left[0])
        own = [error for error in failures.values() if not isinstance(error, PeerTimeout)]
        for error in [*own, *failures.values()]:
            raise error
        if self.late:
            raise self._timeout("ranks at once", 0)
        return [found[rank] for rank in range(self.world)]

    def in_turn(self, program: Callable[["OneProcessMemory"], Result]) -> list[Result]:
        """program(memory) of one rank after another, in this thread; their waits must be satisfied or aborted."""
        return [self.alone(rank, program) for rank in range(self.world)]

    def alone(self, rank: int, program: Callable[["OneProcessMemory"], Result]) -> Result:
        """program(memory) of one rank, in this thread. Raises PeerTimeout where a wait of its did not end in time."""
        with self._deadline(), self._on_stream(rank):
            found = program(self.memories[rank])
        if self.late:
            raise self._timeout("alone", rank)
        return found

    @contextlib.contextmanager
    def aborted(self) -> Iterator[None]:
        """All abort words are set: launches do nothing, and `guard` does not mind."""
        self._set_aborts(1)
        try:
            yield
        finally:
            self._set_aborts(0)

    def reset(self) -> None:
        """All signals and aborts are 0 again; no rank may be inside anything."""
        for memory in self.memories:
            memory.clear()
        self._set_aborts(0)
        self._meeting.reset()
        self.late = False

    def signal_ahead(self, rank: int, launches: int = 1000) -> None:
        """Sets what peers signal to a rank in every channel that it has, for its next `launches` launches.

        In stream order.
        """
        for key, parts in self._parts.items():
            name, _, kind = key.rpartition(": ")
            if kind in _FROM_PEERS:
                state = self._parts[f"{name}: state"][rank]
                parts[rank].copy_((state[:1] + launches).expand_as(parts[rank]))

    def abort(self) -> None:
        """Ends every wait: of kernels, and of threads for each other."""
        self.late = True
        for alarm in self._alarms:
            alarm()
        if not self._alarms:
            self._set_aborts(1)
        self._meeting.abort()

    def meet(self, op: str, rank: int) -> None:
        """Until all ranks have come here."""
        try:
            self._meeting.wait()
        except threading.BrokenBarrierError:
            raise self._timeout(op, rank) from None

    def parts(self, key: str, shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
        """A buffer's part of each rank, made and zeroed by the rank that comes first."""
        with self._lock:
            if key not in self._parts:
                self._parts[key] = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.world)]
                self.synchronize()
            return self._parts[key]

    def forget(self, key: str) -> None:
        """Drops a buffer."""
        del self._parts[key]

    def synchronize(self) -> None:
        """Until the current stream is through."""
        if self.calls:
            torch.cuda.current_stream(self.device).synchronize()

    def _reserve(self, rank: int) -> None:
        """Memory that torch gives to a rank's stream later: CUDA may wait for kernels before it gives torch more."""
        with self._on_stream(rank):
            kept = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in (_LARGE, *_SMALL)]
            del kept

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
    """One rank's view; see `SymmetricMemory`. `guard` raises PeerTimeout once the ranks were told to end."""

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
            raise ValueError(f"symmetric buffer {key!r}: another rank has {parts[0].dtype} {tuple(parts[0].shape)}")
        addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=self.device)
        return SymmetricBuffer(key, parts, self.rank, addresses)

    def _release(self, buffer: SymmetricBuffer) -> None:
        self._ranks.meet(f"free {buffer.key}", self.rank)
        if self.rank == 0:
            self._ranks.forget(buffer.key)
        self._ranks.meet(f"free {buffer.key}", self.rank)

    def put(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        """On a GPU in stream order. value: also an int32 word [1] of the device."""
        flags.check_signal(owner, index)
        if isinstance(value, Tensor):
            flags.peers[owner][index : index + 1].copy_(value, non_blocking=True)
        elif self._ranks.calls:
            self._ranks.calls.set_word(flags.peers[owner], index, value)
        else:
            flags.peers[owner][index] = wrapped(value)

    def wait(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        """On a GPU in stream order. Ends early where the rank's abort word is set."""
        flags.check_signal(owner, index)
        word = flags.peers[owner][index : index + 1]
        if self._ranks.calls:
            self._ranks.calls.wait_for_word(word, value, self.abort)
            return
        while wrapped(int(word) - value) < 0 and not int(self.abort):
            sleep(1e-4)
        self._check(op)

    def barrier(self, op: str = "barrier") -> None:
        """Until every rank has come here, and its stream is through."""
        self._ranks.synchronize()
        self._check(op)
        self._ranks.meet(op, self.rank)

    @contextlib.contextmanager
    def guard(self, op: str, *, kernel: bool = False) -> Iterator[None]:
        self._check(op)
        yield
        self._check(op)

    def _check(self, op: str) -> None:
        if self._ranks.late:
            raise PeerTimeout(op, step=self.step, rank=self.rank, peer=None, waited=self.timeout, detail="ended")

    def clear(self) -> None:
        """This rank's signals are 0 again."""
        for key in self._signals & self._buffers.keys():
            self._buffers[key].local.zero_()
        self._ranks.synchronize()
        self.generation += 1

    def reset(self) -> None:
        """Raises PeerTimeout once the ranks were told to end: `OneProcess.reset` is for that."""
        self.barrier("reset")
        self.clear()
        self.barrier("reset")


def set_epochs(memory: SymmetricMemory, epoch: int) -> None:
    """The next launch of every channel that the rank has made is of `epoch` + 1, which may wrap around as an int32.

    All ranks do it, between two barriers.
    """
    for key, buffer in memory._buffers.items():
        if key.endswith(": state"):
            buffer.local[0] = wrapped(epoch)
