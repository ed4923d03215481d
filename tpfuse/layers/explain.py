"""The implementations that the communicating layers of a model use, and the reasons for them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn

from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import shown
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.partial_gradients import warnings_of
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.ops.linear import torch_operators
from tpfuse.ops.linear.dispatch import CANDIDATES, measured_products


@dataclass(frozen=True)
class LayerPlan:
    """The implementation of one layer, and the reason for it.

    weight: the shape of the whole weight, () for none; shard: the shape of this rank's shard of it; operator: the
    operator's name; implementation: "fused", "direct" or "collective" (`tpfuse.switches`), "torch" for torch's own
    operators (`tpfuse.ops.linear.torch_operators`), or "local" for one rank.
    """

    layer: str
    kind: str
    weight: tuple[int, ...]
    shard: tuple[int, ...]
    operator: str
    implementation: str
    reason: str


@runtime_checkable
class Explained(Protocol):
    """A layer that communicates in a way of its own, such as attention over context ranks, and describes it."""

    def explained(self, name: str) -> LayerPlan | None:
        """Return the layer's plan, or None if it does not communicate. The call is collective."""


@runtime_checkable
class ExplainedTraining(Protocol):
    """An object that trains a model in a way of its own, as a `tpfuse.Pipeline` and the engines of `tpfuse.zero` do."""

    model: nn.Module

    def explanation(self) -> list[str]:
        """Return the lines that `explain` prints before those of the model's layers. The call is collective."""


def plans(model: nn.Module) -> list[LayerPlan]:
    """Return the plan of each ColumnParallelLinear, RowParallelLinear and `Explained` layer of the model.

    The first call for a group is collective. Raise ValueError as `tpfuse.comm.dispatch.choose_implementation` does.
    """
    layer_plans = []
    for name, layer in model.named_modules():
        if isinstance(layer, Explained):
            plan = layer.explained(name)
            layer_plans += [] if plan is None else [plan]
        elif isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            implementation, reason = "local", "one rank"
            if layer.group is not None:
                implementation, reason = _linear_plan(layer, layer.group)
                reason = "; ".join(filter(None, (reason, layer.__dict__.get("reason"))))
            shapes = tuple(layer.weight.shape), tuple(local_tensor(layer.weight).shape)
            layer_plans.append(LayerPlan(name, type(layer).__name__, *shapes, layer.operator, implementation, reason))
    return layer_plans


def _linear_plan(layer: ColumnParallelLinear | RowParallelLinear, group: dist.ProcessGroup) -> tuple[str, str]:
    """Return (implementation, reason) of a layer.

    If the group has measured the layer's products, the reason has the times of all candidates, and the implementation
    is that of the forward product that was measured first.
    """
    weight = local_tensor(layer.weight)
    choice = choose_implementation(weight.device, weight.dtype, group)
    if choice.state == "default":
        shape = weight.flatten(0, -2).shape
        measured = [(product, decision) for product, decision in measured_products(group).items()
                    if product.operator == layer.operator and shape in product.weights]  # fmt: skip
        if measured:
            times = [f"{product.direction} of {'x'.join(map(str, product.x))}: {taken}" for product, taken in measured]
            return measured[0][1].taken.partition(" ")[0], f"measured {'; '.join(times)}"
    return choice.implementation, choice.reason


def _torch_lines(model: nn.Module) -> list[str]:
    """Return a line for each of torch's operators that says whether a measurement tries it for the model's layers."""
    lines: dict[str, None] = {}
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.group is not None:
            weight = local_tensor(layer.weight)
            choice = choose_implementation(weight.device, weight.dtype, layer.group)
            of_torch = torch_operators.CANDIDATES.keys() & set(CANDIDATES.get(weight.device.type, ()))
            if choice.state == "default" and of_torch:
                found = torch_operators.obstacles(layer.group, weight.device, weight.dtype)
                for name, reason in found.items():
                    operators = ", ".join(torch_operators.CANDIDATES[name][0])
                    lines[f"{name} ({operators}): {f'not possible: {reason}' if reason else 'measured'}"] = None
    return list(lines)


def summary(layer_plans: Sequence[LayerPlan]) -> str:
    """Return one line with the number of layers of each implementation, and the reasons."""
    counts = Counter((plan.implementation, plan.reason) for plan in layer_plans)
    return "; ".join(f"{count} {name} ({reason})" for (name, reason), count in counts.items())


def explain(model: nn.Module | ExplainedTraining) -> list[LayerPlan]:
    """Print, on the first rank, a line for each layer of `plans` (shapes, implementation, reason); return the plans.

    On GPUs, where a measurement may decide (`tpfuse.autotune`), a line for each of torch's own operators says whether
    it is tried. After a forward pass with gradients, a warning follows for each parameter that saw a part of the
    activations alone, and whose gradient nothing sums over the ranks (`tpfuse.layers.partial_gradients`).

    model: a module, a `tpfuse.Pipeline`, or an engine of `tpfuse.zero`. The first rank prints the stages of a pipeline,
    or how the engine exchanges and keeps gradients, before the layers; in a pipeline those of its own stages, if there
    are any. The call is collective, as `plans` is. Raise ValueError as `plans` does.
    """
    lines, module = (model.explanation(), model.model) if isinstance(model, ExplainedTraining) else ([], model)
    if not isinstance(module, nn.Module):
        raise ValueError(f"explain: model is {shown(model)}: expected a module, a Pipeline or an engine of tpfuse.zero")
    layer_plans = plans(module)
    head = ("layer", "kind", "weight", "on a rank", "operator", "implementation", "reason")
    rows = [head, *(["-" if value == () else str(value) for value in vars(plan).values()] for plan in layer_plans)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    if layer_plans or not lines:
        for row in rows:
            lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    lines += [*_torch_lines(module), *warnings_of(module)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(lines))
    return layer_plans
