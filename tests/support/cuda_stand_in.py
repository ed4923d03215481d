"""A stand-in for a GPU, which lets `CudaMemory` run on CPU ranks, for its memory, and for torch's attention on GPUs.

A stream is a thread, and device memory is shared memory of the host. A tensor begins inside its allocation, at another
offset on each rank, as tensors of torch's memory pools may.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpfuse.comm import collectives
from tpfuse.comm.cuda_calls import CudaCalls, Event
from tpfuse.comm.rank_state import Mapping
from tpfuse.comm.symmetric_memory import wrapped
from tpfuse.zero import muon

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
        self.do(event.passed.set)
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, StandInEvent) and not self.capture
        self.waits += 1
        self.do(event.passed.wait)

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


DEVICE = torch.device("cpu", 0)  # the device of `TwoMemories`, whose host is torch.device("cpu")


class TwoMemories(TorchDispatchMode):
    """A host's memory and a device's on a CPU: an operation or a collective of tensors that it cannot reach fails.

    What is computed from tensors of the host is there too, and everything else on the device. `.to` with one of both
    copies a tensor to the other one, and counts its bytes in `to_device` or `to_host`; `copy_` does it uncounted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_device = self.to_host = 0
        self._host: dict[int, Tensor] = {}  # by their storage, which is never used again

    def keep(self, x: Tensor) -> None:
        """Let a tensor be in the host's memory."""
        if x.untyped_storage().data_ptr():  # fake tensors have no memory
            self._host[x.untyped_storage().data_ptr()] = x

    def on_host(self, x: Tensor) -> bool:
        """Return whether a tensor is in the host's memory."""
        return bool(x.numel()) and x.untyped_storage().data_ptr() in self._host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the local tensors
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        places = [self.on_host(x) for x in given]
        wide = {place for x, place in zip(given, places, strict=True) if x.ndim}  # a scalar may be on the host
        assert len(wide) < 2 or func is torch.ops.aten.copy_.default, f"{func} of tensors of the host and the device"
        out = func(*args, **(kwargs or {}))
        if places and all(places):
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.numel():
                    self.keep(x)
        return out

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Take every `.to` of a device as a copy, and check what ranks send."""
        to = Tensor.to

        def moved(x: Tensor, *args: Any, **options: Any) -> Tensor:
            if not (args and isinstance(args[0], torch.device)) or isinstance(x, DTensor):
                return to(x, *args, **options)
            host = args[0] != DEVICE
            if self.on_host(x) == host or not x.numel():
                return x
            y = torch.empty(x.shape, dtype=x.dtype).copy_(x)
            if host:
                self.keep(y)
                self.to_host += x.nbytes
            else:
                self.to_device += x.nbytes
            return y

        def checked(send: Callable[..., Any]) -> Callable[..., Any]:
            def call(x: Tensor, *args: Any, **options: Any) -> Any:
                assert not self.on_host(x), "a collective of a tensor of the host"
                return send(x, *args, **options)

            return call

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Tensor, "to", moved))
            for module, name in (
                *((collectives, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "start_all_reduce")),
                (muon, "start_all_to_all"),
            ):
                stack.enter_context(mock.patch.object(module, name, checked(getattr(module, name))))
            stack.enter_context(self)
            yield


class AttentionCall(NamedTuple):
    """A call of an operator of torch that attends. window: (left, right) of flash attention."""

    operator: str
    backward: bool
    rows: int
    keys: int
    causal: bool
    window: tuple[int | None, int | None] = (None, None)


@contextlib.contextmanager
def attention_of_gpus(backend: SDPBackend) -> Iterator[list[AttentionCall]]:
    """Let scaled_dot_product_attention choose `backend`, whose operators run on CPU tensors; yield the calls.

    Those of flash attention run too. They are computed by torch's operator for CPUs. What the real ones would refuse,
    or read wrongly without a word, fails: full dtypes, causal rectangles, for cuDNN one key, for flash attention
    negative windows and rows that see no key, other strides of out or grad_out than q's, other shapes or strides of the
    log-sum-exp than forward returns.
    """
    calls, cpu, aten = list[AttentionCall](), "_scaled_dot_product_flash_attention_for_cpu", torch.ops.aten
    nothing = torch.empty(0)

    def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        check(call, q, k, v)
        options = {"attn_mask": _bias(call), "scale": scale}
        out, lse = getattr(aten, cpu)(q.float(), k.float(), v.float(), 0.0, call.causal, **options)
        return torch.empty_like(q).copy_(out), lse.contiguous()

    def backward(call: AttentionCall, *tensors: Tensor, scale: float) -> tuple[Tensor, ...]:
        grad, q, k, v, out, lse = tensors
        check(call, q, k, v)
        assert grad.dtype == out.dtype == q.dtype and grad.stride() == out.stride() == q.stride()
        assert lse.is_contiguous() and lse.shape == q.shape[:3]
        wide = (x.float() for x in (grad, q, k, v, out))
        options = {"attn_mask": _bias(call), "scale": scale}
        found = getattr(aten, f"{cpu}_backward")(*wide, lse, 0.0, call.causal, **options)
        return tuple(torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), found, strict=True))

    def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        calls.append(call)
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert q.stride(3) == k.stride(3) == v.stride(3) == 1 and not q.shape[3] % 8
        assert (call.rows, call.keys) == (q.shape[2], k.shape[2]) and (not call.causal or call.rows == call.keys)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, *options: Any, scale: float) -> tuple[Any, ...]:
        bias, has_lse, *rest = options
        dropout, causal, mask = (*rest, *(0.0, False, False)[len(rest) :])  # torch leaves defaults out
        assert (bias, has_lse, dropout, mask) == (None, True, 0.0, False) and k.shape[2] > 1
        rows, keys = q.shape[2], k.shape[2]
        out, lse = forward(AttentionCall("cudnn", False, rows, keys, causal), q, k, v, scale)
        return out, lse.unsqueeze(-1), None, None, rows, keys, nothing, nothing, None

    def cudnn_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any, scale: float
    ) -> tuple[Tensor, ...]:
        _seed, _offset, *absent, rows, keys, dropout, causal = options
        assert absent == [None] * 3 and dropout == 0.0 and k.shape[2] > 1 and lse.is_contiguous()
        call = AttentionCall("cudnn", True, rows, keys, causal)
        return backward(call, grad, q, k, v, out, lse.squeeze(-1), scale=scale)

    def flash(q: Tensor, k: Tensor, v: Tensor, *options: Any, scale: float, **window: int | None) -> tuple[Tensor, ...]:
        *absent, rows, keys, dropout, causal, mask = options
        assert (absent, dropout, mask) == ([None] * 2, 0.0, False)
        call = AttentionCall("flash", False, rows, keys, causal, _sizes(**window))
        out, lse = forward(call, *(x.transpose(1, 2) for x in (q, k, v)), scale)  # type: ignore[arg-type]
        return out.transpose(1, 2), lse, nothing, nothing, nothing

    def flash_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any, scale: float,
        **window: int | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *absent, rows, keys, dropout, causal, _state, _unused = options
        assert (absent, dropout) == ([None] * 2, 0.0)
        call = AttentionCall("flash", True, rows, keys, causal, _sizes(**window))
        found = backward(call, *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, scale=scale)
        return tuple(x.transpose(1, 2) for x in found)

    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.library._scoped_library("aten", "IMPL") as library, contextlib.ExitStack() as stack:
        library.impl("_scaled_dot_product_cudnn_attention", cudnn, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
        library.impl("_flash_attention_forward", flash, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        stack.enter_context(mock.patch("torch._fused_sdp_choice", return_value=backend.value))
        stack.enter_context(mock.patch("torch.backends.cuda.is_flash_attention_available", return_value=True))
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        torch.use_deterministic_algorithms(False)
        yield calls


def _sizes(window_size_left: int | None = None, window_size_right: int | None = None) -> tuple[int | None, int | None]:
    assert min(window_size_left or 0, window_size_right or 0) >= 0, "flash attention takes negative sizes for no bound"
    return window_size_left, window_size_right


def _bias(call: AttentionCall) -> Tensor | None:
    """Return what is added to the scores: flash attention's window counts from the diagonal through the last corner."""
    if call.window == (None, None):
        return None
    left, right = (call.keys if size is None else size for size in call.window)
    place = torch.arange(call.keys) - torch.arange(call.rows).unsqueeze(1) - (call.keys - call.rows)
    seen = (place >= -left) & (place <= right)
    assert not call.causal and seen.any(1).all(), "flash attention's log-sum-exp of no keys is inf, not -inf"
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


