"""ZeRO's stage 3 (arXiv:1910.02054): a rank keeps a shard of the parameters, of their gradients and of AdamW's state.

PyTorch's `fully_shard` does the work. This module makes it an engine like the buckets of the other stages:

- Gradients are summed, not averaged. Each backward pass reduces them and adds them to the shards. If `accumulate` is
  "whole", they are accumulated over micro-batches without communication (`set_requires_gradient_sync`).
- Parameters in a half type have float32 masters: the shards are float32, and the gathered parameters are rounded. The
  initial weights are drawn in the half type and then widened, so they equal those of the other stages.
- Offload: shards of parameters and gradients are in the host's memory, pinned for GPUs (`CPUOffloadPolicy`): copied to
  the device each time that a unit is gathered, and to the host when it is reduced. If the place is a folder, the shards
  of parameters move to its file (`move_shards`), from which a unit is read when it is gathered; nothing is pinned.
- Communication between CPU ranks goes through `tpfuse.comm.collectives` (`tpfuse.zero.collectives_with_traffic`).
- Replicas: groups of neighbouring ranks, so that parameters are gathered within a node, each hold the whole model in
  shards; sums of shards are then reduced over the groups, once in a step, in its last micro-batch
  (`set_requires_all_reduce`; before torch 2.13 and with offload in each one).
- Pipelines: in a step of many passes, parameters stay gathered from their first use to `finish()`: otherwise every
  micro-batch would gather all of them again. A pass reduces the units whose gradients it computes; if `accumulate` is
  "whole", those for which no later pass computes any (`backward_pass`). The ranks that reduce a unit have the same
  stages, and are at the same point of the schedule then.

`tpfuse.zero.fsdp_internals` has what of this torch has no public way for.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.nn import Parameter

from tpfuse.choices import Accumulate, GradientDtype
from tpfuse.comm import collectives
from tpfuse.comm.collectives.collective import set_timeout
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.mesh import rank_and_size
from tpfuse.comm.sum_order import REAL_RANKS, Sum, VirtualRanks, sum_in_tree, sum_leaves, tree_order
from tpfuse.comm.traffic import Traffic
from tpfuse.layers.local_parameter import offer_head
from tpfuse.zero import fsdp_internals as internals
from tpfuse.zero.broadcast_start import broadcast_model
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.collectives_with_traffic import Counted, scatter_sum
from tpfuse.zero.engine import Engine, RankGroups, StepState
from tpfuse.zero.muon_matrices import HiddenMatrix
from tpfuse.zero.parameter_takeover import (
    GradientPlace,
    hand_over_hooks,
    in_backward,
    location,
    share_hooks,
    take_context_sums,
)
from tpfuse.zero.reducer.collective import reserve
from tpfuse.zero.reducer.shard_update import StateStore
from tpfuse.zero.sharded_units import (
    TAKEN,
    ShardedParameter,
    Sums,
    Unit,
    check_units,
    copies_of_shards,
    data_mesh,
    inner_first,
    shard_dim,
    shard_units,
)
from tpfuse.zero.unit_order import Operation, UnitOrder
from tpfuse.zero.whole_gradients import WholeGradients

_REPLACED = (
    "{name} was replaced by its shards when stage 3 took the model: make optimizers and lists of"
    " model.parameters() after that"
)


class FullySharded(Engine):
    """An engine that takes over the parameters of `model`: it shards them and sums their gradients into `members`.

    `tpfuse.zero.shard` makes it and documents the arguments. tied: that of `SharedParameters`.

    Call `start(last=…)`, forward and backward for each micro-batch, then `finish()`. Every rank must run the same units
    in the same order: if one skips a unit, all raise Disagreement, which names the unit, between CPU ranks in the pass
    itself, on GPUs in `finish()`. A parameter of a unit that took no part on some rank, or on any rank, has gradient
    zero there (before torch 2.13 it must take part on all ranks or on none). A parameter without elements stays as it
    is. A micro-batch that is not reduced leaves its gradients whole. Between CPU ranks, forward and backward
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
        uses: Mapping[str, int] | None = None,
        tied: Iterable[str] = (),
        matrices: Sequence[HiddenMatrix] = (),
        offload: str | PathLike[str] = "none",
        virtual: VirtualRanks = REAL_RANKS,
    ) -> None:
        super().__init__(model, virtual, uses or {})
        self.accumulate: Accumulate = "whole" if virtual.number else accumulate
        self.stage, self.offload, self.matrices = 3, offload, matrices
        place = "shards in the host's memory" if offload == "host" else f"parameters in {offload}"
        self.reasons += ["fully_shard", *([] if offload == "none" else [place])]
        self._store: StateStore | None = None  # the file of the shards
        self.traffic = Traffic()
        self.world_group, self.stage_group, self._ends = groups.world, groups.stage, groups.ends
        self.device = torch.empty(0, device=mesh.device_type).device
        self._pipelined = "pp" in (mesh.mesh_dim_names or ())
        units, tied = inner_first(units), list(tied)
        dtype = check_units(model, units)
        shards, across = data_mesh(mesh, replicas)
        self._join(shards.get_group("shard"), across.get_group())
        self._total = self._order_of_sums(groups, replicas)
        self.data_ranks = replicas * shards.size() // take_context_sums(model, groups.data)
        broadcast_model(model, groups.data, tied, self._ends)
        copies = copies_of_shards(model, mesh, across)
        replaced = {name: model.get_parameter(name) for name in copies}
        sent = dtype if reduce_dtype == "parameter" else torch.float32
        pinned = CPUOffloadPolicy(pin_memory=self.device.type == "cuda" and offload == "host")
        policy = OffloadPolicy() if offload == "none" else pinned
        self._units = shard_units(model, units, shards, (dtype, sent), policy)
        self._await_step()
        self._take_over_units()
        self._add_members(copies, tied)
        for name, parameter in replaced.items():  # an optimizer may still hold the replaced parameter
            hand_over_hooks(parameter, self.model.get_parameter(name))
            GradientPlace(parameter, _REPLACED.format(name=name)).leave(taken=True)
        self._record_parameters()

    def _join(self, shards: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        """Take the groups of the ranks that share a copy of the model, and of those with the same shard of it."""
        data_groups = [group for group in (shards, across) if group.size() > 1]
        self._shards = shards
        self._across, self._groups = across, data_groups + ([] if self._ends is None else [self._ends])
        for group in self._groups:
            set_timeout(group)
        reserve(data_groups[0])  # for good: an engine of this stage has no end
        each = self.device.type == "cpu"
        self._order = UnitOrder(data_groups, self.device, lambda number: self._units[number].title, each=each)

    def _order_of_sums(self, groups: RankGroups, replicas: int) -> Sum | None:
        """Return the order of sums over the ranks that share a copy of the model; None for that of the backend."""
        inner = rank_and_size(groups.data)[1] // groups.dp
        if not self.virtual.number:
            return None
        if inner > 1 and replicas > 1:
            raise ValueError("virtual_ranks: context-parallel ranks and replicas have no common order of sums")
        return partial(sum_leaves, tree_order(self._shards.size(), groups.dp // replicas, inner))

    def _await_step(self) -> None:
        """Set the progress of a step before the first one."""
        # Units with gradients that are not in the sums of the step over all ranks yet, units whose next reduction is
        # the last one of the step, and those that the current pass has reduced.
        self._owed, self._final, self._reduced = set[Unit](), set[Unit](), set[Unit]()
        self._next = set[Unit]()  # those that the next pass reduces
        self._wholes: dict[Unit, WholeGradients] = {}  # of virtual ranks
        self._heads: dict[str, Tensor] = {}  # gradients of the use as head, which are reduced last
        self._last_stage = False  # whether the current pass is that of the last stage of a pipeline
        self._completed = set[str]()  # the parameters of which no later pass of a pipeline's step computes gradients
        self._ran = False  # whether a backward pass has run in the micro-batch
        self._used = False  # whether a forward pass has run, in which `fully_shard` makes the state that it resets

    def _take_over_units(self) -> None:
        self._root = self._units[-1].module
        # Whether sums are reduced over replicas in the last micro-batch alone. Before torch 2.13 those of two may be of
        # different parameters of a unit; with offload those of earlier ones would stay on the device.
        self._postpones = internals.FROM_2_13 and self.offload == "none"
        for unit in self._units:
            self._take_over(unit)
        self.traffic.sent = self.traffic.received = 0
        if internals.FROM_2_13:
            self._root.set_reduce_scatter_unused_params(True)
        self._keep_gathered(False)

    def _add_members(self, copies: Mapping[str, tuple[int, int]], tied: list[str]) -> None:
        """Describe this rank's shards as `members`, and give each a place for its gradient."""
        self._name_of = {p: name for unit in self._units for name, p in (*unit.shards.items(), *unit.gathered.items())}
        self.members = [self._member(index, name, *copies[name], tied) for index, name in enumerate(copies)]
        self._tied = [member for name in tied for member in self.members if member.name == name]
        self._places: dict[str, Sums] = {member.name: member.place for member in self.members}

    def _member(self, index: int, name: str, copies: int, copy: int, tied: list[str]) -> ShardedParameter:
        if name in tied:  # the ends have other parameters beside it, so they number it by its place in `tied`
            end, ends = rank_and_size(self._ends)
            index, copies, copy = tied.index(name), copies * ends, copy * ends + end
        sharded = self.model.get_parameter(name)
        place = Sums(sharded, TAKEN.format(name=name))
        return ShardedParameter(name, sharded, decays(name, sharded), copy == 0, index % copies == copy, place)

    def _take_over(self, unit: Unit) -> None:
        """Let `fully_shard` gather and reduce a unit in our way."""
        module, begin = unit.module, partial(self._begin, unit)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no other reduction
        module.set_custom_all_gather(cast(Any, Counted("all_gather", self.traffic, begin)))
        module.set_custom_reduce_scatter(cast(Any, Counted("reduce_scatter", self.traffic, begin, self._total)))
        if self._across.size() > 1:
            module.set_all_reduce_hook(partial(self._sum_over_replicas, unit))
        # From now on the gathered parameters exist; were they made in inference mode, they could never be trained.
        module.unshard()
        unit.gathered = {name: self.model.get_parameter(name) for name in unit.shards}
        for name in () if self._pipelined else self._twice.intersection(unit.trained):
            offer_head(unit.gathered[name], partial(self._take_of_head, unit, name))
        module.reshard()
        internals.around_gather(module, partial(self._gather, unit))
        internals.around_reduce(module, partial(self._reduce, unit))

    def _begin(self, unit: Unit, operation: Operation) -> None:
        """Compare an operation of a unit with those of the other ranks before it begins."""
        self._order.begin(operation, unit.number)
        if operation == "reduce_scatter":
            self._reduced.add(unit)
            if unit in self._final:
                self._owed.discard(unit)

    def _gather(self, unit: Unit, gather: Callable[[bool], None], async_op: bool = False) -> None:
        """Gather the parameters of a unit unless they are gathered, in place of `gather`.

        If shards were written since the last time (load_state_dict, an update), what was gathered is old, also what was
        gathered ahead.
        """
        self._used = True
        for name in unit.trained:
            share_hooks(unit.gathered[name], unit.shards[name])
        if unit.count_writes():
            internals.free(unit.module)
        if self._store is None:
            gather(async_op)
            return
        for shard in internals.padded_shards(unit.module).values():
            self._store.load(shard)
        gather(async_op)
        self._store.release()

    def _reduce(self, unit: Unit, reduce: Callable[[], None], *_: object) -> None:
        """Reduce the gradients of a unit into the shards if this pass is to, in place of `reduce`.

        Raise ValueError in a backward pass after the last one of a step, whose sums do not have its gradients.
        """
        if in_backward() and not self.accumulating and any(p.grad is not None for p in unit.gathered.values()):
            raise ValueError(
                f"a backward pass of {unit.title} after the last one of a step, {self._situation}: with ZeroOptimizer"
                " call zero_grad() first, without it start()"
            )
        self._ran = True
        for name in unit.trained:
            self._places[name].check(name)
            self._places[name].give()
        if self.virtual.number:
            self._take_whole(unit)
        reduce()
        for name in unit.trained:
            self._places[name].take()

    def _whole_gradients(self, unit: Unit) -> WholeGradients:
        if unit not in self._wholes:
            self._wholes[unit] = WholeGradients(unit, self.virtual, self._twice)
        return self._wholes[unit]

    def _take_whole(self, unit: Unit) -> None:
        """Add the gradients of a unit to those of its virtual rank, and hand on the sums before they are reduced."""
        leaf, wholes = self.virtual.of_micro_batch(self._micro_batch), self._whole_gradients(unit)
        wholes.take(leaf, as_head=self._last_stage)
        if unit in self._next:
            sums, heads = wholes.close()
            self._heads |= heads
            internals.set_whole_gradients(unit.module, {unit.shards[name]: sums.get(name) for name in unit.shards})
            del self._wholes[unit]

    def _take_of_head(self, unit: Unit, name: str, gradient: Tensor) -> None:
        self._whole_gradients(unit).take_of_head(name, gradient, self.virtual.of_micro_batch(self._micro_batch))

    def _reduce_heads(self) -> None:
        """Add the sums over ranks of the gradients of heads to those of the same parameters as embeddings."""
        world, total = self._shards.size(), self._total
        for name, whole in self._heads.items():
            gradient = next(member for member in self.members if member.name == name).own_gradient()
            dim = shard_dim(whole.shape, world)
            rows = whole.movedim(dim, 0)
            count = -(-len(rows) // world)
            padded = rows.new_zeros(world * count, *rows.shape[1:])
            padded[: len(rows)] = rows
            part = torch.empty_like(padded[:count])
            assert total is not None
            scatter_sum(padded.view(-1), part.view(-1), self._shards, total)
            self._add_replicas(part)
            self.traffic.exchange((world - 1) * part.nbytes)
            gradient.add_(part.movedim(0, dim).narrow(dim, 0, gradient.shape[dim]))
        self._heads.clear()

    def _add_replicas(self, sums: Tensor) -> None:
        """Replace sums by their sums over replicas."""
        if self._across.size() > 1 and self.virtual.number:
            parts = collectives.all_gather(sums.view(1, -1), self._across)
            sum_in_tree(parts.unbind(), sums.view(-1))
        else:
            collectives.start_all_reduce(sums, self._across).wait()

    def _sum_over_replicas(self, unit: Unit, sums: Tensor) -> None:
        self._begin(unit, "reduce_scatter")  # with one rank to a replica there was no other
        replicas = self._across.size()
        self.traffic.exchange(2 * (replicas - 1) * sums.nbytes // replicas)
        self._add_replicas(sums)

    def move_shards(self, store: StateStore) -> None:
        """Move this rank's shards of all parameters, with their padding, into a store, from which they are gathered."""
        self._check_parameters()
        for unit in self._units:
            for shard, padded in internals.padded_shards(unit.module).items():
                moved = store.tensor(self._name_of[shard], padded.numel(), padded.dtype).copy_(padded)
                internals.move_shard(unit.module, shard, moved)
        self._store = store
        store.release()
        self._recorded = [(name, p, required, location(p)) for name, p, required, _ in self._recorded]

    @property
    def shard_bytes(self) -> list[int]:
        """Return the bytes of what `move_shards` moves, for each parameter."""
        return [x.nbytes for unit in self._units for x in internals.padded_shards(unit.module).values()]

    def _check_parameters(self) -> None:
        for unit in self._units:
            unit.check()
        self.free_gathered()  # afterwards the modules hold shards
        super()._check_parameters()

    def _begin_micro_batch(self, *, first: bool, last: bool, reduces: bool, backwards: int) -> None:
        if backwards > 1 and not self._pipelined:
            raise ValueError(f'start(backwards={backwards}): expected 1, because the mesh has no axis "pp"')
        if first:
            self.clear_gradients()
        reduces &= not self._pipelined  # `backward_pass` and `finish` do it there
        if not (last and reduces):
            self._owed = {unit for unit in self._units if unit.trained}
        self._completed, self._ran = set(), False
        self._keep_gathered(last and self._pipelined)
        self._reduce_next(self._units if reduces else (), self._units if last else ())
        # On GPUs the reductions of a pass run beside the next one, which waits for that of a unit before it reduces it.
        beside = reduces and not last and self.device.type == "cuda"
        self._root.set_is_last_backward(not (beside or (last and self._pipelined)))

    def _keep_gathered(self, keep: bool) -> None:
        """Let parameters stay gathered from now on, or let passes free them."""
        for unit in self._units:
            # The backward pass begins with the model and its last unit. If they freed their parameters after the
            # forward pass, they would have to gather them again at once.
            unit.module.set_reshard_after_forward(not keep and unit not in self._units[-2:], recurse=False)
        self._root.set_reshard_after_backward(not keep)

    def _reduce_next(self, units: Collection[Unit], final: Collection[Unit]) -> None:
        """Let the next pass reduce the gradients of `units` alone. final: units of which it has the last ones."""
        for unit in self._units:
            unit.module.set_requires_gradient_sync(unit in units, recurse=False)
            unit.module.set_requires_all_reduce(unit in final or not self._postpones, recurse=False)
        self._next = set(units)
        for unit in self._owed.intersection(units):
            gathered = {shard: unit.gathered[name] for name, shard in unit.shards.items()}
            internals.complete_gradients(unit.module, gathered)
        self._final, self._reduced = set(final), set()

    def _end_backward(self, units: Collection[Unit], final: Collection[Unit]) -> None:
        """Reduce gradients of units that no pass of `fully_shard` will reduce. Arguments: as for `_reduce_next`."""
        self._reduce_next(units, final)
        internals.end_backward(self._root)

    def _complete(self, *, sums: bool) -> None:
        """Reduce the gradients that no pass has reduced, and wait for all reductions.

        Raise Disagreement on every rank if ranks have run other units, and ValueError if a gathered parameter was
        written to.
        """
        for unit in self._units:
            unit.check()
        self._keep_gathered(False)
        self._root.set_is_last_backward(True)
        if self._owed or (self._pipelined and self._ran):
            self._end_backward(self._owed, self._owed)
        self._order.end("finish()")
        self._reduce_heads()
        for member in self._tied:
            gradient = member.own_gradient()
            if gradient.numel():
                gradient.copy_(collectives.all_reduce(gradient.to(self.device), self._ends))

    @contextmanager
    def backward_pass(
        self, parameters: set[Parameter], complete: set[Parameter], *, split: bool, micro_batch: int, last_stage: bool
    ) -> Iterator[None]:
        self._micro_batch, self._last_stage = micro_batch, last_stage
        names = {self._name_of[p] for p in parameters if p in self._name_of}
        self._completed |= {self._name_of[p] for p in complete if p in self._name_of}
        final = {unit for unit in self._owed if unit.trained <= self._completed}
        units = final | {u for u in self._owed if self.accumulate == "sharded" and not u.trained.isdisjoint(names)}
        self._reduce_next(() if split else units, final)
        yield
        if split or not units <= self._reduced:
            self._end_backward(units - self._reduced, final)
        self._reduce_next((), ())
        for unit in self._units if self.virtual.number else ():
            self._take_whole(unit)  # what no call of `_reduce` has taken

    def _abandon(self, *, begun: bool) -> None:
        if not internals.FROM_2_13:
            raise ValueError(
                "stage 3 can abandon a step from torch 2.13 on: continue from a checkpoint in a new process"
            )
        for group in self._groups if self.device.type == "cpu" else []:
            memory = choose_implementation(self.device, torch.float32, group).memory
            if memory is not None:
                memory.reset()
        self._keep_gathered(False)
        self._drop()

    def discard(self) -> None:
        """See `Engine`. Raise Disagreement on all ranks if only some have run a backward pass."""
        if self.state is StepState.REDUCING:
            self._order.end("zero_grad() after a backward pass" if self._ran else "zero_grad() without a backward pass")
        for place in self._places.values():  # changes of what is discarded do not matter
            place.leave(taken=place.sums is not None)
        if self.unused:
            self._owed.clear()  # no rank has a gradient to reduce
        super().discard()

    @property
    def unused(self) -> bool:
        return not self._ran or (self.accumulate == "sharded" and not self._pipelined)

    def _drop(self) -> None:
        if self._used and internals.FROM_2_13:
            self._root.reset_iter_state()
        elif self._used:
            self._root.set_is_last_backward(True)
            self._end_backward((), ())
        for unit in self._units:
            internals.set_whole_gradients(unit.module, dict.fromkeys(unit.shards.values()))
            for gathered in unit.gathered.values():
                gathered.grad = None
        self.clear_gradients()

    def close(self) -> None:
        """Do nothing: the memory of the engine is the model's."""

    def clear_gradients(self) -> None:
        """Free the gradients."""
        self._owed.clear()
        self._wholes.clear()
        self._heads.clear()
        for place in self._places.values():
            place.sums = None
            place.leave(taken=False)

    def _counted_shards(self) -> Iterator[Tensor]:
        gradients = (member.gradient for member in self.members if member.in_norm)
        return (gradient.flatten() for gradient in gradients if gradient.numel())

    def nonfinite(self) -> list[str]:
        return [member.name for member in self.members if not bool(torch.isfinite(member.gradient).all())]

    def free_gathered(self) -> None:
        """Free gathered parameters, which do not have the new values after the shards have been changed.

        Where a rank has several stages of a pipeline, a unit may have been gathered ahead that has not computed since.
        Wait until offloaded shards have been copied to the device, so that the host may write to them.
        """
        for unit in self._units:
            internals.free(unit.module)
        if self.offload != "none" and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
