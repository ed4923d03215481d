"""The report of `tpfuse plan`: the best layouts, their time and memory, and why each is slower than the best."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from shlex import join
from textwrap import wrap
from typing import Any

from tpfuse.commands.plan.planned import PlannedModel
from tpfuse.commands.plan.search import EQUAL, PlanCandidate, SearchResult, usable_memory
from tpfuse.plan.hardware import Cluster
from tpfuse.plan.memory import RankMemory
from tpfuse.plan.reliability import Reliability, reliability
from tpfuse.plan.sizes import RankLayout
from tpfuse.plan.time import StepTimes
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import described_layout

GIB = 2**30
_ROWS = 8  # layouts in the tables
_UNFIT = 3  # layouts that do not fit, below the table
_MANY = 64  # GPUs from which on failures and stragglers are reported
_MASTER_BYTES = 12  # of an element in a checkpoint of tpfuse: the master and two moments, in float32
_WORDS = {
    "products": "matrix products add",
    "attention": "attention adds",
    "elementwise": "elementwise operators add",
    "tensor": "tensor-parallel communication adds",
    "context": "context-parallel communication adds",
    "pipeline": "messages between stages add",
    "data": "data-parallel communication adds",
    "bubble": "the bubble adds",
    "optimizer": "the optimizer adds",
    "launches": "launches add",
}


@dataclass(frozen=True)
class PlanReport:
    """All that the text and the JSON document are made of."""

    model: PlannedModel
    cluster: Cluster
    found: SearchResult
    # Those of `tpfuse train` for the best layout.
    options: TrainCommand
    # Where each number of the cluster comes from.
    sources: Mapping[str, str]

    @property
    def best(self) -> PlanCandidate:
        """Return the layout to choose."""
        return self.found.best[0]

    @property
    def reliability(self) -> Reliability:
        """Return what is expected of a long run with these GPUs."""
        nodes = self.cluster.gpus // self.cluster.per_node
        return reliability(self.cluster.gpus, nodes, _MASTER_BYTES * self.model.parameters)

    def tokens_per_second(self, candidate: PlanCandidate) -> float:
        """Return the predicted tokens per second of all GPUs."""
        return candidate.layout.batch * self.model.sizes.tokens / candidate.times.total

    def utilization(self, candidate: PlanCandidate) -> float:
        """Return the model FLOPs utilization: the share of the GPUs' highest rate that the model's operations reach."""
        gpu = self.cluster.gpu
        rate = gpu.half_rate if self.model.program.parameter_bytes == 2 else gpu.single_rate
        return self.tokens_per_second(candidate) * self.model.sizes.flops_per_token / (rate * self.cluster.gpus)

    def price(self, candidate: PlanCandidate) -> float:
        """Return the dollars of a million tokens; 0 if the price of the GPU is not known."""
        return self.cluster.gpu.price * self.cluster.gpus / 3600 * 1e6 / self.tokens_per_second(candidate)

    def command(self) -> str:
        """Return the command that trains with the best layout."""
        return " ".join([launcher(self.cluster), join(train_arguments(self.model, self.options))])

    def lines(self) -> list[str]:
        """Return the lines of the text."""
        shown = self.found.best[:_ROWS]
        return [
            *self._heading(),
            "",
            *_table(self._columns(shown)),
            "",
            *(f"{index} is {slower(self.best, each)}" for index, each in enumerate(shown[1:], 2)),
            *_further(len(self.found.best) - len(shown), "fit and are slower"),
            *self._unfit(),
            "",
            "Seconds of a step, by kind. Communication is what nothing hides.",
            *_table({"": _numbers(shown), **_by_kind([each.times for each in shown], StepTimes, 1.0)}),
            "",
            f"GiB of a rank, by kind. A GPU has {self.cluster.gpu.memory / GIB:.1f}, of which"
            f" {usable_memory(self.cluster) / GIB:.1f} are used at most.",
            *_table({"": _numbers(shown), **_by_kind([each.memory for each in shown], RankMemory, GIB)}),
            "",
            *self._scale(),
            "The best layout is trained by",
            "",
            *_wrapped(self.command()),
            "",
            *self._assumptions(),
        ]

    def _heading(self) -> list[str]:
        sizes, cluster, found = self.model.sizes, self.cluster, self.found
        nodes = cluster.gpus // cluster.per_node
        places = "1 node" if nodes == 1 else f"{nodes:,} nodes, network {cluster.network.name}"
        heading = [
            f"{sizes.name}: {self.model.parameters:,} parameters, {self.model.options.train.dtype}; steps of"
            f" {self.best.layout.batch:,} sequences of {sizes.tokens:,} tokens",
            f"{cluster.gpus:,} x {cluster.gpu.name}, {cluster.gpu.link.name}; {places}",
            f"{found.compared:,} layouts were compared, of which {len(found.fitting):,} fit the memory.",
        ]
        if cluster.gpu.price:
            heading.append(
                f"The best costs ${self.price(self.best):.3g} for a million tokens, at ${cluster.gpu.price:.2f} for an"
                " hour of a GPU."
            )
        return heading

    def _columns(self, shown: Sequence[PlanCandidate]) -> dict[str, list[str]]:
        layouts = [each.layout for each in shown]
        return {
            "": _numbers(shown),
            **{name: [str(getattr(layout, name)) for layout in layouts] for name in ("tp", "cp", "dp", "pp")},
            "schedule": [described_schedule(layout) for layout in layouts],
            "ZeRO": [str(layout.zero) for layout in layouts],
            "recompute": [layout.recompute for layout in layouts],
            "micro-batch": [str(layout.micro_batch) for layout in layouts],
            "tokens/s": [f"{self.tokens_per_second(each):,.0f}" for each in shown],
            "MFU": [f"{self.utilization(each):.1%}" for each in shown],
            "step s": [number(each.times.total) for each in shown],
            "GiB": [f"{each.memory.total / GIB:.1f}" for each in shown],
        }

    def _unfit(self) -> list[str]:
        nearest = self.found.nearest
        return [
            f"{named(each.layout)} does not fit: it needs {missing(each, self.cluster):.1f} GiB more than are usable."
            for each in nearest[:_UNFIT]
        ] + _further(len(nearest) - _UNFIT, "do not fit")

    def _scale(self) -> list[str]:
        if self.cluster.gpus < _MANY:
            return []
        expected = self.reliability
        return [
            f"In a long run a GPU is expected to fail every {_duration(expected.between_failures)}. With a checkpoint"
            f" every {_duration(expected.interval)},",
            f"checkpoints, restarts and lost work take {expected.lost:.1%} of the time. The slowest of"
            f" {self.cluster.gpus:,} GPUs is expected to be",
            f"{expected.slower:.1%} slower than the mean. Expect {expected.effective:.0%} of the predicted speed:"
            f" {expected.effective * self.tokens_per_second(self.best):,.0f} tokens/s.",
            "",
        ]

    def _assumptions(self) -> list[str]:
        hardware = dict.fromkeys(name.rpartition(" ")[0] for name in self.sources)
        assumed = [name for name, source in self.sources.items() if source.startswith("assumed")]
        lines = [
            f"Everything here is predicted, by the numbers of {', '.join(hardware)}; --json lists the source of each."
        ]
        if assumed:
            lines += wrap(f"Assumed, since no measurement was found: {', '.join(assumed)}.", 116)
        return lines

    def document(self) -> dict[str, Any]:
        """Return the JSON document, which has all layouts that fit."""
        return {
            "model": {**asdict(self.model.sizes), "parameters": self.model.parameters},
            "cluster": asdict(self.cluster),
            "program": asdict(self.model.program),
            "compared": self.found.compared,
            "layouts": [self._entry(each) for each in self.found.fitting],
            "too_large": [self._entry(each) for each in self.found.nearest],
            "train": train_arguments(self.model, self.options),
            "command": self.command(),
            "reliability": {**asdict(self.reliability), "effective": self.reliability.effective},
            "sources": dict(self.sources),
        }

    def _entry(self, candidate: PlanCandidate) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "layout": asdict(candidate.layout),
            "tokens_per_second": self.tokens_per_second(candidate),
            "mfu": self.utilization(candidate),
            "seconds": candidate.times.total,
            "bytes": candidate.memory.total,
            "seconds_by_kind": asdict(candidate.times),
            "bytes_by_kind": asdict(candidate.memory),
        }
        return entry | ({"dollars_per_million_tokens": self.price(candidate)} if self.cluster.gpu.price else {})


def slower(best: PlanCandidate, other: PlanCandidate) -> str:
    """Return in words how much slower a layout is than the best, and on which kinds of time it spends more.

    The shares are those of the best step.
    """
    whole = best.times.total
    more = {kind: (getattr(other.times, kind) - getattr(best.times, kind)) / whole for kind in _WORDS}
    share = other.times.total / whole - 1.0
    if share < EQUAL:
        return "equally fast: predictions within 1 % count as ties"
    first, second, *_ = sorted(more, key=lambda kind: -more[kind])
    reason, also = f"{share:.1%} slower: {_WORDS[first]} {more[first]:.1%}", _WORDS[second].rpartition(" ")[0]
    return reason + (f", {also} {more[second]:.1%}" if more[second] > share / 4 else "")


def _further(count: int, fate: str) -> list[str]:
    return [f"{count:,} further combinations of tp, cp, dp and pp {fate}."] if count > 0 else []


def missing(candidate: PlanCandidate, cluster: Cluster) -> float:
    """Return how many GiB a layout needs more than are usable."""
    return (candidate.memory.total - usable_memory(cluster)) / GIB


def described_schedule(layout: RankLayout) -> str:
    """Return the schedule of a pipeline in words; a dash without a pipeline."""
    if layout.pp == 1:
        return "-"
    return layout.schedule + (f", {layout.stages_per_rank} stages" if layout.stages_per_rank > 1 else "")


def named(layout: RankLayout) -> str:
    """Return a layout in words."""
    ranks = described_layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp)
    schedule = f" {described_schedule(layout)}," if layout.pp > 1 else ""
    return f"{ranks} with{schedule} ZeRO {layout.zero}, recompute {layout.recompute}, micro-batch {layout.micro_batch}"


def train_arguments(model: PlannedModel, options: TrainCommand) -> list[str]:
    """Return the arguments of `tpfuse train` that give these options, which differ from the model's in the layout."""
    arguments = list(model.arguments)
    for section in ("parallel", "zero", "train"):
        before, after = getattr(model.options, section), getattr(options, section)
        for item in fields(after):
            value = getattr(after, item.name)
            if value != getattr(before, item.name) or (section, item.name) == ("parallel", "dp"):
                arguments += [f"--{section}.{item.name.replace('_', '-')}", str(value)]
    return arguments


