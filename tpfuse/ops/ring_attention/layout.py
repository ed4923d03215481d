"""How the tokens of a sequence are spread over the ranks of a group: the one rule that all context parallelism obeys.

With a causal mask the tokens behind see more than those in front, so ranks that hold contiguous parts have unequal
work. zigzag, the default, gives each rank one chunk from the front and its mirror image from behind; striped deals
tokens out one by one (`tpfuse.kernels.sequence_runs` has the table). A sequence that cannot be cut so is padded.

Sharding commutes with Ulysses: ranks that exchange heads for tokens hold, together, what one rank of a ring of
world / ulysses ranks would hold.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from tpfuse.choices import Balance as Balance
from tpfuse.kernels.sequence_runs import SequenceRuns

BALANCES: tuple[Balance, ...] = get_args(Balance)


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of `length` tokens on `world` ranks, of which `ulysses` neighbours at a time exchange heads.

    Raises ValueError for a length, a world or a balance that cannot be.
    """

    length: int
    world: int
    balance: Balance = "zigzag"
    ulysses: int = 1

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise ValueError(f"balance {self.balance!r}: expected one of {', '.join(BALANCES)}")
        if self.world < 1 or self.ulysses < 1 or self.world % self.ulysses:
            raise ValueError(f"{self.world} ranks, {self.ulysses} of them for Ulysses: expected a divisor")
        if self.length < self.world:
            raise ValueError(f"a sequence of {self.length} tokens cannot be spread over {self.world} ranks")

    @property
    def runs(self) -> SequenceRuns:
        """What ranks of the ring hold, each of them `ulysses` ranks of the group."""
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
        """Tokens of each rank, padding among them."""
        return self.runs.local_length // self.ulysses

    @property
    def padded_length(self) -> int:
        """Tokens of all ranks."""
        return self.local_length * self.world

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """[local_length] int64: where this rank's tokens are in the sequence, growing; from `length` on: padding."""
        if self.balance != "striped":
            return SequenceLayout(self.length, self.world, self.balance).runs.positions(rank, device)
        # Ranks that exchange heads hold the tokens of one stripe of their ring's, so that together they have it whole.
        ring = self.world // self.ulysses
        stripe = rank % self.ulysses * ring + rank // self.ulysses
        return stripe + torch.arange(self.local_length, device=device) * self.world

    def shard(self, x: Tensor, rank: int, dim: int, value: float = 0) -> Tensor:
        """This rank's part of x, which has all tokens along `dim`; padding is `value`."""
        if x.shape[dim] != self.length:
            raise ValueError(f"x has {x.shape[dim]} tokens in dimension {dim}: expected {self.length}")
        positions = self.positions(rank, x.device)
        part = x.index_select(dim, positions.clamp(max=self.length - 1))
        if self.padded_length == self.length:
            return part
        shape = [1] * x.ndim
        shape[dim] = -1
        return part.masked_fill((positions >= self.length).view(shape), value)

    def whole(self, parts: Tensor, dim: int) -> Tensor:
        """All tokens along `dim`, in order and without padding; parts: [world, ...], each rank's along dim of parts[r].

        The inverse of `shard`.
        """
        dim %= parts.ndim - 1
        order = torch.cat([self.positions(rank, parts.device) for rank in range(self.world)])
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return parts.movedim(0, dim).flatten(dim, dim + 1).index_select(dim, place[: self.length])
