"""The time of a training step, by kind."""

from dataclasses import dataclass, fields

from tpfuse.cost.hardware import Cluster
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes


@dataclass(frozen=True)
class Times:
    """The seconds of a step on the rank that ends last, by kind. They add up to the time of the step.

    products: matrix products. attention: attention's kernels. elementwise: operators that the memory's bandwidth bounds.
    tensor, context, pipeline, data: communication of each dimension that nothing hides. bubble: waiting for other
    pipeline ranks. optimizer: its update. launches: what kernels and their host need beyond the times above.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    launches: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(getattr(self, kind.name) for kind in fields(self))


def step_times(sizes: ModelSizes, layout: Layout, cluster: Cluster, program: Program) -> Times:
    """Return the times of a step. It must be fast: `tpfuse plan` calls it for tens of thousands of layouts."""
    raise NotImplementedError
