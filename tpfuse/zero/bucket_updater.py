"""AdamW on this rank's shards of the gradient buckets (`tpfuse.zero.reducer.base` describes the order of work).

Muon updates buckets of matrices (`tpfuse.zero.muon`) before that; the reducers then only send the new parameters.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tpfuse.comm.layout import local_slices
from tpfuse.comm.sum_order import HALF
from tpfuse.zero.bucket import Bucket
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.muon import Muon, update_momentum
from tpfuse.zero.parameter_takeover import count_write, writes
from tpfuse.zero.reducer.base import GradientReducer
from tpfuse.zero.reducer.shard_update import ShardUpdate, Staging
from tpfuse.zero.shard_slices import StateKind, StateRectangle, state_rectangles
from tpfuse.zero.updater import Updater


class BucketUpdater(Updater):
    """AdamW that keeps the state of this rank's shards only. At stage 0 a rank's shards are the whole buckets.

    Values that are written into parameters of a half type between two updates (for example by load_state_dict) replace
    the masters, except those equal to the rounded master.
    """

    _engine: GradientBuckets

    def _allocate(self) -> None:
        buckets = self._engine
        self._state: dict[Bucket, dict[StateKind, Tensor]] = {}
        for bucket in buckets.buckets:
            layout, size = bucket.layout, len(bucket.shard)
            half = layout.dtype in HALF
            self._state[bucket] = {"model": self._store.tensor("model", size, layout.state_dtype)} if half else {}
            self._state[bucket] |= self._moments(size, layout.state_dtype, layout.muon)
        state_device = next((state["exp_avg"].device for state in self._state.values()), buckets.device)
        self._staging = None if state_device == buckets.device else Staging()
        self._step = torch.zeros((), dtype=torch.float32, device=state_device)
        for bucket, state in self._state.items():
            if "model" in state:
                for part in self._store.blocks([state["model"]]):
                    state["model"][part].copy_(bucket.shard_values[part])
        self._versions = self._current_versions()
        self._matrices = [bucket for bucket in buckets.buckets if bucket.layout.muon]
        masters = [
            piece
            for bucket in self._matrices
            for piece in self._rectangles(bucket, {"model": self._state[bucket].get("model", bucket.shard_values)})
        ]
        self._masters = [piece.tensor for piece in masters]
        if buckets.matrices:
            slices = [(piece.name, piece.slices) for piece in masters]
            dtype = self._matrices[0].layout.state_dtype
            group, traffic = buckets.stage_group, buckets.matrix_traffic
            alone = buckets.virtual.number > 0
            self._muon = Muon(buckets.matrices, slices, group, dtype, buckets.device, traffic, alone)

    def _current_versions(self) -> dict[str, int]:
        """Return how often each parameter was written; writes into the bucket do not count."""
        return {name: writes(parameter) for name, parameter in self._engine.trained.items()}

    def _take_written(self) -> None:
        """Copy parameters that other code has written since the last update into their masters."""
        versions = self._current_versions()
        if versions == self._versions:
            return
        for bucket, state in self._state.items():
            for segment, part in bucket.layout.segments_in(bucket.shard):
                if "model" in state and versions[segment.name] != self._versions[segment.name]:
                    local = slice(part.start - bucket.shard.start, part.stop - bucket.shard.start)
                    master = state["model"][local]
                    own = bucket.shard_values[local].to(master.device)
                    master.copy_(torch.where(master.to(own.dtype) == own, master, own.to(master.dtype)))
        self._store.release()

    def step(self, lr: float, factor: float = 1.0, muon_lr: float | None = None) -> None:
        """Update the parameters with the buckets' gradients times `factor`. Then every rank has all new parameters.

        muon_lr: the learning rate of Muon's matrices, by default that of its options, or else `lr`. Raise ValueError if
        the buckets were not finished (`finish()`) since the last update. Raise PeerTimeout; some parameters may then be
        new and others old, so continue from a checkpoint.
        """
        self._engine.take_sums()
        self._take_written()
        self._step += 1
        self._update_matrices(self.muon.rate(lr, muon_lr), factor)
        rates = self._rates(lr, factor)
        updates: dict[GradientReducer, list[ShardUpdate | None]] = {}
        following: tuple[Tensor, ...] = ()
        for bucket, state in reversed(self._state.items()):
            if bucket.layout.muon:
                updates.setdefault(bucket.reducer, []).insert(0, None)
                continue
            moments, decay_end = (state["exp_avg"], state["exp_avg_sq"]), bucket.layout.decay_end - bucket.shard.start
            update = ShardUpdate(*moments, state.get("model"), decay_end, rates, self._store, self._staging, following)
            following = update.state
            updates.setdefault(bucket.reducer, []).insert(0, update)
        for reducer in self._engine.reducers:
            reducer.update(updates[reducer])
        if self._engine.compression is not None:
            self._engine.compression.keep_pending()
        count_write(list(self._engine.trained.values()))
        self._versions = self._current_versions()

    def _update_matrices(self, lr: float, factor: float) -> None:
        """Update the shards of Muon's matrices, which other ranks do not get yet."""
        if self._muon is None:
            return
        directions: list[Tensor] = []
        for bucket in self._matrices:
            sums, momentum = bucket.reduced_shard, self._state[bucket]["exp_avg"]
            direction = torch.empty(len(momentum), dtype=self._muon.dtype, device=sums.device)
            update_momentum(sums, momentum, direction, factor, self.muon, self._store, self._staging)
            directions += [piece.tensor for piece in self._rectangles(bucket, {"exp_avg": direction})]
        self._muon.step(directions, self._masters, lr, self.weight_decay, self.muon)
        for bucket in self._matrices:
            if "model" in self._state[bucket]:
                bucket.shard_values.copy_(self._state[bucket]["model"])
        self._store.release()

    def state(self, bucket: Bucket) -> dict[StateKind, Tensor]:
        """Return "model", "exp_avg" and "exp_avg_sq" of this rank's shard of a bucket, flat.

        "model" is the master; parameters that are not of a half type are their own masters. Muon's matrices have no
        "exp_avg_sq", and "exp_avg" is their momentum.
        """
        return {"model": bucket.shard_values, **self._state[bucket]}

    def publish(self) -> None:
        """Round the masters, which a checkpoint has changed, into the parameters on all ranks. Collective."""
        for bucket, state in self._state.items():
            if "model" in state:
                for part in self._store.blocks([state["model"]]):
                    bucket.shard_values[part].copy_(state["model"][part])
        for reducer in self._engine.reducers:
            reducer.publish()
        self._versions = self._current_versions()
        self._store.release()

    def rectangles(self) -> Iterator[StateRectangle]:
        """Yield the masters and moments that this rank holds, as rectangles for checkpoints; one rank owns each."""
        for bucket in self._engine.buckets:
            yield from self._rectangles(bucket, self.state(bucket))

    def _rectangles(self, bucket: Bucket, state: Mapping[StateKind, Tensor]) -> Iterator[StateRectangle]:
        """Yield the rectangles of this rank's shard of a bucket. state: flat tensors of the shard by kind."""
        for index, (segment, part) in enumerate(bucket.layout.segments_in(bucket.shard)):
            parameter = self._engine.model.get_parameter(segment.name)
            local = slice(part.start - bucket.shard.start, part.stop - bucket.shard.start)
            yield from state_rectangles(
                segment.name,
                tuple(parameter.shape),
                local_slices(parameter),
                range(part.start - segment.start, part.stop - segment.start),
                {kind: flat[local] for kind, flat in state.items()},
                self._engine.is_owner(bucket, index),
            )
