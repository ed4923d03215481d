"""The memory and the time of cores that control groups leave to a process, and the threads that it takes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpfuse.comm import limits
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.limits import available_memory, core_time
from tpfuse.testing.patience import patient

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


UNDER_TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("share", "environment", "of_torchrun", "limit", "threads"),
    [
        (8, {}, None, 99, 8),
        (2.5, {}, None, 99, 2),
        (0.5, {}, None, 99, 1),
        (8, {"OMP_NUM_THREADS": "3"}, None, 99, 3),
        (1, {"OMP_NUM_THREADS": " 12,4"}, None, 99, 12),
        (2, {"OMP_NUM_THREADS": "0"}, None, 99, 1),
        (2, {"OMP_NUM_THREADS": "many"}, None, 99, 2),
        (8, {}, None, 3, 3),
        (1, {"OMP_NUM_THREADS": "5"}, None, 3, 3),
        (8, UNDER_TORCHRUN, "HOME=/root", 99, 8),
        (8, UNDER_TORCHRUN, "HOME=/root\0OMP_NUM_THREADS=1", 99, 1),
        (8, UNDER_TORCHRUN | {"OMP_NUM_THREADS": "2"}, "HOME=/root", 99, 2),
        (8, UNDER_TORCHRUN, None, 99, 1),
    ],
)
def test_a_rank_takes_the_threads_that_are_given_or_its_share_and_no_more_than_openmp_gives(
    share: float,
    environment: dict[str, str],
    of_torchrun: str | None,
    limit: int,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    for name in UNDER_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if of_torchrun is not None:
        _write(tmp_path, {f"proc/{os.getppid()}/environ": of_torchrun})
    monkeypatch.setattr(limits, "openmp_threads", lambda: limit)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    limits.set_threads(share, tmp_path)
    assert taken == [threads]


def test_openmp_says_how_many_threads_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    openmp = ctypes.CDLL(None)
    usual, levels = limits.openmp_threads(), openmp.omp_get_max_active_levels()
    assert usual > torch.get_num_threads()
    for change, back in (("dynamic", 0), ("max_active_levels", levels)):
        getattr(openmp, f"omp_set_{change}")(change == "dynamic")
        try:
            assert limits.openmp_threads() == 1
        finally:
            getattr(openmp, f"omp_set_{change}")(back)
    assert limits.openmp_threads() == usual
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert limits.openmp_threads() == sys.maxsize, "a torch without OpenMP"


PRODUCT = """
import sys, warnings, torch
from tpfuse.comm import limits
rows, terms, columns = 192, 52, 48
x, weight = torch.randn(rows, terms), torch.randn(columns, terms)
expected = x @ weight.t()
def right():
    spare = torch.full((rows, columns), torch.nan)
    del spare
    return torch.allclose(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""), expected, atol=1e-4)
limits.set_threads(2)
print(torch.get_num_threads(), all([right() for _ in range(20)]))
torch.set_num_threads(2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    limits.keep_to_openmp()
    limits.keep_to_openmp()
print(torch.get_num_threads(), all([right() for _ in range(20)]), len(said), said[0].message)
"""


@pytest.mark.processes
@pytest.mark.parametrize("setting", ["OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true", "OMP_MAX_ACTIVE_LEVELS=0"])
def test_products_of_onednn_are_right_under_the_limits_of_openmp(setting: str) -> None:
    """oneDNN computes wrong products with the two threads that torch would take, in float32 on every CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", **dict([setting.split("=")])}
    run = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    first, second = run.stdout.splitlines()
    assert first == "1 True"
    assert second.startswith("1 True 1 torch had 2 threads, but OpenMP may give it only 1 (OMP_THREAD_LIMIT, OMP_DYNA")


def test_ranks_that_connect_keep_to_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the user's own may have set more threads."""
    monkeypatch.setattr(limits, "openmp_threads", lambda: 2)
    torch.set_num_threads(3)
    group = type("Group", (), {"size": lambda self: 1})()
    with pytest.warns(UserWarning, match=r"torch had 3 threads, but OpenMP may give it only 2 .*: torch now has 2$"):
        choose_implementation(torch.device("cpu"), torch.float32, group)
    assert torch.get_num_threads() == 2
