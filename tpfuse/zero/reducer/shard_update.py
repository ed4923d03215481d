"""AdamW on a shard of a flat bucket, block by block, so that a reducer can do other work between the blocks.

On CPUs a block stays in the cache from the sum of its gradients to its update and its copies to the other ranks. On
GPUs the shard is one block, unless its state is in other memory and is updated in blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tpfuse.ops.adamw import adamw_

# Elements of a block on a CPU: the data that its update reads and writes fits in a core's second cache (2 MiB here).
CPU_BLOCK = 2**16


@dataclass(frozen=True)
class Rates:
    """The hyperparameters of a step of AdamW, as in `tpfuse.ops.adamw`.

    step: the number of the step, from 1, float32 [] on the device of the state. factor: multiplies all gradients, for
    clipping.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    factor: float = 1.0


class Store(Protocol):
    """The memory of the shards' state (`tpfuse.zero.offload`)."""

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """Yield slices that together cover `tensors` [n], in order. following: the tensors of the next call."""


class Staging(Protocol):
    """Copies blocks from the parameters' device to the state's device and back (`tpfuse.zero.offload`)."""

    def host(
        self, gradient: Tensor, parameter: Tensor, *, read: bool = False
    ) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Yield both blocks on the state's device; on exit the parameter's block is copied back."""


@dataclass(frozen=True)
class ShardUpdate:
    """The update of one shard of n elements: its state and hyperparameters.

    master, exp_avg, exp_avg_sq: [n] of the state's dtype. master is None if the parameters have that dtype themselves
    and so are their own master. decay_end: elements before it have weight decay. store: the memory of the state.
    staging: None if that memory is on the parameters' device. following: the state of the next update.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    decay_end: int
    rates: Rates
    store: Store
    staging: Staging | None = None
    following: tuple[Tensor, ...] = ()

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Return the tensors of the state: the master, if there is one, and both moments."""
        moments = self.exp_avg, self.exp_avg_sq
        return moments if self.master is None else (self.master, *moments)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the bounds [a, b) of the blocks in order; on CPUs a block has at most CPU_BLOCK elements."""
        for part in self.store.blocks(self.state, self.following):
            block = CPU_BLOCK if self.staging is None and self.exp_avg.device.type == "cpu" else part.stop
            for a in range(part.start, part.stop, max(block, 1)):
                yield a, min(a + block, part.stop)

    def apply(self, gradient: Tensor, values: Tensor) -> None:
        """Update the whole shard. gradient: [n], of any floating dtype. values: [n], the parameters, written."""
        for a, b in self.blocks():
            self.block(a, b, gradient[a:b], values[a:b])

    def block(self, a: int, b: int, gradient: Tensor, values: Tensor) -> None:
        """Update elements [a, b) of the state, and the parameters.

        gradient: [b - a], of any floating dtype. values: [b - a], the parameters, written.
        """
        if self.staging is None:
            self._update(a, b, gradient, values)
            return
        with self.staging.host(gradient, values, read=self.master is None) as (on_host, new):
            self._update(a, b, on_host, new)

    def _update(self, a: int, b: int, gradient: Tensor, values: Tensor) -> None:
        rates = self.rates
        cut = min(max(self.decay_end, a), b)
        for start, stop, weight_decay in ((a, cut, rates.weight_decay), (cut, b, 0.0)):
            if start == stop:
                continue
            in_shard, in_block = slice(start, stop), slice(start - a, stop - a)
            adamw_(
                [values[in_block] if self.master is None else self.master[in_shard]],
                [gradient[in_block]],
                [self.exp_avg[in_shard]],
                [self.exp_avg_sq[in_shard]],
                [None if self.master is None else values[in_block]],
                lr=rates.lr,
                beta1=rates.beta1,
                beta2=rates.beta2,
                eps=rates.eps,
                weight_decay=weight_decay,
                step=rates.step,
                clip=None if rates.factor == 1.0 else rates.factor,
            )
