"""Measure the figures that need a GPU, and write the table of all of them: what is measured, and what is not yet.

    python -m benchmarks.gpu --out runs/h100 --minutes 25       on a machine with GPUs
    python -m benchmarks.gpu --out runs/h100 --only gemm nodes
    python -m benchmarks.gpu --plan --keep                       the table alone, on any machine

On a new machine run `benchmarks.first_contact` first: it checks every result, tunes, and times. This program takes
only the steps of it that time: every operator in bfloat16 beside cuBLAS, torch's attention, Liger-Kernel where it is
installed and torch.compile, and between several GPUs (`nodes`) the fused products and the collectives beside NCCL. It
continues in the folder of `benchmarks.first_contact` if that is given. Then it writes into build/results, or with
--keep into benchmarks/results:

    gpu-MACHINE.json    the rows of operators, with the machine, versions, commit and command
    gpu-MACHINE.md      the table of these rows
    gpu.md              every figure of the project that needs a GPU, of all machines that have such a document; the
                        rows between GPUs come from node.jsonl and collectives.jsonl, and those of training from
                        training.jsonl. What has no row is "not measured yet", beside the command that measures it.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.apart import read, run_steps
from benchmarks.collectives import OPERATIONS
from benchmarks.contact_steps import TIMED, Plan, kept_ceilings, steps
from benchmarks.documents import document_of, slug, table_lines
from benchmarks.figures import FIGURES
from benchmarks.first_contact import line, measurements
from benchmarks.harness import OURS, Parser, Row, results, unable
from benchmarks.node import BY_HAND, SYMMETRIC
from tpfuse.comm.host import replace_file
from tpfuse.kernels.configurations import TABLE, read_table

WHAT = "tpfuse's operators beside their peers on a GPU: medians, alternately"
UNKNOWN = "not measured yet"
NODES = "nodes"  # the name of the steps between several GPUs
GROUPS = ("device", "timings", "other timings", NODES, "torch.compile", "more timings")
FAMILIES = ("sm_80", "sm_90", "sm_100")
_TORCHRUN = "torchrun --nproc-per-node 8 -m"
_LONG = "tpfuse train --model.preset gpt2-124m --model.n-positions 65536 --train.batch 1 --parallel.cp 8"
_TP_BESIDE_NCCL = (
    "python -m benchmarks.training_speed --model.preset gpt2-1558m --parallel.tp 2 --parallel.dp 4 --zero.stage 3"
)
# The commands that time what a limit decides, by the file and the name of the limit. A test finds the names.
LIMITS = {
    "tpfuse/comm/collectives/fused.py: _SLOT_BYTES": f"{_TORCHRUN} benchmarks.collectives",
    "tpfuse/comm/collectives/fused.py: ONE_SHOT_BYTES": f"{_TORCHRUN} benchmarks.collectives",
    "kernels/launch.py: RESERVED": _TP_BESIDE_NCCL,
    "tpfuse/ops/linear/fused.py: ENGINE_BYTES": f"{_TORCHRUN} benchmarks.node",
    "tpfuse/ops/ring_attention/fused.py: ROUND_BYTES": f"{_LONG} --parallel.cp-schedule ring",
    "tpfuse/ops/ring_attention/schedule.py: GATHERED_BYTES": f"{_LONG} --parallel.cp-schedule all_gather",
}
# The options of `tpfuse train` whose speed is a figure: one model on each GPU, the same while a trace is recorded, and
# one model that eight GPUs share, as tensor-parallel ranks, as stages of a pipeline and by ZeRO.
_BUCKETS = "--model.preset gpt2-1558m --parallel.dp 8 --zero.stage 2 --parallel.impl"
_STAGES = "--model.preset gpt2-1558m --parallel.pp 8 --parallel.impl"
TRAINED = (
    "--model.preset gpt2-124m",
    "--model.preset gpt2-124m --profile.steps 16:50 --profile.trace profiles/speed",
    "--model.preset gpt2-1558m --parallel.tp 8 --parallel.impl collective",
    "--model.preset gpt2-1558m --parallel.tp 8 --parallel.impl fused",
    f"{_STAGES} collective",
    f"{_STAGES} fused",
    f"{_BUCKETS} collective",
    f"{_BUCKETS} fused",
)


@dataclass(frozen=True)
class GpuResults:
    """The contents of the folder of results, oldest first.

    documents: those that were measured on GPUs; the other fields: the rows of GPUs in the files of these names.
    """

    documents: Sequence[Row]
    node: Sequence[Row]
    collectives: Sequence[Row]
    training: Sequence[Row]


@dataclass(frozen=True)
class Figure:
    """A line of the table. measured: returns its results, one text for each machine; none where there are none."""

    part: str
    name: str
    asked: str
    command: str
    measured: Callable[[GpuResults], list[str]] = lambda _: []


def measured_in(folder: Path) -> GpuResults:
    """Return what a folder of results has."""

    def rows(name: str) -> list[Row]:
        path = folder / f"{name}.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]
    collectives = [row for row in rows("collectives") if "nccl_us" in row]
    return GpuResults(documents, rows("node"), collectives, [row for row in rows("training") if row["gpus"]])


def figures() -> Iterator[Figure]:
    """Yield all figures of the project that need a GPU."""
    operators = "python -m benchmarks.gpu --out runs/gpu"
    for target in FIGURES:
        asked = f"{'at most' if target.at_most else 'at least'} {target.threshold:.2f}"
        command = f"{operators} --only {target.operator}"
        yield Figure("operators", target.name, asked, command, partial(_outcome, target.name))
    speeds = [(operator, "", f"{operator}, speed / fastest peer") for operator in TIMED]
    speeds = [each for each in speeds if each[0] not in {target.operator for target in FIGURES}]
    speeds.append(("gemm", "backward", "gemm backward, speed / fastest peer (backward_products.md)"))
    for operator, mode, name in speeds:
        yield Figure("operators", name, "", f"{operators} --only {operator}", partial(_speed, operator, mode))
    yield Figure("operators", "host time of a call, µs (host_time.md)", "", operators, _host_time)
    for kind, layers in (("all_gather_gemm", ("qkv", "up")), ("gemm_reduce_scatter", ("proj", "down"))):
        for peer, text in ((BY_HAND, "NCCL and cuBLAS"), (SYMMETRIC, SYMMETRIC)):
            name = f"{kind} on a node, fused, speed / {text}"
            yield Figure("between GPUs", name, "", f"{_TORCHRUN} benchmarks.node", partial(_fused, layers, peer))
    for op in OPERATIONS:
        if op not in ("broadcast", "reduce"):  # tpfuse has no kernels for these
            command = f"{_TORCHRUN} benchmarks.collectives"
            yield Figure("between GPUs", f"{op}, speed / NCCL", "", command, partial(_collective_speed, op))
    command = f"python -m benchmarks.training_speed {_STAGES} fused"
    yield Figure("between GPUs", "messages between stages, fused, training speed / NCCL", "", command, _messages)
    for options in TRAINED:
        name, command = f"tokens per second, MFU: {options}", f"python -m benchmarks.training_speed {options}"
        yield Figure("training", name, "", command, partial(_training, options))
    for limit, command in LIMITS.items():
        yield Figure("limits", limit, "", command)
    rows = read_table(TABLE)
    for family in FAMILIES:
        left = any(row.family == family and row.measured.startswith(UNKNOWN) for row in rows)
        name, told = f"kernels/configurations.toml, {family}", [] if left else ["measured, the table says where"]
        yield Figure("tile sizes", name, "", "tpfuse tune", lambda _, told=told: told)


def _place(document: Row) -> str:
    return f"{document['machine']}, {document['date']}"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _outcome(name: str, measured: GpuResults) -> list[str]:
    """Return the outcomes of a figure of `benchmarks.figures` in the documents."""
    return [
        f"{outcome['got']:.2f}, {outcome['verdict']} ({_place(document)})"
        for document in measured.documents
        for outcome in document["figures"]
        if outcome["figure"] == name and outcome["got"] is not None
    ]


def _by_document(measured: GpuResults, values: Callable[[Row], list[float]]) -> list[str]:
    """Return the range of the values of each document that has some."""
    found = [(document, values(document)) for document in measured.documents]
    return [f"{_range(numbers)} ({_place(document)})" for document, numbers in found if numbers]


def _speed(operator: str, mode: str, measured: GpuResults) -> list[str]:
    """Return the fastest peer's time divided by tpfuse's, over the cases and modes of the documents."""

    def values(document: Row) -> list[float]:
        times: dict[tuple[str, str], dict[str, float]] = {}
        for row in document["rows"]:
            if row["benchmark"] == operator and mode in ("", row["mode"]) and "median_ms" in row:
                times.setdefault((row["case"], row["mode"]), {})[row["candidate"]] = row["median_ms"]
        return [
            min(time for name, time in by_name.items() if name != OURS) / by_name[OURS]
            for by_name in times.values()
            if OURS in by_name and len(by_name) > 1
        ]

    return _by_document(measured, values)


def _host_time(measured: GpuResults) -> list[str]:
    """Return the range over all operators of tpfuse."""
    ours = lambda row: row.get("candidate") == OURS and "host_us" in row  # noqa: E731
    return _by_document(measured, lambda document: [row["host_us"] for row in document["rows"] if ours(row)])


def _by_node(ratios: dict[tuple[Any, ...], tuple[float, str]]) -> list[str]:
    """Return the range of the ratios of each machine and number of ranks, with its newest date.

    ratios: (ratio, date) by (machine, ranks, …), where newer ones have replaced older ones.
    """
    texts = []
    for machine, ranks in dict.fromkeys(key[:2] for key in ratios):
        values, dates = zip(*(each for key, each in ratios.items() if key[:2] == (machine, ranks)), strict=True)
        texts.append(f"{_range(values)} ({ranks} x {machine}, {max(dates)})")
    return texts


def _fused(layers: tuple[str, ...], peer: str, measured: GpuResults) -> list[str]:
    """Return the peer's time divided by that of the fused program, over the newest products of each machine's node."""
    ratios = {}
    for row in measured.node:
        times = row.get("us", {})
        if row["layer"].split()[-1] in layers and f"{OURS} fused" in times and peer in times:
            ratio = times[peer]["median"] / times[f"{OURS} fused"]["median"]
            ratios[row["machine"], row["ranks"], row["layer"], row["M"]] = ratio, row["date"]
    return _by_node(ratios)


def _collective_speed(op: str, measured: GpuResults) -> list[str]:
    """Return NCCL's time divided by tpfuse's, over the sizes of each machine's newest rows."""
    rows = [row for row in measured.collectives if row["op"] == op and "tpfuse_us" in row]
    return _by_node(
        {
            (row["machine"], row["ranks"], row["bytes"]): (
                row["nccl_us"]["median"] / row["tpfuse_us"]["median"],
                row["date"],
            )
            for row in rows
        }
    )


