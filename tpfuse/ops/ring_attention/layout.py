"""The layout of a sequence's tokens on the ranks of a group: the one rule that all context parallelism follows.

With a causal mask later tokens see more than earlier ones, so ranks that hold contiguous chunks have unequal work.
zigzag, the default, gives each rank one chunk of the first half and its mirror image in the second half; striped deals
tokens out one by one (`tpfuse.kernels.sequence_runs` has the table). A sequence that is not divisible is padded.

Sharding commutes with Ulysses: ranks that exchange heads for tokens together hold the tokens that one rank of a ring of
world / ulysses ranks would hold.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tpfuse.choices import Balance as Balance
from tpfuse.kernels.sequence_runs import SequenceRuns

BALANCES: tuple[Balance, ...] = get_args(Balance)


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of `length` tokens on `world` ranks, of which each `ulysses` neighbours exchange heads for tokens.

    Raise ValueError for an unknown balance, for a world that `ulysses` does not divide, and for a length below world.
    """

    length: int
    world: int
    balance: Balance = "zigzag"
    ulysses: int = 1

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise ValueError(f"balance {self.balance!r}: expected one of {', '.join(BALANCES)}")
        if self.world < 1 or self.ulysses < 1 or self.world % self.ulysses:
            expected = "at least one rank" if self.world < 1 else f"a divisor of {self.world}"
            raise ValueError(f"{self.world} ranks, {self.ulysses} of them exchange heads: expected {expected}")
        if self.length < self.world:
            raise ValueError(f"a sequence of {self.length} tokens cannot be sharded over {self.world} ranks")

    @property
    def runs(self) -> SequenceRuns:
        """Return the positions that the ranks of the ring hold; one of them stands for `ulysses` ranks of the group."""
        ring = self.world // self.ulysses
        if self.balance == "zigzag":
            chunk = -(-self.length // (2 * self.world)) * self.ulysses
            return SequenceRuns(self.length, ring, 2, chunk, chunk, 1)
        size = -(-self.length // self.world) * self.ulysses
        if self.balance == "contiguous":
            return SequenceRuns(self.length, ring, 1, size, size, 1)
        return SequenceRuns(self.length, ring, 1, size, 1, ring)

    @property
    def local_length(self) -> int:
        """Return the number of tokens of each rank, with the padding."""
        return self.runs.local_length // self.ulysses

    @property
    def padded_length(self) -> int:
        """Return the number of tokens of all ranks, with the padding."""
        return self.local_length * self.world

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return [local_length] int64: the positions of a rank's tokens, increasing; from `length` on: padding.

        Raise ValueError for a rank outside of the world, as `shard` does.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} of {self.world}: expected 0 to {self.world - 1}")
        if self.balance != "striped":
            return SequenceLayout(self.length, self.world, self.balance).runs.positions(rank, device)
        # Ranks that exchange heads each hold a part of one ring rank's stripe, so that together they have all of it.
        ring = self.world // self.ulysses
        stripe = rank % self.ulysses * ring + rank // self.ulysses
        return stripe + torch.arange(self.local_length, device=device) * self.world

    def shard(self, x: Tensor, rank: int, dim: int, value: float = 0) -> Tensor:
        """Return a rank's shard of x, which has all tokens along `dim`; padding is `value`."""
        if x.shape[dim] != self.length:
            raise ValueError(f"x has {x.shape[dim]} tokens in dimension {dim}: expected {self.length}")
        positions = self.positions(rank, x.device)
        shard = x.index_select(dim, positions.clamp(max=self.length - 1))
        if statically_known_true(self.padded_length == self.length):  # one graph of torch.compile for other lengths
            return shard
        shape = [1] * x.ndim
        shape[dim] = -1
        return shard.masked_fill((positions >= self.length).view(shape), value)

    def whole(self, shards: Tensor, dim: int) -> Tensor:
        """Return all tokens along `dim`, in order and without padding: the inverse of `shard`.

        shards: [world, ...]; shards[r] has rank r's `local_length` tokens along `dim`. Raise ValueError for others.
        """
        dim %= shards.ndim - 1
        expected = self.world, self.local_length
        if (shards.shape[0], shards.shape[1 + dim]) != expected:
            given = f"{shards.shape[0]} shards of {shards.shape[1 + dim]} tokens"
            raise ValueError(f"{given} in dimension {dim}: expected {expected[0]} of {expected[1]}")
        order = torch.cat([self.positions(rank, shards.device) for rank in range(self.world)])
        index = torch.empty_like(order)
        index[order] = torch.arange(len(order), device=order.device)
        return shards.movedim(0, dim).flatten(dim, dim + 1).index_select(dim, index[: self.length])
