"""ZeRO's stage 3 (arXiv:1910.02054): a rank keeps a shard of the parameters, of their gradients and of AdamW's state.

PyTorch's `fully_shard` does the work. This module makes it an engine like the buckets of the other stages:

- Gradients are summed, not averaged. Each backward pass reduces them and adds them to the shards. If `accumulate` is
  "whole", they are accumulated over micro-batches without communication.
- Parameters in a half type have float32 masters: the shards are float32, and the gathered parameters are rounded. The
  initial weights are drawn in the half type and then widened, so they equal those of the other stages.
- Offload: shards of parameters and gradients are in the host's memory, pinned for GPUs (`CPUOffloadPolicy`): copied to
  the device each time that a unit is gathered, and to the host when it is reduced. If the place is a folder, the shards
  of parameters move to its file (`move_shards`), from which a unit is read when it is gathered; nothing is pinned.
- Communication between CPU ranks goes through `tpfuse.comm.collectives` (`tpfuse.zero.collectives_with_traffic`).
- Replicas: groups of neighbouring ranks, so that parameters are gathered within a node, each hold the whole model in
  shards; sums of shards are then reduced over the groups, once in a step, in its last micro-batch (before torch 2.13
  and with offload in each one).
- Pipelines: in a step of many passes, parameters stay gathered from their first use to `finish()`: otherwise every
  micro-batch would gather all of them again. The reduction of a unit starts with the last gradient of its parameters in
  a pass that computes some of them; if `accumulate` is "whole", in the last such pass of a step alone
  (`backward_pass`). All ranks reduce the units of a pass in one order: from the last one to the first one, and then the
  model. They are at the same point of the schedule then, since the ranks that reduce a unit have the same stages.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from tpfuse.choices import Accumulate, GradientDtype
from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import set_timeout
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.comm.mesh import check_order, flat_group, rank_and_size, reducer_options, shown
from tpfuse.comm.rank_order import HALF
from tpfuse.comm.traffic import Traffic
from tpfuse.layers.local_parameter import Borrowed
from tpfuse.zero.broadcast_start import broadcast_model
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.collectives_with_traffic import Counted
from tpfuse.zero.engine import Engine, RankGroups, StepState, trained_parameters
from tpfuse.zero.muon_matrices import HiddenMatrix
from tpfuse.zero.parameter_takeover import GradientPlace, count_write, location, take_context_sums, writes
from tpfuse.zero.reducer.collective import reserve
from tpfuse.zero.reducer.shard_update import StateStore
from tpfuse.zero.unit_order import UnitOrder

_LOST = (
    "{name} was written to while it was gathered, and its shards do not have what was written: call"
    " engine.free_gathered() before you write to it, or use stage 2 if a forward pass writes to it"
)
_REPLACED = (
    "{name} was replaced by its shards when stage 3 took the model: make optimizers and lists of"
    " model.parameters() after that"
)
_TAKEN = (
    "{name}.grad is in ZeRO's shards, summed over the ranks: with ZeroOptimizer call its zero_grad() after each step,"
    " clip by its clip_grad_norm_(), and train in bfloat16, which needs no torch.amp.GradScaler; without it,"
    " engine.members[…].gradient has this rank's sums after finish()"
)


class _Sums(GradientPlace):
    """The place of the gradient of a shard, which is in `sums` instead."""

    sums: Tensor | None = None
    advice = "; compute a penalty of parameters in the model's forward, since outside of it they are this rank's shards"

    def give(self) -> None:
        """Set `.grad` to the sums, to which `fully_shard` adds."""
        self.parameter.grad = self.sums

    def take(self) -> None:
        """Move what is in `.grad` to the sums."""
        self.sums = self.parameter.grad
        self.leave(taken=self.sums is not None)


@dataclass(frozen=True)
class ShardedParameter:
    """A trained parameter."""

    name: str
    sharded: Parameter  # the DTensor of its shards, float32 for half types
    decay: bool
    in_norm: bool  # true on exactly one of the ranks with the same shard
    is_owner: bool  # whether this rank saves it: exactly one of them does
    place: _Sums

    @property
    def gradient(self) -> Tensor:
        """Return the summed gradient of this rank's shard, in its shape; zeros if the parameter took no part."""
        if self.place.sums is None:
            return torch.zeros_like(local_tensor(self.sharded))
        return local_tensor(self.place.sums)