def launcher(cluster: Cluster) -> str:
    """Return the words before the options of `tpfuse train`: on several nodes torchrun starts the ranks."""
    nodes = cluster.gpus // cluster.per_node
    if nodes == 1:
        return "tpfuse train"
    return (
        f"torchrun --nnodes {nodes} --node-rank $NODE --nproc-per-node {cluster.per_node} --master-addr $HOST"
        " --master-port 29500 -m tpfuse train"
    )


def number(value: float) -> str:
    """Return a number of seconds, or of GiB, with three digits."""
    if value < 0.0005:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value >= 1 else 3}f}"


def _numbers(shown: Sequence[PlanCandidate]) -> list[str]:
    return [str(index) for index in range(1, len(shown) + 1)]


def _by_kind(values: Sequence[object], kind: type[StepTimes] | type[RankMemory], unit: float) -> dict[str, list[str]]:
    """Return a column for each kind that any of the values has, and one for the sum."""
    names = [item.name for item in fields(kind)]
    columns = {name: [getattr(value, name) / unit for value in values] for name in (*names, "total")}
    return {name: [number(value) for value in column] for name, column in columns.items() if any(column)}


def _table(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table."""
    widths = {head: max(map(len, (head, *cells))) for head, cells in columns.items()}
    return [
        "  ".join(
            cell.ljust(width) if head in ("schedule", "recompute") else cell.rjust(width)
            for cell, (head, width) in zip(row, widths.items(), strict=True)
        ).rstrip()
        for row in (tuple(columns), *zip(*columns.values(), strict=True))
    ]


def _wrapped(command: str) -> list[str]:
    """Return the lines of a command, which a shell reads as one."""
    *lines, last = wrap(command, 114, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [*(f"{line} \\" for line in lines), last]


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
