"""Parameters that see a part of the activations, and whose gradients nothing sums: what `tpfuse.explain` warns of.

Between a row-parallel layer and the next column-parallel one activations may be shards of the sequence, and between a
column- and a row-parallel layer they are shards of the features. A parameter of another module there gets the gradient
of this rank's tokens, or features, alone. Layers at the ends of such a stretch look once at the graph of their input:
from there back to the operators that sum gradients over the ranks, every parameter is one of these. No pass after the
first one looks again.
"""

from collections import deque
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tpfuse.comm.layout import is_sharded
from tpfuse.layers.local_parameter import Borrowed

Part = Literal["sequence", "features"]

# The graph's nodes of the operators that sum over the ranks, or gather, in backward; DTensors do so by themselves.
_SUMMING = (
    "_ToTorchTensorBackward",
    "_CollectiveBackward",
    "_AllGatherLinearBackward",
    "_LinearReduceScatterBackward",
    "_LinearAllReduceBackward",
)


def mark_partial_gradients(layer: nn.Module, x: Tensor | None, part: Part) -> None:
    """Mark the parameters on which `x`, the shard of `part` that a layer gets, depends. Only the first call looks.

    Without a graph, of a DTensor, and while torch.compile traces, there is nothing to look at.
    """
    if torch.compiler.is_compiling() or part in layer.__dict__.get("looked_at", ()):
        return
    if x is None or x.grad_fn is None or isinstance(x, DTensor):
        return
    layer.__dict__["looked_at"] = (*layer.__dict__.get("looked_at", ()), part)
    waiting, known = deque([x.grad_fn]), {x.grad_fn}
    while waiting:
        node = waiting.popleft()
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, Parameter) and not is_sharded(parameter):
            parameter.seen_part = part  # type: ignore[attr-defined]
        for following, _ in () if node.name() in _SUMMING else node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                waiting.append(following)


def warnings_of(model: nn.Module) -> list[str]:
    """Return a line for each parameter of the model that was marked and that no module or engine sums."""
    lines = []
    for prefix, module in model.named_modules():
        sums = getattr(module, "sum_gradients", False)
        if isinstance(sums, Borrowed) and sums.own:  # an engine sums them
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            part: Part | None = getattr(parameter, "seen_part", None)
            if part is not None:
                lines.append(
                    f"warning: {name} {tuple(parameter.shape)} of {type(module).__name__} sees this rank's shard of the"
                    f" {part} alone, and nothing sums its gradient over the ranks:"
                    ' "What stands between the pairs" in docs/layers.md says what does'
                )
    return lines
