"""The memory of a rank, by kind."""

from dataclasses import dataclass, fields

from tpfuse.cost.layout import Layout
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes


@dataclass(frozen=True)
class Memory:
    """The bytes of the rank that needs the most, by kind, as `tpfuse memory` counts them.

    workspace: the largest short-lived tensors, such as logits, and what the allocator and libraries keep.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return sum(getattr(self, kind.name) for kind in fields(self))


def rank_memory(sizes: ModelSizes, layout: Layout, program: Program) -> Memory:
    """Return the memory of the rank that needs the most. It must be fast, as `step_times` must."""
    raise NotImplementedError
