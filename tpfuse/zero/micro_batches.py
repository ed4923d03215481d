"""What the engines of all stages have in common: the micro-batches of a step, and a model that is not to change."""

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from tpfuse.zero.reducer.inter_node import Compression
from tpfuse.zero.taken_parameters import location


class MicroBatches(ABC):
    """An engine that takes over the parameters of `model`: `tpfuse.zero.gradient_buckets`, `fully_sharded`.

    Between the first micro-batch of a step and `finish()` it is accumulating, `_last` from the last one on; from
    `finish()` to the update `_summed`. `_begun` lasts from the first micro-batch to the update, also after an error.
    data_ranks: how many ranks have other tokens, over which gradients are summed. compression: of what passes between
    nodes.
    """

    data_ranks: int
    compression: Compression | None = None
    _advice = ""  # for a model that was changed: what to do

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._last = self._accumulating = self._summed = self._begun = False

    def _record_parameters(self) -> None:
        """When the parameters are those that training will have: from here on the model must keep them."""
        self._recorded = [(name, p, p.requires_grad, location(p)) for name, p in self.model.named_parameters()]
        self._module_parameters, self._named_parameters = _module_parameters(self.model), _named_parameters(self.model)

    def start(self, *, last: bool) -> None:
        """Before each micro-batch; `last`: the one in whose backward gradients are reduced.

        Raises ValueError after a last one that was not followed by `finish()`, whose sums would be summed again, and
        where a parameter was frozen, released, converted or replaced since the engine was made. Raises PeerTimeout.
        """
        if self._last:
            raise ValueError("start() after the last micro-batch: call finish() first, or after an error abandon()")
        if not self._accumulating:
            self._check_parameters()
        for name, parameter, required, _ in self._recorded:
            if parameter.requires_grad != required:
                raise ValueError(f"{name}.requires_grad is {not required} now: {self._advice}")
        self._begin_micro_batch(first=not self._accumulating, last=last)
        self._accumulating, self._last, self._summed, self._begun = True, last, False, True

    def _check_parameters(self) -> None:
        """Raises ValueError unless the model holds the parameters that the engine has taken, where it put them."""
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
    def _begin_micro_batch(self, *, first: bool, last: bool) -> None:
        """What a micro-batch needs: the first of a step, the last, or both."""

    def defer(self) -> None:
        """After `start(last=True)`: the micro-batch is not the last one after all, and gradients are kept.

        Raises ValueError where no micro-batch was announced as the last one, or gradients of it have come.
        """
        if not self._last or self._reducing():
            raise ValueError("no_sync() is for the backward passes between zero_grad() and the last one of a step")
        self._begin_micro_batch(first=False, last=False)
        self._last = False

    @abstractmethod
    def _reducing(self) -> bool:
        """Whether gradients of the last micro-batch have come on this rank."""

    def finish(self, *, sums: bool = True) -> None:
        """After the last micro-batch: waits until this rank's sums are there. Raises PeerTimeout.

        sums: False where nobody asks for them, or for their norm, before the update; it then takes them on its way
        where it can, and memory is passed over once less. Raises ValueError where no micro-batch was the last.
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
        """What is left to be done when backward is over."""

    def discard(self) -> None:
        """Gives up the gradients since the last update, where nothing failed; the next `start()` begins a step.

        Every rank calls it after the same micro-batches: gradients of the last one are reduced first, since other ranks
        may wait for them. Raises PeerTimeout.
        """
        if self._last and self._reducing():
            self.finish()
        self._drop()
        self._accumulating = self._last = self._summed = False

    @abstractmethod
    def _drop(self) -> None:
        """Lets go of the gradients of micro-batches that were not reduced."""

    def abandon(self) -> None:
        """Gives up the gradients of a step, after an error on some rank or all; the next `start()` begins a step anew.

        Collective: every rank calls it, wherever its own step has ended; ranks that still wait for others in this
        engine then raise PeerTimeout, and are to call it too. Memory in which tensor-parallel operators failed has a
        `reset()` of its own. After an error in an update some parameters may be new: go on from a checkpoint. Raises
        PeerTimeout where a rank does not come.
        """
        self._abandon(begun=self._begun)
        self._last = self._accumulating = self._summed = self._begun = False

    @abstractmethod
    def _abandon(self, *, begun: bool) -> None:
        """begun: whether this rank has begun the step, which others may have."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """After `finish()`: this rank's contribution to the squared norm of the whole gradient, float64 []."""

    @property
    @abstractmethod
    def world_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the sum of `squared_norm()` is the squared norm: data × tensor parallelism; None for one
        rank. Collective when first asked for. Raises ValueError where the engine was not told."""

    def take_sums(self) -> None:
        """Before an update: it uses up what `finish()` has brought. Raises ValueError where that is not there."""
        if not self._summed:
            raise ValueError("an update without new gradients: call finish() after the last backward pass, step() once")
        self._summed = self._begun = False


def _module_parameters(model: nn.Module) -> list[Parameter | None]:
    """What the modules hold, in one order; without names, whose making takes longer than all else."""
    return [parameter for module in model.modules() for parameter in module._parameters.values()]


def _named_parameters(model: nn.Module) -> dict[str, Parameter]:
    """The model's parameters by all their names: tied ones have several."""
    return dict(model.named_parameters(remove_duplicate=False))
