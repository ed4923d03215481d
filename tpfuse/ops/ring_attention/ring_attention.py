"""ring_attention: attention over a sequence that is sharded over the ranks of a group, longer than one rank could hold.

| schedule     | what is exchanged                                                              | requires         |
|--------------|--------------------------------------------------------------------------------|------------------|
| ring         | keys and values, from each rank to the next, while the present ones are used   |                  |
| all_gather   | keys and values, from their owners to all ranks                                |                  |
| ulysses      | heads for tokens, and back afterwards: a rank has all tokens of some heads     | world divides H  |
| ulysses_ring | heads for tokens among neighbours, keys and values around a ring of neighbours | a pair of groups |

Sources: arXiv:2310.01889 for the ring, arXiv:2407.21783, section 3.3.2, for gathered keys and values, arXiv:2309.14509
for Ulysses, and arXiv:2405.07719 for both together. All schedules return the same numbers but for the order of sums.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from tpfuse.choices import Implementation
from tpfuse.choices import Schedule as Schedule
from tpfuse.comm import collectives
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.layout import is_traced
from tpfuse.comm.mesh import check_group, named_group
from tpfuse.ops.attention import autocast_heads
from tpfuse.ops.autograd import once_differentiable
from tpfuse.ops.ring_attention.backend import attend_ring, check_call, ring_of
from tpfuse.ops.ring_attention.call import RingCall, computed
from tpfuse.ops.ring_attention.layout import Balance, SequenceLayout
from tpfuse.ops.ring_attention.ulysses import TokenSlices, find_token_slices, to_heads, to_tokens
from tpfuse.ops.values import check_cumulative

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Group = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]

GATHERED_BYTES = 2**30  # `auto` gathers the keys and values of all ranks up to this many bytes: not measured yet


class Options(TypedDict, total=False):
    """The keywords of `ring_attention` that do not change what it returns."""

    causal: bool
    schedule: Schedule
    balance: Balance
    length: int | None
    window: int | None
    scale: float | None
    cu_seqlens: Tensor | None
    dropout_p: float
    head_rows: Tensor | None
    key: Tensor | None
    dropout_width: int | None


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = True,
    schedule: Schedule = "auto",
    balance: Balance = "zigzag",
    length: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    head_rows: Tensor | None = None,
    key: Tensor | None = None,
    dropout_width: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out, in q's shape and dtype, or with return_lse (out, lse): lse [B, H, n] float32 (float64 for float64).

    q: [B, H, n, D]; k, v: [B, Hk, n, D], H a multiple of Hk, of one float dtype, any strides: this rank's tokens of
    sequences of `length` tokens (default: n on each rank) as `tpfuse.ops.ring_attention.layout.SequenceLayout(length,
    world, balance)` shards them, with the padding, which no query sees and whose output is 0.
    group: the ranks; or two groups (ring, ulysses) for schedule `ulysses_ring`. Then this rank's number is ring.rank()
    * ulysses.size() + ulysses.rank(), and the layout is made with `ulysses=ulysses.size()`. schedule: see the module;
    `auto`: see `choose_schedule`. All ranks pass the same options.

    causal, window, scale: as in `tpfuse.ops.attention`, by position in the sequence. cu_seqlens: [S + 1] int32,
    cumulative lengths of the documents of the whole sequence, with B = 1; a document's tokens see each other alone. A
    document may be on several ranks, and the last one may end before the sequence does. dropout_p, head_rows, key,
    dropout_width (default: length): as in `attention`; the mask is that of the whole sequence on one rank. For a query
    that sees no key, out is 0 and lse -inf. lse has no gradient.

    Under torch.autocast, attention is computed in autocast's dtype. Raise ValueError before ranks communicate if
    arguments do not fit together, or do not fit the schedule, and says which ones do; ValueError when ranks meet if
    their n differ; PeerTimeout if a rank does not come.
    """
    q, k, v = autocast_heads(q, k, v)
    name = "ring_attention"
    check_call(name, q, k, v, window, scale, cu_seqlens, dropout_p, key, head_rows)
    _check_groups(name, group, schedule)
    tensors = cu_seqlens, head_rows, key
    options: dict[str, Any] = {
        "causal": causal,
        "schedule": schedule,
        "balance": balance,
        "length": length,
        "window": window,
        "scale": scale,
        "dropout_p": dropout_p,
        "dropout_width": dropout_width,
    }
    if is_traced(q):
        ring, ulysses = group if isinstance(group, tuple) else (group, None)
        names = {"ring": ring.group_name, "ulysses": None if ulysses is None else ulysses.group_name}
        out, lse = _forward(q, k, v, *tensors, **names, **options)
    else:
        placement, call = _planned(q, k, group, *tensors, **options)
        out, lse = _attend(q, k, v, placement, call, with_lse=return_lse)
    return (out, lse) if return_lse else out


