"""The common base of the buckets' and stage 3's updates: hyperparameters, the memory of the state, Muon."""

from typing import Any

import torch
from torch import Tensor

from tpfuse.choices import MomentDtype
from tpfuse.zero.muon import Muon, MuonOptions
from tpfuse.zero.offload import MemoryStore, moment_dtype
from tpfuse.zero.reducer.shard_update import Rates, StateStore
from tpfuse.zero.shard_slices import StateKind

MOMENTS: tuple[StateKind, StateKind] = ("exp_avg", "exp_avg_sq")


class Updater:
    """AdamW and Muon on the shards of an engine on this rank: the base class.

    betas, eps, weight_decay: as in torch.optim.AdamW; they may be changed between updates. Biases and norms have no
    weight decay (`tpfuse.zero.bucket_layout.decays`). muon: the options of Muon, which updates the engine's `matrices`;
    they may be changed too. state_dtype: as for `tpfuse.zero.adamw`. store: the memory of the state if the engine
    offloads it, else None (`tpfuse.zero.offload`).
    """

    _step: Tensor  # the number of updates, float32 [] on the device of the state
    _muon: Muon | None = None

    def __init__(
        self,
        engine: Any,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        muon: MuonOptions | None = None,
        state_dtype: MomentDtype = "float32",
        store: StateStore | None = None,
    ) -> None:
        self._engine, self.betas, self.eps, self.weight_decay = engine, betas, eps, weight_decay
        self.muon, self._state_dtype = muon or MuonOptions(), state_dtype
        self._offloads, self._store = store is not None, MemoryStore(engine.device) if store is None else store
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the state."""
        raise NotImplementedError

    def _moments(self, size: int, master: torch.dtype, by_muon: bool) -> dict[StateKind, Tensor]:
        """Return new moments [size] of masters of this dtype; Muon has only the first one."""
        dtype = master if by_muon else moment_dtype(self._state_dtype, master)
        return {kind: self._store.tensor(kind, size, dtype) for kind in (MOMENTS[:1] if by_muon else MOMENTS)}

    def _rates(self, lr: float, factor: float) -> Rates:
        return Rates(lr, *self.betas, self.eps, self.weight_decay, self._step, factor)

    def release(self) -> None:
        """Release the memory that is not needed after a checkpoint has read the state."""
        self._store.release()

    @property
    def updates(self) -> int:
        """Return the number of updates that the moments contain."""
        return int(self._step)

    @updates.setter
    def updates(self, count: int) -> None:
        self._step.fill_(count)
