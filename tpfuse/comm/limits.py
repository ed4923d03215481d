"""The memory and the time of cores that this process may still take, which control groups such as containers limit."""

import os
from collections.abc import Iterator
from pathlib import Path

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
