"""The memory and the time of cores that control groups leave to a process."""

import os
from pathlib import Path

import pytest
import torch

from tpfuse.comm.limits import available_memory, core_time
from tpfuse.train import hardware

GIB = 2**30


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {99 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB"}
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (MEMINFO, 8 * GIB),
        (  # version 2: an inner group without a limit, an outer one with a limit
            MEMINFO
            | {
                "proc/self/cgroup": "0::/outer/inner",
                f"{V2}/outer/inner/memory.max": "max",
                f"{V2}/outer/inner/memory.current": GIB,
                f"{V2}/outer/memory.max": 4 * GIB,
                f"{V2}/outer/memory.current": 3 * GIB,
                f"{V2}/outer/memory.stat": f"anon 1\ninactive_file {GIB // 4}\nactive_file {GIB // 4}",
            },
            GIB + GIB // 2,
        ),
        (  # version 1, in a container whose group is mounted at the base
            MEMINFO
            | {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc",
                f"{V1}/memory.limit_in_bytes": 2 * GIB,
                f"{V1}/memory.usage_in_bytes": 3 * GIB,
            },
            0,
        ),
        (  # a number that means no limit
            MEMINFO
            | {
                "proc/self/cgroup": "4:memory:/",
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
                f"{V1}/memory.usage_in_bytes": 3 * GIB,
            },
            8 * GIB,
        ),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "?", "proc/meminfo": "MemAvailable: much"}, None),
    ],
)
def test_memory_that_control_groups_limit(files: dict[str, object], available: int | None, tmp_path: Path) -> None:
    assert available_memory(_write(tmp_path, files)) == available


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "damaged"}, None),
        ({"proc/self/cgroup": "0::/a/b", f"{V2}/a/b/cpu.max": "max 100000", f"{V2}/a/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "4:memory:/\n5:cpu,cpuacct:/docker/abc",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 400000,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            },
            None,
        ),
    ],
)
def test_time_that_control_groups_limit(
    files: dict[str, object], cores: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert core_time(_write(tmp_path, files)) == (8 if cores is None else cores)


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 1, 8), (8, 3, 2), (2.5, 1, 2), (0.5, 1, 1)])
def test_ranks_share_the_cores_whose_time_they_may_take(
    cores: float, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(hardware, "core_time", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    hardware.set_threads(ranks)
    assert taken == [threads]
