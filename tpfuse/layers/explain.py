"""What the tensor-parallel layers of a model compute with, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from tpfuse.comm.choice import choose
from tpfuse.comm.layout import local_tensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear


@dataclass(frozen=True)
class LayerPlan:
    """One layer. weight: its shape, whole; shard: what of it a rank holds; operator: of `tpfuse.ops`.

    implementation: "fused", "direct" or "collective" (`tpfuse.implementation_choice`), or "local" for one rank.
    """

    layer: str
    kind: str
    weight: tuple[int, ...]
    shard: tuple[int, ...]
    operator: str
    implementation: str
    reason: str


def plans(model: nn.Module) -> list[LayerPlan]:
    """What each ColumnParallelLinear and RowParallelLinear of the model would compute with now.

    Collective: a group finds out when it is first asked. Raises ValueError as `tpfuse.comm.choice.choose` does.
    """
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            implementation, reason = "local", "one rank"
            if layer.group is not None:
                choice = choose(layer.weight.device, layer.weight.dtype, layer.group)
                implementation, reason = choice.implementation, choice.reason
            shapes = tuple(layer.weight.shape), tuple(local_tensor(layer.weight).shape)
            found.append(LayerPlan(name, type(layer).__name__, *shapes, layer.operator, implementation, reason))
    return found


def summary(found: Sequence[LayerPlan]) -> str:
    """In one line: how many layers have which implementation, and why."""
    counts = Counter((plan.implementation, plan.reason) for plan in found)
    return "; ".join(f"{count} {name} ({reason})" for (name, reason), count in counts.items())


def explain(model: nn.Module) -> list[LayerPlan]:
    """Prints, on the first rank, a line for each tensor-parallel layer: shapes, implementation, reason; returns them.

    Collective, as `plans` is.
    """
    found = plans(model)
    head = ("layer", "kind", "weight", "on a rank", "operator", "implementation", "reason")
    rows = [head, *([str(value) for value in vars(plan).values()] for plan in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    if not dist.is_initialized() or dist.get_rank() == 0:
        for row in rows:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return found
