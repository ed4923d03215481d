"""Launches that run interpreted or are recorded, and the errors where neither is possible."""

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from tpfuse.kernels import launch as launching
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.interpreter import interpreter_problem
from tpfuse.kernels.launch import Reservation, family, launch, multiprocessors, recording


@triton.jit
def _add_one_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


def _add_one(x: torch.Tensor) -> None:
    launch(_add_one_kernel, (triton.cdiv(len(x), 16),), num_warps=4, num_stages=1, x_ptr=x, n=len(x), BLOCK=16)


@pytest.mark.parametrize("n", [0, 1, 16, 63])
def test_a_kernel_runs_interpreted(n: int) -> None:
    x = torch.arange(n)
    _add_one(x)
    assert torch.equal(x, torch.arange(n) + 1)


def test_recorded_launches_run_nothing_and_know_their_family() -> None:
    x = torch.empty(40, device="meta")
    with recording("sm_90") as record:
        _add_one(x)
        assert family(x.device) == "sm_90" and multiprocessors(x.device) == 132
    (seen,) = record.launches
    assert seen.grid == (3,) and seen.arguments["x_ptr"] is x and seen.arguments["BLOCK"] == 16
    assert (seen.num_warps, seen.num_stages) == (4, 1)


def test_products_leave_multiprocessors_to_nccl_until_the_reservation_ends() -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    with recording("sm_90") as record:
        gemm_forward(x, x)
        reservations = Reservation(), Reservation()
        gemm_forward(x, x)
        reservations[0].end()
        reservations[0].end()
        gemm_forward(x, x)
        sums = Reservation("sums")  # beside NCCL
        gemm_forward(x, x)
        sums.end()
        reservations[1].end()
        gemm_forward(x, x)
    assert [launch.grid for launch in record.launches] == [(132,), (116,), (116,), (100,), (132,)]


def test_launches_are_planned_anew_when_multiprocessors_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    plan = launching.planned(lambda x: len(Reservation.held))
    x = torch.empty(3)
    found = [plan(x)]
    reservation = Reservation()
    found.append(plan(x))
    reservation.end()
    assert [*found, plan(x)] == [0, 1, 0]


def test_families() -> None:
    assert family(torch.device("cpu")) == "interpreted"
    with pytest.raises(ValueError, match=r"meta.*CUDA"):
        family(torch.device("meta"))


def test_cpu_tensors_without_interpretation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        family(torch.device("cpu"))


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "fits"),
    [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.6.1", "3.0.0rc1", False), ("3.7.1", "2.4.6", True)],
)
def test_a_numpy_that_the_interpreter_cannot_use_is_named(triton_version: str, numpy_version: str, fits: bool) -> None:
    problem = interpreter_problem(triton_version, numpy_version)
    assert (problem == "") == fits
    if not fits:
        assert problem.startswith(f"Triton {triton_version} interprets kernels with numpy < 2.4 only")
        assert f"numpy {numpy_version}" in problem and "\n" not in problem


def test_it_is_named_once_when_interpretation_is_requested() -> None:
    """It runs in a Python whose Triton and numpy have version numbers that do not fit."""
    script = (
        "import numpy, triton\ntriton.__version__, numpy.__version__ = '3.6.0', '2.4.6'\nimport tpfuse.kernels.gemm"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: Triton 3.6.0 interprets kernels with numpy < 2.4 only")
