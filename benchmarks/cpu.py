"""Time every operator and every parallel layer on the CPU beside its peers: one JSON file and one table per machine.

    python -m benchmarks.cpu                                   every benchmark, within 10 minutes on two idle cores
    python -m benchmarks.cpu --only zero collectives
    python -m benchmarks.cpu --quick                           one round of each, to check that the benchmarks work

The cases, checks and candidates are those of the benchmarks `bench_NAME` and `collectives`, in float32 and at sizes
that two cores compute in a second. An operator computes by torch in one process with a thread for each core: its row
shows what tpfuse adds to torch's own operator. Everything else runs on two ranks of one thread each, and the single
process beside them has two threads.

Each benchmark is a process of its own with a deadline (`benchmarks.apart`), and both files are written again after
each row: a run that is killed keeps its rows. The files are cpu-MACHINE.json and cpu-MACHINE.md in build/results, or
with --keep in benchmarks/results, if the run is a whole one. A benchmark that fails has a row with its error, and the
exit status is 1.
"""

import importlib
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import triton

from benchmarks import bench_ring_attention, bench_tensor_parallel, bench_zero, collectives
from benchmarks.apart import Rows, Step, run_steps
from benchmarks.contact_steps import time_case
from benchmarks.cpu_ranks import ALONE, OtherPrograms, pools
from benchmarks.documents import document_of, slug, table_lines
from benchmarks.harness import (
    OURS,
    Bench,
    BenchCase,
    Parser,
    Row,
    cores,
    cpu_machine,
    new_cpu_bench,
    percentiles,
    provenance,
    results,
)
from benchmarks.zero_training import Training
from benchmarks.zero_update import Update
from tpfuse.comm.host import replace_file
from tpfuse.testing.ranks import RankPool

WHAT = "tpfuse beside its peers on the CPU: medians, alternately"
RANKS = 2
MINUTES = 20.0  # the longest run; benchmarks that are left then count as failed
OPERATORS = ("gemm", "attention", "layer_norm", "rms_norm", "linear_cross_entropy", "adamw")
# The benchmarks that are not part of a run, with the reasons.
LEFT_OUT = {
    "activation": "not an operator of its own: gemm's row with gelu_tanh contains it",
    "cross_entropy": "in one process on the CPU it is F.cross_entropy, whose float32 gradient is less exact than the "
    "tests of tpfuse allow",
    "carried_attention": "a kernel of GPUs: on the CPU it would be interpreted",
    "overlapped_gemm": "a kernel of GPUs: on the CPU it would be interpreted",
    "sharded_adamw": "a kernel of GPUs: on the CPU it would be interpreted; zero's rows have the update by CPU ranks",
    "existing_models": "needs transformers: `python -m benchmarks.bench_existing_models`",
    "pipeline": "its own table, since a step needs several ranks: `python -m benchmarks.bench_pipeline`",
    "nanogpt": "needs a checkout of nanoGPT and a text: `python -m benchmarks.bench_nanogpt`",
}
_PATIENCE = 600.0  # the seconds after which a row counts as a hang


def _rounded(others: float) -> float | None:
    """Return the share of the cores that other programs took, or None where the machine does not count it (NaN)."""
    return None if math.isnan(others) else max(0.0, round(others, 3))


def measurements(case: str, mode: str, times: Mapping[str, Sequence[float]], others: float, **more: Any) -> list[Row]:
    """Return a row for each candidate. times: the seconds of each round, by candidate; others: see `_rounded`."""
    rows = []
    for name, seconds in times.items():
        alone = name == ALONE
        row: Row = {"case": case, "mode": mode, "candidate": "one process" if alone else name}
        row |= {"processes": 1 if alone else RANKS, "threads": RANKS if alone else 1}
        row |= {f"{key}_ms": round(value * 1e3, 4) for key, value in percentiles(list(seconds)).items()}
        rows.append(row | {"rounds": len(seconds), "others": _rounded(others)} | more)
    return rows