def _planned(
    q: Tensor,
    k: Tensor,
    group: Group,
    cu_seqlens: Tensor | None,
    head_rows: Tensor | None,
    key: Tensor | None,
    *,
    causal: bool,
    schedule: Schedule,
    balance: Balance,
    length: int | None,
    window: int | None,
    scale: float | None,
    dropout_p: float,
    dropout_width: int | None,
) -> tuple["_Placement", RingCall]:
    """Return this rank's placement and the call that its ring computes. Raise ValueError for what does not fit."""
    placement = _placement("ring_attention", q, k, group, schedule, balance, length, cu_seqlens)
    call = RingCall(
        placement.layout.runs,
        placement.ring_rank,
        causal=causal,
        window=window,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        cu_seqlens=cu_seqlens,
        dropout_p=dropout_p,
        head_rows=None if head_rows is None else head_rows[:, placement.heads_of(q.shape[1])],
        key=key,
        dropout_width=placement.layout.length if dropout_width is None else dropout_width,
        ring=placement.schedule != "all_gather",
    )
    return placement, call


def _attend(
    q: Tensor, k: Tensor, v: Tensor, placement: "_Placement", call: RingCall, *, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return (out, lse). out is differentiable; lse must not be used unless `with_lse`."""
    if placement.ulysses is None:
        return attend_ring(q, k, v, call, placement.ring)
    groups = (placement.ulysses,) if placement.ring is None else (placement.ulysses, placement.ring)
    collectives.agree_on_rows(q.shape[2], q.device, *groups, op="ring_attention", unit="tokens")
    k, v = (_repeated(x, placement.ulysses.size()) for x in (k, v))
    described = call.described("for ring_attention", k)
    q, k, v = placement.to_heads(described, q, k, v)
    out, lse = attend_ring(q, k, v, call, placement.ring)
    (out,) = placement.to_tokens(described, out)
    if with_lse:
        lse = placement.to_tokens(described, lse.unsqueeze(-1))[0].squeeze(-1)
    return out, lse


def _attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, placement: "_Placement", call: RingCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `_attend`, which keeps nothing for it: ranks exchange their heads once more."""
    if placement.ulysses is None:
        return ring_of(q, placement.ring).backward(grad_out, q, k, v, out, lse, call)
    kv_heads = k.shape[1]
    k, v = (_repeated(x, placement.ulysses.size()) for x in (k, v))
    described = call.described("for ring_attention backward", k)
    grad_out, q, k, v, out = placement.to_heads(described, grad_out, q, k, v, out)
    lse = placement.to_heads(described, lse.unsqueeze(-1))[0].squeeze(-1)
    gradients = ring_of(q, placement.ring).backward(grad_out, q, k, v, out, lse, call)
    dq, dk, dv = placement.to_tokens(described, *gradients)
    return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)


def choose_schedule(
    shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, device: torch.device, group: Group
) -> tuple[Schedule, str]:
    """Return the schedule that `auto` stands for, for q of `shape` [B, H, n, D] on a rank, and the reason.

    Ulysses moves the fewest bytes if the ranks can divide the heads: in the measurements of prime-rl (pull request
    2418) it costs 8 % at two ranks, where a ring of messages costs 29 %. On CPU ranks it takes 0.85 of the time of
    blocks that are read in place (4 ranks, 4096 tokens, 8 heads of 64, 2026-11-22): attention of many queries at once
    makes better use of caches. The first call for a group is collective.
    """
    if isinstance(group, tuple):
        return "ulysses_ring", "a pair of groups"
    if group.size() == 1:
        return "ring", "one rank"
    return schedule_for(
        choose_implementation(device, dtype, group).implementation, shape, kv_heads, dtype, group.size()
    )


