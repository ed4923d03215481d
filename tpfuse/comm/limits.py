"""The memory, the time of cores and the threads that this process may take.

Control groups such as those of containers limit the first two, and variables of OpenMP the last.
"""

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

# These files of a memory group have its limit and its usage, by the version of control groups.
_MEMORY_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be allocated: the lesser of the machine's and of the control group's.

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
        limit, usage = (_number(folder / name) for name in _MEMORY_FILES[version])
        if limit is not None and usage is not None:
            limits.append(max(0, limit - usage + _reclaimable(folder)))
    return min(limits, default=None)


def core_time(root: Path = Path("/")) -> float:
    """Return the number of cores whose time this process may take, by its affinity and its control groups.

    Sources: cgroup-v2.rst (cpu.max) and sched-bwc.rst (cpu.cfs_quota_us) of the kernel's documentation.
    """
    limits: list[float] = [len(os.sched_getaffinity(0))]
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
    return min(limits)


def openmp_threads() -> int:
    """Return the number of threads that OpenMP is sure to give to a parallel region if torch asks for so many.

    OMP_THREAD_LIMIT, OMP_DYNAMIC and OMP_MAX_ACTIVE_LEVELS limit it, which torch does not look at. If torch counts on
    more threads than it gets, nobody computes the parts of the others in oneDNN's products.
    """
    openmp = ctypes.CDLL(None)
    try:
        if openmp.omp_get_dynamic() or openmp.omp_get_max_active_levels() < 1:
            return 1
        return int(openmp.omp_get_thread_limit())
    except AttributeError:  # a build of torch without OpenMP
        return sys.maxsize


def set_threads(otherwise: float, root: Path = Path("/")) -> None:
    """Give torch as many threads as OMP_NUM_THREADS says, else `otherwise`; at least 1, and no more than OpenMP gives.

    torchrun sets the variable to 1 for several ranks if nobody has given it. That counts as not given.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            given *= b"OMP_NUM_THREADS=" in (root / f"proc/{os.getppid()}/environ").read_bytes()
    wanted = int(given) if given.isdigit() else int(otherwise)
    torch.set_num_threads(max(1, min(wanted, openmp_threads())))


def repeat_bits() -> None:
    """Let products and updates round alike in every process on such a CPU: by one thread, whatever the addresses.

    Several threads would cut a tensor where its size says. MKL reads the variable before its first product (Intel's
    "Conditional Numerical Reproducibility"). A library that was linked with -ffast-math lets the thread that loads it
    take denormal numbers for 0.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    if (instructions := torch.backends.cpu.get_cpu_capability()) in ("AVX2", "AVX512"):
        os.environ.setdefault("MKL_CBWR", f"{instructions},STRICT")


def keep_to_openmp() -> None:
    """Lower torch's number of threads to what OpenMP gives, with a warning. Nothing gets slower by that."""
    threads, most = torch.get_num_threads(), openmp_threads()
    if threads > most:
        torch.set_num_threads(most)
        warnings.warn(
            f"torch had {threads} threads, but OpenMP may give it only {most} (OMP_THREAD_LIMIT, OMP_DYNAMIC or"
            f" OMP_MAX_ACTIVE_LEVELS), and products would lack the parts of the others: torch now has {most}",
            stacklevel=2,
        )


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) for this process's groups of a controller, "memory" or "cpu", innermost first.

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
    """Return the number in a file of a control group; None if there is none ("max", or v1's 2^63 less a page)."""
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number < 2**60 else None


def _reclaimable(folder: Path) -> int:
    """Return the bytes that a control group is charged for and would give back: pages of files."""
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
    except (OSError, ValueError):
        return 0
