"""The common parts of the benchmarks: cases, rows with their provenance, and a table of the rows."""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks import timing
from benchmarks.timing import BenchClock, Candidate, Ceilings, DeviceClock, HostClock, Timing
from tpfuse.comm.host import processor
from tpfuse.switches import use
from tpfuse.tools.assembler import ptxas
from tpfuse.tools.operator import Draw
from tpfuse.tools.search import one_line

RESULTS = Path(__file__).parent / "results"  # git tracks it
SCRATCH = Path(__file__).parents[1] / "build" / "results"
OURS = "tpfuse"
Row = dict[str, Any]


def percentiles(times: list[float]) -> dict[str, float]:
    """Return the median, p20 and p80 of times in any unit."""
    p20, median, p80 = np.percentile(times, [20, 50, 80])
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def machine() -> str:
    """Return the GPU's name, or the CPU's with the number of cores that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _commit() -> str:
    changed = "+changes" if _output_of("git", "status", "--porcelain", "-uno") else ""
    return (_output_of("git", "rev-parse", "--short", "HEAD") or "unknown") + changed


def _sources() -> str:
    """Return a fingerprint of the kernels and operators, which identifies them where there is no commit to name."""
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("kernels/*.py"), *root.glob("kernels/*.toml"), *root.glob("tpfuse/ops/**/*.py")])
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:12]


def _portable(argument: str) -> str:
    """Return an argument without the folders of this machine."""
    return Path(argument).name if argument.startswith("/") else argument


def provenance() -> Row:
    """Return the date, machine, driver, versions, commit, fingerprint of the kernels, and command."""
    row: Row = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _commit(),
        "sources": _sources(),
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_portable, sys.argv[1:])]),
    }
    if torch.cuda.is_available():
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        assembler = ptxas()
        row |= {"driver": driver[0] if driver else "unknown", "cuda": torch.version.cuda}
        row["ptxas"] = assembler.version if assembler else "unknown"
    return row


def conditions() -> Row:
    """Return the GPU's power, clocks and temperature as of now; nothing where nvidia-smi does not tell them."""
    query = {"power.draw": "power_w", "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "temperature.gpu": "celsius"}
    options = f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits", "--id=0"
    told = _output_of("nvidia-smi", *options).split(",") if torch.cuda.is_available() else []
    if len(told) != len(query):
        return {}
    return {name: value.strip() for name, value in zip(query.values(), told, strict=True)}


class Parser(argparse.ArgumentParser):
    """The options of a benchmark: --keep, and those that it adds. description: its module's docstring."""

    def __init__(self, description: str | None, prog: str | None = None, keep: bool = True) -> None:
        super().__init__(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        if keep:
            self.option("--keep", False, "write to benchmarks/results, which git tracks (default: build/results)")

    def option(self, name: str, default: Any, text: str) -> None:
        """Add an option whose type is that of its default.

        False stands for a flag, a list for several values, and a type for an option that must be given.
        """
        if default is False:
            self.add_argument(name, action="store_true", help=text)
        elif isinstance(default, list):
            self.add_argument(name, type=type(default[0]), nargs="+", default=default, help=text)
        elif isinstance(default, type):
            self.add_argument(name, type=default, required=True, help=text)
        else:
            self.add_argument(
                name, type=Path if isinstance(default, Path) else type(default), default=default, help=text
            )


def results(keep: bool) -> Path:
    """Return the folder of results, which exists: that of rows to commit, or that of all others."""
    folder = RESULTS if keep else SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_row(name: str, figures: Row, keep: bool) -> Path:
    """Append a row to NAME.jsonl in `results(keep)` with the machine, versions, commit and command."""
    path = results(keep) / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(provenance() | figures) + "\n")
    return path


@dataclass
class Bench(Draw):
    """The device that cases run on, and the source of their inputs."""

    interpreted: bool = False
    clock: BenchClock = field(default_factory=HostClock)
    ceilings: Ceilings = field(default_factory=lambda: Ceilings(1.0, 1.0))
    seconds: float = 0.6  # for which one `TimedMode` times all its candidates
    rounds: tuple[int, int] = (7, 50)  # the least and the most of them
    compiler: bool = True  # whether the peers by torch.compile run; each takes a minute


def new_bench(seed: int, *, interpreted: bool, ceilings: Ceilings | None = None) -> Bench:
    """Return the Bench of this machine; ceilings are measured where they are not given."""
    device = torch.device("cpu" if interpreted else "cuda")
    if interpreted:
        torch.set_num_threads(1)  # the tensors are tiny
    clock: BenchClock = HostClock() if interpreted else DeviceClock(device)
    ceilings = ceilings or timing.measure_ceilings(device, clock, tiny=interpreted)
    generator = torch.Generator(device).manual_seed(seed)
    bench = Bench(device, torch.bfloat16, generator, interpreted, clock, ceilings)
    if interpreted:
        bench.seconds, bench.rounds = 0.0, (1, 1)
    return bench


@dataclass(frozen=True)
class TimedMode:
    """Candidates that are timed alternately. mode: "forward", "backward", ….

    flops, moved: the least operations and bytes of device memory that it takes, for the bound. memory: whether the peak
    is measured too.
    """

    mode: str
    flops: float
    moved: float
    candidates: tuple[Candidate, ...]
    memory: bool = False


Built = tuple[Callable[[], dict[str, str]], list[TimedMode]]


@dataclass(frozen=True)
class BenchCase:
    """An operator at a shape. asked: whether a figure to be reached is computed from it, so that it comes first.

    build: draws inputs and returns the check (verdict by candidate, "" where it is right) and the measurements.
    compiled: whether torch.compile is a peer.
    """

    operator: str
    name: str
    build: Callable[[Bench], Built]
    asked: bool = False
    compiled: bool = False


def measure(case: BenchCase, bench: Bench) -> Iterator[Row]:
    """Yield a row per mode and candidate. tpfuse is not timed where it is wrong; a failure's row has the error."""
    identity: Row = {"operator": case.operator, "case": case.name, "asked": case.asked}
    try:
        with use(kernels="triton"):
            check, works = case.build(bench)
            verdicts = check()
            for work in works:
                for row in _rows(work, verdicts, bench):
                    yield identity | row
    except Exception as error:
        yield identity | {"mode": "", "candidate": OURS, "error": one_line(error)}
    finally:
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(work: TimedMode, verdicts: dict[str, str], bench: Bench) -> Iterator[Row]:
    least, most = bench.rounds
    fit = [x for x in work.candidates if may_run(x.name, verdicts.get(x.name, ""))]
    timings = timing.alternate(fit, bench.clock, bench.seconds, least=least, most=most)
    bound = bench.ceilings.bound(work.flops, work.moved) * 1e6
    for candidate in work.candidates:
        name = candidate.name
        row: Row = {"mode": work.mode, "candidate": name, "flops": work.flops, "bytes": work.moved, "bound_us": bound}
        row["check"] = verdicts.get(name, "not compared") or "within the bound"
        result = timings.get(name, verdicts.get(name, ""))
        if isinstance(result, Timing):
            row |= {f"{key}_us": value * 1e6 for key, value in percentiles(result.seconds).items()}
            row |= {"rounds": len(result.seconds), "host_us": result.host * 1e6}
            row["times_bound"] = row["median_us"] / bound
            if work.memory:
                row["peak_bytes"] = timing.peak_bytes(candidate, bench.device)
        else:
            row["error"] = result
        yield row


def may_run(name: str, verdict: str) -> bool:
    """Return whether a candidate is right, or is a peer that ran but is less exact; that peer's row reports it."""
    return not verdict or (not name.startswith(OURS) and "AssertionError" in verdict)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned columns, with errors in place of times."""
    head = ("operator", "case", "mode", "candidate", "median us", "p20", "p80", "x bound", "peak MiB")
    lines = [head]
    for row in rows:
        left = tuple(str(row[key]) for key in ("operator", "case", "mode", "candidate"))
        if "median_us" not in row:
            lines.append((*left, row.get("error", "not measured yet"), "", "", "", ""))
            continue
        peak = "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**20:.0f}"
        times = tuple(f"{row[key]:.1f}" for key in ("median_us", "p20_us", "p80_us"))
        bound = f"{row['times_bound']:.2f}" if "times_bound" in row else ""
        lines.append((*left, *times, bound, peak))
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return columns of text as wide as their widest cell; a cell followed by empty cells may be longer."""
    columns = range(len(lines[0]))
    widths = [max(len(x[i]) for x in lines if i + 1 == len(x) or x[i + 1] or not x[i]) for i in columns]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def unable(program: str) -> str | None:
    """Return the one line that explains why nothing can be measured here, or None where it can."""
    if not torch.cuda.is_available():
        return f"{program}: error: there is no CUDA GPU here, and times of anything else say nothing about kernels"
    if triton.knobs.runtime.interpret:
        return f"{program}: error: TRITON_INTERPRET=1 is set: kernels would be interpreted, not run"
    return None
