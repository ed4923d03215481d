"""AdamW on the shards of stage 3: one update of all local shards (`tpfuse.ops.adamw`).

If they are offloaded, the host updates the shards one after another, in blocks, as those of the buckets
(`tpfuse.zero.reducer.shard_update`). The shards of the parameters, which are the masters, and of their gradients are in
its memory then (`tpfuse.zero.fully_sharded`), and so are the moments; or parameters and moments are in a file.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.ops.adamw import adamw_
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.muon import Muon, update_momentum
from tpfuse.zero.parameter_takeover import count_write
from tpfuse.zero.reducer.shard_update import Rates, ShardUpdate
from tpfuse.zero.shard_slices import StateKind, StateRectangle
from tpfuse.zero.sharded_units import ShardedParameter
from tpfuse.zero.updater import MOMENTS, Updater


class UnitUpdater(Updater):
    """AdamW that keeps the moments of this rank's shards. The shards are the master weights.

    store: has the shards of the parameters too if the place is a folder (`FullySharded.move_shards`).
    """

    _engine: FullySharded

    def _allocate(self) -> None:
        engine, names = self._engine, {matrix.name for matrix in self._engine.matrices}
        self._state: dict[str, dict[StateKind, Tensor]] = {}
        for member in engine.members:
            shard = local_tensor(member.sharded)
            moments = self._moments(shard.numel(), shard.dtype, member.name in names)
            self._state[member.name] = {kind: x.view(shard.shape) for kind, x in moments.items()}
        device = next((state["exp_avg"].device for state in self._state.values()), engine.device)
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self._matrices = [member for member in engine.members if member.name in names]
        if engine.matrices:
            slices = [(member.name, local_slices(member.sharded)) for member in self._matrices]
            dtype, alone = self._matrices[0].sharded.dtype, engine.virtual.number > 0
            group, traffic = engine.stage_group, engine.traffic
            self._muon = Muon(engine.matrices, slices, group, dtype, engine.device, traffic, alone)

    def step(self, lr: float, factor: float = 1.0, muon_lr: float | None = None) -> None:
        """Update the shards with the gradients times `factor`, then free the gradients.

        muon_lr: the learning rate of Muon's matrices, by default that of its options, or else `lr`. Raise ValueError if
        the engine was not finished (`finish()`) since the last update.
        """
        self._engine.take_sums()
        self._engine.free_gathered()
        self._step += 1
        self._update_matrices(self.muon.rate(lr, muon_lr), factor)
        by_adamw = [member for member in self._engine.members if "exp_avg_sq" in self._state[member.name]]
        others = [member for member in by_adamw if local_tensor(member.sharded).numel()]
        for decay in (True, False):
            members = [member for member in others if member.decay == decay]
            if members:
                rates = self._rates(lr, factor)
                self._update(members, rates if decay else replace(rates, weight_decay=0.0))
        count_write([member.sharded for member in self._engine.members])
        self._engine.clear_gradients()
        self.release()

    def _update_matrices(self, lr: float, factor: float) -> None:
        """Update the shards of Muon's matrices."""
        if self._muon is None:
            return
        directions: list[Tensor] = []
        for member in self._matrices:
            momentum = self._state[member.name]["exp_avg"]
            direction = torch.empty(momentum.shape, dtype=self._muon.dtype, device=self._engine.device)
            gradient, flat = member.gradient.view(-1), momentum.view(-1)
            update_momentum(gradient, flat, direction.view(-1), factor, self.muon, self._store, None)
            directions.append(direction)
        masters = [local_tensor(member.sharded) for member in self._matrices]
        self._muon.step(directions, masters, lr, self.weight_decay, self.muon)

    def _update(self, members: list[ShardedParameter], rates: Rates) -> None:
        shards = [local_tensor(member.sharded).detach().view(-1) for member in members]
        states = [self._state[member.name] for member in members]
        exp_avg, exp_avg_sq = ([state[kind].view(-1) for state in states] for kind in MOMENTS)
        if self._offloads:
            used = list(zip(exp_avg, exp_avg_sq, shards, strict=True))
            for (first, second, shard), member, next_one in zip(used, members, [*used[1:], ()], strict=True):
                update = ShardUpdate(first, second, None, len(shard), rates, self._store, None, next_one)
                update.apply(member.gradient.view(-1), shard)
            return
        gradients = [member.gradient.view(-1) for member in members]
        adamw_(shards, gradients, exp_avg, exp_avg_sq, [None] * len(members), **rates.options(rates.weight_decay))

    def publish(self) -> None:
        """Free gathered parameters after a checkpoint has changed the shards, so that the new values are gathered."""
        self._engine.free_gathered()

    def rectangles(self) -> Iterator[StateRectangle]:
        """Yield the parameters and moments that this rank holds, as rectangles for checkpoints; one rank owns each."""
        for member in self._engine.members:
            shape, slices = tuple(member.sharded.shape), local_slices(member.sharded)
            state: dict[StateKind, Tensor] = {"model": local_tensor(member.sharded), **self._state[member.name]}
            for kind, tensor in state.items():
                yield StateRectangle(member.name, kind, shape, slices, tensor, member.is_owner)
