"""Attention by a plan: ranks exchange tokens for heads if the schedule says so, attend in their ring, exchange back."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from tpfuse.ops.autograd import once_differentiable, without_autocast
from tpfuse.ops.ring_attention.placement import RingPlan

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(q, k, v, out, lse) as the ring has them: after the exchange of heads, if there is one."""


def attend(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, *, with_lse: bool) -> tuple[Tensor, Tensor]:
    """Return (out, lse). out is differentiable; lse may be used only with `with_lse`."""
    out, lse = _Attend.apply(q, k, v, plan, with_lse)  # type: ignore[no-untyped-call]
    return out, lse


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, with_lse: bool) -> tuple[Tensor, Tensor]:
        out, lse, kept = forward(q, k, v, plan, with_lse=with_lse)
        ctx.save_for_backward(*kept, plan.call.cu_seqlens, plan.call.head_rows, plan.call.key)
        ctx.mark_non_differentiable(lse)
        ctx.plan = plan
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors[:5]  # the others are there so that torch refuses them if they changed in place
        return *backward(grad_out, kept, ctx.plan), None, None


@without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, *, with_lse: bool) -> tuple[Tensor, Tensor, Kept]:
    """Return (out, lse, what `backward` takes). lse may be used only with `with_lse`."""
    exchange, call = plan.exchange, plan.call
    if exchange is None:
        out, lse = plan.ring.forward(q, k, v, call)
        return out, lse, (q, k, v, out, lse)
    exchange.compare(call.described("ring_attention", q, k), k.device)
    k, v = exchange.repeated(k), exchange.repeated(v)
    op = call.described("for ring_attention", q, k)
    q, k, v = exchange.to_heads(op, q, k, v)
    out, lse = plan.ring.forward(q, k, v, call)
    kept = q, k, v, out, lse
    if with_lse:
        lse = exchange.to_tokens(op, lse.unsqueeze(-1))[0].squeeze(-1)
    return exchange.to_tokens(op, out)[0], lse, kept


@without_autocast
def backward(grad_out: Tensor, kept: Kept, plan: RingPlan, *, exchanged: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv). exchanged: whether `kept` has this rank's heads, not its tokens, if heads are exchanged."""
    exchange, call, (q, k, v, out, lse) = plan.exchange, plan.call, kept
    if exchange is None:
        return plan.ring.backward(grad_out, *kept, call)
    if exchanged:
        op = call.described("for ring_attention backward", q, k)
        (grad_out,) = exchange.to_heads(op, grad_out)
    else:
        k, v = exchange.repeated(k), exchange.repeated(v)
        op = call.described("for ring_attention backward", q, k)
        grad_out, q, k, v, out = exchange.to_heads(op, grad_out, q, k, v, out)
        lse = exchange.to_heads(op, lse.unsqueeze(-1))[0].squeeze(-1)
    dq, dk, dv = exchange.to_tokens(op, *plan.ring.backward(grad_out, q, k, v, out, lse, call))
    return dq, exchange.summed(dk), exchange.summed(dv)
