"""Symmetric memory of CUDA ranks of one host: torch's, with its CUDA backend (peer access over NVLink or PCIe).

Only the group shares its allocations. Small buffers, such as signals, share one, because each allocation takes a
rendezvous and 2 MiB; a large buffer has its own. None is in torch's shared workspace or signal pads, whose users would
see each other's signals. Ranks of one GPU also share memory if the environment variable
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows it: this is for tests, since their kernels must then run side by side.

The operation under a guard continues on the current stream after the guard has ended. So PeerTimeout is not raised at
the guard's end but at the next guard of the memory, or at `check()`, which belongs at the end of each step. Until then
the results of the operation must not be trusted. Operations on two streams wait for each other in the order in which
they were begun. While a graph is captured nothing is recorded or checked, since nothing runs: put a guard around its
replay.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.cuda_calls import CudaCalls, Event
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable
from tpfuse.comm.host_coordinated_memory import HostCoordinatedMemory
from tpfuse.comm.settings import FIRST_WAIT
from tpfuse.comm.stream_watchdog import Pending, StreamWatchdog
from tpfuse.comm.symmetric_memory import SymmetricBuffer

_SHARED_PROGRAMS = 32  # so that launches of four ranks that share one H100 fit side by side
_SMALL = 2**16  # bytes of the largest buffer that shares an allocation
_SHARED = 2**20  # bytes of such an allocation; with torch's signal pad it fills a part of the 2 MiB that are mapped
_ALIGNMENT = 128  # bytes; a line of the cache, so that signals of two buffers do not slow each other down


@dataclass(eq=False)
class _Allocation:
    """An allocation of every rank, and the buffers in it, which have the same place on every rank."""

    parts: list[Tensor]  # uint8 [bytes] of each rank
    addresses: list[int]
    handle: Any  # the peers' tensors do not own their memory: this does
    # The first byte and the end of each buffer, by its key.
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def gap(self, size: int) -> int | None:
        """Return the first byte of the first gap of `size` bytes; None if there is none."""
        start = 0
        for first, end in sorted(self.places.values()):
            if first - start >= size:
                break
            start = end
        return start if start + size <= len(self.parts[0]) else None


class CudaMemory(HostCoordinatedMemory):
    """The symmetric memory of CUDA ranks, see `SymmetricMemory`. Raise Unavailable, with the reason, on every rank.

    calls: the object that calls CUDA; tests replace it.
    """

    backend = "cuda"

    @torch.inference_mode(False)  # The signals and the abort word are kept, also for calls that need gradients.
    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: float, calls: CudaCalls | None = None
    ) -> None:
        super().__init__(group, device, timeout)
        self._calls = CudaCalls(device) if calls is None else calls
        self._group_name = group.group_name
        self._check_gpus()
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._calls.synchronize()
        self._on_streams = StreamWatchdog(self.control, self._calls.alarm(self._abort), self._calls.enter_thread)
        self._allocations = [self._share("signals", _SHARED)]  # at once, so that failures are reasons
        self._waited: set[str | int] = set()  # the operations, and the peers of messages, for which it has waited
        self._begun: Event | None = None
        self._inside = False
        self._last: tuple[int, Event] | None = None  # the stream and the end of the last operation that ran
        self._captured: int | None = None  # the stream whose operations are being captured

    @property
    def abort(self) -> Tensor:
        return self._abort

    def _check_gpus(self) -> None:
        """Raise Unavailable on every rank unless each rank's GPU can signal in the memory of all others."""
        op, calls = "symmetric memory", self._calls
        with agreement(op, self, alike=Unavailable, by_rank=True):
            if reason := calls.why_not():
                raise Unavailable(reason)
            own = str(self.device), calls.gpu(), calls.model(), calls.socket_folder()
        gpus = exchange(own, self, op=op)
        with agreement(op, self, alike=Unavailable):
            for rank, gpu in enumerate(gpus):
                if rank != self.rank and (text := self._obstacle(rank, *gpu)):
                    raise Unavailable(text)
        self.has_second_stream = len({gpu for _, gpu, *_ in gpus}) == self.world
        if not self.has_second_stream:
            self.resident_programs = _SHARED_PROGRAMS

    def _obstacle(self, rank: int, name: str, gpu: str, model: str, folder: str) -> str:
        """Return why this rank's GPU cannot share memory with that of `rank`; empty if it can.

        name: the device of `rank`; gpu, model: the identifier and the model of its GPU; folder: of its sockets.
        """
        calls, pair = self._calls, f"rank {self.rank} ({self.device}) and rank {rank} ({name})"
        if folder != calls.socket_folder():
            return f"{pair} have torch's sockets in {calls.socket_folder()} and {folder}: set TMPDIR to one folder"
        if gpu == calls.gpu() and not calls.overlapping_allowed():
            return f"{pair} are on one GPU: torch refuses that without TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
        if gpu == calls.gpu() and calls.shared_by_mps():
            return (
                f"{pair} are on one GPU under MPS: waiting kernels of one would leave no space for those of the other"
            )
        if model != calls.model():
            return f"{pair} have GPUs of two models, {calls.model()} and {model}: kernels of a group need one"
        reason = calls.obstacle(gpu) if gpu != calls.gpu() else ""
        return f"{reason} between the GPUs of {pair}" if reason else ""

    def _allocate(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer:
        self.control.timeout = FIRST_WAIT * self.timeout
        try:
            return self._allocate_in_time(key, shape, dtype)
        finally:
            self.control.timeout = self.timeout

    def _allocate_in_time(self, key: str, shape: torch.Size, dtype: torch.dtype) -> SymmetricBuffer:
        if self._calls.capturing():
            raise RuntimeError(f"symmetric buffer {key!r} is requested while a graph is captured: request it before")
        nbytes = shape.numel() * dtype.itemsize
        size = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        gaps = ((number, each.gap(size)) for number, each in enumerate(self._allocations) if size <= _SMALL)
        number, start = next(((number, gap) for number, gap in gaps if gap is not None), (len(self._allocations), 0))
        for allocation in self._allocations[number : number + 1]:
            allocation.parts[self.rank][start : start + size].zero_()  # before ranks agree, and so before peers write
            self._calls.synchronize()
        # After an error that not all ranks raised, their gaps may differ.
        self._meet(f"buffer {key!r} {dtype} {tuple(shape)} at {number}, {start}", f"buffer {key}")
        if number == len(self._allocations):
            self._allocations.append(self._share(key, _SHARED if size <= _SMALL else size))
        allocation = self._allocations[number]
        allocation.places[key] = start, start + size
        peers = [part[start : start + nbytes].view(dtype).view(shape) for part in allocation.parts]
        addresses = torch.tensor([address + start for address in allocation.addresses], device=self.device)
        return SymmetricBuffer(key, peers, self.rank, addresses)

    def _share(self, key: str, size: int) -> _Allocation:
        """Return `size` bytes of every rank, zeroed. Collective. Raise Unavailable on every rank, which names `key`."""
        op = f"buffer {key}"
        with agreement(op, self, alike=Unavailable, by_rank=True):
            try:
                tensor = self._calls.allocate(size, self._group_name)
            except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError.
                text = f"{size} bytes of GPU memory for {key} cannot be allocated: {_first_line(error)}"
                raise Unavailable(text) from error
        with agreement(op, self, alike=Unavailable, by_rank=True):
            try:
                handle = self._calls.rendezvous(tensor, self._group_name)
                tensor.zero_()
                self._calls.synchronize()
            except RuntimeError as error:
                raise Unavailable(f"GPU memory for {key} cannot be shared: {_first_line(error)}") from error
        offsets = exchange(handle.offset, self, op=op)
        peers = [
            tensor if rank == self.rank else handle.get_buffer(rank, (size,), torch.uint8, offset)
            for rank, offset in enumerate(offsets)
        ]
        addresses = [pointer + offset for pointer, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
        assert addresses[self.rank] == tensor.data_ptr(), "the handle is of another tensor"
        return _Allocation(peers, addresses, handle)

    def _release(self, buffer: SymmetricBuffer) -> None:
        self._calls.synchronize()
        allocation = next(each for each in self._allocations if buffer.key in each.places)
        del allocation.places[buffer.key]
        if not allocation.places:
            self._allocations.remove(allocation)

    def signal(self, flags: SymmetricBuffer, owner: int, index: int, value: int | Tensor) -> None:
        """Signal on the current stream, after everything before it there, copies included."""
        flags.check_signal(owner, index)
        if isinstance(value, Tensor):
            self._calls.copy_word(flags.peers[owner], index, value)
        else:
            self._calls.set_word(flags.addresses, owner, index, value)

    def wait_signal(
        self, flags: SymmetricBuffer, owner: int, index: int, value: int, *, peer: int | None = None, op: str
    ) -> None:
        """Make the current stream wait, but not the host. `check` raises the PeerTimeout."""
        flags.check_signal(owner, index)
        if self.control.aborted:
            raise self._failure(op, 0.0)
        begun = None if self._inside or self._calls.capturing() else self._calls.record()
        self._calls.wait_for_word(flags.peers[owner][index : index + 1], value, self._abort)
        if begun is not None:
            self._add(op, begun, self._calls.record(), owner if peer is None else peer, op)

    def barrier(self, op: str = "barrier") -> None:
        """Wait until every rank and its GPU have come here."""
        if self._calls.capturing():
            raise RuntimeError(f"{op}: the host cannot wait in a barrier while a graph is captured")
        self._calls.synchronize()
        super().barrier(op)

    def beside(self, work: Callable[[], None]) -> object | None:
        if not self.has_second_stream or self._calls.capturing():
            return None
        here = self._calls.record()
        with self._calls.second_stream():
            self._calls.wait_for(here)
            work()
            return self._calls.record()

    def join(self, end: object) -> None:
        self._calls.wait_for(cast(Event, end))

    def _watch(self, op: str, kernel: bool, peer: int | None) -> None:
        """Record the beginning of an operation, a kernel or copies with signals, which the stream watchdog watches."""
        stream = self._calls.stream()
        if self._calls.capturing():
            if self._captured not in (None, stream):
                raise RuntimeError(
                    f"{op}: the graph captures a second stream of the group: capture one stream, then call check()"
                )
            self._captured = stream
        else:
            self._captured = None
            if self._last is not None and self._last[0] != stream:
                self._calls.wait_for(self._last[1])
            self._begun = self._calls.record()
        self._inside = True

    def _unwatch(self, op: str, peer: int | None) -> None:
        self._inside = False
        begun, self._begun = self._begun, None
        if begun is not None:
            end = self._calls.record()
            self._add(op, begun, end, peer, op if peer is None else peer)  # the names of messages are numbered
            self._last = self._calls.stream(), end

    def _add(self, op: str, begun: Event, end: Event, peer: int | None, key: str | int) -> None:
        """Let the stream watchdog watch an operation. key: what may wait longer at its first time."""
        patience = 1.0 if key in self._waited else FIRST_WAIT
        self._waited.add(key)
        self._on_streams.add(Pending(op, begun, end, peer, patience))

    def _failure(self, op: str, waited: float) -> PeerTimeout | Disagreement:
        return self._on_streams.failure() or super()._failure(op, waited)

    def check(self) -> None:
        if not self._calls.capturing():
            self._captured = None
            if self.control.aborted:
                raise self._failure("check", 0.0)
            super().check()

    def reset(self) -> None:
        if self.control.aborted:
            self._on_streams.check()  # This tells the kernels that still wait.
        self._calls.synchronize()
        self._on_streams.forget()
        self._last = self._captured = None
        super().reset()

    def clear_signals(self) -> None:
        super().clear_signals()
        self._abort.zero_()
        self._calls.synchronize()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