class FullySharded(Engine):
    """An engine that takes over the parameters of `model`: it shards them and sums their gradients into `members`.

    `tpfuse.zero.shard` makes it and documents the arguments. tied: that of `SharedParameters`.

    Call `start(last=…)`, forward and backward for each micro-batch, then `finish()`. Every rank must run the same units
    in the same order: if one skips a unit, all raise Disagreement, which names the unit, between CPU ranks in the pass
    itself, on GPUs in `finish()`. A parameter of a unit that took no part on some rank, or on any rank, has gradient
    zero there (before torch 2.13 it must take part on all ranks or on none). A parameter without elements stays as it
    is. A micro-batch whose gradients are not reduced leaves them unsharded. Between CPU ranks, forward and backward
    passes raise PeerTimeout. The gradients of the shards are in `members`; code that computes with a shard's `.grad`
    raises ValueError.

    As in a plain model, a backward pass raises RuntimeError if a parameter was written after its forward pass
    (load_state_dict, an update). The model's own parameters and its last unit stay gathered after a forward pass, so
    call `free_gathered()` before you write to them; otherwise the next `finish()` or `start()` raises ValueError.
    """

    _advice = "shard a new model after such changes"

    def __init__(
        self,
        model: nn.Module,
        groups: RankGroups,
        *,
        mesh: DeviceMesh,
        units: Iterable[nn.Module] = (),
        replicas: int = 1,
        reduce_dtype: GradientDtype = "float32",
        accumulate: Accumulate = "sharded",
        tied: Iterable[str] = (),
        matrices: Sequence[HiddenMatrix] = (),
        offload: str | PathLike[str] = "none",
    ) -> None:
        super().__init__(model)
        self.stage, self.accumulate, self.reasons = 3, accumulate, ["fully_shard"]
        self.offload = offload
        self._store: StateStore | None = None  # the file of the shards
        if offload != "none":
            self.reasons.append("shards in the host's memory" if offload == "host" else f"parameters in {offload}")
        self.traffic = Traffic()
        self.world_group, self.stage_group, self.matrices = groups.world, groups.stage, matrices
        units = list(units)
        _check_units(model, units)
        dtype = _checked(model, units)
        shards, across = data_mesh(mesh, replicas)
        for submesh in (shards, across):
            set_timeout(submesh.get_group())
        self._groups = [submesh.get_group() for submesh in (shards, across) if submesh.size() > 1]
        reserve(self._groups[0])  # for good: an engine of this stage has no end
        self.device = torch.empty(0, device=mesh.device_type).device
        each = self.device.type == "cpu"
        self._order = UnitOrder(tuple(self._groups), self.device, self._described, each=each)
        self._across = across.get_group() if across.size() > 1 else None
        self._pipelined, self._kept_whole = "pp" in (mesh.mesh_dim_names or ()), False
        # For fully_shard's parameters: the writes to the shards before they were gathered, and our own counts of writes
        # to the gathered ones.
        self._versions: dict[Any, int] = {}
        self._counted: Counter[Any] = Counter()
        # In a pipeline's step: fully_shard's parameters whose gradients the current pass computes before a reduction,
        # those that have all gradients for it, those that no later pass of the step computes gradients of, and the
        # units whose reduction has not started.
        self._awaited: set[Any] = set()
        self._arrived: set[Any] = set()
        self._completed: set[Any] = set()
        self._unreduced: list[FSDPModule] = []
        # Whether reductions sum over the replicas too, and the units with gradients for which that is still to be done.
        self._sums_replicas, self._unsummed = True, set[int]()
        self._unsettled = False  # whether reductions run on other streams that no pass has waited for
        tied, self._ends = list(tied), groups.ends
        if self._ends is not None:
            set_timeout(self._ends)
            self._groups.append(self._ends)
        copies, copy = across.size(), across.get_local_rank()
        self.data_ranks = copies * shards.size() // take_context_sums(model, groups.data)
        broadcast_model(model, groups.data, tied, self._ends)
        replaced = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
        tensor_sharded = {name for name, p in model.named_parameters() if is_sharded(p)}
        tp_rank, tp = rank_and_size(flat_group(mesh, "tp"))
        self._shard(units, shards, dtype, dtype if reduce_dtype == "parameter" else torch.float32)
        self.members: list[ShardedParameter] = []
        self._places: dict[str, _Sums] = {}
        for index, name in enumerate(replaced):
            parameter = model.get_parameter(name)
            copy_count, copy_index = (copies, copy) if name in tensor_sharded else (copies * tp, copy * tp + tp_rank)
            if name in tied:  # the ends have other parameters beside it, so they number it by its place in `tied`
                end, ends = rank_and_size(self._ends)
                index, copy_count, copy_index = tied.index(name), copy_count * ends, copy_index * ends + end
            decay = decays(name, parameter)
            place = self._places[name] = _Sums(parameter, _TAKEN.format(name=name))
            self.members.append(
                ShardedParameter(name, parameter, decay, copy_index == 0, index % copy_count == copy_index, place)
            )
        self._tied = [member for name in tied for member in self.members if member.name == name]
        for name, parameter in replaced.items():  # an optimizer may still hold the replaced parameter
            GradientPlace(parameter, _REPLACED.format(name=name)).leave(taken=True)
        self._record_parameters()

    def _check_parameters(self) -> None:
        self._check_gathered()
        self.free_gathered()  # afterwards the modules hold shards
        super()._check_parameters()

    def _unshard(self, group: Any, async_op: bool = False) -> None:
        """Gather the parameters of a group of `fully_shard` unless they are gathered; replaces its method.

        If shards were written since the last time (load_state_dict, an update), what was gathered is old, also what was
        prefetched. A backward pass that needs the old values is then an error of autograd, as it is for a plain model:
        `fully_shard` would compute it with the new ones.
        """
        versions = {parameter: writes(parameter.sharded_param) for parameter in group.fsdp_params}
        written = [p for p, version in versions.items() if self._versions.get(p, version) != version]
        self._versions |= versions
        if written:
            group.wait_for_unshard()
            group._to_sharded()
            known = [p for p in written if _gathered(p) is not None]
            count_write([p.unsharded_param for p in known])
            self._counted.update(known)
        if self._store is not None:
            for parameter in group.fsdp_params:
                self._store.load(parameter._sharded_param_data)
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False):  # what is made in this mode can never be trained
            type(group).unshard(group, async_op)
            if inference and any(_gathered(parameter) is None for parameter in group.fsdp_params):
                group.wait_for_unshard()
        if self._store is not None:
            self._store.release()

    def _post_backward(self, group: Any) -> None:
        """Reduce the gradients of a group of `fully_shard` into the shards; replaces its method."""
        names = [name for name in (parameter._param_fqn for parameter in group.fsdp_params) if name in self._places]
        for name in names:
            self._places[name].check(name)
            self._places[name].give()
        type(group).post_backward(group)
        for name in names:
            self._places[name].take()

    def move_shards(self, store: StateStore) -> None:
        """Move this rank's shards of all parameters, with their padding, into a store, from which they are gathered."""
        self._check_parameters()
        for parameter in _parameters_of(*self._units):
            data, shard = parameter._sharded_param_data, parameter._sharded_local_tensor
            moved = store.tensor(parameter._param_fqn, data.numel(), data.dtype).copy_(data)
            parameter._sharded_param_data = moved
            parameter.sharded_param._local_tensor = moved[: shard.numel()].view(shard.shape)
        self._store = store
        store.release()
        self._recorded = [(name, p, required, location(p)) for name, p, required, _ in self._recorded]

    @property
    def shard_bytes(self) -> list[int]:
        """Return the bytes of what `move_shards` moves, for each parameter."""
        return [parameter._sharded_param_data.nbytes for parameter in _parameters_of(*self._units)]

    def _check_gathered(self) -> None:
        """Raise ValueError if others have written to a gathered parameter: its shards do not have that."""
        for parameter in _parameters_of(*self._units):
            gathered = _gathered(parameter)
            if gathered is not None and writes(gathered) != self._counted[parameter]:
                raise ValueError(_LOST.format(name=parameter._param_fqn))

    def _shard(self, units: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype, reduced: torch.dtype) -> None:
        """Shard the units, then the model, which has the parameters that no unit has taken."""
        half = dtype in HALF
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if half else None, reduce_dtype=reduced if half else None, cast_forward_inputs=False
        )
        on_host = CPUOffloadPolicy(pin_memory=self.device.type == "cuda" and self.offload == "host")
        self._units: list[FSDPModule] = []
        self._freed: list[FSDPModule] = []  # the units that free their parameters after a forward pass
        for index, unit in enumerate((*units, self.model)):
            _widen(unit)
            begin = partial(self._order.begin, unit=index)
            # The backward pass begins with the model and its last unit. If they freed their parameters after the
            # forward pass, they would have to gather them again at once.
            frees = all(unit is not later for later in (*units[-1:], self.model))
            wrapped = fully_shard(
                unit,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=OffloadPolicy() if self.offload == "none" else on_host,
                reshard_after_forward=frees,
                shard_placement_fn=lambda p: Shard(shard_dim(local_tensor(p).shape, mesh.size())),
                ignored_params={p for p in unit.parameters() if not p.numel()},  # torch cannot reduce their gradients
            )
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)  # Gloo has no other reduction
            wrapped.set_custom_all_gather(cast(Any, Counted("all_gather", self.traffic, begin)))
            wrapped.set_custom_reduce_scatter(cast(Any, Counted("reduce_scatter", self.traffic, begin)))
            if self._across is not None:
                wrapped.set_all_reduce_hook(partial(self._sum_across, index))
            if self._pipelined:
                hook = torch.compiler.disable(self._watch_gradients)  # type: ignore[no-untyped-call]
                unit.register_forward_pre_hook(hook)
            for group in _parameter_groups(wrapped):
                group.unshard = partial(self._unshard, group)
                group.post_backward = partial(self._post_backward, group)
            self._units.append(wrapped)
            self._freed += [wrapped] * frees
        *blocks, root = self._units
        if hasattr(root, "set_reduce_scatter_unused_params"):  # from torch 2.13
            root.set_reduce_scatter_unused_params(True)
        for first, second in zip([root, *blocks], blocks, strict=False):
            first.set_modules_to_forward_prefetch([second])
        for first, second in zip([root, *blocks[::-1]], blocks[::-1], strict=False):
            first.set_modules_to_backward_prefetch([second])

    def _described(self, unit: int) -> str:
        """Return the name of a unit in messages, with its first parameter."""
        names = {module: name for name, module in self.model.named_modules()}
        parameters = [parameter._param_fqn for parameter in _parameters_of(self._units[unit])]
        what = f"unit {names[self._units[unit]]}" if unit < len(self._units) - 1 else "the model's own parameters"
        return f"{what} ({', '.join(parameters[:1] + ['…'] * (len(parameters) > 1))})"

    def _sum_across(self, unit: int, sums: Tensor) -> None:
        """Sum a unit's reduced gradients over the replicas; `fully_shard` then adds them to those in its shards.

        Before the last micro-batch of a step they stay sums over the ranks of one replica.
        """
        assert self._across is not None
        self._order.begin("reduce_scatter", unit)  # with one rank to a replica there was no other
        # Before torch 2.13 the gradients of two micro-batches may belong to different parameters of the unit. The sums
        # of earlier micro-batches are not on the device if shards are offloaded.
        postpones = hasattr(self._units[-1], "set_reduce_scatter_unused_params") and self.offload == "none"
        if postpones and not self._sums_replicas:
            self._unsummed.add(unit)
            return
        if unit in self._unsummed:
            earlier = self._shard_sums(unit)
            sums.add_(earlier)
            earlier.zero_()
            self._unsummed.remove(unit)
        self._all_reduce_across(sums)

    def _all_reduce_across(self, sums: Tensor) -> None:
        assert self._across is not None
        world = self._across.size()
        self.traffic.exchange(2 * (world - 1) * sums.nbytes // world)
        collectives.start_all_reduce(sums, self._across).wait()

    def _shard_sums(self, unit: int) -> Tensor:
        """Return the gradients in the unit's shards as one flat tensor: they are views of what was reduced first."""
        names = [parameter._param_fqn for parameter in _parameters_of(self._units[unit])]
        sums = [self._places[name].sums for name in names if name in self._places]
        first = next(local_tensor(each) for each in sums if each is not None)
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())

    def _begin_micro_batch(self, *, first: bool, last: bool, reduces: bool, backwards: int) -> None:
        if backwards > 1 and not self._pipelined:
            raise ValueError(f'start(backwards={backwards}): expected 1, because the mesh has no dimension "pp"')
        reduces &= last or not self._pipelined
        if first:
            self.clear_gradients()
        elif reduces:
            for group in _parameter_groups(*self._units):
                # Gradients arrive in another dtype than that in which some are accumulated.
                if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
                    for parameter in group.fsdp_params:
                        _complete_gradient(parameter)
        self._keep_whole(last and self._pipelined)
        self._unreduced = self._reduction_order if self._kept_whole else []
        self._awaited, self._arrived, self._completed = set(), set(), set()
        self._sums_replicas = last
        self._units[-1].set_requires_gradient_sync(reduces and not self._pipelined)
        if reduces and not self._pipelined and self.device.type == "cuda":
            # The reductions of a pass run beside the next one, which waits for that of a unit before it reduces it.
            self._units[-1].set_is_last_backward(last)
            self._unsettled |= not last

    def _settle(self) -> None:
        """Wait for the reductions of passes that were not the last of a step."""
        if self._unsettled:
            root = self._units[-1]
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(True)
            root._get_fsdp_state()._root_post_backward_final_callback()
            self._unsettled = False

    @property
    def _reduction_order(self) -> list[FSDPModule]:
        return [*self._units[-2::-1], self._units[-1]]

    def _keep_whole(self, keep: bool) -> None:
        """Let parameters stay gathered and gradients whole from now on, or let each pass free and reduce them again."""
        if keep == self._kept_whole:
            return
        self._kept_whole, root = keep, self._units[-1]
        for unit in self._units:
            unit.set_reshard_after_forward(not keep and unit in self._freed, recurse=False)
        root.set_reshard_after_backward(not keep)
        root.set_is_last_backward(not keep)

    def _complete(self, *, sums: bool) -> None:
        """Reduce the gradients of a pipeline's step that no pass has reduced. After another step there are none.

        Raise Disagreement on every rank if ranks have run other units, and ValueError if a gathered parameter was
        written to.
        """
        self._check_gathered()
        if self._kept_whole:
            self._start_reductions(complete=False)
            self._keep_whole(False)
            for group in _parameter_groups(*self._units):
                group.post_backward()
            self._units[-1]._get_fsdp_state()._root_post_backward_final_callback()
        elif self._has_whole_gradients:
            self._unreduced = self._reduction_order  # no pass has come after a local micro-batch
            self._start_reductions(complete=False)
            self._unsettled = True
        self._settle()
        self._order.end("finish()")
        for unit in sorted(self._unsummed):  # those that no pass of the last micro-batch has reduced
            self._all_reduce_across(self._shard_sums(unit))
        self._unsummed.clear()
        for member in self._tied:
            if member.place.sums is None:
                member.place.sums = torch.zeros_like(member.sharded)
            gradient = member.gradient
            if gradient.numel():
                gradient.copy_(collectives.all_reduce(gradient.to(self.device), self._ends))

    @contextmanager
    def backward_pass(self, parameters: set[Parameter], complete: set[Parameter]) -> Iterator[None]:
        # The modules have the gathered parameters, unless the unit has not computed in this step.
        of_pass, completed = (
            {p for p in _parameters_of(*self._units) if p.sharded_param in of or _gathered(p) in of}
            for of in (parameters, complete)
        )
        self._completed |= completed
        self._awaited = completed
        if self.accumulate == "sharded":
            self._unreduced = [u for u in self._reduction_order if not of_pass.isdisjoint(_parameters_of(u))]
            self._awaited, self._arrived = of_pass, set(_parameters_of(*self._units)) - of_pass
        yield
        self._arrived |= self._awaited
        self._awaited = set()
        self._start_reductions(complete=True)

    def _take(self, parameter: Any, _: Tensor) -> None:
        """Take a gradient of a parameter of `fully_shard`, which has arrived in `.grad` of the gathered one."""
        if not self._kept_whole:
            return
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        if parameter in self._awaited:
            self._arrived.add(parameter)
            self._start_reductions(complete=True)

    def _start_reductions(self, *, complete: bool) -> None:
        """Start the reduction of the next units in order. complete: stop at the first unit that lacks a gradient."""
        while self._unreduced:
            unit = self._unreduced[0]
            parameters = _parameters_of(unit)
            trained = [parameter for parameter in parameters if parameter.sharded_param.requires_grad]
            if complete and not self._arrived.issuperset(trained):
                return
            self._unreduced.pop(0)
            self._sums_replicas = not complete or self._completed.issuperset(trained)
            unit.set_requires_gradient_sync(True, recurse=False)
            for parameter in parameters:
                _complete_gradient(parameter)
            for group in _parameter_groups(unit):
                group.post_backward()  # it frees no parameters: this pass may still compute with them
            unit.set_requires_gradient_sync(False, recurse=False)

    def _watch_gradients(self, unit: nn.Module, _: Any) -> None:
        """Register the hook that takes the gradients of a unit's gathered parameters.

        It accumulates them in the reduction's dtype, not in a half type. `fully_shard` does so itself at the end of a
        backward pass, but not in the second half of a split one.
        """
        for parameter in _parameters_of(cast(FSDPModule, unit)):
            gathered = parameter.unsharded_param
            if gathered.requires_grad and not gathered._post_accumulate_grad_hooks:
                gathered.register_post_accumulate_grad_hook(partial(self._take, parameter))

    def _abandon(self, *, begun: bool) -> None:
        root = self._units[-1]
        if not hasattr(root, "reset_iter_state"):
            raise ValueError(
                "stage 3 can abandon a step from torch 2.13 on: continue from a checkpoint in a new process"
            )
        for group in self._groups if self.device.type == "cpu" else []:
            memory = choose_implementation(self.device, torch.float32, group).memory
            if memory is not None:
                memory.reset()
        root.reset_iter_state()
        self._keep_whole(False)
        self._unsettled = False
        self._drop()

    def discard(self) -> None:
        """See `Engine`. Raise Disagreement on all ranks if only some have run a backward pass."""
        unused = self.unused
        if self.state is StepState.REDUCING:
            ran = not unused or any(member.place.sums is not None for member in self.members)
            self._order.end("zero_grad() after a backward pass" if ran else "zero_grad() without a backward pass")
        for place in self._places.values():  # changes of what is discarded do not matter
            place.leave(taken=place.sums is not None)
        self._settle()
        if unused:
            self._keep_whole(False)  # no rank has a gradient to reduce
        super().discard()

    @property
    def unused(self) -> bool:
        if any(member.place.sums is not None for member in self.members):
            return self.accumulate == "sharded" and not self._pipelined
        return not self._kept_whole or not self._has_whole_gradients

    @property
    def _has_whole_gradients(self) -> bool:
        return any(
            parameter.unsharded_accumulated_grad is not None or getattr(_gathered(parameter), "grad", None) is not None
            for parameter in _parameters_of(*self._units)
        )

    def _drop(self) -> None:
        for parameter in _parameters_of(*self._units):  # fully_shard keeps unsharded gradients of earlier micro-batches
            parameter.unsharded_accumulated_grad, gathered = None, _gathered(parameter)
            if gathered is not None:
                gathered.grad = None
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Free the gradients."""
        self._unsummed.clear()
        for place in self._places.values():
            place.sums = None
            place.leave(taken=False)

    def squared_norm(self) -> Tensor:
        parts = [member.gradient for member in self.members if member.in_norm]
        norms = [torch.linalg.vector_norm(part).double() for part in parts if part.numel()]
        if norms:
            return torch.stack(norms).square().sum().to(self.device)
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def nonfinite(self) -> list[str]:
        return [member.name for member in self.members if not bool(torch.isfinite(member.gradient).all())]

    def free_gathered(self) -> None:
        """Free gathered parameters, which do not have the new values after the shards have been changed.

        Where a rank has several stages of a pipeline, a unit may have been prefetched that has not computed since. Wait
        until offloaded shards have been copied to the device, so that the host may write to them.
        """
        for group in _parameter_groups(*self._units):
            group.wait_for_unshard()
        for unit in self._units:
            unit.reshard()
        if self.offload != "none" and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def shard_dim(shape: Sequence[int], world: int) -> int:
    """Return the dimension in which stage 3 cuts a parameter of this local shape.

    This is the first dimension, unless cutting it would give a rank more than an eighth more than an equal share, as
    for GPT-2's packed [3, C, C]: then it is the first dimension that can be cut evenly, if there is one.
    """
    if -(-shape[0] // world) * world * 8 <= shape[0] * 9:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % world == 0), 0)


def data_mesh(mesh: DeviceMesh, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return two one-dimensional meshes: the ranks that share a copy of the model, and those with the same shard of it.

    mesh: all its dimensions except "tp" and "pp" are data-parallel; together they are `replicas` × shards. Collective:
    all ranks of the mesh must call it. Raise ValueError if these ranks are not in ascending order.
    """
    names = tuple(name for name in mesh.mesh_dim_names or () if name not in ("pp", "tp"))
    wide = tuple(name for name in names if mesh[name].size() > 1) or names[:1]
    data = mesh[wide] if len(wide) == 1 else mesh[wide]._flatten("_".join(wide))
    check_order(data)
    sizes, names = (replicas, data.size() // replicas), ("replicate", "shard")
    options = reducer_options(*names, together=2 if replicas > 1 else 1)
    both = data._unflatten(0, sizes, names, backend_override=options)
    return both["shard"], both["replicate"]


def _complete_gradient(parameter: Any) -> None:
    """Widen the whole gradient of a parameter of `fully_shard`, or make it zeros if the parameter took no part.

    The gradients of a unit must have one dtype, and a parameter may have taken part on another rank.
    """
    gathered = _gathered(parameter)
    if gathered is not None and gathered.requires_grad:
        if gathered.grad is None and parameter.unsharded_accumulated_grad is None:
            gathered.grad = torch.zeros_like(gathered)
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _gathered(parameter: Any) -> Parameter | None:
    """Return the gathered parameter of one of `fully_shard`; None if it has never been gathered."""
    return getattr(parameter, "_unsharded_param", None)


def _parameter_groups(*units: FSDPModule) -> list[Any]:
    """Return the objects in which `fully_shard` keeps the parameters of these units; some torches have one for each."""
    states = [unit._get_fsdp_state() for unit in units]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for of_unit in groups for group in of_unit if group is not None]


