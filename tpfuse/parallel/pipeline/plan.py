"""The plan of a pipeline: its stages and their costs, its bubbles, and what carries its messages."""

from collections.abc import Sequence
from dataclasses import dataclass

from tpfuse.parallel.pipeline.cut import Cost, Stage
from tpfuse.parallel.pipeline.order import Order
from tpfuse.parallel.pipeline.timeline import Timeline, most_in_flight


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of a pipeline, which is the same on all its ranks."""

    order: Order  # the order of a step
    stages: tuple[Stage, ...]  # of all ranks
    costs: tuple[Cost, ...]  # of each stage, as it is counted for the cut
    # what carries messages: "fused", "direct" or "collective" (`tpfuse.switches`), or "local" for one rank
    implementation: str
    reason: str  # why
    predicted: Timeline  # a step whose passes take the time that is expected of them

    @property
    def idle(self) -> list[float]:
        """Return the share of the predicted step in which each pipeline rank does not compute."""
        return [self.predicted.idle_share(rank) for rank in range(self.order.ranks)]

    @property
    def in_flight(self) -> list[int]:
        """Return the most micro-batches in flight on each pipeline rank, counted once for each of its stages."""
        return [most_in_flight(self.order, rank) for rank in range(self.order.ranks)]

    def explanation(self, micro_batch: str = "") -> list[str]:
        """Return the lines that `tpfuse.explain` prints. micro_batch: what a micro-batch is, such as " of 4 tokens"."""
        order, total = self.order, sum(self.costs, Cost(0, 0))
        stages = [
            (
                str(stage.index),
                str(rank),
                f"{stage.layers.start}-{stage.layers.stop - 1}" if len(stage.layers) > 1 else f"{stage.layers.start}",
                _share(cost.flops, total.flops),
                _share(cost.parameters, total.parameters),
            )
            for stage, cost, rank in zip(self.stages, self.costs, order.rank_of, strict=True)
        ]
        ranks = [
            (str(rank), ", ".join(map(str, order.stages_of(rank))), f"{idle:.1%}", str(in_flight))
            for rank, (idle, in_flight) in enumerate(zip(self.idle, self.in_flight, strict=True))
        ]
        return [
            f"{order.schedule}: {_count(order.micro_batches, 'micro-batch', 'es')}{micro_batch} on"
            f" {_count(order.ranks, 'pipeline rank')} with {_count(order.stages // order.ranks, 'stage')} each;"
            f" predicted idle share at most {max(self.idle):.0%}",
            *_table([("stage", "pipeline rank", "layers", "operations", "parameters"), *stages]),
            *_table([("pipeline rank", "stages", "predicted idle share", "most in flight"), *ranks]),
            f"messages: {self.implementation} ({self.reason})",
        ]


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{ending * (number != 1)}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
