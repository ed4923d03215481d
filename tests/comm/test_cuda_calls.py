"""`CudaCalls` asks torch, the driver and NVML, whose answers these tests replace."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory

from tpfuse.comm.cuda_calls import CudaCalls


def _say_no(found: Any, attribute: int, source: Any, target: Any) -> int:
    """Give the driver's answer for GPUs on PCIe."""
    assert (attribute, source.value, target.value) == (3, 1, 0)
    found._obj.value = 0
    return 0


def _run_mps(found: Any, attribute: int, device: Any) -> int:
    """Give the driver's answer for this rank's GPU under MPS."""
    assert (attribute, device.value) == (133, 1)
    found._obj.value = 1
    return 0


def test_obstacles_between_gpus_and_mps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CudaCalls(torch.device("cuda:1"))
    asked: list[tuple[int, int]] = []

    def access(a: int, b: int) -> bool:
        asked.append((a, b))
        return b != 2

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"gpu {getattr(device, 'index', device)}"),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert calls.gpu() == "gpu 1"
    assert [calls.obstacle(f"gpu {number}") for number in (0, 2)] == ["", "there is no peer access"]
    assert asked == [(1, 0), (1, 2)]
    driver = SimpleNamespace(cuDeviceGet=lambda *_: 0, cuDeviceGetP2PAttribute=_say_no)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert calls.obstacle("gpu 0") == "there are no native atomic operations"
    driver.cuDeviceGetP2PAttribute = lambda *_: (
        1
    )  # This is an error, as from a driver that does not know the attribute.
    assert calls.obstacle("gpu 0") == ""
    assert not calls.shared_by_mps(), "a driver that does not know"
    driver.cuDeviceGetAttribute = _run_mps
    assert calls.shared_by_mps()
    for value, allowed in (("1", True), ("0", False)):
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", value)
        assert calls.overlapping_allowed() == allowed


def test_nvml_is_asked_about_gpus_that_are_hidden_from_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's --gpu-bind shows each rank one GPU alone, number 0."""
    calls, names, status = CudaCalls(torch.device("cuda:0")), ["NVIDIA H100"], {"GPU-far": 2, "GPU-near": 0}

    def find(uuid: bytes, device: Any) -> int:
        device._obj.value = {b"GPU-here": 1, b"GPU-far": 3, b"GPU-near": 2}.get(uuid)
        return 0 if device._obj.value else 6  # NVML_ERROR_NOT_FOUND

    def answer(here: Any, other: Any, question: int, found: Any) -> int:
        assert (here.value, question) == (1, 3)
        found._obj.value = {2: status["GPU-near"], 3: status["GPU-far"]}[other.value]
        return 0

    nvml = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByUUID=find, nvmlDeviceGetP2PStatus=answer)
    monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": nvml}.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="here"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[0])
    assert calls.obstacle("near") == "" and calls.obstacle("far") == "there are no native atomic operations"
    unknown = "GPUs are hidden (let all ranks see all of them), and NVML knows of no native atomic operations"
    assert calls.obstacle("nowhere") == unknown
    names[0] = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert calls.obstacle("near") == "MIG permits no peer access"
    names[0], nvml.nvmlInit_v2 = "NVIDIA H100", lambda: 9  # NVML_ERROR_DRIVER_NOT_LOADED
    assert calls.obstacle("near") == unknown


@pytest.mark.parametrize("before", [None, "0"])
def test_torch_sees_two_variables_at_a_rendezvous_alone(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's C++ reads them: no multicast object is made, and GPUs of one number are no obstacle."""
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    monkeypatch.delenv(names[1], raising=False)
    if before is None:
        monkeypatch.delenv(names[0], raising=False)
    else:
        monkeypatch.setenv(names[0], before)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    seen = []

    def rendezvous(tensor: torch.Tensor, group: str) -> str:
        seen.append([getenv(name.encode()) for name in names])
        raise RuntimeError

    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", rendezvous)
    with pytest.raises(RuntimeError):
        CudaCalls(torch.device("cuda:0")).rendezvous(torch.empty(1), "group")
    after = [None if before is None else before.encode(), None]
    assert seen == [[b"1", b"1"]] and [getenv(name.encode()) for name in names] == after


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_SymmetricMemory, "get_backend", lambda device: backend)
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    calls = CudaCalls(torch.device("cuda:0"))
    found = calls.why_not()
    assert found.endswith(reason) and bool(found) == bool(reason) and calls.socket_folder() == "/tmp"
    monkeypatch.setenv("TEMP", "/short")
    monkeypatch.setenv("TMP", "/" + 89 * "s")
    assert calls.why_not() == found and len(calls.socket_folder()) == 90
    monkeypatch.setenv("TMPDIR", "/" + 90 * "l")
    assert calls.why_not() == (found or "torch's sockets need a path of at most 90 bytes: set TMPDIR to a shorter one")
