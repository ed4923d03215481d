"""The commands of Nsight Compute, and the kernels for which there must be none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tpfuse.profile import ncu
from tpfuse.profile.kernels import kernels
from tpfuse.testing.patience import patient
from tpfuse.train.errors import UserError

TRAIN = ["python", "-m", "tpfuse", "train", "--model.preset", "tiny"]
ALONE = [sys.executable, "-m", "tpfuse.tools.one_rank"]
REPLAY = ["ncu", "--replay-mode", "kernel", "--target-processes", "all", "--set", "full"]
MARKED = ["--profile-from-start", "off"]
OUT = Path("p")


def _measured(kernel: str, report: str) -> list[str]:
    return ["--kernel-name", f"regex:{kernel}", "--launch-count", "5", "--force-overwrite", "--export", report]


def test_a_kernel_that_waits_for_nobody_is_replayed_in_the_program() -> None:
    expected = [*REPLAY, *MARKED, *_measured("^gemm_forward", "p/ncu"), *TRAIN]
    assert ncu.commands("^gemm_forward", TRAIN, OUT) == [expected]


def test_a_program_without_marks_is_measured_from_its_start() -> None:
    expected = ["/opt/ncu", *REPLAY[1:], *_measured("^adamw", "p/ncu"), *TRAIN]
    assert ncu.commands("^adamw", TRAIN, OUT, marked=False, tool="/opt/ncu") == [expected]


def test_a_kernel_that_is_not_of_tpfuse_is_replayed() -> None:
    assert ncu.commands("elementwise", TRAIN, OUT) == [[*REPLAY, *MARKED, *_measured("elementwise", "p/ncu"), *TRAIN]]


def test_kernels_that_wait_are_replayed_in_one_rank_alone() -> None:
    kernel = "^all_(reduce|gather_gemm)_"
    assert ncu.commands(kernel, [], OUT) == [
        [*REPLAY, *MARKED, *_measured(kernel, "p/ncu-all_gather_gemm"), *ALONE, "all_gather_gemm"],
        [*REPLAY, *MARKED, *_measured(kernel, "p/ncu-collectives"), *ALONE, "collectives"],
    ]


def test_kernels_that_wait_are_replayed_in_a_given_program_of_one_rank() -> None:
    program = ["python", "-m", "tpfuse.tools.one_rank", "collectives", "--elements", "1000"]
    expected = [*REPLAY, *MARKED, *_measured("all_reduce", "p/ncu"), *program]
    assert ncu.commands("all_reduce", program, OUT) == [expected]


def test_a_kernel_that_waits_is_never_replayed_in_another_program() -> None:
    reason = (
        r"\(await_part_kernel\).* would wait for ever.*: python -m tpfuse.tools.one_rank 'gemm_reduce_scatter, copy"
    )
    with pytest.raises(UserError, match=reason):
        ncu.commands("await_part", TRAIN, OUT)
    for kernel, waits in kernels().items():
        if waits:
            with pytest.raises(UserError):
                ncu.commands(f"^{kernel}$", TRAIN, OUT)


@pytest.mark.parametrize("kernel", ["close_copies", "signal_wait"])
def test_a_kernel_without_a_program_of_one_rank_is_refused(kernel: str) -> None:
    for program in ([], TRAIN):
        with pytest.raises(UserError, match=rf"launches {kernel}_kernel, .*--with nsys"):
            ncu.commands(kernel, program, OUT)


@pytest.mark.parametrize("kernel", ["gemm", "kernel", "."])
@pytest.mark.parametrize("program", [[], TRAIN, [*ALONE, "collectives"]])
def test_an_expression_for_both_kinds_is_refused(kernel: str, program: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        ncu.commands(kernel, program, OUT)
    if kernel == "gemm":
        waiting, others = "all_gather_gemm_forward_kernel, gemm_reduce_scatter_forward_kernel", "gemm_forward_kernel"
        assert f"for other ranks ({waiting}) and kernels that do not ({others})" in str(raised.value)


@pytest.mark.parametrize("kernel", ["nccl", "NCCL.*", "DevKernel", "AllGather", "SendRecv", "TREE_LL128", "Sum_bf16"])
def test_kernels_of_nccl_are_refused(kernel: str) -> None:
    with pytest.raises(UserError, match="NCCL, which wait for other ranks"):
        ncu.commands(kernel, TRAIN, OUT)


@pytest.mark.parametrize(
    ("kernel", "program", "reason"),
    [
        ("(", TRAIN, "not a regular expression"),
        ("", TRAIN, "needs --kernel"),
        ("^gemm_forward", [], "expected a command"),
    ],
)
def test_a_bad_expression_or_no_program_is_refused(kernel: str, program: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        ncu.commands(kernel, program, OUT)


def test_nothing_of_the_profilers_imports_torch() -> None:
    modules = "tpfuse.profile.ncu, tpfuse.profile.nsys, tpfuse.profile.command"
    code = f"import sys, {modules}\ntpfuse.profile.ncu.commands('^gemm_f', ['p'], __import__('pathlib').Path())\n"
    code += "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=patient(30.0)).returncode == 0