class CopyStandIn:
    """`tpfuse.parallel.offloaded_inputs.CopyStream` on a CPU, whose copies are made when something waits for them.

    Until then what a copy writes is NaN. It stays NaN if the memory that the copy reads has been freed by then, or if
    the copy was not put behind the work of the current stream. Tests read `log`.
    """

    def __init__(self, _: torch.device) -> None:
        self._copies: list[Callable[[], object]] = []
        self._made = 0
        self._follows = False
        self.log: list[str] = []

    def follow(self) -> None:
        self._follows = True

    def to_host(self, x: Tensor) -> Tensor:
        return self._copy(x, "to host")

    def to_device(self, host: Tensor) -> Tensor:
        return self._copy(host, "to device")

    def _copy(self, source: Tensor, what: str) -> Tensor:
        ends, follows = (ref(source), ref(target := torch.full_like(source, torch.nan))), self._follows

        def copy() -> None:
            source, target = (end() for end in ends)
            if follows and source is not None and target is not None:
                target.copy_(source)

        self._follows = False
        self._copies.append(copy)
        self.log.append(what)
        return target

    def record(self) -> int:
        return len(self._copies)

    def wait(self, event: int) -> None:
        with torch.no_grad():
            for copy in self._copies[self._made : event]:
                copy()
        self._made = max(self._made, event)
        self.log.append("wait")