def time_operator(name: str, rows: Rows, quick: bool) -> None:
    """Time the cases of `benchmarks.bench_NAME` at their sizes for CPUs."""
    bench = new_cpu_bench(seed=1, seconds=0.0 if quick else 0.6)
    for case in importlib.import_module(f"benchmarks.bench_{name}").cases("cpu"):
        rows.each(case.name, partial(_time_operator, case, bench))


def _time_operator(case: BenchCase, bench: Bench) -> Row:
    others = OtherPrograms()
    found = time_case(case, bench)
    share, kept = _rounded(others.share()), []
    for measured in found.pop("measurements"):
        row: Row = {key: measured[key] for key in ("case", "mode", "candidate")}
        row |= {"processes": 1, "threads": cores()}
        if "median_us" in measured:
            row |= {f"{key}_ms": round(measured[f"{key}_us"] / 1e3, 4) for key in ("median", "p20", "p80")}
            row |= {"rounds": measured["rounds"], "others": share}
        else:
            row["error"] = measured["error"]
        kept.append(row)
    return {"measurements": kept} if kept else found


def time_tensor_parallel(rows: Rows, quick: bool) -> None:
    """Time the sequence-parallel MLP and the training step of `benchmarks.bench_tensor_parallel`."""

    def work(case: str, subject: bench_tensor_parallel.TpSubject) -> Row:
        mode = "training step" if subject.name == "gpt" else "forward and backward"
        times, others = bench_tensor_parallel.measure(subject, ranks, alone, 1 if quick else 9)
        return {"measurements": measurements(case, mode, times, others)}

    with pools(RANKS) as (ranks, alone):
        for subject in bench_tensor_parallel.SUBJECTS:
            case = f"{subject.name}, {' x '.join(map(str, subject.sizes)) or 'tiny'}"
            rows.each(case, partial(work, case, subject))


def time_ring_attention(rows: Rows, quick: bool) -> None:
    """Time the causal attention of `benchmarks.bench_ring_attention` on 2048 tokens."""
    subject = bench_ring_attention.CpSubject(256, 4, 16) if quick else bench_ring_attention.CpSubject(2048)
    case = f"{subject.tokens} tokens, {subject.heads} heads of {subject.size}"

    def work() -> Row:
        seconds = 0.01 if quick else 0.3
        times, others = bench_ring_attention.measure(subject, ranks, alone, 1 if quick else 7, seconds=seconds)
        return {"measurements": measurements(case, "forward and backward", times, others)}

    with pools(RANKS) as (ranks, alone):
        rows.each(case, work)


def time_zero(rows: Rows, quick: bool) -> None:
    """Time the training step and the update of `benchmarks.bench_zero`."""

    def work(case: str, mode: str, subject: Training | Update, ranks: RankPool) -> Row:
        times, others = bench_zero.measure(subject, ranks, 1 if quick else 5, 0.01 if quick else 1.0)
        return {"measurements": measurements(case, mode, times, others)}

    for subjects in bench_zero.SUBJECTS.values():
        subject, ranks = subjects[quick], RankPool(RANKS, timeout=_PATIENCE)
        if isinstance(subject, Training):
            case, mode = f"GPT of {subject.n_layer} layers x {subject.n_embd}", "training step"
            case += f", {subject.sequences} x {subject.tokens} tokens per rank"
        else:
            case, mode = f"{subject.matrices} matrices of {subject.size} x {subject.size}", "update"
        rows.each(case, partial(work, case, mode, subject, ranks))
        ranks.close()  # this frees the memory of its candidates


def time_collectives(rows: Rows, quick: bool) -> None:
    """Time the operations and sizes of `benchmarks.collectives`, with their bus bandwidths."""

    def work(op: str) -> Row:
        found: list[Row] = []
        for nbytes in collectives.SIZES[: 2 if quick else None]:
            others = OtherPrograms(ranks)
            times = ranks.run(collectives.measure, op, nbytes, 1 if quick else 9)[0]
            for row in measurements(f"{op}, {nbytes} bytes", op, times, others.share(), bytes=nbytes):
                if row["candidate"] != "copy":
                    bus = nbytes / row["median_ms"] / 1e6 * collectives.bus_factor(op, RANKS)
                    row["bus_gb_s"] = round(bus, 5)
                found.append(row)
        return {"measurements": found}

    with pools(RANKS) as (ranks, _):
        for op in collectives.OPERATIONS:
            rows.each(op, partial(work, op))


