"""AdamW on a shard of a flat bucket, block by block, so that an exchange can put other work between.

On CPUs a block stays in the cache between the sum of its gradients, its update and its way to the other ranks; on GPUs
the shard is one block, unless its state lies elsewhere and comes in pieces.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tpfuse.ops.adamw import adamw_

# Of a block on a CPU, in elements: what is read and written of it fits in a core's second cache (2 MiB here).
CPU_BLOCK = 2**16


@dataclass(frozen=True)
class Rates:
    """One step of AdamW: as `tpfuse.ops.adamw` has them.

    step: float32 [], on the device of the state, from 1. factor: of all gradients, for clipping.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    factor: float = 1.0


class Store(Protocol):
    """Where the state of shards lies (`tpfuse.zero.offload`)."""

    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """Parts that together are the whole of `tensors` [n], to be used one after the other; then: what comes next."""


class Staging(Protocol):
    """Takes blocks from the parameters' device to the state's and back (`tpfuse.zero.offload`)."""

    def host(
        self, gradient: Tensor, parameter: Tensor, *, read: bool = False
    ) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Both blocks where the state is; the parameter's comes back at the end."""


@dataclass(frozen=True)
class ShardUpdate:
    """The state of one shard of n elements and what is to be done to it.

    master, exp_avg, exp_avg_sq: [n] of the state's dtype; master None where the parameters are of that dtype themselves
    and so their own master. decay_end: elements before it are decayed. store: where the state lies; staging: None where
    that is the parameters' device; then: the state of the update after this one.
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
        """All of it."""
        moments = self.exp_avg, self.exp_avg_sq
        return moments if self.master is None else (self.master, *moments)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """[a, b) of one block after the other; on CPUs at most CPU_BLOCK elements."""
        for part in self.store.blocks(self.state, self.following):
            block = CPU_BLOCK if self.staging is None and self.exp_avg.device.type == "cpu" else part.stop
            for a in range(part.start, part.stop, max(block, 1)):
                yield a, min(a + block, part.stop)

    def apply(self, gradient: Tensor, values: Tensor) -> None:
        """The whole update. gradient: [n], of any floating dtype; values: [n], the parameters, written."""
        for a, b in self.blocks():
            self.block(a, b, gradient[a:b], values[a:b])

    def block(self, a: int, b: int, gradient: Tensor, values: Tensor) -> None:
        """Updates elements [a, b) of the state, and the parameters.

        gradient: [b - a], of any floating dtype; values: [b - a], the parameters, written.
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
            place, inside = slice(start, stop), slice(start - a, stop - a)
            adamw_(
                [values[inside] if self.master is None else self.master[place]],
                [gradient[inside]],
                [self.exp_avg[place]],
                [self.exp_avg_sq[place]],
                [None if self.master is None else values[inside]],
                lr=rates.lr,
                beta1=rates.beta1,
                beta2=rates.beta2,
                eps=rates.eps,
                weight_decay=weight_decay,
                step=rates.step,
                clip=None if rates.factor == 1.0 else rates.factor,
            )