def _newest(options: str, measured: GpuResults) -> dict[tuple[str, int], Row]:
    """Return each machine's newest training run with these options, by machine and number of GPUs."""
    rows = [row for row in measured.training if " ".join(row["options"]) == options]
    return {(row["machine"], row["gpus"]): row for row in rows}


def _training(options: str, measured: GpuResults) -> list[str]:
    return [
        f"{row['tokens_per_second']['median']:.0f}, {row['mfu']['median']:.0%} ({row['gpus']} x {_place(row)})"
        for row in _newest(options, measured).values()
    ]


def _messages(measured: GpuResults) -> list[str]:
    """Return the speed of training with fused messages, divided by that with NCCL's."""
    fused, peers = (_newest(f"{_STAGES} {name}", measured) for name in ("fused", "collective"))
    speeds = {
        key: [rows[key]["tokens_per_second"]["median"] for rows in (fused, peers)] for key in fused if key in peers
    }
    return _by_node({key: (ours / theirs, fused[key]["date"]) for key, (ours, theirs) in speeds.items()})


def plan_of(measured: GpuResults) -> str:
    """Return the text of gpu.md."""
    lines = [
        "# The figures that need a GPU",
        "",
        "`python -m benchmarks.gpu --plan` writes this file, and a test compares it. Figures of at least a number are",
        "speeds (the time of the peer after the slash, divided by tpfuse's) or parts of the copy bandwidth. Figures of",
        "at most a number are tpfuse's time or memory, divided by the peer's. With several cases the worst one counts,",
        "or the range over all is shown. A figure is not measured yet if no row of this folder has it; its command",
        "measures it. The limits are numbers in the code that were chosen without a measurement. The tile sizes are",
        "the rows of a table that `tpfuse tune` measures one by one.",
        "",
        "| part | figure | asked | measured | command |",
        "|---|---|---|---|---|",
    ]
    for figure in figures():
        results = "; ".join(figure.measured(measured)) or UNKNOWN
        lines.append(f"| {figure.part} | {figure.name} | {figure.asked} | {results} | `{figure.command}` |")
    return "\n".join(lines) + "\n"


