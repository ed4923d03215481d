"""The commands of Nsight Compute, and the kernels for which there must be none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tpfuse.errors import UserError
from tpfuse.profile import ncu
from tpfuse.profile.kernels import kernels
from tpfuse.testing.patience import patient

TRAIN = ["python", "-m", "tpfuse", "train", "--model.preset", "tiny"]
ALONE = [sys.executable, "-m", "tpfuse.tools.one_rank"]
OUT = Path("p")


@pytest.mark.parametrize(
    ("kernel", "program", "expected"),
    [
        ("elementwise", TRAIN, [("p/ncu", TRAIN)]),  # a kernel that is not tpfuse's
        (
            "^all_(reduce|gather_gemm)_", [],
            [("p/ncu-all_gather_gemm", [*ALONE, "all_gather_gemm"]), ("p/ncu-collectives", [*ALONE, "collectives"])],
        ),
        ("all_reduce", ["python", *ALONE[1:], "collectives"], [("p/ncu", ["python", *ALONE[1:], "collectives"])]),
    ],
)  # fmt: skip
def test_kernels_that_wait_are_measured_in_one_rank_alone(
    kernel: str, program: list[str], expected: list[tuple[str, list[str]]]
) -> None:
    """Other kernels are measured in the program. test_command.py has the other words of the commands."""
    commands = ncu.commands(kernel, program, OUT, tool="/opt/ncu")
    assert [command[0] for command in commands] == ["/opt/ncu"] * len(expected)
    found = [command[command.index("--export") + 1 :] for command in commands]
    assert found == [[report, *words] for report, words in expected]


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


BOTH = (
    r"for other ranks \(all_gather_gemm_forward_kernel, all_gather_gemm_ping_pong_kernel,"
    r" gemm_reduce_scatter_forward_kernel, gemm_reduce_scatter_ping_pong_kernel\)"
    r" and kernels that do not \(gemm_forward_kernel, gemm_ping_pong_kernel\)"
)


@pytest.mark.parametrize("program", [[], TRAIN, [*ALONE, "collectives"]])
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("gemm", BOTH), ("kernel", "which ncu measures in different ways"), (".", "NCCL"), ("(", "not a regular"),
        ("", "needs --kernel"),
        *((name, "NCCL, which wait") for name in ("nccl", "NCCL.*", "DevKernel", "AllGather", "f32_TREE")),
    ],
)  # fmt: skip
def test_expressions_that_are_refused(kernel: str, reason: str, program: list[str]) -> None:
    with pytest.raises(UserError, match=reason):
        ncu.commands(kernel, program, OUT)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("close_copies", "launches close_copies_kernel, .*--with nsys"),
        ("signal_wait", "launches signal_wait_kernel, .*--with nsys"),
        ("^gemm_forward", "expected a command"),
    ],
)
def test_kernels_without_a_program_are_refused(kernel: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        ncu.commands(kernel, [], OUT)


def test_nothing_of_the_profilers_imports_torch() -> None:
    modules = "tpfuse.profile.ncu, tpfuse.profile.nsys, tpfuse.commands.profile"
    code = f"import sys, {modules}\ntpfuse.profile.ncu.commands('^gemm_f', ['p'], __import__('pathlib').Path())\n"
    code += "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=patient(30.0)).returncode == 0