def _parameters_of(*units: FSDPModule) -> list[Any]:
    return [parameter for group in _parameter_groups(*units) for parameter in group.fsdp_params]


def _check_units(model: nn.Module, units: list[nn.Module]) -> None:
    modules = set(model.modules()) - {model}
    for unit in units:
        if not isinstance(unit, nn.Module) or unit not in modules:
            raise ValueError(
                f"shard: a unit is {shown(unit)} that is not a part of the model: expected modules, such as its"
                " blocks, by which it shares its parameters"
            )
        if isinstance(unit, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"shard: a unit is {shown(unit)}, which is never called: pass the modules in it")


def _checked(model: nn.Module, units: list[nn.Module]) -> torch.dtype:
    """Return the dtype of the parameters. Raise ValueError if they cannot be sharded."""
    trained_parameters(model)
    unit_of = dict.fromkeys(model.modules(), model)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "sum_gradients", None), Borrowed):
            raise ValueError(
                f"an engine of stage 0, 1 or 2 sums the gradients of {name} over tensor-parallel ranks: shard a copy of"
                " the model (copy.deepcopy) or a new model"
            )
    for module in model.modules():  # from the outside in
        if any(module is unit for unit in units):
            unit_of |= dict.fromkeys(module.modules(), module)
    first_use: dict[Parameter, tuple[str, nn.Module]] = {}
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = unit_of[model.get_submodule(name.rpartition(".")[0])]
        first, its_unit = first_use.setdefault(parameter, (name, unit))
        if its_unit is not unit:
            raise ValueError(f"{first} and {name} are one parameter in two units of stage 3: put both in one unit")
        if not parameter.ndim:
            raise ValueError(f"{name} is a scalar, and stage 3 cannot shard it: expected a parameter of shape (1,)")
        if not local_tensor(parameter).is_contiguous():
            raise ValueError(f"{name} is not contiguous, and stage 3 cannot shard it: expected a contiguous parameter")
        if parameter.is_floating_point() and parameter.numel():
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        several = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise ValueError(f"{several}: stage 3 expects parameters of one dtype")
    return next(iter(dtypes), torch.float32)


def _widen(unit: nn.Module) -> None:
    """Convert the unit's own parameters of a half type to float32; tied parameters stay tied."""
    widened: dict[Parameter, Parameter] = {}
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in HALF and parameter.numel():
                if parameter not in widened:
                    wide = parameter.detach().float()
                    widened[parameter] = Parameter(wide, requires_grad=parameter.requires_grad)
                module.register_parameter(name, widened[parameter])
