"""Properties of this machine: devices, peak rate, memory in use."""

import ctypes
import resource
from pathlib import Path
from time import perf_counter

import torch

from tpfuse.comm.limits import available_memory
from tpfuse.plan.hardware import known_gpu

PROBE_SECONDS = 0.3


def device_count() -> int:
    """Return the number of GPUs of this machine that torch can use."""
    return torch.cuda.device_count()


def name_and_memory(device: torch.device) -> tuple[str, int]:
    """Return the name that torch gives to a GPU, and its bytes; a CPU has no name."""
    if device.type != "cuda":
        return "", 0
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, numpy or torch could not allocate memory. On a CPU torch has no error class for it."""
    named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return (FLOP/s of one device, the source of the number).

    For bfloat16 and float16 on a known GPU, the rate is that of the data sheet. Otherwise it is measured: the best rate
    of the square matrix products of this dtype that fit into `PROBE_SECONDS`, with the threads of this process. Another
    process may slow down all of these products, so training may later reach a higher rate.
    """
    gpu = known_gpu(*name_and_memory(device))
    if gpu is not None and dtype in (torch.bfloat16, torch.float16):
        return gpu.half_rate, f"{gpu.name} data sheet"
    size = 4096 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device).to(dtype)
    best, end = float("inf"), perf_counter() + PROBE_SECONDS
    while best == float("inf") or perf_counter() < end:
        start = perf_counter()
        b = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
        del b
    return 2 * size**3 / best, f"measured, {size}x{size} products"


def memory_bytes(device: torch.device) -> int:
    """Return the most bytes that this rank has held: allocated by torch on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held_bytes(device: torch.device) -> int:
    """Return the bytes that this rank holds: torch's largest allocation so far on a GPU, resident memory now on CPU.

    On CPU, a page that several ranks share is divided among them, so that the sum over the ranks is the memory in use.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
        return int(text.partition("\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return memory_bytes(device)


def free_bytes(device: torch.device, local_world: int) -> int | None:
    """Return this rank's share of the bytes that nothing holds, on its GPU or the host; None if they are not known.

    local_world: the ranks of this host. On a CPU half of the memory stays for others.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // -(-local_world // device_count())
    available = available_memory()
    return None if available is None else available // 2 // local_world


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it to the kernel after every step.

    A training step frees all its activations. By default, glibc returns most of them at once, and the next step faults
    every page in again. With this setting, allocations of up to 32 MiB (the largest threshold, mallopt(3)) come from
    the heap, and the heap is not trimmed. Return whether it worked; it does not on other C libraries.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        return bool(libc.mallopt(m_mmap_threshold, 1 << 25)) and bool(libc.mallopt(m_trim_threshold, (1 << 31) - 1))
    except (OSError, AttributeError):
        return False


def expand_segments() -> None:
    """Tell torch's CUDA allocator to grow its segments instead of allocating new ones, which fragment memory."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # torch.cuda.memory's warns in torch 2.11
