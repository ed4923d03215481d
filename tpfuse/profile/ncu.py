"""Commands of Nsight Compute, which measures single kernels. It runs a kernel many times to read all its counters.

A kernel that waits for other ranks must not be run again alone: the other ranks would not run it again, and it would
wait for ever. Such a kernel is measured in `python -m tpfuse.tools.one_rank`, which runs one rank in one process, with
all signals set in advance.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tpfuse.errors import UserError
from tpfuse.profile.kernels import PROGRAMS, kernels

_ONE_RANK = [sys.executable, "-m", "tpfuse.tools.one_rank"]
_LAUNCHES = 5  # of a kernel, which are measured
_NAMED = 4  # kernels in an error
# A name of each operation of NCCL, whose kernels wait for other ranks too.
_NCCL = [
    f"{prefix}_{name}"
    for prefix in ("ncclKernel", "ncclDevKernel", "ncclSymkDevKernel")
    for name in (
        "AllReduce_Sum_bf16_RING_LL", "ReduceScatter_Sum_f32_TREE_LL128", "Reduce_Max_f16_RING_SIMPLE",
        "AllGather_NVLS_SIMPLE", "Broadcast_RING_LL", "SendRecv", "Generic",
    )
]  # fmt: skip


def commands(
    kernel: str, program: Sequence[str], out: Path, *, marked: bool = True, tool: str = "ncu"
) -> list[list[str]]:
    """Return the commands that measure the kernels whose names contain a match of `kernel`, a regular expression.

    program: the command that launches them; empty for kernels that wait, of which one rank then runs alone. marked:
    whether the program marks what to measure by cudaProfilerStart and cudaProfilerStop. out: the folder of the reports.

    Raise UserError if a kernel would wait for ever.
    """
    waiting, others = _matched(kernel)
    if waiting and others:
        raise UserError(
            f"--kernel {kernel} matches kernels that wait for other ranks ({_list(waiting)}) and kernels that do not"
            f" ({_list(others)}), which ncu measures in different ways: give an expression that matches only one kind"
        )
    if not waiting and not program:
        raise UserError(f"--kernel {kernel}: expected a command that launches this kernel")
    if not program:
        return [
            _replayed(kernel, alone, out / re.sub(r"\W+", "-", f"ncu-{alone[-1]}"), True, tool)
            for alone in _alone(waiting)
        ]
    if waiting and list(program[1:3]) != _ONE_RANK[1:]:
        working = "; or ".join(shlex.join(["python", *alone[1:]]) for alone in _alone(waiting))
        raise UserError(
            f"--kernel {kernel} matches kernels that wait for other ranks ({_list(waiting)}). ncu runs a kernel many"
            f" times, and it would wait for ever. Give this command instead, which runs one rank alone: {working}"
        )
    return [_replayed(kernel, program, out / "ncu", marked, tool)]


def _matched(kernel: str) -> tuple[list[str], list[str]]:
    """Return the kernels of tpfuse that match an expression: those that wait for other ranks, and the others."""
    try:
        expression = re.compile(kernel)
    except re.error as error:
        raise UserError(f"--kernel {kernel} is not a regular expression: {error}") from None
    if not kernel:
        raise UserError("profiler ncu needs --kernel with a regular expression, such as --kernel '^gemm_forward'")
    if any(map(expression.search, _NCCL)) or "nccl" in kernel.lower():
        raise UserError(
            f"--kernel {kernel} matches kernels of NCCL, which wait for other ranks. ncu runs a kernel many times, and"
            " it would wait for ever: give an expression that does not match them, or use --with nsys"
        )
    matched = {name: waits for name, waits in kernels().items() if expression.search(name)}
    return [name for name, waits in matched.items() if waits], [name for name, waits in matched.items() if not waits]


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def _alone(waiting: Sequence[str]) -> list[list[str]]:
    """Return the commands that launch these kernels in one process. Raise UserError if there is none."""
    programs = dict.fromkeys(program for name in waiting if (program := PROGRAMS[name]))
    if waiting and not programs:
        raise UserError(
            f"no program of tpfuse.tools.one_rank launches {_list(waiting)}, so ncu cannot measure it: use --with nsys"
        )
    return [[*_ONE_RANK, program] for program in programs]


def _replayed(kernel: str, program: Sequence[str], report: Path, marked: bool, tool: str) -> list[str]:
    """Return the command that runs each launch many times, with the memory restored before each time."""
    command = [tool, "--replay-mode", "kernel", "--target-processes", "all", "--set", "full"]
    command += ["--profile-from-start", "off"] if marked else []
    command += ["--kernel-name", f"regex:{kernel}", "--launch-count", str(_LAUNCHES), "--force-overwrite"]
    return [*command, "--export", str(report), *program]
