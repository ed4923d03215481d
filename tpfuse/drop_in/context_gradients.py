"""The mean of gradients over the ranks of a context, which hooks of parameters take in each backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tpfuse.comm import collectives
from tpfuse.comm.layout import local_tensor
from tpfuse.parallel.context import ContextParallel


class AveragedGradients:
    """A forward of `model` whose parameters' gradients are averaged over a context. context: None for one rank."""

    model: Any
    context: ContextParallel | None
    agreed_pass = -1  # the backward pass for which `agree_on_gradients` has returned
    agreed: dict[str, bool] | None = None  # which parameters get gradients in it

    def average_gradients(self) -> None:
        """Let hooks average gradients over the context, if there are any and no engine of `tpfuse.zero` does."""
        if not torch.is_grad_enabled() or not self.model.mean_over_context:
            return
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise ValueError(
                "context parallelism: torch's fully_shard replaces the parameters whose gradients are averaged over"
                " the context: use tpfuse.ZeroOptimizer with stage=3 and the mesh"
            )
        register_means(self)

    def agree_on_gradients(self, device: torch.device) -> None:
        """Raise ValueError if a parameter gets a gradient on some ranks of the context alone.

        The ranks reduce gradients in the order of their backward passes, in which one would then stand for another. The
        first hook of each pass finds out which parameters will get one. On GPUs a rank waits for the answer only if
        they are others than in the pass before; of ranks that disagree, one at least sees others.
        """
        assert self.context is not None
        running = torch._C._current_graph_task_id()
        if running == self.agreed_pass:
            return
        trained = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        getting = {name: _gets_gradient(x) for name, x in trained.items()}
        counts = torch.tensor(list(getting.values()), dtype=torch.float32).to(device, non_blocking=True)
        for group in self.context.groups:
            counts = collectives.all_reduce(counts, group)
        if device.type == "cpu" or getting != self.agreed:
            for name, count in zip(trained, counts.tolist(), strict=True):
                if 0 < count < self.context.size:
                    raise ValueError(
                        f"context parallelism: {name} has a gradient on {count:.0f} of {self.context.size} ranks:"
                        " expected a module that runs on each of them, for any tokens"
                    )
        self.agreed_pass, self.agreed = running, getting


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Return whether the backward pass that runs comes to a parameter."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns its gradient
        return True


def register_means(forward: AveragedGradients) -> bool:
    """Register hooks that average gradients over the context on all parameters that have none, if they are trained.

    A layer that PEFT has added, a parameter that is trained from now on, and a copy of the model get their hooks in the
    next forward pass. torch.compile does not trace the call, in which it would see no hook and register them again at
    each step. It calls the function while it traces the pass, and traces again if `forward` is another one or another
    parameter is trained.
    """
    assert forward.context is not None
    for parameter in forward.model.parameters():
        hooks = (parameter._backward_hooks or {}).values()
        if parameter.requires_grad and not any(isinstance(hook, ContextMean) for hook in hooks):
            parameter.register_hook(ContextMean(forward, forward.context))
    return True


class ContextMean:
    """A hook of a parameter that takes the mean of its gradients on the ranks of a context."""

    __torch_unserializable__ = True  # a copy of the model registers hooks of its own

    def __init__(self, forward: AveragedGradients, context: ContextParallel) -> None:
        self.forward, self.context = forward, context

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return the mean of the ranks' gradients; None for this rank's own, if an engine has taken the means over."""
        if not self.forward.model.mean_over_context:
            return None
        self.forward.agree_on_gradients(gradient.device)
        total = local_tensor(gradient)
        for group in self.context.groups:
            total = collectives.all_reduce(total, group)
        total = total / self.context.size
        if isinstance(gradient, DTensor):
            return DTensor(total, gradient._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return total
