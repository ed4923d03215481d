"""A stand-in for CUDA on CPU ranks, with which `CudaMemory` runs on a machine without a GPU.

Faked: streams, each of which is a thread, and their events; device memory, which is shared memory of the host (a tensor
begins inside its allocation, at another offset on each rank, as tensors of torch's memory pools may); the alarm; and
what a rank is told of its GPU. Real: CudaMemory, its guards, deadlines and watchdog, the kernels that set signals,
which Triton interprets, and the ranks. Not covered: the order of memory on a GPU, compiled kernels, and captures by
CUDA (`tests/comm/test_cuda_ranks.py`).
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.cuda_calls import CudaCalls, Event
from tpfuse.comm.rank_state import Mapping
from tpfuse.comm.symmetric_memory import wrapped

_interpreter = threading.Lock()  # Triton's interpreter serves one thread


class Stream:
    """A thread that runs pieces of work in the order in which they are put."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue()
        self._errors: list[Exception] = []
        self.put = self._queue.put
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._queue.get()()
            except Exception as error:
                self._errors.append(error)
            self._queue.task_done()

    def synchronize(self) -> None:
        """Wait for all work. Raise the first error of it, as CUDA does."""
        self._queue.join()
        if self._errors:
            raise self._errors[0]


class StandInEvent(threading.Event):
    """An event on a stream: it has passed once the stream has run all work that was put before it."""

    query = threading.Event.is_set


class StandInHandle:
    """A handle of one allocation per rank. This rank's tensor begins `offset` bytes after its allocation's start."""

    def __init__(self, allocations: Sequence[Tensor], offset: int) -> None:
        self._allocations, self.offset = allocations, offset
        self.buffer_ptrs = [allocation.data_ptr() for allocation in allocations]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        start = storage_offset * dtype.itemsize
        size = torch.Size(sizes).numel() * dtype.itemsize
        assert start + size <= len(self._allocations[rank])
        return self._allocations[rank][start : start + size].view(dtype).view(sizes)


class StandIn(CudaCalls):
    """The calls of `CudaCalls`, on a CPU. `use` changes the current stream, and `do` puts work on it.

    answers: what methods of `CudaCalls` that ask about the GPU return: why_not, gpu, model, socket_folder,
    overlapping_allowed, shared_by_mps. blind: a GPU that this one does not reach. Tests set `capture` (whether a graph
    is being captured) and `fails` (the calls that fail, of "allocate" and "rendezvous"). They read `events` and `waits`
    (how many there were) and `rung` (how often the alarm was raised).
    """

    def __init__(self, group: dist.ProcessGroup, *, blind: str = "none", **answers: object) -> None:
        super().__init__(torch.device("cpu"))
        healthy: dict[str, object] = {
            "why_not": "", "gpu": f"gpu {group.rank()}", "model": "the one model", "socket_folder": "/tmp",
            "overlapping_allowed": True, "shared_by_mps": False,
        }  # fmt: skip
        assert answers.keys() <= healthy.keys()
        for name, answer in (healthy | answers).items():
            setattr(self, name, lambda answer=answer: answer)
        self.group, self.blind = group, blind
        self.streams: dict[str, Stream] = {}
        self.capture = False
        self.events = self.waits = self.rung = 0
        self.fails: set[str] = set()
        self.live: list[tuple[Tensor, Mapping]] = []
        self.use("default")

    def use(self, name: str) -> None:
        """Make the stream `name` the current one; create it at its first use."""
        if name not in self.streams:
            self.streams[name] = Stream()
        self.current = self.streams[name]

    def do(self, work: Callable[[], object]) -> None:
        """Put `work` on the current stream; it is dropped while a graph is being captured."""
        if not self.capture:
            self.current.put(work)

    def obstacle(self, gpu: str) -> str:
        return "there is no peer access" if gpu == self.blind else ""

    def allocate(self, size: int, group_name: str) -> Tensor:
        assert group_name == self.group.group_name
        if "allocate" in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        offset = 16 * (1 + self.group.rank())
        mapping = Mapping("stand-in", offset + size)
        memory = torch.from_numpy(mapping.memory).fill_(0xAB)  # not zero: cudaMalloc does not clear memory either
        tensor = memory[offset:]
        self.live.append((tensor, mapping))
        return tensor

    def rendezvous(self, tensor: Tensor, group_name: str) -> StandInHandle:
        mapping = next(mapping for x, mapping in self.live if x is tensor)
        place = os.getpid(), mapping.descriptor, len(mapping.memory)
        places: list[tuple[int, int, int]] = [(0, 0, 0)] * self.group.size()
        dist.all_gather_object(places, place, group=self.group)
        parts = [
            mapping.memory if place == other else Mapping("stand-in", other[2], other[:2]).memory for other in places
        ]
        dist.barrier(self.group)
        mapping.close_descriptor()
        if "rendezvous" in self.fails:
            raise RuntimeError("CUDA driver error: invalid device ordinal\nException raised from ...")
        return StandInHandle([torch.from_numpy(part) for part in parts], 16 * (1 + self.group.rank()))

    def set_word(self, addresses: Tensor, owner: int, index: int, value: int) -> None:
        def launch() -> None:
            with _interpreter:
                super(StandIn, self).set_word(addresses, owner, index, value)

        self.do(launch)

    def copy_word(self, words: Tensor, index: int, value: Tensor) -> None:
        self.do(lambda: super(StandIn, self).copy_word(words, index, value))

    def wait_for_word(self, word: Tensor, value: int, abort: Tensor) -> None:
        def spin() -> None:
            while wrapped(int(word) - value) < 0 and not int(abort):
                time.sleep(1e-3)

        self.do(spin)

    def synchronize(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def stream(self) -> int:
        return id(self.current)

    def capturing(self) -> bool:
        return self.capture

    def record(self) -> Event:
        assert not self.capture, "an event that is captured in a graph cannot be queried"
        self.events += 1
        event = StandInEvent()
        self.do(event.set)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, StandInEvent) and not self.capture
        self.waits += 1
        self.do(event.wait)

    @contextlib.contextmanager
    def second_stream(self) -> Iterator[None]:
        first = self.current
        self.use("second")
        try:
            yield
        finally:
            self.current = first

    def alarm(self, word: Tensor) -> Callable[[], None]:
        def ring() -> None:
            self.rung += 1
            word.fill_(1)

        return ring

    def enter_thread(self) -> None:
        pass
