"""Every layout of a model on a cluster that `tpfuse train` accepts, and those that fit the memory, fastest first.

Four rules leave out layouts that cannot be better than one that is tried, if the model of cost is what it should be
(`tests/plan/test_search.py` compares with a search without them):

- More recomputation takes more operations. So it is tried only if the layout does not fit with less.
- A larger micro-batch never needs less memory, unless gradients accumulate whole, which those of one alone do not. So
  after the first size that fits with no stage, only one micro-batch is tried, and only then.
- A pipeline with fewer than two micro-batches for each rank is idle for a third of the time, but for the schedules that
  split backward passes. So it is tried only if the batch has no more sequences.
- The schedule gpipe takes as long as 1f1b, and never less memory. With two stages on a rank, zbv is tried for
  zero_bubble. More than two stages, at most 8, cut the layers into equal parts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from tpfuse.choices import PipelineSchedule, Recompute
from tpfuse.commands.plan.planned import PlannedModel
from tpfuse.parallel.pipeline.order import usual_stages
from tpfuse.plan.hardware import Cluster
from tpfuse.plan.memory import RankMemory, rank_memory
from tpfuse.plan.sizes import RankLayout
from tpfuse.plan.time import StepTimes, step_times
from tpfuse.train.check_options import check_options, with_layout
from tpfuse.train.model_options import model_config
from tpfuse.train.option_marks import suited
from tpfuse.train.options import TrainCommand

# A context-parallel rank has at least this many tokens of a sequence: inside a node as many as a tile of attention has
# rows; across nodes, where these ranks belong only if sequences are long, a thirty-second of the sequences in the last
# stage of Llama 3's training.
LEAST_TOKENS, LEAST_TOKENS_ACROSS = 128, 4096
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)  # the least first
_MOST_STAGES = 8  # of a pipeline rank
EQUAL = 0.01  # predictions within 1 % count as ties
_USABLE = 0.97  # the share of a GPU's memory that a layout may need, since predictions are about so exact


@dataclass(frozen=True)
class PlanCandidate:
    """A layout with its predicted memory and times."""

    layout: RankLayout
    memory: RankMemory
    times: StepTimes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (tp, cp, dp, pp)."""
        return self.layout.tp, self.layout.cp, self.layout.dp, self.layout.pp


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    # The layouts that fit the memory, fastest first.
    fitting: list[PlanCandidate]
    # For each (tp, cp, dp, pp) of which no layout fits, the one that needs the least memory; the least of them first.
    nearest: list[PlanCandidate]
    # The number of layouts that were tried.
    compared: int

    @cached_property
    def best(self) -> list[PlanCandidate]:
        """Return the layout to choose for each (tp, cp, dp, pp), fastest first.

        Predictions within 1 % count as ties. Of the layouts that tie with the fastest, choose the one that shards and
        recomputes the least, and of these the fastest.
        """
        groups: dict[tuple[int, int, int, int], list[PlanCandidate]] = {}
        for each in self.fitting:
            group = groups.setdefault(each.shape, [each])
            if each.times.total <= (1 + EQUAL) * group[0].times.total:
                group.append(each)
        simplest = [min(group, key=_complexity) for group in groups.values()]
        return sorted(simplest, key=lambda each: each.times.total)


def _complexity(candidate: PlanCandidate) -> tuple[int, int, float]:
    layout = candidate.layout
    return layout.zero, RECOMPUTES.index(layout.recompute), candidate.times.total


def search(model: PlannedModel, cluster: Cluster) -> SearchResult:
    """Return the layouts of the model on all GPUs of the cluster."""

    def candidate(layout: RankLayout, memory: RankMemory) -> PlanCandidate:
        return PlanCandidate(layout, memory, step_times(model.sizes, layout, cluster, model.program))

    fitting: list[PlanCandidate] = []
    nearest: list[PlanCandidate] = []
    compared = 0
    for shape in shapes(model, cluster):
        tried = list(_tried(model, usable_memory(cluster), shape, schedules(model, shape[-1])))
        compared += len(tried)
        found = [candidate(layout, memory) for layout, memory, fits in tried if fits]
        fitting += found
        if tried and not found:
            layout, memory, _ = min(tried, key=lambda each: each[1].total)
            nearest.append(candidate(layout, memory))
    fitting.sort(key=lambda each: (each.times.total, each.memory.total))
    return SearchResult(fitting, sorted(nearest, key=lambda each: each.memory.total), compared)


