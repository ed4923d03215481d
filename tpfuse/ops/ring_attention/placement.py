"""The plan of one call of ring attention on one rank: its place in the groups, and what computes and communicates."""

import functools
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.choices import Balance, ContextSchedule
from tpfuse.comm.dispatch import Choice, Implementations, choose_implementation
from tpfuse.ops.checks import check_cumulative
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.collective import CollectiveRing
from tpfuse.ops.ring_attention.direct import DirectRing
from tpfuse.ops.ring_attention.fused import FusedRing
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.ring import LocalRing, Ring
from tpfuse.ops.ring_attention.schedule import divides, schedule_for
from tpfuse.ops.ring_attention.ulysses import HeadExchange, TokenSlices, find_token_slices

Group = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The ranks that attend together, or (ring, ulysses)."""

_IMPLEMENTATIONS: Implementations[Ring] = Implementations(CollectiveRing, direct=DirectRing, fused=FusedRing)


class RingOptions(TypedDict, total=False):
    """The keywords of `ring_attention` that do not change what it returns."""

    causal: bool
    schedule: ContextSchedule
    balance: Balance
    length: int | None
    window: int | None
    scale: float | None
    cu_seqlens: Tensor | None
    dropout_p: float
    head_rows: Tensor | None
    key: Tensor | None
    dropout_width: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class RingPlan:
    """This rank's part in one call of `ring_attention`."""

    # What attends to the keys of the ranks of the ring.
    ring: Ring
    # The call that the ring computes.
    call: RingCall
    # The exchange of heads for tokens before and after it; None if each rank has all heads of its tokens.
    exchange: HeadExchange | None


def placement(q: Tensor, k: Tensor, group: Group, options: RingOptions) -> RingPlan:
    """Return this rank's plan. Raise ValueError for a layout, heads or documents that do not fit.

    The call is collective, but it raises ValueError before ranks communicate.
    """
    ring, ulysses = group if isinstance(group, tuple) else (group, None)
    exchanging = 1 if ulysses is None else ulysses.size()
    world, (batch, heads, n, size) = ring.size() * exchanging, q.shape
    length = world * n if options["length"] is None else options["length"]
    layout = SequenceLayout(length, world, options["balance"], exchanging)
    if layout.local_length != n:
        raise ValueError(
            f"ring_attention: q has {n} tokens: expected {layout.local_length} on each of {world} ranks for {length}"
            f" tokens, {layout.balance} (SequenceLayout.shard pads them)"
        )
    if options["cu_seqlens"] is not None:
        check_cumulative("ring_attention", "cu_seqlens", options["cu_seqlens"], length)
    schedule = options["schedule"]
    if schedule == "auto":
        schedule = "ulysses_ring"
        if ulysses is None:
            implementation = "direct" if world == 1 else _choice(q, ring, options).implementation
            schedule, _ = schedule_for(implementation, (batch, heads, n, size), k.shape[1], q.dtype, world)
    ring_rank, blocks_from = ring.rank(), ring if ring.size() > 1 else None
    if schedule == "ulysses":  # a ring of one rank, which has all tokens of some heads
        ulysses, exchanging, ring_rank, blocks_from = ring, world, 0, None
        layout = SequenceLayout(length, world, options["balance"], world)
    if ulysses is not None and not divides(exchanging, heads, k.shape[1]):
        raise ValueError(
            f"ring_attention: schedule {schedule}: {exchanging} ranks cannot divide {heads} heads of q and"
            f" {k.shape[1]} of k: schedules ring and all_gather can be used"
        )
    exchange = None
    if ulysses is not None:
        choice = _choice(q, ulysses, options)
        memory = choice.memory if choice.implementation == "direct" else None
        slices = _token_slices(layout, ring_rank * exchanging, exchanging)
        together = (ulysses,) if blocks_from is None else (ulysses, blocks_from)
        exchange = HeadExchange(slices, ulysses, memory, k.shape[1], together)
    head_rows, sinks = options["head_rows"], options["sinks"]
    if head_rows is not None and exchange is not None:
        head_rows = head_rows[:, exchange.own(heads)]
    if sinks is not None and exchange is not None:
        sinks = sinks[exchange.own(heads)]
    call = RingCall(
        layout.runs, ring_rank, causal=options["causal"], window=options["window"],
        scale=q.shape[3] ** -0.5 if options["scale"] is None else options["scale"],
        cu_seqlens=options["cu_seqlens"], dropout_p=options["dropout_p"], head_rows=head_rows, key=options["key"],
        dropout_width=length if options["dropout_width"] is None else options["dropout_width"],
        ring=schedule != "all_gather", softcap=options["softcap"], sinks=sinks,
    )  # fmt: skip
    if blocks_from is None:
        return RingPlan(LocalRing(), call, exchange)
    return RingPlan(_IMPLEMENTATIONS.of(_choice(q, blocks_from, options), blocks_from), call, exchange)


def _choice(q: Tensor, group: dist.ProcessGroup, options: RingOptions) -> Choice:
    """Return the choice for the call: the kernels have no softcap, and leave it to the blocks of torch."""
    choice = choose_implementation(q.device, q.dtype, group)
    if choice.implementation != "fused" or options["softcap"] is None:
        return choice
    return choose_implementation(q.device, q.dtype, group, "direct")


@functools.lru_cache(maxsize=64)
def _token_slices(layout: SequenceLayout, first: int, ranks: int) -> TokenSlices:
    """Return `find_token_slices` of the `ranks` ranks from `first` on."""
    return find_token_slices(torch.stack([layout.positions(first + rank) for rank in range(ranks)]))
