"""The calls of `CudaMemory` to CUDA, all in one class, so that tests can replace it.

Memory comes from torch.distributed._symmetric_memory with its CUDA backend. The meaning of its handles was read in the
source of torch 2.11 and 2.13 (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu): `buffer_ptrs` are the
addresses of the allocations, `offset` is the number of bytes between the beginning of an allocation and its tensor, and
`get_buffer` does not add it. Ranks exchange them by sockets in a folder of temporary files.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.kernels.signal_wait import set_signal, signal_wait

_THREAD_LOCAL = 1  # a value of CUstreamCaptureMode
_NATIVE_ATOMICS = 3  # a value of CUdevice_P2PAttribute
_MPS_ENABLED = 133  # a value of CUdevice_attribute
_NVML_ATOMICS = 3  # a value of nvmlGpuP2PCapsIndex_t
# The path of a Unix socket has at most 107 bytes. torch appends "/symm_mem-" and the number of the process.
_LONGEST_FOLDER = 90
# torch reads these at each rendezvous. tpfuse uses no multicast object, of which NVSwitches have few, and has compared
# the GPUs themselves, where torch compares their numbers: each rank that sees one GPU alone has number 0.
_AT_RENDEZVOUS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


class Event(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""


class CudaCalls:
    """The calls for one GPU. They use the current stream of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def why_not(self) -> str:
        """Return why there is no symmetric memory; empty if there is."""
        if not torch.cuda.is_available():
            return "there is no GPU that this torch can use"
        if not dist.is_available():
            return "this torch was built without torch.distributed"
        try:
            backend = _torch().get_backend(torch.device("cuda"))
        except ImportError:
            return f"torch {torch.__version__} has no symmetric memory: 2.11 or newer is needed"
        if backend is None:
            return f"torch {torch.__version__} was built without symmetric memory for CUDA"
        if backend != "CUDA":
            return f"torch's symmetric memory uses {backend} in this process: unset TORCH_SYMMMEM, which chose it"
        if len(os.fsencode(self.socket_folder())) > _LONGEST_FOLDER:
            return f"torch's sockets need a path of at most {_LONGEST_FOLDER} bytes: set TMPDIR to a shorter one"
        return ""

    def socket_folder(self) -> str:
        """Return the folder of torch's sockets (CUDASymmetricMemoryUtils.cpp, get_socket_name)."""
        names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
        return next((os.environ[name] for name in names if name in os.environ), "/tmp")

    def gpu(self) -> str:
        """Return the GPU's identifier, which is the same in every process of the machine."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def model(self) -> str:
        """Return the GPU's model."""
        return torch.cuda.get_device_name(self.device)

    def obstacle(self, gpu: str) -> str:
        """Return why this rank's GPU cannot signal in another one's memory; empty if it can.

        gpu: the other GPU's identifier. Whether a GPU that is hidden from this process can be reached is known when its
        memory is mapped. NVML says whether signals would be lost there; it sees all GPUs (as NVSHMEM asks it).
        """
        for number in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(number).uuid) == gpu:
                if not torch.cuda.can_device_access_peer(self.device.index, number):
                    return "there is no peer access"
                if _driver_says("cuDeviceGetP2PAttribute", _NATIVE_ATOMICS, self.device.index, number) is False:
                    return "there are no native atomic operations"  # Across PCIe signals could be lost.
                return ""
        if " MIG " in self.model():
            return "MIG permits no peer access"
        atomics = _nvml_says_atomics(self.gpu(), gpu)
        if atomics is None:
            return "GPUs are hidden (let all ranks see all of them), and NVML knows of no native atomic operations"
        return "" if atomics else "there are no native atomic operations"

    def overlapping_allowed(self) -> bool:
        """Return whether torch lets ranks that have one GPU, or different GPUs of one number, share memory."""
        return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "") == "1"

    def shared_by_mps(self) -> bool:
        """Return whether kernels of several processes run on the GPU at once; without MPS they are time-sliced."""
        return _driver_says("cuDeviceGetAttribute", _MPS_ENABLED, self.device.index) is True

    def allocate(self, size: int, group_name: str) -> Tensor:
        """Return uint8 [size] in an allocation of its own. The pool of symm_mem.empty may give ranks other offsets."""
        tensor: Tensor = _torch().empty_strided_p2p((size,), (1,), torch.uint8, self.device, group_name)
        return tensor

    def rendezvous(self, tensor: Tensor, group_name: str) -> Any:
        """Map every rank's allocation and return torch's handle of all of them. Collective."""
        # The import registers operators, so it is left to processes with a GPU.
        from torch.distributed import _symmetric_memory as symmetric

        with _environment(_AT_RENDEZVOUS):  # Other users of torch's symmetric memory keep their settings.
            return symmetric.rendezvous(tensor, group_name)  # type: ignore[arg-type]

    def set_word(self, addresses: Tensor, owner: int, index: int, value: int) -> None:
        """Set a word of any rank on the current stream, by a kernel, which a graph may capture.

        A reader that sees the value sees everything before it on the stream. addresses: `SymmetricBuffer.addresses`.
        """
        set_signal(addresses, owner, index, value)

    def copy_word(self, words: Tensor, index: int, value: Tensor) -> None:
        """Set a word as `set_word` does, to what `value` [1] is when the current stream comes to this call.

        If the words are in another GPU's memory, a copy engine writes them. The call may be captured in a graph. NCCL's
        collectives by copy engines signal in the same way (src/ce_coll.cc, ncclPrepUCSync).
        """
        words[index : index + 1].copy_(value, non_blocking=True)

    def wait_for_word(self, word: Tensor, value: int, abort: Tensor) -> None:
        """Wait on the current stream until the word [1] is at least `value`, or `abort` is not 0."""
        signal_wait(word, value, abort)

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        torch.cuda.synchronize(self.device)

    def stream(self) -> int:
        """Return a number that identifies the current stream."""
        # Triton asks in the same way: the call makes no object.
        stream: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return stream

    def capturing(self) -> bool:
        """Return whether the current stream only captures a graph."""
        return torch.cuda.is_current_stream_capturing()

    def record(self) -> Event:
        """Return an event at the present point of the current stream."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_for(self, event: Event) -> None:
        """Make the current stream wait until another one has passed the event."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def second_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the current stream is the second one of this process and GPU."""
        return torch.cuda.stream(_second_stream(self.device))

    def alarm(self, word: Tensor) -> Callable[[], None]:
        """Return a function that begins to set a word [1] to 1 while a kernel that polls it fills the device.

        It copies from pinned memory on a stream of its own: torch's streams do not wait for the default stream, and
        streams of the highest priority have queues that ordinary streams do not share. The kernel cannot poll a word of
        the host instead, because its atomic operations do not hold across PCIe.
        """
        one, stream = torch.ones(1, dtype=torch.int32, pin_memory=True), urgent_stream(word.device)

        def ring() -> None:
            with torch.cuda.stream(stream):
                word.copy_(one, non_blocking=True)

        return ring

    def enter_thread(self) -> None:
        """Prepare a thread that watches, so that its calls do not invalidate a graph that another thread captures.

        The thread calls this first, as torch's own watchdog for NCCL does.
        """
        torch.cuda.set_device(self.device)
        with contextlib.suppress(OSError, AttributeError):
            mode = ctypes.c_int(_THREAD_LOCAL)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of the lowest priority, 0, which the default stream has too."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def urgent_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of the highest priority."""
    streams: Any = torch.cuda.Stream
    stream: torch.cuda.Stream = streams(device, priority=streams.priority_range()[1])
    return stream


def _driver_says(question: str, attribute: int, *gpus: int) -> bool | None:
    """Return whether the driver's answer for these GPUs is not 0; None if it does not answer."""
    value, devices = ctypes.c_int(), [ctypes.c_int(gpu) for gpu in gpus]
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if any(driver.cuDeviceGet(ctypes.byref(device), device) for device in devices):
            return None
        if not getattr(driver, question)(ctypes.byref(value), attribute, *devices):
            return value.value != 0
    return None


def _nvml_says_atomics(*gpus: str) -> bool | None:
    """Return whether two GPUs have native atomic operations in each other's memory; None if NVML does not answer."""
    status, devices = ctypes.c_int(), [ctypes.c_void_p() for _ in gpus]
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = nvml.nvmlInit_v2()
        for gpu, device in zip(gpus, devices, strict=True):
            failed = failed or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode(), ctypes.byref(device))
        if not (failed or nvml.nvmlDeviceGetP2PStatus(*devices, _NVML_ATOMICS, ctypes.byref(status))):
            return status.value == 0  # NVML_P2P_STATUS_OK
    return None


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _torch() -> Any:
    """Return torch's class for symmetric memory. A build without torch.distributed does not have it."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory
