"""The abilities of this machine for ranks that share memory, in words, for `tpfuse verify` and for error messages.

No function here is collective, and none raises: a fact that cannot be found out is called unknown.
"""

import ctypes
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_GIB = 2**30
# These are values of CUdevice_attribute in CUDA's cuda.h, which torch does not expose.
_FABRIC, MULTICAST = 128, 132
# These files of a memory group have its limit and its usage, by the version of control groups.
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


@dataclass(frozen=True)
class Finding:
    """A fact about the machine. meaning: the consequence for tpfuse."""

    name: str
    value: str
    meaning: str


def probe() -> list[Finding]:
    """Returns the facts that this process finds about its machine."""
    return [*_host(), *_gpus()]


def _host() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("CPU cores", str(cores), "more CPU ranks than this take turns")
    memory, limit = available_memory(), memory_limit()
    yield Finding("memory available", _size(memory), "for all buffers of CPU ranks and everything else")
    yield Finding(
        "memory limit", "none" if limit is None else _size(limit), "for this control group, such as a container"
    )
    why_not = anonymous_memory()
    yield Finding(
        "shared memory",
        why_not or "works",
        "anonymous (memfd): CPU ranks communicate through it" if not why_not else "CPU ranks use Gloo instead",
    )
    yield Finding("/dev/shm", _dev_shm(), "not used by tpfuse: its size does not matter")


def _gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding("GPUs", "none", "kernels are interpreted, on the CPU")
        return
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        value = f"{properties.name}, {_size(properties.total_memory)}, {properties.multi_processor_count} processors"
        yield Finding(f"cuda:{device}", value, f"compute capability {properties.major}.{properties.minor}")
    missing = no_peer_access(range(count))
    yield Finding(
        "peer access",
        "one GPU" if count == 1 else "between all GPUs" if not missing else f"not between {', '.join(missing)}",
        "ranks on GPUs without it use NCCL instead",
    )
    for name, attribute, meaning in (
        ("multicast", MULTICAST, "NVLink switches can sum and broadcast; tpfuse does not use this yet"),
        ("fabric handles", _FABRIC, "memory can be shared across hosts of one NVLink domain; tpfuse does not use this"),
    ):
        yield Finding(name, gpus_with(attribute, count), meaning)
    reason = no_symmetric_memory()
    meaning = "GPU ranks use NCCL instead" if reason else "GPU ranks can access each other's memory"
    yield Finding("symmetric memory of torch", reason or "CUDA backend", meaning)


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / _GIB:.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.0f} MiB"


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that may still be allocated: the lesser of the machine's and of the control group's.

    None: unknown. A request for more memory is not refused: the kernel kills a process when the pages are written.
    """
    limits = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    for folder, version in _control_groups(root, "memory"):
        limit_name, usage_name = _MEMORY_FILES[version]
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            limits.append(max(0, limit - usage + _reclaimable(folder)))
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process's control group may take; None if there is no limit or it cannot be read."""
    limits = (_number(folder / _MEMORY_FILES[version][0]) for folder, version in _control_groups(root, "memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def time_limit(root: Path = Path("/")) -> float | None:
    """Returns the number of cores whose time this process's control group may take; None if there is no limit.

    Sources: cgroup-v2.rst (cpu.max) and sched-bwc.rst (cpu.cfs_quota_us) of the kernel's documentation.
    """
    limits = []
    for folder, version in _control_groups(root, "cpu"):
        try:
            if version == 2:
                quota, period = (int(word) for word in (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        except (OSError, ValueError):  # version 2 writes "max" for no limit
            continue
        if quota > 0 < period:  # version 1 writes -1 for no limit
            limits.append(quota / period)
    return min(limits, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yields (folder, version) for this process's groups of a controller, "memory" or "cpu", innermost first.

    Sources: cgroup-v1/memory.rst and cgroup-v2.rst of the kernel's documentation.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        version = 2 if number == "0" else 1
        base = root / "sys/fs/cgroup" if version == 2 else root / "sys/fs/cgroup" / controller
        folder = base / path.lstrip("/")
        # In a container the path is often that of the host, and the container's own group is mounted at the base.
        for ancestor in (folder, *folder.parents):
            if ancestor.is_relative_to(base):
                yield ancestor, version


def _number(file: Path) -> int | None:
    """Returns the number in a file of a control group; None if there is none ("max", or v1's 2^63 less a page)."""
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number < 2**60 else None


def _reclaimable(folder: Path) -> int:
    """Returns the bytes that a control group is charged for and would give back: pages of files."""
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def anonymous_memory() -> str:
    """Returns why processes cannot share anonymous memory; empty if they can."""
    try:
        descriptor = os.memfd_create("tpfuse probe", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        return f"memfd_create: {error}"
    try:
        os.posix_fallocate(descriptor, 0, 4096)
        os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return ""


def _dev_shm() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "not there"
    return f"{_size(usage.total)}, {_size(usage.used)} used"


def no_peer_access(devices: range | list[int]) -> list[str]:
    """Returns the pairs of GPUs that cannot access each other's memory, as "cuda:0 and cuda:3".

    devices: torch's numbers of the GPUs.
    """
    return [
        f"cuda:{a} and cuda:{b}"
        for a in devices
        for b in devices
        if a < b and not (torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a))
    ]


def gpus_with(attribute: int, count: int) -> str:
    """Returns which of the first GPUs have an attribute of the driver: "yes" (all), "no", their names, or "unknown"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "unknown"
    having, value = [], ctypes.c_int()
    for device in range(count):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return "unknown"
        if value.value:
            having.append(device)
    return "yes" if len(having) == count else "no" if not having else ", ".join(f"cuda:{device}" for device in having)


def no_symmetric_memory() -> str:
    """Returns why torch cannot share GPU memory between processes; empty if it can."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory: 2.11 or newer is needed"
    backend = _SymmetricMemory.get_backend(torch.device("cuda"))
    if backend is None:
        return f"torch {torch.__version__} was built without symmetric memory for CUDA"
    if backend != "CUDA":
        return f"torch's symmetric memory uses {backend} in this process: unset TORCH_SYMMMEM, which chose it"
    return ""