def schedule_for(
    impl: Implementation, shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, world: int
) -> tuple[Schedule, str]:
    """Returns the schedule of `choose_schedule` for `world` ranks, at least two, of one group, and the reason.

    The function is pure: `tpfuse memory` calls it where no ranks run.
    """
    if impl == "fused":
        return "all_gather", "one launch reads the blocks of all owners"
    if _divides(world, shape[1], kv_heads) and (impl == "collective" or kv_heads % world == 0):
        return "ulysses", "the heads can be divided, and it moves the fewest bytes"
    if impl == "direct":
        return "ring", f"{world} ranks cannot divide the heads; blocks are read in place"
    batch, _, tokens, size = shape
    if 2 * batch * kv_heads * tokens * world * size * dtype.itemsize <= GATHERED_BYTES:
        return "all_gather", f"{world} ranks cannot divide {shape[1]} heads"
    return "ring", f"{world} ranks cannot divide {shape[1]} heads, and keys and values are too large to be gathered"


@dataclass(frozen=True)
class _Placement:
    """This rank's place in the groups that attend together.

    ring: the ranks that exchange blocks; ulysses: the ranks that exchange heads for tokens; None for no ranks.
    """

    schedule: Schedule
    layout: SequenceLayout
    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None
    ring_rank: int
    token_slices: TokenSlices | None

    def to_heads(self, described: str, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's heads of all tokens, of tensors [B, heads, n, …]; described: `call` in `ulysses`."""
        assert self.ulysses is not None and self.token_slices is not None
        return to_heads(tensors, self.token_slices, self.ulysses, described)

    def to_tokens(self, described: str, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's tokens of all heads: the inverse of `to_heads`."""
        assert self.ulysses is not None and self.token_slices is not None
        return to_tokens(tensors, self.token_slices, self.ulysses, described)

    def heads_of(self, heads: int) -> slice:
        """Return which of `heads` heads are this rank's."""
        if self.ulysses is None:
            return slice(0, heads)
        count = heads // self.ulysses.size()
        return slice(self.ulysses.rank() * count, (self.ulysses.rank() + 1) * count)


def _check_groups(name: str, group: Group, schedule: Schedule) -> None:
    """Raise ValueError for an unknown schedule, and for groups that are none or do not fit the schedule."""
    if group is None:
        raise ValueError(f"{name}: group is None: expected a process group (tpfuse.ops.attention serves one rank)")
    for each in group if isinstance(group, tuple) else (group,):
        check_group(name, each)
    if schedule not in SCHEDULES:
        raise ValueError(f"{name}: schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if schedule != "auto" and isinstance(group, tuple) != (schedule == "ulysses_ring"):
        wanted = "a pair of groups (ring, ulysses)" if schedule == "ulysses_ring" else "one group"
        raise ValueError(f"{name}: group: schedule {schedule} expects {wanted}")


def _placement(
    name: str,
    q: Tensor,
    k: Tensor,
    group: Group,
    schedule: Schedule,
    balance: Balance,
    length: int | None,
    cu_seqlens: Tensor | None,
) -> _Placement:
    """Return this rank's placement. Raise ValueError for a layout, heads or documents that do not fit."""
    ring, ulysses = group if isinstance(group, tuple) else (group, None)
    exchanging = 1 if ulysses is None else ulysses.size()
    world, heads, n = ring.size() * exchanging, q.shape[1], q.shape[2]
    length = world * n if length is None else length
    layout = SequenceLayout(length, world, balance, exchanging)
    if layout.local_length != n:
        raise ValueError(
            f"{name}: q has {n} tokens: expected {layout.local_length} on each of {world} ranks for {length} tokens,"
            f" {balance} (SequenceLayout.shard pads them)"
        )
    if cu_seqlens is not None:
        check_cumulative(name, "cu_seqlens", cu_seqlens, length)
    if schedule == "auto":
        schedule, _ = choose_schedule((q.shape[0], heads, n, q.shape[3]), k.shape[1], q.dtype, q.device, group)
    ring_rank, block_group = ring.rank(), ring if ring.size() > 1 else None
    if schedule == "ulysses":  # a ring of one rank, which has all tokens of some heads
        ulysses, exchanging, ring_rank, block_group = ring, world, 0, None
        layout = SequenceLayout(length, world, balance, world)
    if ulysses is None:
        return _Placement(schedule, layout, block_group, None, ring_rank, None)
    if not _divides(exchanging, heads, k.shape[1]):
        raise ValueError(
            f"{name}: schedule {schedule}: {exchanging} ranks cannot divide {heads} heads of q and {k.shape[1]} of k:"
            " schedules ring and all_gather can be used"
        )
    token_slices = _token_slices(layout, ring_rank * exchanging, exchanging)
    return _Placement(schedule, layout, block_group, ulysses, ring_rank, token_slices)


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    """Return whether ranks can have equally many heads each; a head of keys may serve several ranks."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % max(kv_heads, 1) == 0)


def _repeated(x: Tensor, ranks: int) -> Tensor:
    """Return x [B, Hk, n, D] with its heads repeated, if necessary, so that each rank has one."""
    return x if x.shape[1] % ranks == 0 else x.repeat_interleave(ranks // x.shape[1], 1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Return the gradient [B, heads, n, D] of `_repeated`'s argument."""
    batch, repeated, tokens, size = grad.shape
    return grad if repeated == heads else grad.reshape(batch, heads, -1, tokens, size).sum(2)


@functools.lru_cache(maxsize=64)
def _token_slices(layout: SequenceLayout, first: int, ranks: int) -> TokenSlices:
    """Return `find_token_slices` of the `ranks` ranks from `first` on."""
    return find_token_slices(torch.stack([layout.positions(first + rank) for rank in range(ranks)]))


# The tensors and options that both operators of torch.library below take, after the tensors of their own.
_SHARED_ARGUMENTS = (
    "Tensor? cu_seqlens, Tensor? head_rows, Tensor? key, *, str ring, str? ulysses, bool causal, str schedule, "
    "str balance, SymInt? length, SymInt? window, float? scale, float dropout_p, SymInt? dropout_width"
)


@custom_op(
    "tpfuse::ring_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SHARED_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    head_rows: Tensor | None,
    key: Tensor | None,
    *,
    ring: str,
    ulysses: str | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse): a node of torch.compile's graph. `auto` chooses when it runs. ring, ulysses: group names."""
    placement, call = _planned(q, k, _named(ring, ulysses), cu_seqlens, head_rows, key, **options)
    out, lse = _attend(q, k, v, placement, call, with_lse=True)
    return _heads_inside(out), lse.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    return _empty_like(q), q.new_empty(q.shape[:3], dtype=computed(q.dtype))


@custom_op(
    "tpfuse::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SHARED_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    head_rows: Tensor | None,
    key: Tensor | None,
    *,
    ring: str,
    ulysses: str | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    placement, call = _planned(q, k, _named(ring, ulysses), cu_seqlens, head_rows, key, **options)
    dq, dk, dv = (_heads_inside(x) for x in _attend_backward(grad_out, q, k, v, out, lse, placement, call))
    if dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr():
        dv = dv.clone()  # results of an operator share no memory
    return dq, dk, dv


@_gradients.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _named(ring: str, ulysses: str | None) -> Group:
    return named_group(ring) if ulysses is None else (named_group(ring), named_group(ulysses))


def _heads_inside(x: Tensor) -> Tensor:
    """Return x [B, H, n, D] in memory as [B, n, H, D], as models have it: a graph has one layout for all schedules."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape in the layout of `_heads_inside`."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


def _save(
    ctx: Any,
    inputs: tuple[Tensor | None, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


@once_differentiable
def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    return *_gradients(grad_out, *inputs[:3], out, lse, *inputs[3:], **ctx.options), None, None, None


_forward.register_autograd(_backward, setup_context=_save)
