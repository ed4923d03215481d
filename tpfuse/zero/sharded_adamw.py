"""AdamW on the shards of stage 3: one update of all local shards (`tpfuse.ops.adamw`).

If they are offloaded, the host updates the shards one after another, in blocks, as those of the buckets
(`tpfuse.zero.reducer.shard_update`). The shards of the parameters, which are the masters, and of their gradients are in
its memory then (`tpfuse.zero.fully_sharded`), and so are the moments; or parameters and moments are in a file.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tpfuse.choices import MomentDtype
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.ops.adamw import adamw_
from tpfuse.zero.fully_sharded import FullySharded, ShardedParameter
from tpfuse.zero.muon import Muon, MuonOptions, update_momentum
from tpfuse.zero.offload import MemoryStore, moment_dtype
from tpfuse.zero.parameter_takeover import count_write
from tpfuse.zero.reducer.shard_update import Rates, ShardUpdate, StateStore
from tpfuse.zero.shard_slices import StateRectangle


class ShardedAdamW:
    """AdamW that keeps the moments of this rank's shards. The shards are the master weights.

    betas, eps, weight_decay: as in torch.optim.AdamW; they may be changed between updates. Biases and norms have no
    weight decay (`tpfuse.zero.bucket_layout.decays`). muon: the options of Muon, which updates the engine's `matrices`;
    they may be changed too. state_dtype: as for `tpfuse.zero.adamw`. store: the memory of the moments if the engine
    offloads its shards, else None; shards that are in a file are in this store (`FullySharded.move_shards`).
    """

    def __init__(
        self,
        engine: FullySharded,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        muon: MuonOptions | None = None,
        state_dtype: MomentDtype = "float32",
        store: StateStore | None = None,
    ) -> None:
        self._engine, self.betas, self.eps, self.weight_decay = engine, betas, eps, weight_decay
        self.muon = muon or MuonOptions()
        self._store, self._memory = store, MemoryStore(engine.device) if store is None else store
        self._exp_avg, self._exp_avg_sq = dict[str, Tensor](), dict[str, Tensor]()
        names = {matrix.name for matrix in engine.matrices}
        for member in engine.members:
            shard = local_tensor(member.sharded)
            by_muon = member.name in names
            dtype = shard.dtype if by_muon else moment_dtype(state_dtype, shard.dtype)
            kinds = [("exp_avg", self._exp_avg)] + [("exp_avg_sq", self._exp_avg_sq)] * (not by_muon)
            for kind, moments in kinds:
                moments[member.name] = self._memory.tensor(kind, shard.numel(), dtype).view(shard.shape)
        self._step = torch.zeros((), dtype=torch.float32, device=self._exp_avg[engine.members[0].name].device)
        self._matrices = [member for member in engine.members if member.name in names]
        self._muon = None
        if engine.matrices:
            slices = [(member.name, local_slices(member.sharded)) for member in self._matrices]
            dtype = self._matrices[0].sharded.dtype
            self._muon = Muon(engine.matrices, slices, engine.stage_group, dtype, engine.device, engine.traffic)

    def step(self, lr: float, factor: float = 1.0, muon_lr: float | None = None) -> None:
        """Update the shards with the gradients times `factor`, then free the gradients.

        muon_lr: the learning rate of Muon's matrices, by default that of its options, or else `lr`. Raise ValueError if
        the engine was not finished (`finish()`) since the last update.
        """
        self._engine.take_sums()
        self._engine.free_gathered()
        self._step += 1
        self._update_matrices(self.muon.rate(lr, muon_lr), factor)
        others = [m for m in self._engine.members if m.name in self._exp_avg_sq and local_tensor(m.sharded).numel()]
        for decay in (True, False):
            members = [member for member in others if member.decay == decay]
            if members:
                self._update(members, lr, factor, self.weight_decay if decay else 0.0)
        count_write([member.sharded for member in self._engine.members])
        self._engine.clear_gradients()
        self.release()

    def _update_matrices(self, lr: float, factor: float) -> None:
        """Update the shards of Muon's matrices."""
        if self._muon is None:
            return
        directions: list[Tensor] = []
        for member in self._matrices:
            momentum = self._exp_avg[member.name]
            direction = torch.empty(momentum.shape, dtype=self._muon.dtype, device=self._engine.device)
            gradient, flat = member.gradient.view(-1), momentum.view(-1)
            update_momentum(gradient, flat, direction.view(-1), factor, self.muon, self._memory, None)
            directions.append(direction)
        masters = [local_tensor(member.sharded) for member in self._matrices]
        self._muon.step(directions, masters, lr, self.weight_decay, self.muon)

    def _update(self, members: list[ShardedParameter], lr: float, factor: float, weight_decay: float) -> None:
        if self._store is not None:
            self._update_elsewhere(self._store, members, lr, factor, weight_decay)
            return
        masters = [local_tensor(member.sharded).view(-1) for member in members]
        adamw_(
            masters,
            [member.gradient.view(-1) for member in members],
            [self._exp_avg[member.name].view(-1) for member in members],
            [self._exp_avg_sq[member.name].view(-1) for member in members],
            [None] * len(members),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=weight_decay,
            step=self._step,
            clip=None if factor == 1.0 else factor,
        )

    def _update_elsewhere(
        self, store: StateStore, members: list[ShardedParameter], lr: float, factor: float, weight_decay: float
    ) -> None:
        rates = Rates(lr, *self.betas, self.eps, weight_decay, self._step, factor)
        following: tuple[Tensor, ...] = ()
        updates = []
        for member in reversed(members):
            moments = self._exp_avg[member.name].view(-1), self._exp_avg_sq[member.name].view(-1)
            updates.append(ShardUpdate(*moments, None, len(moments[0]), rates, store, None, following))
            following = *moments, _flat_shard(member)
        for member, update in zip(members, reversed(updates), strict=True):
            update.apply(member.gradient.view(-1), _flat_shard(member))

    def publish(self) -> None:
        """Free gathered parameters after a checkpoint has changed the shards, so that the new values are gathered."""
        self._engine.free_gathered()

    def rectangles(self) -> Iterator[StateRectangle]:
        """Yield the parameters and moments that this rank holds, as rectangles for checkpoints; one rank owns each."""
        for member in self._engine.members:
            shape, slices = tuple(member.sharded.shape), local_slices(member.sharded)
            shard: Tensor = local_tensor(member.sharded)
            state = {"model": shard, "exp_avg": self._exp_avg[member.name]}
            if member.name in self._exp_avg_sq:
                state["exp_avg_sq"] = self._exp_avg_sq[member.name]
            for kind, tensor in state.items():
                yield StateRectangle(member.name, kind, shape, slices, tensor, member.is_owner)  # type: ignore[arg-type]

    def release(self) -> None:
        """Release the memory that is not needed after a checkpoint has read the state."""
        if self._store is not None:
            self._store.release()

    @property
    def updates(self) -> int:
        """Return the number of updates that the moments contain."""
        return int(self._step)

    @updates.setter
    def updates(self, count: int) -> None:
        self._step.fill_(count)


def _flat_shard(member: ShardedParameter) -> Tensor:
    return local_tensor(member.sharded).detach().view(-1)
