"""Commands of Nsight Compute, which measures single kernels. It runs a kernel many times to read all its counters.

A kernel that waits for other ranks must not be run again alone: the other ranks would not run it again, and it would
wait for ever. Two ways are left for such a kernel:

    one rank: `python -m tpfuse.tools.one_rank` runs it in one process, with all signals set in advance;
    all ranks: one ncu for each rank, which run the whole program many times, and each launch on all ranks at once.

The second way needs the options --communicator tcp and --lockstep-kernel-launch, which the documentation of Nsight
Compute 2026.1 describes; `tpfuse.profile.preflight` asks the installed ncu whether it has them. It is not measured yet:
on several GPUs, `tpfuse.profile.preflight.ncu(Host(), lockstep=True)` and then the commands of `commands` with
application=True would do so.
"""

import itertools
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpfuse.profile.kernels import PROGRAMS, kernels
from tpfuse.train.errors import UserError

_ONE_RANK = [sys.executable, "-m", "tpfuse.tools.one_rank"]
_LAUNCHES = 5  # a kernel is measured in so many launches
_NAMED = 4  # so many kernels are named in an error
# The names of NCCL's kernels, which wait for other ranks too.
_NCCL = [
    f"{prefix}_{'_'.join(words)}"
    for prefix in ("ncclDevKernel", "ncclKernel", "ncclSymkDevKernel", "ncclSymDevKernel")
    for words in (
        *itertools.product(
            ("AllReduce", "ReduceScatter", "Reduce"),
            ("Sum", "Prod", "Min", "Max", "MinMax", "PreMulSum", "SumPostDiv"),
            ("f16", "bf16", "f32", "f64", "i8", "u8", "i32", "u32", "i64", "u64", "f8e4m3", "f8e5m2"),
            ("RING", "TREE", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"),
            ("LL", "LL128", "SIMPLE"),
        ),
        *itertools.product(
            ("AllGather", "Broadcast"), ("RING", "COLLNET_DIRECT", "NVLS", "PAT"), ("LL", "LL128", "SIMPLE")
        ),
        ("SendRecv",),
        ("Generic",),
    )
]


def commands(
    kernel: str,
    program: Sequence[str],
    out: Path,
    *,
    world: int = 8,
    marked: bool = True,
    application: bool = False,
    tool: str = "ncu",
) -> list[list[str]]:
    """Returns the commands that measure the kernels whose names contain a match of `kernel`, a regular expression.

    program: the command that launches them; empty for kernels that wait, of which one rank of `world` then runs alone.
    marked: whether the program marks what to measure by cudaProfilerStart and cudaProfilerStop. application: run the
    program on `world` ranks of this machine, which torchrun starts, each with an ncu of its own. It runs many times, so
    it must not refuse files of an earlier run. Its process group should be one of Gloo: nobody has tried whether
    kernels of NCCL proceed beside kernels that ncu delays. out: the folder of the reports.

    Raises UserError if a kernel would wait for ever.
    """
    waiting, others = _matched(kernel)
    if waiting and others:
        raise UserError(
            f"--kernel {kernel} matches kernels that wait for other ranks ({_list(waiting)}) and kernels that do not"
            f" ({_list(others)}), which ncu measures in different ways: give an expression that matches only one kind"
        )
    if not program and (application or not waiting):
        raise UserError(f"--kernel {kernel}: expected a command that launches this kernel")
    if application:
        return _on_all_ranks(kernel, program, out, world, marked, tool)
    if waiting and not program:
        return [
            _replayed(kernel, alone, out / f"ncu-{_file_name(alone[len(_ONE_RANK)])}", True, tool)
            for alone in _alone(waiting, world)
        ]
    if waiting and list(program[1:3]) != _ONE_RANK[1:]:
        working = "; or ".join(shlex.join(["python", *alone[1:]]) for alone in _alone(waiting, world))
        raise UserError(
            f"--kernel {kernel} matches kernels that wait for other ranks ({_list(waiting)}). ncu runs a kernel many"
            f" times, and it would wait for ever. Give this command instead, which runs one rank alone: {working}"
        )
    return [_replayed(kernel, program, out / "ncu", marked, tool)]


def _matched(kernel: str) -> tuple[list[str], list[str]]:
    """Returns the kernels of tpfuse that match an expression: those that wait for other ranks, and the others."""
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


def _file_name(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def _alone(waiting: Iterable[str], world: int) -> list[list[str]]:
    """Returns the commands that launch these kernels in one process. Raises UserError if a kernel has none."""
    without = [name for name in waiting if name not in PROGRAMS]
    if without:
        raise UserError(
            f"no program of tpfuse.tools.one_rank launches {_list(without)}, so ncu cannot measure it: use --with nsys"
        )
    programs = dict.fromkeys(PROGRAMS[name] for name in waiting)
    return [[*_ONE_RANK, program, "--world", str(world)] for program in programs]


def _replayed(kernel: str, program: Sequence[str], report: Path, marked: bool, tool: str) -> list[str]:
    """Returns the command that runs each launch many times, with the memory restored before each time."""
    options = ["--replay-mode", "kernel", "--target-processes", "all", "--set", "full"]
    return [tool, *options, *_common(kernel, report, marked), *program]


def _common(kernel: str, report: Path, marked: bool) -> list[str]:
    start = ["--profile-from-start", "off"] if marked else []
    names = ["--kernel-name", f"regex:{kernel}", "--launch-count", str(_LAUNCHES)]
    return [*start, *names, "--force-overwrite", "--export", str(report)]


def _on_all_ranks(
    kernel: str, program: Sequence[str], out: Path, world: int, marked: bool, tool: str
) -> list[list[str]]:
    """Returns a run without ncu, which fills Triton's cache, and the run with an ncu for each rank.

    A rank that still compiled would let the others wait at the launch. Every ncu runs its rank many times, and the
    ranks meet anew each time: rank 0 opens the store for that, not torchrun, whose store keeps what earlier runs wrote.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    start += ["--no-python"]
    meeting, communicator = _free_ports(2)
    own_store = ["env", "TORCHELASTIC_USE_AGENT_STORE=False", f"MASTER_PORT={meeting}"]
    options = [
        "--replay-mode", "application", "--lockstep-kernel-launch", "--communicator", "tcp",
        "--communicator-tcp-hostname", "127.0.0.1", "--communicator-tcp-port", str(communicator),
        "--communicator-tcp-num-peers", str(world), "--set", "basic",
    ]  # fmt: skip
    measured = [tool, *options, *_common(kernel, out / "ncu-rank%q{RANK}", marked), *program]
    return [[*start, *program], [*start, *own_store, *measured]]


def _free_ports(count: int) -> list[int]:
    """Returns ports that no program listens at now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
