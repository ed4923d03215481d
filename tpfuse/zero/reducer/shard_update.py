"""AdamW on a shard of a flat bucket, block by block, so that a reducer can do other work between the blocks.

On CPUs a block stays in the cache from the sum of its gradients to its update and its copies to the other ranks. On
GPUs the shard is one block, unless its state is in other memory and is updated in blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfuse.ops.adamw import adamw_

# Elements of a block on a CPU: the data that its update reads and writes fits in a core's second cache (2 MiB here).
CPU_BLOCK = 2**16


@dataclass(frozen=True)
class Rates:
    """The hyperparameters of a step of AdamW, as in `tpfuse.ops.adamw`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor  # the number of the step, from 1, float32 [] on the device of the state
    factor: float = 1.0  # multiplies all gradients, for clipping

    def options(self, weight_decay: float) -> dict[str, Any]:
        """Return the options of `adamw_`, with this weight decay."""
        return {
            "lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, "weight_decay": weight_decay,
            "step": self.step, "clip": None if self.factor == 1.0 else self.factor,
        }  # fmt: skip


class StateStore(ABC):
    """A store allocates tensors of state and yields the blocks in which the update reads and writes them."""

    @abstractmethod
    def tensor(self, key: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [size], which are valid as long as the store exists. key: their name in error messages."""

    @abstractmethod
    def blocks(self, tensors: Sequence[Tensor], following: Sequence[Tensor] = ()) -> Iterator[slice]:
        """Yield slices that together cover `tensors` [n], in order. The caller uses a slice until it requests the next.

        tensors: tensors of this store or parts of them; other tensors of the same length may be among them. following:
        the tensors of the next call, if they are known.
        """

    def load(self, tensor: Tensor) -> None:
        """Load a contiguous tensor of this store into memory, before something else reads it. Raise OSError."""
        return

    def release(self) -> None:
        """Release memory that is not needed, after a checkpoint has read or written the state without `blocks`."""
        return


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Staging:
    """Copies blocks of gradients from a device to the host, and new parameters back. On the CPU it copies nothing.

    Both are copied through pinned memory. Before the memory is used again, `host` waits for the stream, and so for the
    copy of the new parameters to the device.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def _buffer(self, name: str, block: Tensor) -> Tensor:
        """Return pinned memory for a block, which may be larger than earlier blocks."""
        if name not in self._memory or self._memory[name].nbytes < block.nbytes:
            self._memory[name] = _pinned(block.nbytes)
        return self._memory[name][: block.nbytes].view(block.dtype)

    @contextmanager
    def host(self, gradient: Tensor, parameter: Tensor, *, read: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield both blocks [n] on the host: the gradient to read, and the parameter to write.

        read: whether the block of the parameter must have its present values, which is so if it is its own master. On
        exit the new values are copied to the device's parameter on the current stream.
        """
        if _on_host(gradient):
            yield gradient, parameter
            return
        stream = torch.cuda.current_stream(gradient.device)
        on_host, new = self._buffer("gradient", gradient), self._buffer("parameter", parameter)
        on_host.copy_(gradient, non_blocking=True)
        if read:
            new.copy_(parameter, non_blocking=True)
        stream.synchronize()
        yield on_host, new
        parameter.copy_(new, non_blocking=True)


def blocks_of(
    state: Sequence[Tensor], store: StateStore, staging: Staging | None, following: Sequence[Tensor] = ()
) -> Iterator[tuple[int, int]]:
    """Yield the bounds [a, b) of the blocks of a shard in order; on CPUs a block has at most CPU_BLOCK elements.

    state, following: as for `StateStore.blocks`. staging: None if the memory of the state is on the gradients' device.
    """
    for part in store.blocks(state, following):
        block = CPU_BLOCK if staging is None and _on_host(state[0]) else part.stop
        for a in range(part.start, part.stop, max(block, 1)):
            yield a, min(a + block, part.stop)


@dataclass(frozen=True)
class ShardUpdate:
    """The update of one shard of n elements: its state, [n] of the state's dtype, and hyperparameters."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None  # None if the parameters have the state's dtype and so are their own master
    decay_end: int  # elements before it have weight decay
    rates: Rates
    store: StateStore  # the memory of the state
    staging: Staging | None = None  # None if that memory is on the parameters' device
    following: tuple[Tensor, ...] = ()  # the state of the next update

    @property
    def state(self) -> tuple[Tensor, ...]:
        moments = self.exp_avg, self.exp_avg_sq
        return moments if self.master is None else (self.master, *moments)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the bounds [a, b) of `blocks_of` this shard."""
        return blocks_of(self.state, self.store, self.staging, self.following)

    def apply(self, gradient: Tensor, values: Tensor) -> None:
        """Update the whole shard. gradient: [n], of any floating dtype. values: [n], the parameters, written.

        The parameters may be in the store too.
        """
        for part in self.store.blocks((*self.state, values), self.following):
            self.block(part.start, part.stop, gradient[part], values[part])

    def block(self, a: int, b: int, gradient: Tensor, values: Tensor) -> None:
        """Update elements [a, b) of the state and of the parameters, as `apply` does."""
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
                **rates.options(weight_decay),
            )