def _tried(
    model: PlannedModel,
    usable: float,
    shape: tuple[int, int, int, int],
    pipelines: Iterable[tuple[PipelineSchedule, int]],
) -> Iterator[tuple[RankLayout, RankMemory, bool]]:
    """Yield the layouts of one (tp, cp, dp, pp) that are tried, with their memory and whether they fit.

    pipelines: the schedules, each with its stages on a rank.
    """
    (tp, cp, dp, pp), batch = shape, model.options.train.batch
    share, whole = batch // dp, model.program.accumulate == "whole"
    for schedule, stages in pipelines:
        fitted = True
        for size in divisors(share):
            count = share // size
            if pp > 1 and (count < min(2 * pp, share) or not accepts(schedule, pp, count)):
                continue
            if not fitted and not (whole and count == 1):
                continue
            fitted = False
            for zero in zero_stages(model.options, dp * cp):
                for recompute in model.recomputes:  # more and more
                    layout = RankLayout(tp, cp, dp, pp, schedule, stages, zero, recompute, size, batch)
                    memory = rank_memory(model.sizes, layout, model.program)
                    fits = memory.total <= usable
                    yield layout, memory, fits
                    if fits:
                        fitted = True
                        break


def usable_memory(cluster: Cluster) -> float:
    """Return the bytes that a layout may need of a GPU."""
    return _USABLE * cluster.gpu.memory


def smallest(model: PlannedModel, cluster: Cluster) -> tuple[RankLayout, RankMemory]:
    """Return the layout that needs the least memory, among those with the schedule 1f1b."""
    every = (tried for shape in shapes(model, cluster) for tried in _tried(model, 0.0, shape, [("1f1b", 1)]))
    layout, memory, _ = min(every, key=lambda each: each[1].total)
    return layout, memory


def shapes(model: PlannedModel, cluster: Cluster) -> Iterator[tuple[int, int, int, int]]:
    """Yield every (tp, cp, dp, pp) that the model and the batch accept."""
    sizes = model.sizes
    for tp in tensor_ranks(model, cluster):
        for cp in divisors(cluster.gpus // tp):
            inside = cluster.per_node % (tp * cp) == 0
            if cp > 1 and sizes.tokens // cp < (LEAST_TOKENS if inside else LEAST_TOKENS_ACROSS):
                continue
            for pp in divisors(cluster.gpus // (tp * cp)):
                dp = cluster.gpus // (tp * cp * pp)
                if pp <= sizes.layers and model.options.train.batch % dp == 0:
                    yield tp, cp, dp, pp


def tensor_ranks(model: PlannedModel, cluster: Cluster) -> list[int]:
    """Return the numbers of tensor-parallel ranks that share heads and MLP equally and stay inside a node."""
    sizes = model.sizes
    return [
        tp
        for tp in divisors(cluster.per_node)
        if sizes.heads % tp == 0 and sizes.kv_heads % tp == 0 and sizes.inner % tp == 0
    ]


def schedules(model: PlannedModel, ranks: int) -> Iterator[tuple[PipelineSchedule, int]]:
    """Yield the schedules of a pipeline of `ranks` ranks that are tried, each with its stages on a rank."""
    yield "1f1b", 1
    if ranks == 1:
        return
    layers, splits = model.sizes.layers, not model.options.train.compile
    if splits:
        yield "zero_bubble", 1
    if splits and layers >= 2 * ranks:
        yield "zbv", 2
    for stages in range(2, min(layers // ranks, _MOST_STAGES) + 1):
        if layers % (ranks * stages) == 0 or stages == 2:
            yield "interleaved_1f1b", stages


def zero_stages(options: TrainCommand, replicas: int) -> Iterator[int]:
    """Yield the stages of ZeRO that the options accept. Without replicas there is nothing to shard."""
    zero = options.zero
    yield 0
    if replicas > 1:
        yield from (1, 2)
        if zero.gradient_dtype == "float32":
            yield 3


def accepts(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> bool:
    """Return whether `tpfuse.parallel.pipeline.order` has an order of these numbers, without making it.

    torch's schedules with several stages on a rank divide the micro-batches into equal rounds of at least `ranks`.
    """
    if schedule in ("gpipe", "1f1b", "zbv"):
        return micro_batches >= 1
    return micro_batches >= 1 and micro_batches % max(1, micro_batches // ranks) == 0


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, the smallest first."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def train_options(model: PlannedModel, layout: RankLayout) -> TrainCommand:
    """Return the options of `tpfuse train` for a layout. Raise UserError if it would refuse them."""
    options, piped = model.options, layout.pp > 1
    parallel = replace(
        options.parallel, tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, cp_schedule="auto", cp_ulysses=None,
        pp_schedule=layout.schedule if piped else "1f1b", pp_layers=None, replicas=1,
        pp_stages_per_rank=layout.stages_per_rank
        if piped and layout.stages_per_rank != usual_stages(layout.schedule) else None,
    )  # fmt: skip
    train = replace(options.train, recompute=layout.recompute, micro_batch=layout.micro_batch)
    zero = replace(options.zero, stage=layout.zero)
    options = suited(with_layout(replace(options, parallel=parallel, train=train, zero=zero), layout.ranks))
    check_options(options)
    model_config(options, model.vocabulary)
    return options
