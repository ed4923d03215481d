"""A layout: how the ranks share a training step."""

from dataclasses import dataclass
from typing import NamedTuple

from tpfuse.choices import PipelineSchedule, Recompute


class Share(NamedTuple):
    """A rank's share of a micro-batch, which decides what the rank computes. The fields are those of `Layout`."""

    tp: int
    cp: int
    micro_batch: int
    recompute: Recompute


@dataclass(frozen=True)
class Layout:
    """The options of `tpfuse train` that decide how fast a step is and how much memory it needs.

    tp, cp, dp, pp: the numbers of tensor-, context-, data- and pipeline-parallel ranks; neighbouring ranks are
    tensor-parallel, then context-, data- and pipeline-parallel. schedule, stages_per_rank: of the pipeline. zero: the
    stage of ZeRO. recompute: the activations that the backward pass computes again. micro_batch: the sequences of a
    micro-batch of a data-parallel rank. batch: the sequences of a step over all ranks, a multiple of dp x micro_batch.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    schedule: PipelineSchedule
    stages_per_rank: int
    zero: int
    recompute: Recompute
    micro_batch: int
    batch: int

    @property
    def share(self) -> Share:
        """Return a rank's share of a micro-batch."""
        return Share(self.tp, self.cp, self.micro_batch, self.recompute)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of each data-parallel rank in a step."""
        return self.batch // (self.dp * self.micro_batch)