def _row(row: Row) -> Row:
    """Return a row of the document for a row of `benchmarks.harness`."""
    kept: Row = {"benchmark": row["operator"], **{key: row[key] for key in ("case", "mode", "candidate")}}
    if "median_us" not in row:
        return kept | {"error": row.get("error", UNKNOWN)}
    kept |= {f"{key}_ms": round(row[f"{key}_us"] / 1e3, 6) for key in ("median", "p20", "p80")}
    return kept | {key: row[key] for key in ("rounds", "host_us", "times_bound", "peak_bytes", "check") if key in row}


def keep(folder: Path, results: Path) -> None:
    """Write the files of results from the rows of a folder."""
    rows = read(folder)
    devices = [row for row in rows if row.get("row") == "device" and "machine" in row]
    ceilings, measured = kept_ceilings(rows), measurements(rows)
    if devices and measured:
        head: Row = {"what": WHAT} | {key: x for key, x in devices[-1].items() if key not in ("step", "row", "seconds")}
        copy = ceilings.copy if ceilings else float("nan")
        head["figures"] = [target.outcome(measured, copy) for target in FIGURES]
        kept = [_row(row) for row in measured]
        stem = f"gpu-{slug(head['machine'])}"
        replace_file(results / f"{stem}.json", document_of(head, kept))
        text = [
            f"# tpfuse's operators beside their peers on {head['machine']}",
            "",
            f"`{head['command']}` measured these times on {head['date']} at commit {head['commit']}, with torch",
            f"{head['torch']}, CUDA {head.get('cuda')}, driver {head.get('driver')} and Triton {head['triton']}, in",
            "bfloat16. Times are medians on the device, and all candidates of a line alternated.",
            "",
            *table_lines(kept),
        ]
        replace_file(results / f"{stem}.md", "\n".join(text) + "\n")
    replace_file(results / "gpu.md", plan_of(measured_in(results)))


