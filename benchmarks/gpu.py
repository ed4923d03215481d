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
from pathlib import Path
from time import monotonic

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
GROUPS = ("device", "timings", NODES, "torch.compile", "more timings")
FAMILIES = ("sm_80", "sm_90", "sm_100")
_TORCHRUN = "torchrun --nproc-per-node 8 -m"
_LONG = "tpfuse train --model.preset gpt2-124m --model.n-positions 65536 --train.batch 1 --parallel.cp 8"
# The commands that time what a limit decides, by the file and the name of the limit. A test finds the names.
LIMITS = {
    "tpfuse/comm/collectives/fused.py: _SLOT_BYTES": f"{_TORCHRUN} benchmarks.collectives",
    "tpfuse/comm/collectives/fused.py: ONE_SHOT_BYTES": f"{_TORCHRUN} benchmarks.collectives",
    "tpfuse/comm/collectives/fused.py: _PROGRAMS": f"{_TORCHRUN} benchmarks.collectives",
    "tpfuse/ops/linear/fused.py: ENGINE_BYTES": f"{_TORCHRUN} benchmarks.node",
    "tpfuse/ops/ring_attention/fused.py: ROUND_BYTES": f"{_LONG} --parallel.cp-schedule ring",
    "tpfuse/ops/ring_attention/schedule.py: GATHERED_BYTES": f"{_LONG} --parallel.cp-schedule all_gather",
}
# The options of `tpfuse train` whose speed is a figure: one model on each GPU, the same while a trace is recorded, and
# one model that eight GPUs share, as tensor-parallel ranks and as stages of a pipeline.
_STAGES = "--model.preset gpt2-1558m --parallel.pp 8 --parallel.impl"
TRAINED = (
    "--model.preset gpt2-124m",
    "--model.preset gpt2-124m --profile.steps 16:50 --profile.trace profiles/speed",
    "--model.preset gpt2-1558m --parallel.tp 8 --parallel.impl collective",
    "--model.preset gpt2-1558m --parallel.tp 8 --parallel.impl fused",
    f"{_STAGES} collective",
    f"{_STAGES} fused",
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
    for target in FIGURES:
        asked = f"{'at most' if target.at_most else 'at least'} {target.threshold:.2f}"
        yield Figure("operators", target.name, asked, _only(target.operator), _Outcome(target.name))
    for operator in TIMED:
        if operator not in {target.operator for target in FIGURES}:
            yield Figure("operators", f"{operator}, speed / fastest peer", "", _only(operator), _Speed(operator))
    yield Figure(
        "operators",
        "gemm backward, speed / fastest peer (backward_products.md)",
        "",
        _only("gemm"),
        _Speed("gemm", "backward"),
    )
    yield Figure(
        "operators", "host time of a call, µs (host_time.md)", "", "python -m benchmarks.gpu --out runs/gpu", _host_time
    )
    for kind, layers in (("all_gather_gemm", ("qkv", "up")), ("gemm_reduce_scatter", ("proj", "down"))):
        for peer, text in ((BY_HAND, "NCCL and cuBLAS"), (SYMMETRIC, SYMMETRIC)):
            name = f"{kind} on a node, fused, speed / {text}"
            yield Figure("between GPUs", name, "", f"{_TORCHRUN} benchmarks.node", _Fused(layers, peer))
    for op in OPERATIONS:
        if op not in ("broadcast", "reduce"):  # tpfuse has no kernels for these
            name = f"{op}, speed / NCCL"
            yield Figure("between GPUs", name, "", f"{_TORCHRUN} benchmarks.collectives", _CollectiveSpeed(op))
    command = f"python -m benchmarks.training_speed {_STAGES} fused"
    yield Figure("between GPUs", "messages between stages, fused, training speed / NCCL", "", command, _messages)
    for options in TRAINED:
        name = f"tokens per second, MFU: {options}"
        yield Figure("training", name, "", f"python -m benchmarks.training_speed {options}", _Training(options))
    for limit, command in LIMITS.items():
        yield Figure("limits", limit, "", command)
    for family in FAMILIES:
        yield Figure("tile sizes", f"kernels/configurations.toml, {family}", "", "tpfuse tune", _Tuned(family))


def _only(operator: str) -> str:
    return f"python -m benchmarks.gpu --out runs/gpu --only {operator}"


def _place(document: Row) -> str:
    return f"{document['machine']}, {document['date']}"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a figure of `benchmarks.figures` in the documents."""

    name: str

    def __call__(self, measured: GpuResults) -> list[str]:
        return [
            f"{outcome['got']:.2f}, {outcome['verdict']} ({_place(document)})"
            for document in measured.documents
            for outcome in document["figures"]
            if outcome["figure"] == self.name and outcome["got"] is not None
        ]


@dataclass(frozen=True)
class _Speed:
    """The fastest peer's time divided by tpfuse's, over the cases and modes of the documents."""

    operator: str
    mode: str = ""

    def __call__(self, measured: GpuResults) -> list[str]:
        texts = []
        for document in measured.documents:
            times: dict[tuple[str, str], dict[str, float]] = {}
            for row in document["rows"]:
                if row["benchmark"] == self.operator and self.mode in ("", row["mode"]) and "median_ms" in row:
                    times.setdefault((row["case"], row["mode"]), {})[row["candidate"]] = row["median_ms"]
            values = [
                min(time for name, time in by_name.items() if name != OURS) / by_name[OURS]
                for by_name in times.values()
                if OURS in by_name and len(by_name) > 1
            ]
            texts += [f"{_range(values)} ({_place(document)})"] if values else []
        return texts


def _host_time(measured: GpuResults) -> list[str]:
    """Return the range over all operators of tpfuse."""
    texts = []
    for document in measured.documents:
        values = [row["host_us"] for row in document["rows"] if row.get("candidate") == OURS and "host_us" in row]
        texts += [f"{_range(values)} ({_place(document)})"] if values else []
    return texts


@dataclass(frozen=True)
class _Fused:
    """A peer's time divided by that of the fused program, over the newest products of each machine's node."""

    layers: tuple[str, ...]
    peer: str

    def __call__(self, measured: GpuResults) -> list[str]:
        newest = {}
        for row in measured.node:
            times = row["us"]
            if row["layer"].split()[-1] in self.layers and f"{OURS} fused" in times and self.peer in times:
                newest[row["machine"], row["ranks"], row["layer"], row["M"]] = row
        ratios = [row | {"ratio": _median(row, self.peer) / _median(row, f"{OURS} fused")} for row in newest.values()]
        return _by_node(ratios)


def _median(row: Row, name: str) -> float:
    return float(row["us"][name]["median"])


@dataclass(frozen=True)
class _CollectiveSpeed:
    """NCCL's time divided by tpfuse's, over the sizes of each machine's newest rows."""

    op: str

    def __call__(self, measured: GpuResults) -> list[str]:
        rows = [row for row in measured.collectives if row["op"] == self.op and "tpfuse_us" in row]
        newest = {(row["machine"], row["ranks"], row["bytes"]): row for row in rows}
        ratios = [row | {"ratio": row["nccl_us"]["median"] / row["tpfuse_us"]["median"]} for row in newest.values()]
        return _by_node(ratios)


def _by_node(rows: Sequence[Row]) -> list[str]:
    """Return the range of the ratios of each machine and number of ranks, with its newest date."""
    texts = []
    for machine, ranks in dict.fromkeys((row["machine"], row["ranks"]) for row in rows):
        own = [row for row in rows if (row["machine"], row["ranks"]) == (machine, ranks)]
        dates = max(row["date"] for row in own)
        texts.append(f"{_range([row['ratio'] for row in own])} ({ranks} x {machine}, {dates})")
    return texts


@dataclass(frozen=True)
class _Training:
    """The speed of each machine's newest training run with these options."""

    options: str

    def __call__(self, measured: GpuResults) -> list[str]:
        rows = [row for row in measured.training if " ".join(row["options"]) == self.options]
        return [
            f"{row['tokens_per_second']['median']:.0f}, {row['mfu']['median']:.0%} ({row['gpus']} x {_place(row)})"
            for row in {(row["machine"], row["gpus"]): row for row in rows}.values()
        ]


def _messages(measured: GpuResults) -> list[str]:
    """Return the speed of each machine's newest training run with fused messages, divided by that with NCCL's."""
    newest = {(row["machine"], row["gpus"], " ".join(row["options"])): row for row in measured.training}
    ratios = []
    for (machine, gpus, options), row in newest.items():
        peer = newest.get((machine, gpus, f"{_STAGES} collective"))
        if options == f"{_STAGES} fused" and peer is not None:
            ratio = row["tokens_per_second"]["median"] / peer["tokens_per_second"]["median"]
            ratios.append(row | {"ranks": gpus, "ratio": ratio})
    return _by_node(ratios)


@dataclass(frozen=True)
class _Tuned:
    """A figure that is measured if all rows of a GPU family in the table of tile sizes are."""

    family: str

    def __call__(self, _: GpuResults) -> list[str]:
        rows = [row for row in read_table(TABLE) if row.family == self.family]
        return [] if any(row.measured.startswith(UNKNOWN) for row in rows) else ["measured, the table says where"]


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
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="end this call after this number of minutes; another call continues"
    )
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
