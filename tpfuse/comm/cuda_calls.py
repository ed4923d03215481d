"""What `CudaMemory` asks of CUDA: all of it is here, so that tests can put something else in its place.

Memory comes from torch.distributed._symmetric_memory with its CUDA backend, whose handles were read in torch 2.11 and
2.13 (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu): `buffer_ptrs` are where allocations begin, `offset`
is how far into its allocation a tensor begins, in bytes, and `get_buffer` knows nothing of it.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tpfuse.comm.probe import no_symmetric_memory
from tpfuse.kernels.signal_wait import signal_wait

_THREAD_LOCAL = 1  # of CUstreamCaptureMode
_NATIVE_ATOMICS = 3  # of CUdevice_P2PAttribute
_MPS_ENABLED = 133  # of CUdevice_attribute


class Handle(Protocol):
    """What a rendezvous gives: the same allocation of every rank, as this rank's device addresses them."""

    @property
    def buffer_ptrs(self) -> Sequence[int]: ...

    @property
    def offset(self) -> int: ...

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor: ...


class Event(Protocol):
    """A place on a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class CudaCalls:
    """The calls for one GPU. Without a thread's having chosen another one, streams are the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def why_not(self) -> str:
        """Why there is no symmetric memory; empty where there is."""
        if not torch.cuda.is_available():
            return "there is no GPU that this torch can use"
        return no_symmetric_memory()

    def gpu(self) -> str:
        """What the GPU is called by every process of the machine."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def obstacle(self, gpu: str) -> str:
        """What keeps this rank's GPU from signalling in another one's memory; empty where nothing does.

        For a GPU that is hidden from this process the driver decides when memory is mapped.
        """
        for number in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(number).uuid) == gpu:
                if not torch.cuda.can_device_access_peer(self.device.index, number):
                    return "there is no peer access"
                if not _native_atomics(self.device.index, number):
                    return "there are no native atomic operations"  # across PCIe: signals could be lost
        return ""

    def overlapping_allowed(self) -> bool:
        """Whether torch lets ranks that have one GPU, or different GPUs of one number, share memory."""
        return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "") == "1"

    def shared_by_mps(self) -> bool:
        """Whether kernels of several processes run on the GPU at once; without MPS they take turns."""
        return _mps_enabled(self.device.index)

    def allocate(self, size: int, group_name: str) -> Tensor:
        """uint8 [size] in an allocation of its own. Not symm_mem.empty, whose pool may give ranks different offsets."""
        tensor: Tensor = _torch().empty_strided_p2p((size,), (1,), torch.uint8, self.device, group_name)
        return tensor

    def rendezvous(self, tensor: Tensor, group_name: str) -> Handle:
        """Maps every rank's allocation. Collective."""
        from torch.distributed import _symmetric_memory as symmetric  # it registers operators: on GPUs alone

        handle: Handle = symmetric.rendezvous(tensor, group_name)  # type: ignore[arg-type, assignment]
        return handle

    def addresses(self, values: Sequence[int]) -> Tensor:
        """int64 [n] on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def new_word(self) -> Tensor:
        """int32 [1] on the device, 0."""
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def set_word(self, words: Tensor, index: int, value: int) -> None:
        """On the current stream. words: int32; everything before it on the stream is visible to who sees the value.

        cuStreamWriteValue32, which fences for the whole system (CUDA driver API, "Stream Memory Operations").
        """
        _torch().stream_write_value32(words.view(torch.uint32), index, value % 2**32)

    def copy_word(self, words: Tensor, index: int, value: Tensor) -> None:
        """As `set_word`, with what `value` [1] is then. A copy engine does it where the words are of another GPU.

        It may be captured in a graph. NCCL's collectives by copy engines signal so (src/ce_coll.cc, ncclPrepUCSync).
        """
        words[index : index + 1].copy_(value, non_blocking=True)

    def wait_for_word(self, word: Tensor, value: int, abort: Tensor) -> None:
        """On the current stream: until the word [1] is at least `value`, or `abort` is not 0."""
        signal_wait(word, value, abort)

    def synchronize(self) -> None:
        """Until the device has done all that it was given."""
        torch.cuda.synchronize(self.device)

    def stream(self) -> int:
        """What tells the current stream from others."""
        stream: int = torch._C._cuda_getCurrentRawStream(self.device.index)  # as Triton asks: no object is made
        return stream

    def capturing(self) -> bool:
        """Whether the current stream only records a graph."""
        return torch.cuda.is_current_stream_capturing()

    def record(self) -> Event:
        """A place on the current stream, here."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_for(self, event: Event) -> None:
        """The current stream waits until another one has passed the event."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def alarm(self, word: Tensor) -> Callable[[], None]:
        """What sets a word [1] to 1, past everything else that the device does."""
        return Alarm(word).ring

    def enter_thread(self) -> None:
        """First of all in a thread that watches: its calls do not spoil a graph that another thread captures.

        As torch's own watchdog for NCCL does.
        """
        torch.cuda.set_device(self.device)
        with contextlib.suppress(OSError, AttributeError):
            mode = ctypes.c_int(_THREAD_LOCAL)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the highest priority."""
    streams: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = streams(device, priority=streams.priority_range()[1])
    return stream


def _native_atomics(source: int, target: int) -> bool:
    """Whether atomic operations of one GPU hold in the memory of another; True where the driver does not say."""
    numbers = [ctypes.c_int(source), ctypes.c_int(target)]
    value = ctypes.c_int(1)
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if any(driver.cuDeviceGet(ctypes.byref(number), number) for number in numbers):
            return True
        if driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *numbers):
            return True
    return value.value != 0


def _mps_enabled(number: int) -> bool:
    """Whether contexts on this GPU are MPS's; False where the driver does not say."""
    device, value = ctypes.c_int(number), ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if not driver.cuDeviceGet(ctypes.byref(device), device):
            driver.cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, device)
    return value.value != 0


class Alarm:
    """Writes a word while a kernel that polls it fills the device.

    A copy from pinned memory on a stream of its own: torch's streams do not wait for the default stream, and those of
    the highest priority have queues that ordinary ones do not share. Not a word of the host that the kernel polls: its
    atomics do not hold across PCIe.
    """

    def __init__(self, word: Tensor) -> None:
        self._word = word
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._stream = urgent_stream(word.device)

    def ring(self) -> None:
        """Does not wait until it is written."""
        with torch.cuda.stream(self._stream):
            self._word.copy_(self._one, non_blocking=True)


def _torch() -> Any:
    """torch's class, which a build without distributed lacks."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory
