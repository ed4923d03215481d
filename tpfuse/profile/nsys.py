"""Commands of Nsight Systems, which records a timeline of the host and the GPUs, and a table of what took longest."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpfuse.train.errors import RunError, UserError

_DOMAIN = "tpfuse:"  # before the names of the NVTX ranges of tpfuse
_PATIENCE = 600.0  # seconds: a report of some GB is converted first
_TOTAL, _COUNT = "Total Time (ns)", "Instances"


def command(program: Sequence[str], out: Path, capture: bool, *, tool: str = "nsys") -> list[str]:
    """Returns the command that records a program with all ranks that it starts: one report of each machine.

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


def summarise(report: Path, *, rows: int = 12, tool: str = "nsys") -> str:
    """Returns a table of the ranges of tpfuse, and one of the kernels, that took the most time in a report.

    Raises UserError if there is no report, and RunError if nsys cannot read it.
    """
    if not report.is_file():
        raise UserError(f"there is no report {report}: nsys writes it if the program has called cudaProfilerStart")
    words = [tool, "stats", "--report", "nvtx_sum,cuda_gpu_kern_sum", "--format", "json", "--output", "-"]
    try:
        done = subprocess.run(
            [*words, "--force-export=true", str(report)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"nsys stats cannot read {report}: {error}") from error
    found = list(_objects(done.stdout))
    if done.returncode or not found:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = lines[-1] if lines else f"exit status {done.returncode}"
        raise RunError(f"nsys stats cannot read {report}: {reason}")
    ranges = [_timed(row, str(row["Range"]).removeprefix(_DOMAIN)) for row in found if _is_ours(row)]
    kernels = [_timed(row, str(row["Name"])) for row in found if "Name" in row and "Range" not in row]
    parts = [_table("ranges of tpfuse", ranges, rows), _table("kernels", kernels, rows)]
    return "\n\n".join(parts)


def _is_ours(row: Mapping[str, Any]) -> bool:
    return str(row.get("Range", "")).startswith(_DOMAIN)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of all JSON arrays in what nsys prints, which has other lines before and between them."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("[", place)) >= 0:
        try:
            rows, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            place += 1
            continue
        yield from (row for row in rows if isinstance(row, dict) and _TOTAL in row)


def _timed(row: Mapping[str, Any], name: str) -> tuple[float, int, str]:
    """Returns (ms, count, name)."""
    return _number(row[_TOTAL]) / 1e6, int(_number(row.get(_COUNT, 0))), name


def _number(value: object) -> float:
    """Returns a number of a report: newer versions write numbers, some older ones text with commas."""
    try:
        return float(str(value).replace(",", ""))
    except ValueError:
        return 0.0


def _table(title: str, found: list[tuple[float, int, str]], rows: int) -> str:
    if not found:
        return f"{title}: there are none in the report"
    whole = sum(ms for ms, _, _ in found) or 1.0
    lines = [f"{title:<60}{'total':>14}{'share':>8}{'times':>8}"]
    for ms, count, name in sorted(found, reverse=True)[:rows]:
        lines.append(f"{name[:59]:<60}{ms:>11.3f} ms{ms / whole:>8.0%}{count:>8}")
    return "\n".join(lines)
