"""A stand-in for a GPU, which lets `CudaMemory` run on CPU ranks, and for torch's attention on GPUs.

A stream is a thread, and device memory is shared memory of the host. A tensor begins inside its allocation, at another
offset on each rank, as tensors of torch's memory pools may.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend

from tpfuse.comm.cuda_calls import CudaCalls, DriverHandle, Event
from tpfuse.comm.rank_state import Mapping
from tpfuse.comm.symmetric_memory import wrapped

_interpreter = threading.Lock()  # Triton's interpreter serves one thread


class Stream:
    """A thread that runs pieces of work in the order in which they are put."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue()
        self._errors: list[Exception] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._queue.get()()
            except Exception as error:
                self._errors.append(error)
            self._queue.task_done()

    def put(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def synchronize(self) -> None:
        """Wait for all work. Raise the first error of it, as CUDA does."""
        self._queue.join()
        if self._errors:
            raise self._errors[0]


class StandInEvent:
    """An event on a stream: it has passed once the stream has run all work that was put before it."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()


class StandInHandle:
    """A handle of one allocation per rank. This rank's tensor begins `offset` bytes after its allocation's start."""

    def __init__(self, allocations: Sequence[Tensor], offset: int) -> None:
        self._allocations, self.offset = allocations, offset

    @property
    def buffer_ptrs(self) -> list[int]:
        return [allocation.data_ptr() for allocation in self._allocations]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        start = storage_offset * dtype.itemsize
        size = torch.Size(sizes).numel() * dtype.itemsize
        assert start + size <= len(self._allocations[rank])
        return self._allocations[rank][start : start + size].view(dtype).view(sizes)


class StandIn(CudaCalls):
    """The calls of `CudaCalls`, on a CPU. `use` changes the current stream, and `do` puts work on it.

    gpu is the name of the rank's GPU, and blind the name of a GPU that it does not reach. Tests set `kind` (the GPU's
    model), `folder` (of sockets), `reason` (why there is no symmetric memory), `capture` (whether a graph is being
    captured), `mps` (whether the Multi-Process Service runs) and `fails` (the calls that fail, of "allocate" and
    "rendezvous"). Tests read `events` and `waits` (how many there were) and `rung` (how often the alarm has been
    raised).
    """

    def __init__(self, group: dist.ProcessGroup, *, gpu: str = "", allowed: bool = True, blind: str = "none") -> None:
        super().__init__(torch.device("cpu"))
        self.group, self.name, self.allowed, self.blind = group, gpu or f"gpu {group.rank()}", allowed, blind
        self.streams: dict[str, Stream] = {}
        self.kind, self.folder = "the one model", "/tmp"
        self.reason = ""
        self.capture = False
        self.mps = False
        self.events = 0
        self.waits = 0
        self.rung = 0
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

    def why_not(self) -> str:
        return self.reason

    def gpu(self) -> str:
        return self.name

    def model(self) -> str:
        return self.kind

    def socket_folder(self) -> str:
        return self.folder

    def obstacle(self, gpu: str) -> str:
        return "there is no peer access" if gpu == self.blind else ""

    def overlapping_allowed(self) -> bool:
        return self.allowed

    def shared_by_mps(self) -> bool:
        return self.mps

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

    def rendezvous(self, tensor: Tensor, group_name: str) -> DriverHandle:
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
        self.do(event.passed.set)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, StandInEvent) and not self.capture
        self.waits += 1
        self.do(event.passed.wait)

    def alarm(self, word: Tensor) -> Callable[[], None]:
        def ring() -> None:
            self.rung += 1
            word.fill_(1)

        return ring

    def enter_thread(self) -> None:
        pass


@contextlib.contextmanager
def attention_of_gpus(backend: SDPBackend) -> Iterator[list[str]]:
    """Let scaled_dot_product_attention choose `backend`, whose operators run on CPU tensors; yield the calls' names.

    They are computed by torch's operator for CPUs. What the real ones would refuse, or read wrongly without a word,
    fails: full dtypes, causal rectangles, one key, other strides of out or grad_out than q's, other shapes or strides
    of the log-sum-exp than forward returns.
    """
    cudnn, calls = backend == SDPBackend.CUDNN_ATTENTION, list[str]()
    name = "_scaled_dot_product_cudnn_attention" if cudnn else "_scaled_dot_product_flash_attention"
    cpu, aten = "_scaled_dot_product_flash_attention_for_cpu", torch.ops.aten

    def check(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert q.stride(3) == k.stride(3) == v.stride(3) == 1 and not q.shape[3] % 8 and k.shape[2] > 1
        assert not causal or q.shape[2] == k.shape[2]

    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, scale: float) -> tuple[Any, ...]:
        bias, has_lse, *rest = options if cudnn else (None, True, *options)
        dropout, causal, mask = (*rest, *(0.0, False, False)[len(rest) :])  # torch leaves defaults out
        check(q, k, v, causal)
        assert (bias, has_lse, dropout, mask) == (None, True, 0.0, False)
        calls.append("forward")
        out, lse = getattr(aten, cpu)(q.float(), k.float(), v.float(), 0.0, causal, scale=scale)
        lse = lse.contiguous().unsqueeze(-1) if cudnn else lse.contiguous()
        nothing = torch.empty(0)
        return torch.empty_like(q).copy_(out), lse, None, None, q.shape[2], k.shape[2], nothing, nothing, None

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any, scale: float
    ) -> tuple[Tensor, ...]:
        places = slice(2, 5) if cudnn else slice(0, 2)  # the bias and the documents' lengths
        queries, keys, dropout, causal = options[5:] if cudnn else options[2:6]
        check(q, k, v, causal)
        assert options[places] == (None,) * len(options[places]) and dropout == 0.0
        assert (queries, keys) == (q.shape[2], k.shape[2]) and grad.dtype == out.dtype == q.dtype
        assert grad.stride() == out.stride() == q.stride()
        assert lse.is_contiguous() and lse.shape == ((*q.shape[:3], 1) if cudnn else q.shape[:3])
        calls.append("backward")
        wide = (x.float() for x in (grad, q, k, v, out))
        found = getattr(aten, f"{cpu}_backward")(*wide, lse.view(q.shape[:3]), 0.0, causal, scale=scale)
        return tuple(torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), found, strict=True))

    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.library._scoped_library("aten", "IMPL") as library, contextlib.ExitStack() as stack:
        library.impl(name, forward, "CPU")
        library.impl(f"{name}_backward", backward, "CPU")
        stack.enter_context(mock.patch("torch._fused_sdp_choice", return_value=backend.value))
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        torch.use_deterministic_algorithms(False)
        yield calls