BENCHMARKS: dict[str, Callable[..., None]] = {
    **{name: partial(time_operator, name) for name in OPERATORS},
    "tensor_parallel": time_tensor_parallel,
    "ring_attention": time_ring_attention,
    "zero": time_zero,
    "collectives": time_collectives,
}


def rows_of(kept: Row) -> list[Row]:
    """Return the rows of the document for a row that a benchmark's process wrote."""
    benchmark = {"benchmark": kept["step"]}
    if "measurements" not in kept:
        return [benchmark | {"case": kept["row"], "error": kept["error"]}]
    return [benchmark | row for row in kept["measurements"]]


def failed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with an error that is not a peer's."""
    return [row for row in rows if "error" in row and row.get("candidate", OURS).startswith(OURS)]


def page_of(head: Row, rows: Sequence[Row]) -> str:
    """Return the text of the Markdown file."""
    others = [row["others"] for row in rows if row.get("others") is not None]
    lines = [
        f"# tpfuse beside its peers on {head['machine']}",
        "",
        f"`{head['command']}` measured these times on {head['date']} at commit {head['commit']}, with torch",
        f"{head['torch']}, Triton {head['triton']} and Python {head['python']}. Times are medians, all candidates of a",
        "line alternated, and tensors are float32. Bandwidths are bus bandwidths. An operator ran in one process with",
        f"a thread for each core; everything else ran on {RANKS} ranks of one thread each, and the single process",
        f"beside them had {RANKS} threads. Other programs took at most {max(others, default=0.0):.0%} of the cores.",
        "",
        *table_lines(rows),
        *(f"| {name} | left out | | {reason} |" for name, reason in head["left_out"].items()),
    ]
    return "\n".join(lines) + "\n"


class Files:
    """The two files of a run, which are written again after each row."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self.quick, self.rows = folder, quick, list[Row]()
        self.head: Row = {"what": WHAT} | provenance() | {"machine": cpu_machine(), "triton": triton.__version__}
        self.head |= {"quick": quick, "left_out": LEFT_OUT}
        self.stem = f"cpu-{slug(self.head['machine'])}"

    def add(self, rows: Sequence[Row]) -> None:
        """Keep rows, and write the files."""
        self.rows += rows
        replace_file(self.folder / f"{self.stem}.json", document_of(self.head, self.rows))
        replace_file(self.folder / f"{self.stem}.md", page_of(self.head, self.rows))


def run_benchmarks(names: Sequence[str], files: Files, minutes: float = MINUTES) -> int:
    """Run benchmarks, print a line for each case, and return the exit status: 1 where one has failed."""

    def say(kept: Row) -> None:
        if "row" in kept:
            rows = rows_of(kept)
            files.add(rows)
            print("\n".join(table_lines(rows)[2:]), flush=True)

    steps = [Step(name, partial(BENCHMARKS[name], quick=files.quick), patience=_PATIENCE) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        left = run_steps(steps, Path(folder), monotonic() + 60 * minutes, say)
    files.add([{"benchmark": name, "case": "all", "error": f"not done after {minutes:g} minutes"} for name in left])
    wrong = failed(files.rows)
    for row in wrong:
        print(f"benchmarks.cpu: failed: {row['benchmark']}, {row['case']}: {row['error']}", file=sys.stderr)
    return int(bool(wrong))


def main() -> int:
    """Run the benchmarks, and return the exit status."""
    parser = Parser(__doc__, "python -m benchmarks.cpu")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"run only these of {', '.join(BENCHMARKS)}"
    )
    parser.option("--quick", False, "take one round of each benchmark, to check that it works")
    arguments = parser.parse_args()
    if arguments.keep and (arguments.only or arguments.quick):
        parser.error("--keep replaces the files of a whole run: leave out --only and --quick")
    files = Files(results(arguments.keep), arguments.quick)
    status = run_benchmarks(arguments.only or list(BENCHMARKS), files)
    print(f"kept in {files.folder / files.stem}.json")
    return status


if __name__ == "__main__":
    sys.exit(main())
