"""`tpfuse doctor` on this machine, on a simulated machine with eight GPUs, and on broken variants of it.

Faked in a simulated machine: all facts, which are results of `Machine`'s methods. Real: what is found in them and said.
The tests of facts ask this machine, and replace the calls of torch where there is no GPU.
"""

import contextlib
import json
import os
import re
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
from tpfuse.errors import RunError
from tpfuse.tools import doctor
from tpfuse.tools import machine as facts
from tpfuse.tools.doctor import profiler
from tpfuse.tools.machine import Machine, VisibleGpu

GIB = 2**30
GPUS = [VisibleGpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), f"0000-{number}") for number in range(8)]
VOLTA = replace(GPUS[0], name="Tesla V100", capability=(7, 0), problem="Tesla V100: the kernels need 8.0")
PARAMETERS, RIGHTS = "proc/driver/nvidia/params", "proc/self/status"
FILES = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
    PARAMETERS: "RmLogonRC: 1\nRmProfilingAdminOnly: 0\n",
    RIGHTS: "Name: python\nCapEff:\t0000000000000000\n",
    "sys/class/net/lo/mtu": "65536",
    "sys/class/net/eth0/mtu": "1500",
    **{f"dev/nvidia{number}": "" for number in range(8)},
}
TOOLS = {
    "nsys": "NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0\n",
    "ncu": "NVIDIA (R) Nsight Compute\nCopyright (c) 2018-2026 NVIDIA Corporation\nVersion 2026.1.1.0\n",
}


VERSIONS = {
    "python": "3.12.3", "torch": "2.13.0+cu130", "triton": "3.7.1", "numpy": "2.3.0", "cuda": "13.0", "driver": "13.0",
    "nccl": "2.28.3", "pinned": "3.7.1", "ptxas": "12.8.93",
}  # fmt: skip


def versions(**changes: str) -> dict[str, dict[str, str]]:
    return {"versions": {**VERSIONS, **changes}}


ENVIRONMENT = {"OMP_NUM_THREADS": "8", "HOME": "/root"}
FACTS: dict[str, object] = {
    "versions": VERSIONS, "cuda_error": "", "gpus": GPUS, "gpu_obstacle": "", "lost_signal": "",
    "shared_memory": "", "unwritable_cache": "", "python_header": True, "space": (64 * GIB, 60 * GIB),
    "open_files": 65536, "cores": 64.0, "threads": (8, 1000), "wrong_product": "",
    "program": lambda name: f"/usr/bin/{name}" if name in ("gcc", *TOOLS) else None,
    "output": lambda path, option: TOOLS.get(Path(path).name),
}  # fmt: skip
CPU_ONLY: dict[str, Any] = {
    **versions(cuda="", driver="", nccl="", pinned=""), "gpus": [],
    "files": {name: None for name in FILES if "nvidia" in name},
}  # fmt: skip


