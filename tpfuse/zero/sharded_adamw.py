"""AdamW on the shards of stage 3: one update of all local shards (`tpfuse.ops.adamw`)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.ops.adamw import adamw_
from tpfuse.zero.fully_sharded import FullySharded, ShardedParameter
from tpfuse.zero.parameter_takeover import count_write
from tpfuse.zero.shard_slices import StateRectangle


class ShardedAdamW:
    """AdamW that keeps the moments of this rank's shards. The shards are the master weights.

    betas, eps, weight_decay: as in torch.optim.AdamW; they may be changed between updates. Biases and norms have no
    weight decay (`tpfuse.zero.bucket_layout.decays`).
    """

    def __init__(
        self,
        engine: FullySharded,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._engine, self.betas, self.eps, self.weight_decay = engine, betas, eps, weight_decay
        self._step = torch.zeros((), dtype=torch.float32, device=engine.device)
        shards = {member.name: local_tensor(member.sharded) for member in engine.members}
        self._exp_avg = {name: torch.zeros_like(shard) for name, shard in shards.items()}
        self._exp_avg_sq = {name: torch.zeros_like(shard) for name, shard in shards.items()}

    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update the shards with the gradients times `factor`, then free the gradients.

        Raise ValueError if the engine was not finished (`finish()`) since the last update.
        """
        self._engine.take_sums()
        self._step += 1
        for decay in (True, False):
            members = [m for m in self._engine.members if m.decay == decay and local_tensor(m.sharded).numel()]
            if members:
                self._update(members, lr, factor, self.weight_decay if decay else 0.0)
        count_write([member.sharded for member in self._engine.members])
        self._engine.clear_gradients()
        self._engine.free_gathered()

    def _update(self, members: list[ShardedParameter], lr: float, factor: float, weight_decay: float) -> None:
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

    def publish(self) -> None:
        """Free gathered parameters after a checkpoint has changed the shards, so that the new values are gathered."""
        self._engine.free_gathered()

    def rectangles(self) -> Iterator[StateRectangle]:
        """Yield the parameters and moments that this rank holds, as rectangles for checkpoints; one rank owns each."""
        for member in self._engine.members:
            shape, slices = tuple(member.sharded.shape), local_slices(member.sharded)
            shard: Tensor = local_tensor(member.sharded)
            state = {"model": shard, "exp_avg": self._exp_avg[member.name], "exp_avg_sq": self._exp_avg_sq[member.name]}
            for kind, tensor in state.items():
                yield StateRectangle(member.name, kind, shape, slices, tensor, member.is_owner)  # type: ignore[arg-type]

    def release(self) -> None:
        """Do nothing after a checkpoint has read the state: all of the state stays in memory."""

    @property
    def updates(self) -> int:
        """Return the number of updates that the moments contain."""
        return int(self._step)

    @updates.setter
    def updates(self, count: int) -> None:
        self._step.fill_(count)
