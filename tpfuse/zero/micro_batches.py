"""The base class of the engines of all stages: the micro-batches of a step, and the check that a model is unchanged."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from tpfuse.choices import GradientDtype
from tpfuse.comm.mesh import shown
from tpfuse.zero.parameter_takeover import location
from tpfuse.zero.reducer.inter_node import Compression


class MicroBatches(ABC):
    """An engine that takes over the parameters of `model` (`tpfuse.zero.gradient_buckets`, `fully_sharded`).

    `_accumulating` is true between the first micro-batch of a step and `finish()`, `_last` between the last one and
    `finish()`, and `_summed` from `finish()` to the update. `_begun` is true from the first micro-batch to the update,
    also after an error. data_ranks: the number of ranks with different sequences; the ranks of a model's context
    share one loss. Gradients are summed over all of them.
    compression: the compression of the gradients that are sent between nodes. lacks_world_group: whether `world_group`
    raises ValueError.
    """

    data_ranks: int
    lacks_world_group = False
    compression: Compression | None = None
    _advice = ""  # what the user should do after a change of the model; the end of an error message

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{type(self).__name__} got {shown(model)}: expected the model, an nn.Module, since the names and the"
                " modules of its parameters matter too"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{type(self).__name__} got a model in DDP, which it replaces: expected the model, its .module"
            )
        self.model = model
        self._last = self._accumulating = self._summed = self._begun = False

    def _record_parameters(self) -> None:
        """Record the parameters, once they are those that training will use: the model must keep them from now on."""
        self._recorded = [(name, p, p.requires_grad, location(p)) for name, p in self.model.named_parameters()]
        self._module_parameters, self._named_parameters = _module_parameters(self.model), _named_parameters(self.model)

    def start(self, *, last: bool, backwards: int = 1) -> None:
        """Begin a micro-batch. last: whether its backward pass reduces the gradients.

        backwards: for a pipeline, which begins the whole step by one call with `last`: the number of backward passes of
        each of the rank's stages until `finish()`. Forward and backward passes may follow each other in any order, and
        a gradient that a backward pass writes to `.grad` without running hooks is taken by
        `for hook in parameter._post_accumulate_grad_hooks.values(): hook(parameter)`.

        Raises ValueError if no `finish()` followed the last micro-batch, because its sums would be summed again, if a
        parameter was frozen, unfrozen, converted or replaced since the engine was made, and for `backwards` without
        `last`. Raises PeerTimeout.
        """
        if backwards < 1 or (backwards > 1 and not last):
            raise ValueError(f"start(last={last}, backwards={backwards}): expected at least 1, and 1 without last")
        if self._last:
            raise ValueError("start() after the last micro-batch: call finish() first, or after an error abandon()")
        if not self._accumulating:
            self._check_parameters()
        for name, parameter, required, _ in self._recorded:
            if parameter.requires_grad != required:
                raise ValueError(f"{name}.requires_grad is {not required} now: {self._advice}")
        self._begin_micro_batch(first=not self._accumulating, last=last, backwards=backwards)
        self._accumulating, self._last, self._summed, self._begun = True, last, False, True

    @property
    def accumulating(self) -> bool:
        """Return whether a step has begun whose gradients are not summed yet."""
        return self._accumulating

    def start_pipeline(self, backwards: int) -> None:
        """Begin a whole step of a pipeline, also where `ZeroOptimizer.zero_grad()` has begun it already.

        backwards: as in `start`. Raises as `start` does, and ValueError if gradients have arrived since the update.
        """
        if self._last:
            self.defer()
        self.start(last=True, backwards=backwards)

    @abstractmethod
    def last_pass(self, parameters: set[Parameter]) -> AbstractContextManager[None]:
        """Mark the last pass of a pipeline's step that computes gradients of these parameters, around that pass.

        The gradients of a parameter that has had fewer of them than others, or none, are complete at the end of it.
        The replicas of a rank must mark the same passes. They are then at the same point of the pipeline's schedule
        whenever they wait for each other: if one of them waited for gradients of a later pass, that pass might wait,
        through other ranks of the pipeline, for what the first one has not sent yet. Raises PeerTimeout.
        """

    def _check_parameters(self) -> None:
        """Raise ValueError unless the model has the parameters that the engine has taken, in the engine's memory."""
        parameters = _module_parameters(self.model)
        if len(parameters) != len(self._module_parameters) or any(
            a is not b for a, b in zip(parameters, self._module_parameters, strict=True)
        ):
            taken, now = self._named_parameters, _named_parameters(self.model)
            for name in {**taken, **now}:
                if taken.get(name) is now.get(name):
                    continue
                change = "is not in the model any more" if name not in now else "is new in the model"
                if name in now and name in taken:
                    change = "was replaced by another tensor, as load_state_dict(assign=True) does"
                raise ValueError(f"{name} {change}: {self._advice}")
        for name, parameter, _, recorded in self._recorded:
            if location(parameter) != recorded:
                raise ValueError(f"{name} was converted or moved, as model.to() does: {self._advice}")

    @abstractmethod
    def _begin_micro_batch(self, *, first: bool, last: bool, backwards: int) -> None:
        """Prepare the engine for a micro-batch. first, last: whether it is the first and the last of its step.

        backwards: as in `start`.
        """

    def defer(self) -> None:
        """Make the micro-batch that `start(last=True)` began one that is not the last: its gradients are accumulated.

        Raises ValueError if the current micro-batch did not begin as the last one, or if its gradients have arrived.
        """
        if not self._last or self._reducing():
            raise ValueError("no_sync() is for the backward passes between zero_grad() and the last one of a step")
        self._begin_micro_batch(first=False, last=False, backwards=1)
        self._last = False

    @abstractmethod
    def _reducing(self) -> bool:
        """Return whether gradients of the last micro-batch have arrived on this rank."""

    def finish(self, *, sums: bool = True) -> None:
        """Wait until this rank has its summed gradients, after the last micro-batch. Raises PeerTimeout.

        sums: pass False if the caller needs neither the sums nor their norm before the update. The update then computes
        them itself where it can, which saves one pass over memory. Raises ValueError if no micro-batch was the last.
        """
        if not self._last:
            raise ValueError("finish() without a last micro-batch: start(last=True) and its backward pass come first")
        try:
            self._complete(sums=sums)
            self._summed = True
        finally:
            self._accumulating = self._last = False

    @abstractmethod
    def _complete(self, *, sums: bool) -> None:
        """Finish the reduction of the gradients after the backward pass. sums: as in `finish`."""

    def discard(self) -> None:
        """Discard the gradients since the last update, in a step that did not fail; the next `start()` begins a step.

        Every rank must call it, also if none of its gradients has arrived: a rank that has begun the last micro-batch
        finishes its reduction first, since other ranks may wait for it. Raises PeerTimeout.
        """
        if self._last:
            self.finish()
        self._drop()
        self._accumulating = self._last = self._summed = False

    @abstractmethod
    def _drop(self) -> None:
        """Free the gradients of micro-batches that were not reduced."""

    def abandon(self) -> None:
        """Discard the gradients of a step, after an error on some or all ranks; the next `start()` begins a new step.

        Collective: every rank must call it, wherever its own step has ended. Ranks that still wait for others in this
        engine then raise PeerTimeout and must call it too. Memory in which tensor-parallel operators failed has its own
        `reset()`. After an error in an update some parameters may be new, so continue from a checkpoint. Raises
        PeerTimeout if a rank does not call it.
        """
        self._abandon(begun=self._begun)
        self._last = self._accumulating = self._summed = self._begun = False

    @abstractmethod
    def _abandon(self, *, begun: bool) -> None:
        """Discard the gradients of a step. begun: whether this rank has begun the step, as other ranks may have."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return this rank's contribution to the squared norm of the whole gradient, float64 [], after `finish()`."""

    @property
    @abstractmethod
    def world_group(self) -> dist.ProcessGroup | None:
        """Return all ranks that train the model, over which `squared_norm()` must be summed; None for one rank.

        Collective on the first call. Raises ValueError if the engine was made without this group.
        """

    def take_sums(self) -> None:
        """Mark the sums of `finish()` as used, before an update. Raises ValueError if there are no new sums."""
        if not self._summed:
            raise ValueError(
                "an update without new gradients: call finish() after the last backward pass, and then step() once"
            )
        self._summed = self._begun = False


def check_gradient_dtype(engine: str, argument: str, dtype: object) -> None:
    """Raise ValueError unless `dtype` is one of the names of `GradientDtype`."""
    if dtype not in get_args(GradientDtype):
        names = " or ".join(f'"{name}"' for name in get_args(GradientDtype))
        raise ValueError(f"{engine}: {argument} is {shown(dtype)}: expected {names}")


def _module_parameters(model: nn.Module) -> list[Parameter | None]:
    """Return the modules' parameters in a fixed order, without names: building the names takes most of the time."""
    return [parameter for module in model.modules() for parameter in module._parameters.values()]


def _named_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return the model's parameters by name; tied parameters have several names."""
    return dict(model.named_parameters(remove_duplicate=False))