class SimulatedMachine(Machine):
    """A healthy machine with eight GPUs. facts: results of methods, or functions that replace them."""

    def __init__(
        self,
        *,
        files: Mapping[str, str | None] | None = None,
        environment: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(Path("/nowhere"), {**ENVIRONMENT, **(environment or {})})
        self.files = {path: text for path, text in {**FILES, **(files or {})}.items() if text is not None}
        for name, fact in {**FACTS, **facts}.items():
            assert hasattr(Machine, name), name
            setattr(self, name, fact if callable(fact) else lambda *_, fact=fact: fact)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        inside = (path.removeprefix(f"{folder}/") for path in self.files if path.startswith(f"{folder}/"))
        return sorted({path.split("/")[0] for path in inside})


def found(machine: Machine, status: str) -> list[str]:
    """Return the texts of the findings with a status."""
    return [finding.text for finding in doctor.examine(machine) if finding.status == status]


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(False, SimulatedMachine()) == 0
    lines = capsys.readouterr().out.splitlines()
    topics = ["software", "communication", "limits", "GPUs", "profilers", "what tpfuse will use"]
    assert [line for line in lines if line and line[0] != " "] == [*topics, "nothing fails, 0 notes"]
    assert {line[:9] for line in lines if line[:1] == " "} == {"  ok     "}
    for text in (
        "Triton is 3.7.1, which belongs to this torch.",
        "ptxas 12.8.93 assembles the kernels.",
        "The NVIDIA driver 580.65.06 supports CUDA 13.0.",
        "cuda:7 is NVIDIA H100 80GB HBM3 with 80.0 GiB and compute capability 9.0.",
        "/usr/bin/ncu can record.",
        "Ranks have symmetric memory with the backend cuda.",
    ):
        assert f"  ok     {text}" in lines, text


# Each fault and its status, what of the machine is different, and a part of the finding.
FAULTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "fails",
        CPU_ONLY | versions(torch="2.11.0", triton="3.6.0", numpy="2.4.0", driver="", pinned=""),
        "Kernels cannot be interpreted, so `tpfuse verify` without a GPU will fail: Triton 3.6.0 interprets",
    ),
    ("note", versions(triton="3.6.0", numpy="2.4.0", pinned="3.6.0"), "cannot be interpreted"),
    ("note", versions(triton="3.6.0"), "but 3.7.1 belongs to torch 2.13.0+cu130. torch.compile and the"),
    ("note", versions(torch="2.15.0", pinned=""), "but 3.9.0 belongs to torch 2.15.0."),
    ("note", versions(torch="2.99.0", pinned=""), "unknown which one belongs to torch 2.99.0"),
    ("fails", {"program": {name: name for name in TOOLS}.get}, "no C compiler, so every Triton kernel will fail"),
    ("fails", {"python_header": False}, "(Python.h) is missing, so every Triton kernel will fail"),
    ("fails", {"space": None}, "/dev/shm does not exist or cannot"),
    (
        "fails",
        {"space": (2**26, 60 * 2**20)},
        "/dev/shm has 60 MiB free of 64 MiB. NCCL takes about 10 MiB for each of the 8 ranks and will fail: delete",
    ),
    ("fails", {"open_files": 40}, "may open 40 files, but each of 8 ranks needs about 48 and will fail: ulimit -n"),
    ("note", {"cores": 6.5}, "OMP_NUM_THREADS=8 is more than the 6.5 cores whose time this process may take"),
    (
        "note",
        {"threads": (8, 2)},
        "torch takes 8 threads, but OpenMP gives it 2 (OMP_THREAD_LIMIT, OMP_DYNAMIC or OMP_MAX_ACTIVE_LEVELS). tpfuse",
    ),
    (
        "fails",
        {"wrong_product": "[3, 4] x [4, 5] in torch.bfloat16, computed with 2 threads"},
        "product [3, 4] x [4, 5] in torch.bfloat16, computed with 2 threads, is wrong, so training on the CPU will",
    ),
    ("fails", versions(driver="12.4"), "supports CUDA 12.4, but torch is built for CUDA 13.0, so every use of a GPU"),
    ("fails", {"gpus": []} | versions(cuda=""), "has GPUs, but training on them will fail, because torch is built"),
    ("fails", {"gpus": [], "cuda_error": "Error 802"}, "because torch cannot use them: Error 802."),
    ("fails", {"gpus": []}, "because torch cannot use them: the reason is unknown."),
    ("fails", {"gpus": [*GPUS[:7], VOLTA]}, "capability 7.0. Triton kernels will fail: Tesla V100: the kernels"),
    ("note", {"gpus": [], "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES hides every GPU"),
    ("note", {"program": {"gcc": "gcc", "ncu": "ncu"}.get}, "--with nsys` cannot record: nsys is neither on PATH"),
    ("fails", {"environment": {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}}, ":0:0 will make --train.deterministic fail"),
    ("fails", versions(ptxas=""), "no ptxas that runs, so every Triton kernel will fail at its first launch: install"),
    ("fails", {"unwritable_cache": "/x"}, "cannot write its cache /x, so every Triton kernel will fail at its first"),
    ("fails", {"environment": {"GLOO_SOCKET_IFNAME": "eth0,eth7"}}, "names eth7, which does not exist, so Gloo will"),
    (
        "note",
        {"gpu_obstacle": "there is no peer access between cuda:0 and cuda:1"},
        "Ranks have no symmetric memory, because there is no peer access between cuda:0 and cuda:1: check the driver",
    ),
    ("note", {"gpu_obstacle": "torch is old"}, "Ranks have no symmetric memory, because torch is old."),
    (
        "fails",
        {"lost_signal": "cuda:0 to cuda:1 (CUDA error: not supported)"},
        "Signals from cuda:0 to cuda:1 (CUDA error: not supported) do not arrive, so ranks with symmetric memory will",
    ),
    *(
        ("note", {"environment": dict([setting.split("=")])}, f"{setting} hurts: ")
        for setting in (
            "CUDA_DEVICE_MAX_CONNECTIONS=1", "CUDA_LAUNCH_BLOCKING=True", "NCCL_NVLS_ENABLE=0",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL", "PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments: False",
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize(("status", "changes", "text"), FAULTS)
def test_faults(status: str, changes: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine, failed = SimulatedMachine(**changes), status == "fails"
    (sentence,) = (sentence for sentence in found(machine, status) if text in sentence)
    assert len(found(machine, "fails")) == failed and sentence.endswith(".")
    assert doctor.run(False, machine) == failed
    said = capsys.readouterr().out
    assert f"  {status:<6} {sentence}\n" in said and ("1 finding will make something fail, " in said) == failed
    assert doctor.run(True, machine) == failed
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is not failed
    assert sentence in [entry["text"] for entry in document["findings"] if entry["status"] == status]


def test_processes_that_share_no_memory_use_no_symmetric_memory() -> None:
    machine = SimulatedMachine(shared_memory="memfd_create: [Errno 1]")
    (sentence,) = found(machine, "fails")
    assert "share anonymous memory (memfd_create: [Errno 1]), so `tpfuse train` on several ranks will fail" in sentence
    assert found(machine, "note")[0] == "Ranks have no symmetric memory, because memfd_create: [Errno 1]."


SYMMETRIC = "Ranks have symmetric memory with the backend {}."
COMPUTES = "tpfuse computes with {}, which --kernels auto means on {}."
MEASURED = " `tpfuse train` measures them in its first step, and keeps what it finds."


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        (
            CPU_ONLY,
            [COMPUTES.format("torch", "CPUs"), SYMMETRIC.format("shm"),
             "Tensor-parallel products use direct (CPU ranks of one host)."],
        ),
        (
            {**versions(nccl=""), "gpus": GPUS[:1], "environment": {"CC": "icx"}, "program": str},
            [COMPUTES.format("Triton kernels", "GPUs"), "One rank runs on the one GPU, so nothing is communicated."],
        ),
        (
            {},
            [COMPUTES.format("Triton kernels", "GPUs"), SYMMETRIC.format("cuda"),
             "Tensor-parallel products use collective (nothing is measured yet)." + MEASURED],
        ),
    ],
)  # fmt: skip
def test_what_tpfuse_will_use(changes: dict[str, Any], texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "INTERPRETED", False)
    machine = SimulatedMachine(**changes)
    assert found(machine, "note") == found(machine, "fails") == []
    assert [x.text for x in doctor.examine(machine) if x.topic == "what tpfuse will use"] == texts


def test_settings_that_do_not_hurt() -> None:
    harmless = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0", "NCCL_P2P_DISABLE": "0",
        "NCCL_NVLS_ENABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    on_cpus = {"CUDA_LAUNCH_BLOCKING": "1", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    for machine in (SimulatedMachine(environment=harmless), SimulatedMachine(**CPU_ONLY, environment=on_cpus)):
        assert found(machine, "note") == found(machine, "fails") == []


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"files": {f"dev/nvidia{number}": None for number in range(8)}}, "records GPUs, and there is none here"),
        ({"program": None}, "is neither on PATH nor in .*: install Nsight"),
        ({"output": "Copyright (c) 2018-2030\nVersion 2019.5.3"}, "Nsight .* 2019.5, which is too old"),
        ({"output": None}, "--version` fails or names no version: install Nsight"),
        ({"output": "hello"}, "--version` fails or names no version: install Nsight"),
        ({"environment": {"CUDA_INJECTION64_PATH": "x"}}, r"another profiler .* \(CUDA_INJECTION64_PATH is set\)"),
    ],
)  # fmt: skip
def test_whether_a_profiler_can_record(name: str, changes: dict[str, Any], reason: str) -> None:
    path, problem = profiler(SimulatedMachine(**changes), name)
    assert re.search(reason, problem) and bool(problem) == bool(reason)
    assert problem or path == f"/usr/bin/{name}"


