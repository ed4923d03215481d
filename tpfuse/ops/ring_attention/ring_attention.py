"""ring_attention: attention over a sequence that is sharded over the ranks of a group, longer than one rank could hold.

| schedule     | what is exchanged                                                              | requires         |
|--------------|--------------------------------------------------------------------------------|------------------|
| ring         | keys and values, from each rank to the next, while the present ones are used   |                  |
| all_gather   | keys and values, from their owners to all ranks                                |                  |
| ulysses      | heads for tokens, and back afterwards: a rank has all tokens of some heads     | world divides H  |
| ulysses_ring | heads for tokens among neighbours, keys and values around a ring of neighbours | a pair of groups |

Shapes on one of R ranks, each of which has n tokens of the sequence:

    q, out [B, H, n, D]    k, v [B, Hk, n, D]    lse [B, H, n]

    ring, all_gather  forward   k and v of R - 1 ranks
                      backward  k and v again, and in float32 what the queries of a rank add to the others' dk and dv;
                                fused: k and v again, then q, dout and lse, so that owners sum their dk and dv
    ulysses           forward   q, k, v to [B, H / R, R n, D]; out and lse back
                      backward  dout to heads; dq, dk, dv back; in compiled code q, k, v, out, lse to heads too
    ulysses_ring      both, among the ranks of each of the two groups

Sources: arXiv:2310.01889 for the ring, arXiv:2407.21783, section 3.3.2, for gathered keys and values, arXiv:2309.14509
for Ulysses, and arXiv:2405.07719 for both together. All schedules return the same numbers but for the order of sums.
"""

from typing import Literal, Unpack, overload

from torch import Tensor

from tpfuse.choices import Balance, ContextSchedule
from tpfuse.comm.layout import is_traced
from tpfuse.comm.mesh import check_group, shown
from tpfuse.ops.autograd import autocast
from tpfuse.ops.checks import check_attention
from tpfuse.ops.ring_attention.attend import attend
from tpfuse.ops.ring_attention.placement import Group, RingOptions, placement
from tpfuse.ops.ring_attention.schedule import SCHEDULES
from tpfuse.ops.ring_attention.traced import attend_traced


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, return_lse: Literal[False] = False, **options: Unpack[RingOptions]
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, return_lse: Literal[True], **options: Unpack[RingOptions]
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = True,
    schedule: ContextSchedule = "auto",
    balance: Balance = "zigzag",
    length: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    head_rows: Tensor | None = None,
    key: Tensor | None = None,
    dropout_width: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out, in q's shape and dtype, or with return_lse (out, lse): lse [B, H, n] float32 (float64 for float64).

    q: [B, H, n, D]; k, v: [B, Hk, n, D], H a multiple of Hk, of one float dtype, any strides: this rank's tokens of
    sequences of `length` tokens (default: n on each rank) as `tpfuse.ops.ring_attention.layout.SequenceLayout(length,
    world, balance)` shards them, with the padding, which no query sees and whose output is 0.
    group: the ranks; or two groups (ring, ulysses) for schedule `ulysses_ring`. Then this rank's number is ring.rank()
    * ulysses.size() + ulysses.rank(), and the layout is made with `ulysses=ulysses.size()`. schedule: see the module;
    `auto`: see `tpfuse.ops.ring_attention.schedule.schedule_for`. All ranks pass the same options.

    causal, window, scale: as in `tpfuse.ops.attention`, by position in the sequence. cu_seqlens: [S + 1] int32,
    cumulative lengths of the documents of the whole sequence, with B = 1; a document's tokens see each other alone. A
    document may be on several ranks, and the last one may end before the sequence does. dropout_p, head_rows, key,
    dropout_width (default: length): as in `attention`; the mask is that of the whole sequence on one rank. For a query
    that sees no key, out is 0 and lse -inf. lse has no gradient.

    softcap: scores become softcap * tanh(scores / softcap); the fused kernels leave such a call to the blocks of torch.
    sinks: [H], of a float dtype: a logit of each head that joins the log-sum-exp of the scores of every query that sees
    a key, lse included, and gives nothing to its output. On a rank their gradient is that of its queries, or (ulysses)
    of the heads that it attends with: the sum over the ranks is the gradient of the whole sequence.

    Under torch.autocast, attention is computed in autocast's dtype. Raise ValueError before ranks communicate if
    arguments do not fit together, or do not fit the schedule, and say which ones do; Disagreement, a ValueError, when
    ranks meet if their shapes, dtypes or options differ; PeerTimeout if a rank does not come.
    """
    q, k, v = autocast(q, k, v)
    documents = {"cu_seqlens": cu_seqlens}
    # fmt: off
    check_attention(
        "ring_attention", q, k, v, documents, window=window, scale=scale, dropout_p=dropout_p, key=key,
        head_rows=head_rows,
    )
    # fmt: on
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"ring_attention: k has {k.shape[2]} tokens, q has {q.shape[2]}: expected the same number")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"ring_attention: softcap {softcap}: expected a positive number")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.dtype.is_floating_point):
        raise ValueError(
            f"ring_attention: sinks are {sinks.dtype} {tuple(sinks.shape)}: expected floats, one for each of"
            f" {q.shape[1]} heads"
        )
    _check_groups(group, schedule)
    options: RingOptions = {
        "causal": causal, "schedule": schedule, "balance": balance, "length": length, "window": window, "scale": scale,
        "cu_seqlens": cu_seqlens, "dropout_p": dropout_p, "head_rows": head_rows, "key": key,
        "dropout_width": dropout_width, "softcap": softcap, "sinks": sinks,
    }  # fmt: skip
    if is_traced(q):
        out, lse = attend_traced(q, k, v, group, options)
    else:
        out, lse = attend(q, k, v, sinks, placement(q, k, group, options), with_lse=return_lse)
    return (out, lse) if return_lse else out


def _check_groups(group: Group, schedule: ContextSchedule) -> None:
    """Raise ValueError for an unknown schedule, and for groups that are none or do not fit the schedule."""
    name = "ring_attention"
    if group is None:
        raise ValueError(f"{name}: group is None: expected a process group (tpfuse.ops.attention serves one rank)")
    for each in group if isinstance(group, tuple) else (group,):
        check_group(name, each)
    if isinstance(group, tuple) and (len(group) != 2 or None in group):
        given = ", ".join(map(shown, group))
        raise ValueError(f"{name}: group is ({given}): expected a process group, or two, (ring, ulysses)")
    if schedule not in SCHEDULES:
        raise ValueError(f"{name}: schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if schedule != "auto" and isinstance(group, tuple) != (schedule == "ulysses_ring"):
        wanted = "a pair of groups (ring, ulysses)" if schedule == "ulysses_ring" else "one group"
        raise ValueError(f"{name}: group: schedule {schedule} expects {wanted}")
