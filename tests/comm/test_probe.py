"""The facts that `tpfuse.comm.probe` reports about a machine. GPUs are simulated."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory

from tpfuse.comm import probe as probes
from tpfuse.comm.probe import available_memory, memory_limit, no_peer_access, no_symmetric_memory, probe, time_limit

GIB = 2**30


def _found() -> dict[str, tuple[str, str]]:
    return {finding.name: (finding.value, finding.meaning) for finding in probe()}


def test_facts_of_this_machine() -> None:
    found = _found()
    assert found["CPU cores"][0] == str(len(os.sched_getaffinity(0)))
    assert found["shared memory"] == ("works", "anonymous (memfd): CPU ranks communicate through it")
    assert "GiB" in found["memory available"][0] or "MiB" in found["memory available"][0]
    assert all(finding.value and finding.meaning for finding in probe())
    if not torch.cuda.is_available():
        assert found["GPUs"][0] == "none"


def test_the_probe_leaves_nothing_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    probe()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {99 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB"}
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, None, None),
        (MEMINFO, None, 8 * GIB),
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
            4 * GIB,
            GIB + GIB // 2,
        ),
        (  # version 1, in a container whose group is mounted at the base
            MEMINFO
            | {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc",
                f"{V1}/memory.limit_in_bytes": 2 * GIB,
                f"{V1}/memory.usage_in_bytes": 3 * GIB,
            },
            2 * GIB,
            0,
        ),
        (  # a number that means no limit
            MEMINFO
            | {
                "proc/self/cgroup": "4:memory:/",
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
                f"{V1}/memory.usage_in_bytes": 3 * GIB,
            },
            None,
            8 * GIB,
        ),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "?", "proc/meminfo": "MemAvailable: much"}, None, None),
    ],
)
def test_memory_that_control_groups_limit(
    files: dict[str, object], limit: int | None, available: int | None, tmp_path: Path
) -> None:
    root = _write(tmp_path, files)
    assert memory_limit(root) == limit
    assert available_memory(root) == available


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
def test_time_that_control_groups_limit(files: dict[str, object], cores: float | None, tmp_path: Path) -> None:
    assert time_limit(_write(tmp_path, files)) == cores


def test_unknown_facts_are_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        patch.setattr(shutil, "disk_usage", refused)
        patch.setattr(probes, "available_memory", lambda: None)
        found = _found()
        assert found["shared memory"][0] == "memfd_create: [Errno 1] Operation not permitted"
        assert found["shared memory"][1] == "CPU ranks use Gloo instead"
        assert found["/dev/shm"][0] == "not there" and found["memory available"][0] == "unknown"
    monkeypatch.setattr(os, "posix_fallocate", refused)
    assert "not permitted" in _found()["shared memory"][0]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Simulates three GPUs. apart: pairs without peer access; having: attributes of the driver, by GPU."""
    machine = SimpleNamespace(apart=set(), having={}, status=0)

    class Driver:
        def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
            value._obj.value = int(device in machine.having.get(attribute, ()))
            return int(machine.status)

    properties = SimpleNamespace(
        name="NVIDIA H100", total_memory=80 * GIB, multi_processor_count=132, major=9, minor=0, uuid="GPU-1"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in machine.apart)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(probes, "no_symmetric_memory", lambda: "")
    yield machine


def test_facts_of_gpus(gpus: SimpleNamespace) -> None:
    gpus.having = {132: (0, 1, 2), 128: (1,)}
    found = _found()
    assert found["cuda:2"] == ("NVIDIA H100, 80.0 GiB, 132 processors", "compute capability 9.0")
    assert found["peer access"][0] == "between all GPUs"
    assert found["multicast"][0] == "yes" and found["fabric handles"][0] == "cuda:1"
    assert found["symmetric memory of torch"] == ("CUDA backend", "GPU ranks can access each other's memory")
    gpus.apart = {(2, 0)}  # One direction is enough.
    gpus.status = 100
    found = _found()
    assert found["peer access"][0] == "not between cuda:0 and cuda:2"
    assert found["multicast"][0] == "unknown"
    gpus.apart = {(0, 1), (0, 2), (1, 2)}
    assert no_peer_access(range(3)) == ["cuda:0 and cuda:1", "cuda:0 and cuda:2", "cuda:1 and cuda:2"]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("CUDA", ""),
        (None, "was built without symmetric memory for CUDA"),
        ("NVSHMEM", "torch's symmetric memory uses NVSHMEM in this process: unset TORCH_SYMMMEM, which chose it"),
    ],
)
def test_the_backend_of_torchs_symmetric_memory(
    backend: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_SymmetricMemory, "get_backend", lambda device: backend)
    assert no_symmetric_memory().endswith(reason) and bool(no_symmetric_memory()) == bool(reason)