def test_torch_records_cpus_under_another_profiler() -> None:
    assert profiler(SimulatedMachine(), "torch") == ("", "")
    attached = {"NSYS_PROFILING_SESSION_ID": "1"}
    assert "another profiler" in profiler(SimulatedMachine(environment=attached), "torch")[1]
    assert profiler(SimulatedMachine(**CPU_ONLY, environment=attached), "torch") == ("", "")


@pytest.mark.parametrize(
    ("only", "rights", "permitted"),
    [("1", "0" * 16, False), ("0", "0" * 16, True), ("1", "0000000000200000", True), ("1", "0000004000000000", True)],
)
def test_ncu_needs_the_right_to_read_counters(only: str, rights: str, permitted: bool) -> None:
    machine = SimulatedMachine(files={PARAMETERS: f"RmProfilingAdminOnly: {only}", RIGHTS: f"CapEff:\t{rights}\n"})
    assert ("ERR_NVGPUCTRPERM: load the driver with NVreg_" in profiler(machine, "ncu")[1]) is not permitted
    assert profiler(machine, "nsys")[1] == "", "it reads no counters"
    assert profiler(SimulatedMachine(files={PARAMETERS: None}), "ncu")[1] == "", "unknown: ncu will say it"


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    assert cli.run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert all(entry.keys() == {"topic", "status", "text"} for entry in document["findings"])
    assert any(torch.__version__ in entry["text"] for entry in document["findings"])
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    assert machine.versions()["torch"] == torch.__version__ and machine.versions()["triton"] == triton.__version__
    assert machine.text("proc/self/status") and machine.text("no such file") is None
    assert "self" in machine.names("proc") and machine.names("no such folder") == []
    assert machine.output(sys.executable, "-c", "print(1)") == "1\n"
    assert machine.output(sys.executable, "-c", "exit(1)") is None and machine.output("no such command") is None
    monkeypatch.setattr(facts, "_PATIENCE", 0.05)
    assert machine.output("sleep", "5") is None
    for folder in ("2024.1.1", "2025.3.1"):
        place = tmp_path / "opt/nvidia/nsight-systems" / folder / "bin"
        place.mkdir(parents=True)
        (place / "nsys").symlink_to("/bin/sh")
    assert Machine(tmp_path, {"PATH": "/bin"}).program("sh") == "/bin/sh"
    assert Machine(tmp_path, {"PATH": "/nowhere"}).program("nsys") == str(place / "nsys"), "the newest"
    assert Machine(tmp_path, {"PATH": "/nowhere"}).program("ncu") is None
    for folder, unwritable in ((tmp_path / "new/cache", ""), ("/proc/new/cache", "/proc/new/cache")):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        assert machine.unwritable_cache() == unwritable
    size, free = machine.space("tmp") or (0, 0)
    assert size >= free > 0 and machine.space("proc") is None
    assert 0 < machine.cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_which_a_part_is_not_computed_is_found(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for oneDNN's, whose second thread OpenMP did not start; the other dtype is right."""
    plain = torch.mm

    def by_one_thread(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        half = len(a) // 2 if a.dtype == dtype and torch.get_num_threads() == 2 else len(a)
        out[:half] = plain(a[:half], b)
        return out

    monkeypatch.setattr(torch, "mm", by_one_thread)
    for threads, wrong in (("1", ""), ("2", f"[192, 52] x [52, 48] in {dtype}, computed with 2 threads")):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert Machine().wrong_product() == wrong


def test_memory_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert Machine().shared_memory() == ""
    monkeypatch.setattr(facts, "_OPEN", "raise PermissionError")
    assert "another process cannot open /proc/" in Machine().shared_memory()
    monkeypatch.setattr(os, "posix_fallocate", refused)
    assert "not permitted" in Machine().shared_memory()
    monkeypatch.setattr(os, "memfd_create", refused)
    assert Machine().shared_memory() == "memfd_create: [Errno 1] Operation not permitted"


def test_facts_that_torch_reports_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two GPUs is too old, and the second one cannot access its memory."""

    def properties(device: Any) -> SimpleNamespace:
        number = getattr(device, "index", device)
        return SimpleNamespace(
            name=f"GPU {number}", total_memory=GIB, major=7 + 2 * number, minor=0, uuid=f"id-{number}",
            multi_processor_count=80,
        )  # fmt: skip

    def fail(*_: object) -> None:
        raise RuntimeError("Error 802: system not yet initialized\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    first = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=first: (7 + 2 * device.index, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one == 0)
    monkeypatch.setattr(facts.CudaCalls, "why_not", lambda calls: "")
    machine = Machine()
    old, new = machine.gpus()
    assert old == VisibleGpu("GPU 0", GIB, (7, 0), "id-0", "GPU 0: the kernels need compute capability 8.0 or newer")
    assert new.problem == "" and new.capability == (9, 0)
    assert machine.gpu_obstacle([old, new]) == "there is no peer access between cuda:1 and cuda:0"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert machine.gpu_obstacle([old, new]) == "kernels of a group need GPUs of one model, not GPU 0 and GPU 1"
    assert machine.gpu_obstacle([new, new]) == ""
    monkeypatch.setattr(facts.CudaCalls, "why_not", lambda calls: "torch is old")
    assert machine.gpu_obstacle([old, new]) == "torch is old"
    for name in ("init", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.cuda.nccl, "version", fail)
    assert machine.cuda_error() == "Error 802: system not yet initialized"
    assert machine.gpus() == [] and machine.versions()["nccl"] == ""


def test_signals_between_gpus_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word is copied, and one is set by a kernel, between CPU tensors in the place of two GPUs."""
    cpu, lost = torch.device("cpu"), "words of its memory keep their values"

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA driver error: not supported\nmore")

    monkeypatch.setattr(facts, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for call, replacement, reason in (
        ("copy_word", lambda *_: None, lost), ("set_word", lambda *_: None, lost),
        ("set_word", fail, "CUDA driver error: not supported"), ("alarm", fail, ""),
    ):  # fmt: skip
        with monkeypatch.context() as changes:
            changes.setattr(torch, "device", lambda kind, number: cpu)
            changes.setattr(facts.CudaCalls, call, replacement, raising=False)
            assert Machine().lost_signal(GPUS[:2]) == (f"cpu to cpu ({reason})" if reason else "")


def test_facts_about_software(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    assert machine.versions()["nccl"] == "2.28.3"
    required = ["numpy", 'triton==3.7.1; platform_system == "Linux"', "tritonclient==1.0"]
    for requirements, version in ((required, "3.7.1"), (None, "")):
        monkeypatch.setattr(facts.importlib.metadata, "requires", lambda package, found=requirements: found)
        assert machine.versions()["pinned"] == version
    for said, number in (("12040", "12.4"), ("?", "")):
        monkeypatch.setattr(facts, "driver", lambda said=said: said)
        assert machine.versions()["driver"] == number


def test_a_library_that_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("tpfuse.tools.doctor")
    monkeypatch.setitem(sys.modules, "tpfuse.tools.doctor", None)
    assert cli.run(["doctor"]) == RunError("").status == 1
    assert "tpfuse doctor: error: tpfuse cannot be imported, so every command will fail: " in capsys.readouterr().err