def main() -> int:
    """Measure and keep; return 1 where something has failed, and 2 where there is no GPU."""
    parser = Parser(__doc__, "python -m benchmarks.gpu")
    names = (*TIMED, NODES)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--out", type=Path, metavar="FOLDER", help="store rows in this folder, and continue from those that it has"
    )
    what.add_argument("--plan", action="store_true", help="write gpu.md and measure nothing")
    parser.option("--minutes", 25.0, "end this call after this number of minutes; another call continues")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"run only these of {', '.join(names)}"
    )
    arguments = parser.parse_args()
    if arguments.plan:
        folder = results(arguments.keep)
        replace_file(folder / "gpu.md", plan_of(measured_in(folder)))
        return 0
    error = unable("benchmarks.gpu", interpreted=False)
    if error:
        print(error, file=sys.stderr)
        return 2
    return measure(arguments.out.resolve(), arguments.only or names, arguments.minutes, results(arguments.keep))


def measure(folder: Path, names: Sequence[str], minutes: float, results: Path) -> int:
    """Run the steps of these names, write their rows into `results`, and return the exit status."""
    deadline = monotonic() + 60 * minutes
    plan = Plan(folder, False, int(torch.seed() % 2**31), tuple(name for name in names if name != NODES))
    groups = [group for group in GROUPS if group != NODES or NODES in names]
    by_group = steps(plan)
    selected = [step for group in groups for step in by_group[group]]

    def say(row: Row) -> None:
        print(line(row), flush=True)
        keep(folder, results)

    left = run_steps(selected, folder, deadline, say)
    keep(folder, results)
    print(f"left for another call: {', '.join(left)}" if left else "nothing is left")
    known = {step.name for step in selected}
    return int(any("error" in row or row.get("passed") is False for row in read(folder) if row["step"] in known))


if __name__ == "__main__":
    sys.exit(main())
