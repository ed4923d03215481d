"""The base class of the engines of all stages: the micro-batches of a step, and the check that a model is unchanged."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from os import PathLike

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from tpfuse.choices import Accumulate
from tpfuse.comm import collectives
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.sum_order import VirtualRanks
from tpfuse.zero.muon_matrices import HiddenMatrix
from tpfuse.zero.parameter_takeover import GradientPlace, location
from tpfuse.zero.reducer.gradient_norm import bounded, exact_parts, exact_sum, of_shard, rounded
from tpfuse.zero.reducer.inter_node import Compression


class StepState(Enum):
    """The progress of an engine in a step. The value completes the sentence "the engine has …" in error messages."""

    IDLE = "no gradients since the last update"
    ACCUMULATING = "begun a micro-batch that is not the last of its step"
    REDUCING = "begun the last micro-batch of a step"  # with ZeroOptimizer several passes may follow (`accumulate`)
    SUMMED = "the sums of a step"
    ENDED = "ended a step without its sums"  # after an error in `finish()`, or `discard()`


@dataclass(frozen=True)
class RankGroups:
    """The groups over which an engine communicates; None stands for this rank alone."""

    data: dist.ProcessGroup | None = None  # ranks with the same parameters and different tokens
    # Ranks of data × tensor parallelism with this rank's stages: gradients that are partial sums are summed over them.
    stage: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None  # all ranks that train the model
    # Ranks that share the tied parameters of both ends of a pipeline: at stages 0 to 2 the replicas of both ends with
    # this tensor-parallel rank, at stage 3 only those with this data-parallel rank too. None elsewhere.
    ends: dist.ProcessGroup | None = None
    dp: int = 1  # data-parallel ranks, without those along other axes of `data`
    tensor_rank: int = 0  # this rank's number among the tensor-parallel ranks, of which the first counts replicas


class Engine(ABC):
    """An engine that takes over the parameters of `model` (`tpfuse.zero.gradient_buckets`, `fully_sharded`)."""

    data_ranks: int  # the mean gradient is the sum over ranks, divided by this number (`take_context_sums`)
    world_group: dist.ProcessGroup | None  # all ranks that train the model; None for one rank
    stage_group: dist.ProcessGroup | None  # the ranks with the same layers, which share the matrices of Muon
    matrices: Sequence[HiddenMatrix] = ()  # those that Muon updates
    compression: Compression | None = None  # of the gradients that are sent between nodes
    stage: int  # of ZeRO
    accumulate: Accumulate  # "sharded": every backward pass is reduced; "whole": the last one of a step
    device: torch.device  # on which the model computes
    virtual: VirtualRanks  # the order of sums over micro-batches
    offload: str | PathLike[str] = "none"  # the place of the update's state (`tpfuse.zero.offload`)
    reasons: list[str]  # what exchanges gradients and parameters, and why
    _places: Mapping[str, GradientPlace]  # of the trained parameters, by name
    _advice = ""  # what the user should do after a change of the model; the end of an error message

    def __init__(self, model: nn.Module, virtual: VirtualRanks, uses: Mapping[str, int]) -> None:
        self.model, self.virtual = model, virtual
        ordered = virtual.number > 0
        self.reasons = [f"one order of sums for {virtual.number} virtual ranks, of whole gradients"] * ordered
        # The parameters with two uses in a pass, as embedding and as head, whose gradients are summed apart, because
        # they are where the first and the last stage of a pipeline have one each.
        self._twice = {name for name, count in uses.items() if count == 2 and ordered}
        self.state = StepState.IDLE
        self._micro_batch = 0  # the number of the current one in its step; in a pipeline that of the current pass

    def _record_parameters(self) -> None:
        """Record the parameters, once they are those that training will use: the model must keep them from now on."""
        self._recorded = [(name, p, p.requires_grad, location(p)) for name, p in self.model.named_parameters()]
        self._module_parameters, self._named_parameters = _module_parameters(self.model), _named_parameters(self.model)

    def start(self, *, last: bool, backwards: int = 1, local: bool = False, again: bool = False) -> None:
        """Begin a micro-batch. last: whether it is the last of its step.

        The gradients are reduced in the last backward pass of a step. If `accumulate` is "sharded", those of each
        earlier micro-batch are reduced in its own pass, unless it is `local`: then this rank keeps them whole and adds
        them to those of the next pass that is reduced. Every rank must run as many passes that are reduced.

        backwards: for a pipeline, which begins the whole step by one call with `last`: the number of backward passes
        that each stage of the rank runs until `finish()`. Forward and backward passes may follow each other in any
        order, and a gradient that a backward pass writes to `.grad` without running hooks is taken by
        `for hook in parameter._post_accumulate_grad_hooks.values(): hook(parameter)`.

        again: whether this may follow a last micro-batch whose pass has reduced all its gradients, as after
        `ZeroOptimizer.zero_grad()`; without a pass it counts as not begun.

        Raise ValueError if no `finish()` followed the last micro-batch, because its sums would be summed again, if a
        parameter was frozen, unfrozen, converted or replaced since the engine was made, and for `backwards` without
        `last`. Raise PeerTimeout.
        """
        if backwards < 1 or (backwards > 1 and not last):
            raise ValueError(f"start(last={last}, backwards={backwards}): expected at least 1, and 1 without last")
        if self.state is StepState.REDUCING and not (again and self.unused):
            raise ValueError(f"start(): {self._situation}: call finish() first, or after an error abandon()")
        first = not self.accumulating
        self._micro_batch = 0 if first else self._micro_batch + 1
        self._check_virtual(last, backwards)
        if first:
            self._check_parameters()
        elif not again:
            self._end_micro_batch()
        self._check_frozen()
        reduces = last or (self.accumulate == "sharded" and not local)
        self._begin_micro_batch(first=first, last=last, reduces=reduces, backwards=backwards)
        self.state = StepState.REDUCING if last else StepState.ACCUMULATING

    def _check_virtual(self, last: bool, backwards: int) -> None:
        """Raise ValueError unless the step will have as many micro-batches as the virtual ranks of this rank."""
        passes, begun = self.virtual.passes, self._micro_batch + backwards
        if self.virtual.number and (begun > passes or last != (begun == passes)):
            raise ValueError(
                f"start(last={last}) of micro-batch {begun} of a step: expected {passes} micro-batches on each rank, of"
                f" {self.virtual.here} virtual ranks with {self.virtual.micro_batches} each"
            )

    @property
    def _situation(self) -> str:
        return f"the engine has {self.state.value}"

    @property
    def accumulating(self) -> bool:
        """Return whether a step has begun whose gradients are not summed yet."""
        return self.state in (StepState.ACCUMULATING, StepState.REDUCING)

    @property
    @abstractmethod
    def unused(self) -> bool:
        """Return whether every gradient of the last micro-batch is reduced."""

    @abstractmethod
    def backward_pass(
        self, parameters: set[Parameter], complete: set[Parameter], *, split: bool, micro_batch: int, last_stage: bool
    ) -> AbstractContextManager[None]:
        """Mark a pass of a pipeline's step that computes gradients of a stage's parameters, around that pass.

        micro_batch: the number of the pass's micro-batch in the step. last_stage: whether the stage is the last one.
        complete: those that no later pass computes gradients of. The gradients of a parameter that has had fewer of
        them than others, or none, are complete at the end of that pass. split: whether the pass is the second half of
        one, of which the first half has computed the gradient of the stage's input. Each pass that computes gradients
        of parameters must be marked; if `accumulate` is "sharded", its gradients are reduced.

        The replicas of a rank must mark the same passes. They are then at the same point of the pipeline's schedule
        whenever they wait for each other: if one of them waited for gradients of a later pass, that pass might wait,
        through other ranks of the pipeline, for what the first one has not sent yet. Raise PeerTimeout.
        """

    def explanation(self) -> list[str]:
        """Return the line that `tpfuse.explain` prints of the engine, before those of the model's layers."""
        place = "shards, each one when it is reduced" if self.accumulate == "sharded" else "whole gradients"
        return [f"ZeRO stage {self.stage} ({', '.join(dict.fromkeys(self.reasons))}): micro-batches add up in {place}"]

    def _check_parameters(self) -> None:
        """Raise ValueError unless the model has the parameters that the engine has taken, in the engine's memory."""
        if [*map(id, _module_parameters(self.model))] != [*map(id, self._module_parameters)]:
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

    def _check_frozen(self) -> None:
        """Raise ValueError unless the parameters that require a gradient are those of which the engine knows that."""
        for name, parameter, required, _ in self._recorded:
            if parameter.requires_grad != required:
                raise ValueError(f"{name}.requires_grad is {not required} now: {self._advice}")

    @abstractmethod
    def _begin_micro_batch(self, *, first: bool, last: bool, reduces: bool, backwards: int) -> None:
        """Prepare the engine for the first, the last or another micro-batch of a step. backwards: as in `start`.

        reduces: whether the gradients of its backward pass are reduced.
        """

    def _end_micro_batch(self) -> None:
        """Reduce the gradients of a micro-batch that no backward pass has reduced on this rank, before another one."""
        return

    def finish(self, *, sums: bool = True) -> None:
        """Wait until this rank has its summed gradients, after the last micro-batch. Raise PeerTimeout.

        They are the sums of the micro-batches, added in their order, each of which is the sum over the ranks in theirs;
        of gradients that were accumulated whole, the sum over the ranks.

        sums: pass False if the caller needs neither the sums nor their norm before the update. The update then computes
        them itself where it can, which saves one pass over memory. Raise ValueError if no micro-batch was the last.
        """
        if self.state is not StepState.REDUCING:
            raise ValueError(
                f"finish() without a last micro-batch, {self._situation}: start(last=True) and its backward pass come"
                " first; with ZeroOptimizer zero_grad() comes before each step"
            )
        self.state = StepState.ENDED
        self._complete(sums=sums)
        self.state = StepState.SUMMED

    @abstractmethod
    def _complete(self, *, sums: bool) -> None:
        """Finish the reduction of the gradients after the backward pass. sums: as in `finish`."""

    def discard(self) -> None:
        """Discard the gradients since the last update, in a step that did not fail; the next `start()` begins a step.

        Every rank must call it, even if none of its gradients has arrived: a rank that has begun the last micro-batch
        finishes its reduction first, since other ranks may wait for it. Raise PeerTimeout.
        """
        if self.state is StepState.REDUCING:
            self.finish()
        self._drop()
        if self.state is not StepState.IDLE:
            self.state = StepState.ENDED

    @abstractmethod
    def _drop(self) -> None:
        """Free the gradients of micro-batches that were not reduced."""

    def abandon(self) -> None:
        """Discard the gradients of a step, after an error on some or all ranks; the next `start()` begins a new step.

        Collective: every rank must call it, wherever its own step has ended. Ranks that still wait for others in this
        engine then raise PeerTimeout and must call it too. Memory in which tensor-parallel operators failed has its own
        `reset()`. After an error in an update some parameters may be new, so continue from a checkpoint. Raise
        PeerTimeout if a rank does not call it.
        """
        self._abandon(begun=self.state is not StepState.IDLE)
        self.state = StepState.IDLE

    @abstractmethod
    def _abandon(self, *, begun: bool) -> None:
        """Discard the gradients of a step. begun: whether this rank has begun the step, as other ranks may have."""

    @abstractmethod
    def _counted_shards(self) -> Iterator[Tensor]:
        """Yield the summed gradients, flat, whose squares this rank counts: each element is counted on one rank."""

    def squares(self) -> Tensor:
        """Return this rank's sum of squares and the bound of its error, float64 [2], after `finish()`.

        The sum over `world_group` is the argument of `norm`.
        """
        return bounded([of_shard(shard) for shard in self._counted_shards()], self.device)

    def norm(self, squares: Sequence[float] | None = None) -> float:
        """Return the 2-norm of the whole gradient, after `finish()`: the same bits on every rank and in every layout.

        It is the root of the sum of squares, rounded to 24 bits (`tpfuse.zero.reducer.gradient_norm`); that of float64
        gradients is not rounded. squares: the sum of `squares()` over `world_group`, if the caller has it. Collective.
        Raise PeerTimeout.
        """
        group = self.world_group
        total, bound = collectives.all_reduce(self.squares(), group).tolist() if squares is None else squares
        found = rounded(total, bound, rank_and_size(group)[1])
        if found is None:
            found = exact_sum(collectives.all_reduce(exact_parts(self._counted_shards(), self.device), group))
        return math.sqrt(found)

    @abstractmethod
    def nonfinite(self) -> list[str]:
        """Return the names of the parameters with a gradient that is not finite in this rank's shards."""

    def take_sums(self) -> None:
        """Mark the sums of `finish()` as used, before an update.

        Raise ValueError if there are no new sums, or if other code has frozen a parameter, or set, cleared or zeroed
        its `.grad`, during the step: the sums do not have that.
        """
        if self.state is not StepState.SUMMED:
            raise ValueError(
                f"an update without new gradients, {self._situation}: call finish() after the last backward pass, and"
                " then step() once"
            )
        self._check_frozen()
        for name, place in self._places.items():
            place.check(name)
        self.state = StepState.IDLE


def _module_parameters(model: nn.Module) -> list[Parameter | None]:
    """Return the modules' parameters in a fixed order; model.modules() takes ten times as long as this loop."""
    parameters: list[Parameter | None] = []
    waiting, known = [model], {model}
    for module in waiting:
        parameters += module._parameters.values()
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                waiting.append(child)
    return parameters


def _named_parameters(model: nn.Module) -> dict[str, Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def trained_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return the parameters that require a gradient, in the model's order.

    Raise ValueError for one of a complex dtype, and for one in the memory of another parameter or of a buffer, which it
    would leave.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: expected parameters of a real floating dtype")
    first_at: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first = first_at.setdefault(location(parameter)[1], name)
        if first != name and local_tensor(parameter).numel() and not trained.keys().isdisjoint((first, name)):
            raise ValueError(f"{first} and {name} are two parameters in one memory: tie them as one parameter")
    for name, buffer in model.named_buffers():
        of = first_at.get(location(buffer)[1]) if buffer.layout is torch.strided and buffer.numel() else None
        if of in trained:
            raise ValueError(
                f"{name} is a buffer in the memory of {of}, which gets other memory: let the model compute from {of}"
            )
    return trained
