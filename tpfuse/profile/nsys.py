"""Commands of Nsight Systems, which records a timeline of the host and the GPUs, and tables of what took longest."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tpfuse.errors import RunError, UserError

_PATIENCE = 600.0  # seconds: a report of some GB is converted first


def command(program: Sequence[str], out: Path, capture: bool, *, tool: str = "nsys") -> list[str]:
    """Return the command that records a program with all ranks that it starts: one report of each machine.

    capture: record only from cudaProfilerStart to cudaProfilerStop, which the first rank that calls them decides; the
    program then goes on. out: the folder of the report, whose name contains that of the machine (%h).
    """
    steps = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"] if capture else []
    return [
        tool,
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        *steps,
        "--force-overwrite=true",
        f"--output={out}/nsys-%h",
        *program,
    ]


def summarise(report: Path, *, tool: str = "nsys") -> str:
    """Return nsys's tables of the NVTX ranges and of the kernels in a report, those that took the most time first.

    Raise UserError if there is no report, and RunError if nsys cannot read it.
    """
    if not report.is_file():
        raise UserError(f"there is no report {report}: nsys writes it if the program has called cudaProfilerStart")
    words = [tool, "stats", "--report", "nvtx_sum,cuda_gpu_kern_sum", "--format", "table", "--output", "-"]
    try:
        done = subprocess.run(
            [*words, "--force-export=true", str(report)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"nsys stats cannot read {report}: {error}") from error
    if done.returncode or not done.stdout.strip():
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise RunError(f"nsys stats cannot read {report}: {reason}")
    return done.stdout.strip()
