"""Find the first layer with a number that is not finite."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpfuse.comm.agreement import exchange
from tpfuse.comm.layout import local_tensor
from tpfuse.zero.engine import Engine


def _finite(output: Any) -> bool:
    """Return whether all floats of a tensor are finite, and those of all tensors in tuples, lists and dicts."""
    floats = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point())
    return all(bool(torch.isfinite(local_tensor(x)).all()) for x in floats)


@torch.no_grad()
def _first_output(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Return the names of the modules whose output is not finite on this rank, in the order in which they finish."""
    names: list[str] = []
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: None if _finite(output) else names.append(name)
        )
        for name, module in model.named_modules()
        if name and not next(module.children(), None)
    ]
    forward()
    for handle in handles:
        handle.remove()
    return names


def find_nonfinite(
    model: nn.Module,
    whole: nn.Module,
    engine: Engine,
    forward: Callable[[], object],
    group: dist.ProcessGroup | None,
) -> str:
    """Return in words where the first number that is not finite is. The call is collective over `group`.

    model: this rank's part of the model `whole`, which gives the order. A parameter that is not finite is reported
    first. Next comes the first layer whose output is not finite: `forward` runs the forward passes again, with the same
    batches and masks. Gradients come last: backward runs from the end, so the last parameter in the model's order is
    nearest to the cause.
    """
    order = {name: index for index, (name, _) in enumerate(whole.named_parameters())}
    modules = {name: index for index, (name, _) in enumerate(whole.named_modules())}
    broken = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    names = [broken, _first_output(model, forward), engine.nonfinite()]
    of_ranks = exchange(names, group, op="search for what is not finite")
    parameters, outputs, gradients = ([name for rank in of_ranks for name in rank[kind]] for kind in range(3))
    if parameters:
        return f"the parameter {min(parameters, key=order.__getitem__)} is not finite"
    if outputs:
        return f"the first output that is not finite is that of {min(outputs, key=modules.__getitem__)}"
    if gradients:
        return f"backward: the first gradient that is not finite is that of {max(gradients, key=order.__getitem__)}"
    return "the loss alone is not finite"
