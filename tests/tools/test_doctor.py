"""`tpfuse doctor` on this machine, on a simulated machine with eight GPUs, and on broken variants of it."""

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tpfuse import cli
from tpfuse.comm import probe
from tpfuse.tools import doctor
from tpfuse.tools import machine as machines
from tpfuse.tools.machine import Finding, Gpu, Machine
from tpfuse.train import host
from tpfuse.train.errors import RunError

GIB = 2**30
GPUS = [Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), f"0000-{number}") for number in range(8)]
VOLTA = replace(GPUS[0], name="Tesla V100", capability=(7, 0), problem="Tesla V100: the kernels need 8.0")
PCI = [f"0000:{number:02x}:00.0" for number in range(8)]
UUIDS = "".join(f"{number}, GPU-0000-{number}\n" for number in range(8))
FILES = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
    "proc/driver/nvidia/params": "RmLogonRC: 1\nRmProfilingAdminOnly: 0\n",
    "proc/sys/kernel/perf_event_paranoid": "2",
    "proc/self/status": "Name: python\nCapEff:\t0000000000000000\n",
    "sys/class/net/lo/mtu": "65536",
    "sys/class/net/eth0/mtu": "1500",
    "sys/devices/system/node/node0/cpulist": "0-63",
    "dev/nvidiactl": "",
    **{f"dev/nvidia{number}": "" for number in range(8)},
    **{f"proc/driver/nvidia/gpus/{name}/information": "" for name in PCI},
    **{f"sys/bus/pci/devices/{name}/numa_node": str(number // 4) for number, name in enumerate(PCI)},
}
TWO_NODES = {"sys/devices/system/node/node0/cpulist": "0-31", "sys/devices/system/node/node1/cpulist": "32-63"}
CLOCKS = "nvidia-smi --query-gpu=index,clocks_event_reasons.active --format=csv,noheader,nounits"
OLD_CLOCKS = CLOCKS.replace("event", "throttle")
UUID_QUERY = "nvidia-smi --query-gpu=index,uuid --format=csv,noheader,nounits"


def topology(link: str) -> str:
    """Returns the matrix of `nvidia-smi topo -m` for eight GPUs and a network adapter."""
    names = [f"GPU{number}" for number in range(8)]
    rows = [[name, *(" X " if name == other else link for other in names), "PXB", "0-31", "0"] for name in names]
    adapter = ["NIC0", *["PXB"] * 8, " X ", "", ""]
    header = "\t\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"
    return "\n".join([header, *("\t".join(row) for row in [*rows, adapter]), "", "Legend:", "  X    = Self"])


OUTPUTS = {
    CLOCKS: "".join(f"{number}, 0x0000000000000001\n" for number in range(8)),
    UUID_QUERY: UUIDS,
    "nvidia-smi topo -m": topology("NV18"),
    "nsys --version": "NVIDIA Nsight Systems version 2025.3.1",
    "ncu --version": "NVIDIA (R) Nsight Compute Command Line Profiler",
}
VERSIONS = {"python": "3.12.3", "torch": "2.13.0+cu130", "triton": "3.7.1", "numpy": "2.3.0"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ENVIRONMENT = {"OMP_NUM_THREADS": "8", "HOME": "/root"}
FACTS: dict[str, object] = {
    "pinned_triton": "3.7.1", "built_for": "13.0", "nccl": "2.28.3", "gloo": True, "cuda_of_driver": 13000,
    "cuda_error": "", "gpus": GPUS, "peer_access": True, "native_atomics": True, "mps": False, "multicast": "yes",
    "obstacle": "", "decisions": 0, "interpreted": False, "shared_memory": "", "process_descriptors": "",
    "python_header": True,
    "available_memory": 900 * GIB, "time_limit": None, "space": (64 * GIB, 60 * GIB), "writable": True, "cores": 64,
    "usable_cores": set(range(64)),
}  # fmt: skip
LIMITS = {resource.RLIMIT_NOFILE: 65536, resource.RLIMIT_MEMLOCK: None}
CPU_ONLY: dict[str, Any] = {
    "gpus": [], "cuda_of_driver": None, "built_for": None, "nccl": None, "pinned_triton": None,
    "versions": {"torch": "2.13.0+cpu"}, "files": {name: None for name in FILES if "nvidia" in name},
}  # fmt: skip


def _merged(usual: Mapping[Any, Any], changes: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """Returns the usual entries with the changes, among which None deletes an entry."""
    return {name: value for name, value in {**usual, **(changes or {})}.items() if value is not None}


class StandIn(Machine):
    """A healthy machine with eight GPUs. facts: results of methods, or functions that replace them."""

    def __init__(
        self,
        *,
        files: Mapping[str, str | None] | None = None,
        outputs: Mapping[str, str | None] | None = None,
        versions: Mapping[str, str] | None = None,
        environment: Mapping[str, str | None] | None = None,
        limits: Mapping[int, int] | None = None,
        **facts: object,
    ) -> None:
        super().__init__(Path("/nowhere"), _merged(ENVIRONMENT, environment))
        self.files, self.outputs = _merged(FILES, files), _merged(OUTPUTS, outputs)
        self.versions, self.limits = _merged(VERSIONS, versions), {**LIMITS, **(limits or {})}
        for name, fact in {**FACTS, **facts}.items():
            assert hasattr(Machine, name), name
            setattr(self, name, fact if callable(fact) else lambda *_, fact=fact: fact)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        inside = (path.removeprefix(f"{folder}/") for path in self.files if path.startswith(f"{folder}/"))
        return sorted({path.split("/")[0] for path in inside})

    def output(self, *command: str) -> str | None:
        return self.outputs.get(" ".join([Path(command[0]).name, *command[1:]]))

    def program(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name == "gcc" or f"{name} --version" in self.outputs else None

    def version(self, package: str) -> str:
        return str(self.versions[package])

    def limit(self, kind: int) -> int | None:
        return self.limits[kind]


def found(machine: Machine, status: str) -> list[str]:
    """Returns the texts of the findings with a status."""
    return [finding.text for finding in doctor.examine(machine) if finding.status == status]


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(StandIn(), "fails") == found(StandIn(), "note") == []
    assert doctor.run(False, StandIn()) == 0
    lines = capsys.readouterr().out.splitlines()
    for text in (
        "Python is 3.12.3.",
        "torch is 2.13.0+cu130, built for CUDA 13.0.",
        "Triton is 3.7.1, which belongs to this torch.",
        "The NVIDIA driver 580.65.06 supports CUDA 13.0.",
        "Triton builds its launchers with /usr/bin/gcc.",
        "Processes can share anonymous memory, through which ranks watch each other.",
        "NCCL is 2.28.3.",
        "cuda:7 is NVIDIA H100 80GB HBM3 with 80.0 GiB and compute capability 9.0.",
        "Nothing slows down the clocks of the GPUs at this moment.",
        "MPS does not run.",
        "Each of the 28 pairs of GPUs has NVLink (18 links) with peer access and native atomic operations.",
        "All GPUs support multicast, which tpfuse does not use yet.",
        "900.0 GiB of memory are available.",
        "/dev/shm has 61440 MiB free of 65536 MiB, which only NCCL uses.",
        "A process may open 65536 files.",
        "A process may lock any amount of memory, and there is no InfiniBand adapter that needs more.",
        "This process may use all 64 logical cores.",
        "There is one NUMA node.",
        "nsys can run.",
        "ncu can run and may read performance counters.",
        "No setting in the environment is known to hurt.",
        "tpfuse computes with Triton kernels, which --kernels auto means on GPUs.",
        "Ranks have symmetric memory with the backend cuda.",
        "Tensor-parallel products use collective (nothing is measured yet). `tpfuse train` measures the others in its"
        " first step.",
    ):
        assert f"  ok     {text}" in lines, text
    topics = [line for line in lines if line and not line.startswith(" ")]
    assert topics == [
        "software", "communication", "memory", "limits", "CPU", "GPUs", "clocks", "MPS", "links", "profilers",
        "environment", "what tpfuse will use", "nothing fails, 0 notes",
    ]  # fmt: skip


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "old torch": (
        {"versions": {"torch": "2.9.1+cu130"}},
        "torch 2.9.1+cu130 is older than 2.11, so symmetric memory and the layers will fail: pip install 'torch>=2.11'",
    ),
    "old Triton": (
        {"versions": {"triton": "3.5.1"}},
        "Triton 3.5.1 is older than 3.6, so the kernels will fail: pip install triton==3.7.1.",
    ),
    "interpreter": (
        {**CPU_ONLY, "versions": {"torch": "2.11.0+cpu", "triton": "3.6.0", "numpy": "2.4.0"}},
        "Kernels cannot be interpreted, so `tpfuse verify` without a GPU will fail: Triton 3.6.0 interprets",
    ),
    "no NCCL": ({"nccl": None}, "torch has no NCCL, so every run on several GPUs will fail"),
    "no Gloo": ({"gloo": False}, "torch has no Gloo, so every run on several CPU ranks will fail"),
    "no shared memory": (
        {"shared_memory": "memfd_create: [Errno 1]"},
        "Processes cannot share anonymous memory (memfd_create: [Errno 1]), so `tpfuse train` on several ranks will",
    ),
    "small /dev/shm": (
        {"space": (64 * 2**20, 60 * 2**20)},
        "/dev/shm has 60 MiB free of 64 MiB. NCCL takes about 10 MiB for each of the 8 ranks and will fail: delete",
    ),
    "no /dev/shm": ({"space": None}, "/dev/shm does not exist or cannot be written, so NCCL will fail"),
    "/dev/shm without permission": ({"writable": False}, "/dev/shm does not exist or cannot be written, so NCCL will"),
    "few files": (
        {"limits": {resource.RLIMIT_NOFILE: 40}},
        "A process may open 40 files, but each of 8 ranks needs about 48 and will fail: ulimit -n 4096.",
    ),
    "no C compiler": (
        {"program": lambda name: None if name in ("gcc", "clang") else name},
        "There is no C compiler, so every Triton kernel will fail when it is launched for the first time: install gcc",
    ),
    "no header of Python": ({"python_header": False}, "The C header of Python (Python.h) is missing, so every Triton"),
    "old driver": (
        {"cuda_of_driver": 12040},
        "supports CUDA 12.4, but torch is built for CUDA 13.0, so every use of a GPU will fail: update the driver",
    ),
    "torch without CUDA": (
        {"gpus": [], "built_for": None},
        "This machine has GPUs, but training on them will fail, because torch is built without CUDA",
    ),
    "GPUs that do not start": (
        {"gpus": [], "cuda_error": "Error 802: system not yet initialized"},
        "training on them will fail, because torch cannot use them: Error 802: system not yet initialized.",
    ),
    "GPUs that do not start for no known reason": (
        {"gpus": []},
        "training on them will fail, because torch cannot use them: the reason is unknown.",
    ),
    "old GPU": (
        {"gpus": [*GPUS[:7], VOLTA]},
        "cuda:7 is Tesla V100 with 80.0 GiB and compute capability 7.0. Triton kernels will fail: Tesla V100: the",
    ),
    "NVLink without peer access": (
        {"peer_access": lambda a, b: (a, b) != (2, 5)},
        "Between cuda:2 and cuda:5 there is NVLink (18 links) but no peer access, so symmetric memory will fail",
    ),
    "cuBLAS workspace": (
        {"environment": {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}},
        "CUBLAS_WORKSPACE_CONFIG=:0:0 will make --train.deterministic fail",
    ),
    "interface": (
        {"environment": {"GLOO_SOCKET_IFNAME": "eth0,eth7"}},
        "GLOO_SOCKET_IFNAME=eth0,eth7 names eth7, which does not exist, so Gloo will fail: choose from eth0, lo, or",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gives_status_1(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, text = FAULTS[name]
    machine = StandIn(**changes)
    (sentence,) = found(machine, "fails")
    assert text in sentence and sentence.endswith(".")
    assert doctor.run(False, machine) == 1
    out = capsys.readouterr().out
    assert f"  fails  {sentence}\n" in out and "\n1 finding will make something fail, " in out
    assert doctor.run(True, machine) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is False
    assert [entry["text"] for entry in document["findings"] if entry["status"] == "fails"] == [sentence]


def at(link: str) -> dict[str, str]:
    """Returns the change of the outputs for GPUs that this connects."""
    return {"nvidia-smi topo -m": topology(link)}


def clocks(word: str) -> dict[str, str | None]:
    """Returns the change of the outputs for GPU 3 with this state of its clocks."""
    return {CLOCKS: OUTPUTS[CLOCKS].replace("3, 0x0000000000000001", f"3, {word}")}


NOTES: dict[str, tuple[dict[str, Any], str]] = {
    "Triton of another torch": (
        {"versions": {"triton": "3.6.0"}},
        "Triton is 3.6.0, but 3.7.1 belongs to torch 2.13.0+cu130. torch.compile and the kernels may fail: pip install",
    ),
    "Triton of another torch by the table": (
        {"pinned_triton": None, "versions": {"torch": "2.15.0"}},
        "Triton is 3.7.1, but 3.9.0 belongs to torch 2.15.0.",
    ),
    "unknown pair": (
        {"pinned_triton": None, "versions": {"torch": "2.99.0"}},
        "It is unknown which one belongs to torch 2.99.0.",
    ),
    "interpreter beside GPUs": (
        {"versions": {"triton": "3.6.0", "numpy": "2.4.0"}, "pinned_triton": "3.6.0"},
        "Kernels cannot be interpreted",
    ),
    "no pidfd": ({"process_descriptors": "[Errno 38]"}, "pidfd_open does not work ([Errno 38]), so ranks notice later"),
    "unknown memory": ({"available_memory": None}, "It is unknown how much memory is available."),
    "/dev/shm without GPUs": ({**CPU_ONLY, "writable": False}, "/dev/shm does not exist or cannot be written. tpfuse"),
    "usual number of files": (
        {"limits": {resource.RLIMIT_NOFILE: 512}},
        "A process may open only 512 files. Runs on many ranks or with many files of data need more: ulimit -n 4096.",
    ),
    "little locked memory": (
        {"limits": {resource.RLIMIT_MEMLOCK: 8 * 2**20}, "files": {"sys/class/infiniband/mlx5_0/fw_ver": "28"}},
        "A process may lock only 8 MiB of memory, so NCCL may fail over mlx5_0: ulimit -l unlimited",
    ),
    "some cores": ({"usable_cores": {*range(16)}}, "This process may use 16 of the 64 logical cores."),
    "time of some cores": (
        {"time_limit": 6.5},
        "The control group may use the time of 6.5 cores, and threads on more of them are paused: set OMP_NUM_THREADS"
        " to 6 divided by the ranks.",
    ),
    "many threads": (
        {"environment": {"OMP_NUM_THREADS": "128"}},
        "OMP_NUM_THREADS=128 is more than the number of usable cores, 64, so threads take turns",
    ),
    "threads of torch": (
        {"environment": {"OMP_NUM_THREADS": None}},
        "OMP_NUM_THREADS is not set, so each rank that torchrun does not start takes 64 threads",
    ),
    "unknown NUMA nodes": (
        {"files": {"sys/devices/system/node/node0/cpulist": None}},
        "The NUMA nodes of this machine are unknown.",
    ),
    "no NUMA binding": (
        {"files": TWO_NODES},
        "This process may run on 2 of 2 NUMA nodes, and ranks slow down on the wrong one: start them with",
    ),
    "wrong NUMA binding": (
        {"files": TWO_NODES, "usable_cores": {5, 6}, "cores": 2},
        "This process is bound to NUMA node 0 of 2, but there are GPUs on node 1: bind each rank.",
    ),
    "unknown driver": (
        {"cuda_of_driver": None},
        "The NVIDIA driver 580.65.06 does not say which version of CUDA it supports.",
    ),
    "hidden GPUs": (
        {"gpus": [], "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        "CUDA_VISIBLE_DEVICES hides every GPU of this machine: unset it to use them.",
    ),
    "some GPUs": (
        {"gpus": GPUS[:2], "environment": {"CUDA_VISIBLE_DEVICES": "0,1"}},
        "CUDA_VISIBLE_DEVICES=0,1 shows 2 of 8 GPUs to this process.",
    ),
    "several models": (
        {"gpus": [*GPUS[:7], replace(GPUS[7], name="NVIDIA A100")]},
        "The GPUs are of several models, so the faster ones will wait.",
    ),
    "hot GPU": (
        {"outputs": clocks("0x0000000000000028")},
        "GPU 3 of nvidia-smi runs below its highest clocks, because the hardware has slowed the clocks down and the"
        " driver has slowed the clocks down because of the temperature.",
    ),
    "clocks of an old driver": (
        {"outputs": {CLOCKS: None, OLD_CLOCKS: "0, 0x0000000000000004\n"}},
        "GPU 0 of nvidia-smi runs below its highest clocks, because the power limit is reached.",
    ),
    "unknown clocks of one GPU": ({"outputs": {CLOCKS: "0, [N/A]\n1, 0x1\n"}}, "The state of the clocks of GPU 0"),
    "unknown clocks": ({"outputs": {CLOCKS: None}}, "The state of the clocks is unknown: nvidia-smi does not report"),
    "MPS": ({"mps": lambda gpu: gpu == 3}, "MPS runs. Ranks that share a GPU cannot share memory under it"),
    "unknown MPS": ({"mps": None}, "It is unknown whether MPS runs: the driver does not say."),
    "no peer access": (
        {"peer_access": False, "outputs": at("SYS")},
        "Each of the 28 pairs of GPUs has PCIe (SYS) without peer access, so ranks use NCCL there instead",
    ),
    "no native atomics": (
        {"native_atomics": False, "outputs": at("PHB")},
        "Each of the 28 pairs of GPUs has PCIe (PHB) with peer access but without native atomic operations, so signals",
    ),
    "unknown atomics": (
        {"native_atomics": lambda a, b: None if (a, b) == (0, 1) else True},
        "Between cuda:0 and cuda:1 there is NVLink (18 links) with peer access, and it is unknown whether there are",
    ),
    "PCIe": ({"outputs": at("PIX")}, "has PCIe (PIX) with peer access and native atomic operations; NVLink would be"),
    "unknown links": (
        {"outputs": {"nvidia-smi topo -m": None}},
        "Each of the 28 pairs of GPUs has an unknown connection with peer access and native atomic operations; NVLink",
    ),
    "unknown multicast": ({"multicast": "unknown"}, "It is unknown whether the GPUs support multicast"),
    "no nsys": ({"outputs": {"nsys --version": None}}, "nsys is not installed"),
    "no ncu": ({"outputs": {"ncu --version": None}}, "ncu is not installed"),
    "damaged nsys": (
        {"outputs": {"nsys --version": None}, "program": lambda name: name},
        "nsys is installed but cannot run: `nsys --version` fails.",
    ),
    "damaged ncu": (
        {"outputs": {"ncu --version": None}, "program": lambda name: name},
        "ncu is installed but cannot run: `ncu --version` fails.",
    ),
    "no samples of the CPU": (
        {"files": {"proc/sys/kernel/perf_event_paranoid": "4"}},
        "nsys can run, but it cannot sample the CPU: `sudo sysctl kernel.perf_event_paranoid=2` allows it.",
    ),
    "denied counters": (
        {"files": {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1"}},
        "ncu will fail with ERR_NVGPUCTRPERM when it reads counters: load the driver with NVreg_RestrictProfiling",
    ),
    "unknown counters": (
        {"files": {"proc/driver/nvidia/params": None}},
        "ncu can run; it is unknown whether it may read performance counters.",
    ),
    "no symmetric memory": (
        {"obstacle": "there is no peer access between cuda:0 and cuda:1"},
        "Ranks have no symmetric memory: there is no peer access between cuda:0 and cuda:1.",
    ),
    **{
        f"{name}={value}": ({"environment": {name: value}}, f"{name}={value} hurts: ")
        for name, value in (
            ("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_ALGO", "Ring"),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"), ("NCCL_PROTO", "Simple"), ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_P2P_LEVEL", "NVL"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_IB_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0"),
            ("NCCL_MAX_NCHANNELS", "4"), ("NCCL_DEBUG", "info"), ("TORCH_NCCL_BLOCKING_WAIT", "1"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("TRITON_INTERPRET", "1"),
            ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False"),
            ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments: false"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_a_note_gives_status_0(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, text = NOTES[name]
    machine = StandIn(**changes)
    sentences = [sentence for sentence in found(machine, "note") if text in sentence]
    assert len(sentences) == 1 and sentences[0].endswith("."), found(machine, "note")
    assert found(machine, "fails") == []
    assert doctor.run(False, machine) == 0
    assert f"  note   {sentences[0]}\n" in capsys.readouterr().out


HARMLESS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "0",
    "NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "0", "TRITON_CACHE_DIR": "/tmp/cache",
}  # fmt: skip


def test_settings_that_do_not_hurt_are_listed() -> None:
    machine = StandIn(environment={**HARMLESS, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "eth0"})
    assert found(machine, "note") == found(machine, "fails") == []
    listed = ", ".join(f"{name}={value}" for name, value in sorted(HARMLESS.items()))
    assert f"These settings are not known to hurt here: {listed}." in found(machine, "ok")
    without = StandIn(**CPU_ONLY, environment={"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert found(without, "note") == found(without, "fails") == []


def test_links_belong_to_the_visible_gpus() -> None:
    """torch sees GPUs 6 and 1 of nvidia-smi, in this order, which are the only ones without NVLink between them."""
    rows = topology("NV18").splitlines()
    rows[2] = "\t".join("SYS" if column == 7 else word for column, word in enumerate(rows[2].split("\t")))
    rows[7] = "\t".join("SYS" if column == 2 else word for column, word in enumerate(rows[7].split("\t")))
    outputs = {"nvidia-smi topo -m": "\n".join(rows)}
    (text,) = (text for text in found(StandIn(gpus=[GPUS[6], GPUS[1]], outputs=outputs), "note") if "Between" in text)
    assert text.startswith("Between cuda:0 and cuda:1 there is PCIe (SYS) with peer access")


def test_administrators_may_read_counters() -> None:
    files = {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1", "proc/sys/kernel/perf_event_paranoid": "4"}
    for capabilities in ("0000000000200000", "0000004000000000"):
        machine = StandIn(files={**files, "proc/self/status": f"CapEff:\t{capabilities}\n"})
        assert found(machine, "note") == []


def test_a_process_bound_to_the_node_of_its_gpus() -> None:
    near: dict[str, str | None] = {f"sys/bus/pci/devices/{name}/numa_node": "1" for name in PCI}
    unknown = dict(zip(near, ("-1", None), strict=False))
    nodes = {"sys/devices/system/node/node0/cpulist": "0-31", "sys/devices/system/node/node1/cpulist": "32-62,63"}
    machine = StandIn(files={**nodes, **near, **unknown}, usable_cores={63}, cores=1, environment=ONE_THREAD)
    assert "This process is bound to NUMA node 1 of 2." in found(machine, "ok")


def test_a_container_without_the_gpus_of_its_host() -> None:
    """The files in /proc show the container the GPUs, which it has no device files for."""
    hidden = {name: None for name in FILES if name.startswith("dev/")}
    facts: dict[str, Any] = {**CPU_ONLY, "files": {**TWO_NODES, **hidden}, "usable_cores": {0}, "cores": 1}
    machine = StandIn(**facts, environment={"OMP_NUM_THREADS": None})
    assert found(machine, "fails") == []
    assert {"There is no GPU.", "This process is bound to NUMA node 0 of 2."} <= {*found(machine, "ok")}


def test_drivers_name_themselves_in_two_ways() -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
    machine = StandIn(files={"proc/driver/nvidia/version": text})
    assert "The NVIDIA driver 550.54.15 supports CUDA 13.0." in found(machine, "ok")
    machine = StandIn(files={"proc/driver/nvidia/version": None})
    assert "The NVIDIA driver, whose version is unknown, supports CUDA 13.0." in found(machine, "ok")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        (
            CPU_ONLY,
            [
                "tpfuse computes with torch, which --kernels auto means on CPUs.",
                "Ranks have symmetric memory with the backend shm.",
                "Tensor-parallel products use direct (CPU ranks of one host).",
            ],
        ),
        (
            {"gpus": GPUS[:1]},
            [
                "tpfuse computes with Triton kernels, which --kernels auto means on GPUs.",
                "One rank runs on the one GPU, so nothing is communicated.",
            ],
        ),
        (
            {"decisions": 3, "interpreted": True},
            [
                "tpfuse computes with interpreted Triton kernels, which --kernels auto means on GPUs.",
                "Ranks have symmetric memory with the backend cuda.",
                "Tensor-parallel products use collective (nothing is measured yet), except for 3 cases that earlier"
                " runs have measured. `tpfuse train` measures the others in its first step.",
            ],
        ),
        (
            {"obstacle": "there is no peer access"},
            [
                "tpfuse computes with Triton kernels, which --kernels auto means on GPUs.",
                "Ranks have no symmetric memory: there is no peer access.",
                "Tensor-parallel products use collective (the ranks share no memory: there is no peer access).",
            ],
        ),
    ],
)
def test_what_tpfuse_will_use(changes: dict[str, Any], texts: list[str]) -> None:
    findings = doctor.examine(StandIn(**changes))
    assert [finding.text for finding in findings if finding.topic == "what tpfuse will use"] == texts


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    assert cli.run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert all(entry.keys() == {"topic", "status", "text"} for entry in document["findings"])
    assert any(torch.__version__ in entry["text"] for entry in document["findings"])
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert cli.run(["doctor"]) == 0
    assert "what tpfuse will use" in capsys.readouterr().out


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    assert machine.version("torch") == torch.__version__ and machine.version("triton") == triton.__version__
    assert machine.version("python").startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert machine.text("proc/self/status") and machine.text("no such file") is None
    assert "self" in machine.names("proc") and machine.names("no such folder") == []
    assert machine.output(sys.executable, "-c", "print(1)") == "1\n"
    assert machine.program("sh") and machine.program("no such command") is None
    assert machine.output(sys.executable, "-c", "exit(1)") is None and machine.output("no such command") is None
    monkeypatch.setattr(host, "_PATIENCE", 0.05)
    assert machine.output("sleep", "5") is None
    assert machine.limit(resource.RLIMIT_NOFILE) in (resource.getrlimit(resource.RLIMIT_NOFILE)[0], None)
    assert machine.usable_cores() == os.sched_getaffinity(0)
    assert machine.writable("tmp") and not machine.writable("proc")
    size, free = machine.space("tmp") or (0, 0)
    assert size >= free > 0 and Machine(tmp_path).space("dev/shm") is None
    assert machine.process_descriptors() == ""
    monkeypatch.setattr(machines.sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert not machine.python_header()
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    assert machine.python_header()
    monkeypatch.setattr(os, "pidfd_open", lambda pid: os.close(-1))
    assert "Bad file descriptor" in machine.process_descriptors()


def test_one_process_is_started_to_find_out_whether_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    output = Machine.output

    def counted(machine: Machine, *command: str) -> str | None:
        if command[0] == sys.executable:
            started.append(command)
        return output(machine, *command)

    monkeypatch.setattr(Machine, "output", counted)
    doctor.examine(Machine())
    assert len(started) == 1


def test_another_process_opens_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine().shared_memory() == ""
    monkeypatch.setattr(machines, "_OPEN", "raise PermissionError")
    assert "another process cannot open /proc/" in Machine().shared_memory()
    monkeypatch.setattr(machines, "anonymous_memory", lambda: "memfd_create: no")
    assert Machine().shared_memory() == "memfd_create: no"


def test_facts_that_torch_reports_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two GPUs is too old, and the second one cannot access its memory."""

    def properties(device: Any) -> SimpleNamespace:
        number = getattr(device, "index", device)
        return SimpleNamespace(
            name=f"GPU {number}", total_memory=GIB, major=7 + 2 * number, minor=0, uuid=f"id-{number}",
            multi_processor_count=80,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7 + 2 * device.index, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one == 0)
    monkeypatch.setattr(machines.CudaCalls, "why_not", lambda calls: "")
    machine = Machine()
    old, new = machine.gpus()
    assert old == Gpu("GPU 0", GIB, (7, 0), "id-0", "GPU 0: the kernels need compute capability 8.0 or newer")
    assert new.problem == "" and new.capability == (9, 0)
    assert not machine.peer_access(0, 1) and machine.native_atomics(0, 1) is None
    assert machine.obstacle([old, new]) == "there is no peer access between cuda:1 and cuda:0"
    answers = {(0, 1): True, (1, 0): False}
    monkeypatch.setattr(machines, "native_atomics", lambda one, other: answers[one, other])
    assert machine.native_atomics(0, 1) is False
    monkeypatch.setattr(machines.CudaCalls, "why_not", lambda calls: "torch is old")
    assert machine.obstacle([old, new]) == "torch is old"
    assert machine.obstacle([]) == ""
    monkeypatch.setattr(machines, "anonymous_memory", lambda: "refused")
    assert Machine().obstacle([]) == Machine().obstacle([old, new]) == "refused"


def test_a_library_that_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("tpfuse.tools.doctor")
    monkeypatch.setitem(sys.modules, "tpfuse.tools.doctor", None)
    assert cli.run(["doctor"]) == RunError("").status == 1
    assert "tpfuse doctor: error: tpfuse cannot be imported, so every command will fail: " in capsys.readouterr().err


def test_verdicts() -> None:
    fails, note = Finding("", "fails", ""), Finding("", "note", "")
    assert doctor.verdict([note]) == "nothing fails, 1 note"
    assert doctor.verdict([fails, fails, note, note]) == "2 findings will make something fail, 2 notes"


def test_multicast_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "gpus_with", lambda attribute, count: f"{attribute} {count}")
    assert Machine().multicast(4) == f"{probe.MULTICAST} 4"
    for answer, text in (("no", "No GPU supports multicast"), ("cuda:1", "Only cuda:1 can use multicast")):
        assert any(sentence.startswith(text) for sentence in found(StandIn(multicast=answer), "ok"))


def test_a_machine_without_gpus() -> None:
    machine = StandIn(**CPU_ONLY, limits={resource.RLIMIT_MEMLOCK: 2**23})
    assert found(machine, "note") == found(machine, "fails") == []
    expected = (
        "torch is 2.13.0+cpu, built for CPUs only.",
        "torch has no NCCL, which only runs on several GPUs need.",
        "/dev/shm has 61440 MiB free of 65536 MiB, which does not matter: CPU ranks use anonymous memory instead.",
        "A process may lock 8 MiB of memory, and there is no InfiniBand adapter that needs more.",
        "There is no NVIDIA driver, so tpfuse runs on the CPU.",
        "There is no GPU.",
        "ncu can run, but there is no GPU for it.",
    )
    assert set(expected) <= {*found(machine, "ok")}


def test_many_cores_need_no_more_files() -> None:
    """The processor's cores are not the ranks of a run."""
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: 2**23}
    machine = StandIn(**CPU_ONLY, limits=limits, cores=512, usable_cores=set(range(512)))
    assert "A process may open 1024 files." in found(machine, "ok")


def test_one_gpu_needs_neither_nccl_nor_links() -> None:
    machine = StandIn(gpus=GPUS[:1], nccl=None, space=(0, 0), environment={"CC": "icx"}, program=lambda name: name)
    assert found(machine, "note") == found(machine, "fails") == []
    assert "Triton builds its launchers with icx." in found(machine, "ok")
    assert not any(finding.topic == "links" for finding in doctor.examine(machine))


def test_clang_is_a_compiler_too() -> None:
    machine = StandIn(program=lambda name: name if name == "clang" else None)
    assert "Triton builds its launchers with clang." in found(machine, "ok")


def test_facts_about_software(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert machine.built_for() == "13.0" and machine.gloo()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    assert machine.nccl() == "2.28.3"
    required = ["numpy", 'triton==3.7.1; platform_system == "Linux"', "tritonclient==1.0"]
    monkeypatch.setattr(machines.importlib.metadata, "requires", lambda package: required)
    assert machine.pinned_triton() == "3.7.1"
    monkeypatch.setattr(machines.importlib.metadata, "requires", lambda package: None)
    assert machine.pinned_triton() is None
    monkeypatch.setattr(machines, "driver", lambda: "13000")
    assert machine.cuda_of_driver() == 13000
    monkeypatch.setattr(machines, "driver", lambda: "?")
    assert machine.cuda_of_driver() is None
    monkeypatch.setattr(machines, "mps_enabled", lambda gpu: gpu == 2)
    assert machine.mps(2) and not machine.mps(1)
    monkeypatch.setattr(machines, "INTERPRETED", False)
    assert not machine.interpreted()
    monkeypatch.setattr(machines, "read_decisions", lambda file, name: dict.fromkeys("abc"))
    assert machine.decisions() == 3


def test_errors_of_torch_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Error 802: system not yet initialized\nmore")

    monkeypatch.setattr(torch.cuda, "init", fails)
    assert Machine().cuda_error() == "Error 802: system not yet initialized"
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert Machine().cuda_error() == ""
    monkeypatch.setattr(torch.cuda.nccl, "version", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: fails())
    assert Machine().gpus() == []
    assert Machine().nccl() is None
