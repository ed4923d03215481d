"""The shards of every sequence on the ranks of a context-parallel group, and the way back to whole sequences.

Each rank holds its tokens from the embedding to the loss; only attention needs the tokens of other ranks
(`tpfuse.ops.ring_attention.ring_attention`). All ranks are given whole sequences and take their shards of ids, targets
(which were shifted while the sequence was whole) and positions by one rule,
`tpfuse.ops.ring_attention.layout.SequenceLayout`. So a token has the same label, position and row of the dropout masks
on every rank that may hold it. Sequences that the ranks do not divide are padded; padding has no loss, and no token
sees it. Sequences whose documents see each other not at all are concatenated to one sequence (`Documents`).

Parameters are the same on all ranks of the group; a rank's gradients are those of its own tokens, and their sum over
the group is the gradient of the whole sequences. A model whose caller computes with whole tensors before and after it
(`tpfuse.drop_in.parallel_forward`) lets them `enter` and `leave` the group, and then the mean is the gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.choices import Balance as Balance
from tpfuse.choices import ContextSchedule as ContextSchedule
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.mesh import check_order
from tpfuse.ops.attention import attention
from tpfuse.ops.autograd import apply, no_view
from tpfuse.ops.collectives import gather_last, replicate
from tpfuse.ops.ring_attention.layout import BALANCES, SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.ops.ring_attention.schedule import SCHEDULES, schedule_for
from tpfuse.ops.ring_attention.triton_blocks import explained_blocks


def heads_to_exchange(ranks: int, heads: int) -> int:
    """Return how many of a context group's ranks exchange heads under schedule ulysses_ring.

    It is the largest divisor of `ranks`, other than `ranks` itself, that divides `heads`. Raise ValueError if it is 1.
    """
    ulysses = max(_divisors(ranks, heads), default=1)
    if ulysses == 1:
        raise ValueError(
            f"schedule ulysses_ring: cp {ranks} has no divisor between 1 and itself that divides {heads} heads;"
            " ring and all_gather need none"
        )
    return ulysses


def _divisors(ranks: int, heads: int) -> list[int]:
    """Return the numbers of ranks that can exchange heads, with a ring of the rest."""
    return [n for n in range(2, ranks) if ranks % n == 0 and heads % n == 0]


def check_context(length: int, heads: int, ranks: int, schedule: str, balance: str, ulysses: int) -> None:
    """Raise ValueError if sequences of `length` tokens and `heads` local heads cannot be sharded like this.

    ulysses: the number of ranks that exchange heads under ulysses_ring, 1 for the other schedules.
    """
    for name, value, known in (("schedule", schedule, SCHEDULES), ("balance", balance, BALANCES)):
        if value not in known:
            raise ValueError(f"{name} {value!r}: expected one of {', '.join(known)}")
    if ranks > length:
        raise ValueError(f"cp {ranks} is more than the {length} tokens of a sequence")
    if schedule != "ulysses_ring" and ulysses != 1:
        raise ValueError(
            f"schedule {schedule} with {ulysses} ranks that exchange heads: expected schedule ulysses_ring"
        )
    if schedule == "ulysses_ring" and (not 1 < ulysses < ranks or ranks % ulysses):
        raise ValueError(f"schedule ulysses_ring: {ulysses} of cp {ranks} exchange heads: expected a divisor between")
    exchanging = {"ulysses": ranks, "ulysses_ring": ulysses}.get(schedule, 1)
    if heads % exchanging:
        fitting = _divisors(ranks, heads)
        others = f", and so can ulysses_ring with one of {fitting}" if fitting else ""
        raise ValueError(
            f"schedule {schedule}: {exchanging} ranks cannot divide {heads} heads;"
            f" ring and all_gather can be used{others}"
        )


class _Scaled(Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class ContextParallel:
    """The ranks over which sequences are sharded.

    mesh: None for one rank; one-dimensional; or (ring, ulysses) for schedule "ulysses_ring", which "auto" then stands
    for. schedule, balance: as in `ring_attention`. Raise ValueError for a mesh of more axes, and for one with
    ranks that are not in ascending order.
    """

    def __init__(
        self, mesh: DeviceMesh | None, schedule: ContextSchedule = "auto", balance: Balance = "zigzag"
    ) -> None:
        check_order(mesh)
        self._mesh = mesh if mesh is not None and mesh.size() > 1 else None
        groups = self.groups
        if len(groups) > 2:
            raise ValueError(f"a context mesh of {len(groups)} axes: expected one, or (ring, ulysses)")
        self.schedule: ContextSchedule = "ulysses_ring" if len(groups) == 2 and schedule == "auto" else schedule
        self.balance = balance
        self.ulysses = groups[1].size() if len(groups) == 2 else 1
        self.size, self.rank = 1, 0
        for group in groups:
            self.size, self.rank = self.size * group.size(), self.rank * group.size() + group.rank()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups of the mesh's axes; there are none for one rank.

        The mesh is asked on every use, so that a model with its context can be copied and pickled.
        """
        mesh = self._mesh
        return () if mesh is None else tuple(mesh.get_group(axis) for axis in range(mesh.ndim))

    @property
    def group(self) -> dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the group, or pair of groups, that `ring_attention` takes."""
        groups = self.groups
        return (groups[0], groups[1]) if len(groups) == 2 else groups[0]

    def enter(self, x: Tensor) -> Tensor:
        """Return x, which is equal on all ranks and used by each for its own tokens. Its gradient is the ranks' mean.

        With `leave` at each result, all ranks have the whole gradient of what x was computed from.
        """
        for group in self.groups:
            x = replicate(x, group)
        return apply(_Scaled, x, 1 / self.size)

    def leave(self, x: Tensor) -> Tensor:
        """Return x, which all ranks have from the tokens of all. Each multiplies its gradient by their number.

        So the mean of the ranks' gradients is the gradient of the whole sequences, and what a parameter gets from code
        that every rank runs on whole tensors is a part of this mean as it is.
        """
        return no_view(apply(_Scaled, x, float(self.size)))

    def check(self, length: int, heads: int) -> None:
        """Raise ValueError as `check_context` does for this group."""
        if self.groups:
            check_context(length, heads, self.size, self.schedule, self.balance, self.ulysses)

    def plan(self, length: int, heads: int, head_size: int, like: Tensor) -> tuple[str, str] | None:
        """Return (implementation, reason) of attention over sequences of `length` tokens; None for one rank.

        like: a tensor of the dtype and device. The call is collective, as
        `tpfuse.comm.dispatch.choose_implementation` is.
        """
        if not self.groups:
            return None
        choice = choose_implementation(like.device, like.dtype, self.groups[0])
        local = SequenceLayout(length, self.size, self.balance).local_length
        schedule, reason = self.schedule, "chosen"
        if schedule == "auto":
            shape = (1, heads, local, head_size)
            schedule, reason = schedule_for(choice.implementation, shape, heads, like.dtype, self.size)
        reason = f"{schedule}, {self.balance}: {reason}; {choice.reason}"
        if choice.implementation == "collective" and like.is_cuda:
            reason += f"; {explained_blocks(like.new_empty(1, 1, local, head_size))}"
        return choice.implementation, reason

    def sharded_batch(self, ids_BT: Tensor, documents: "Documents | None" = None) -> "ShardedBatch":
        """Return the sharding of these sequences over the ranks. documents: those of ids [1, T].

        Raise ValueError if the sequences have fewer tokens than there are ranks.
        """
        batch, length = ids_BT.shape
        if not self.groups:
            positions = torch.arange(length, device=ids_BT.device)
            return ShardedBatch(self, batch, length, length, positions, None, documents)
        layout = SequenceLayout(length, self.size, self.balance, self.ulysses)
        positions = layout.positions(self.rank, ids_BT.device).clamp(max=length - 1)
        return ShardedBatch(self, batch, length, layout.local_length, positions, layout, documents)


ONE_RANK = ContextParallel(None)


class Documents:
    """The documents of sequences [B, T] that are concatenated to one sequence of B * T tokens.

    starts_BT: bool, whether a document begins; one also begins with each sequence. cu_seqlens: [S + 1] int32, the first
    tokens of the documents, and B * T. positions: [B * T] int64, the place of each token in its document. longest: T,
    which no document exceeds.
    """

    def __init__(self, starts_BT: Tensor) -> None:
        starts_BT = starts_BT.clone()
        starts_BT[:, 0] = True
        starts, self.longest = starts_BT.flatten(), starts_BT.shape[1]
        tokens = torch.arange(len(starts), device=starts.device)
        first = starts.nonzero().flatten()
        self.cu_seqlens = torch.cat([first, first.new_tensor([len(starts)])]).to(torch.int32)
        self.positions = tokens - torch.where(starts, tokens, 0).cummax(0).values


@dataclass(frozen=True)
class ShardedBatch:
    """A batch of sequences, sharded over the ranks of a context.

    length: the tokens of a whole sequence; local_length: this rank's tokens of each sequence, with the padding;
    positions: [local_length] int64, their positions in the sequence (for padding: the last one). layout: None for one
    rank. documents: those of the one sequence, which do not see each other; None if each sequence is one document.
    """

    context: ContextParallel
    batch: int
    length: int
    local_length: int
    positions: Tensor
    layout: SequenceLayout | None
    documents: Documents | None = None

    @property
    def tokens(self) -> int:
        """Return the number of this rank's tokens, with the padding."""
        return self.batch * self.local_length

    def shard(self, x_BT: Tensor, padding: int = 0) -> Tensor:
        """Return this rank's [B, local_length] of x [B, length], which is equal on all ranks."""
        return x_BT if self.layout is None else self.layout.shard(x_BT, self.context.rank, 1, padding)

    def gather(self, x: Tensor) -> Tensor:
        """Gather [B, local_length, ...] of each rank to [B, length, ...] on all, in order and without padding.

        All ranks compute the same from the result, so each keeps its own part of the gradient.
        """
        if self.layout is None:
            return x
        x = x.movedim(1, -1)
        for group in reversed(self.context.groups):
            x = gather_last(x, group)
        shards = x.view(*x.shape[:-1], self.context.size, self.local_length)
        return self.layout.whole(shards.movedim(-2, 0).movedim(-1, 2), 1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Return causal attention of this rank's queries to the keys of all ranks.

        q, k, v: [B, H, T, D]; on one rank k and v may also have keys before the first query. options: window, scale
        and those of dropout, as in `attention`.
        """
        documents, context = self.documents, self.context
        if options.get("dropout_p") and documents is not None:
            options["dropout_width"] = documents.longest
        if self.layout is None:
            if documents is not None:
                options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), documents.cu_seqlens)
                options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), documents.longest)
            alone: Tensor = attention(q, k, v, **options)
            return alone
        out: Tensor = ring_attention(
            q,
            k,
            v,
            group=context.group,
            schedule=context.schedule,
            balance=context.balance,
            length=self.length,
            cu_seqlens=None if documents is None else documents.cu_seqlens,
            **options,
        )
        return out
