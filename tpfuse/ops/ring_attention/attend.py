"""Attention by a plan: ranks exchange tokens for heads if the schedule says so, attend in their ring, exchange back."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tpfuse.ops.autograd import once_differentiable, without_autocast
from tpfuse.ops.ring_attention.placement import RingPlan

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(q, k, v, out, lse) as the ring has them, sinks included: after the exchange of heads, if there is one."""
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(dq, dk, dv, dsinks); the sum of the ranks' dsinks [H] is the gradient of the sinks, None without sinks."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: RingPlan, *, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return (out, lse). out is differentiable; lse may be used only with `with_lse`. sinks: those of `plan`, whole."""
    out, lse = _Attend.apply(q, k, v, sinks, plan, with_lse)  # type: ignore[no-untyped-call]
    return out, lse


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: RingPlan, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = forward(q, k, v, plan, with_lse=with_lse)
        ctx.save_for_backward(*kept, plan.call.cu_seqlens, plan.call.head_rows, plan.call.key, sinks)
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
        out, lse = _with_sinks(*plan.ring.forward(q, k, v, call), call.sinks)
        return out, lse, (q, k, v, out, lse)
    exchange.compare(call.described("ring_attention", q, k), k.device)
    k, v = exchange.repeated(k), exchange.repeated(v)
    op = call.described("for ring_attention", q, k)
    q, k, v = exchange.to_heads(op, q, k, v)
    out, lse = _with_sinks(*plan.ring.forward(q, k, v, call), call.sinks)
    kept = q, k, v, out, lse
    if with_lse:
        lse = exchange.to_tokens(op, lse.unsqueeze(-1))[0].squeeze(-1)
    return exchange.to_tokens(op, out)[0], lse, kept


@without_autocast
def backward(grad_out: Tensor, kept: Kept, plan: RingPlan, *, exchanged: bool = True) -> Gradients:
    """Return the gradients. exchanged: whether `kept` has this rank's heads, not its tokens, if heads are exchanged."""
    exchange, call, (q, k, v, out, lse) = plan.exchange, plan.call, kept
    if exchange is None:
        return *plan.ring.backward(grad_out, *kept, call), _of_sinks(grad_out, out, lse, call.sinks)
    if exchanged:
        op = call.described("for ring_attention backward", q, k)
        (grad_out,) = exchange.to_heads(op, grad_out)
    else:
        k, v = exchange.repeated(k), exchange.repeated(v)
        op = call.described("for ring_attention backward", q, k)
        grad_out, q, k, v, out = exchange.to_heads(op, grad_out, q, k, v, out)
        lse = exchange.to_heads(op, lse.unsqueeze(-1))[0].squeeze(-1)
    dq, dk, dv = exchange.to_tokens(op, *plan.ring.backward(grad_out, q, k, v, out, lse, call))
    own = _of_sinks(grad_out, out, lse, call.sinks)
    dsinks = None if own is None else own.new_zeros(dq.shape[1])
    if own is not None and dsinks is not None:
        dsinks[exchange.own(len(dsinks))] = own
    return dq, exchange.summed(dk), exchange.summed(dv), dsinks


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention to all keys with a logit more for each head, whose value is 0.

    The gradients of blocks follow from them as without sinks: with the value 0, Σ p dp is still the product of out and
    its gradient. A query that sees no key does not see the sink, since kernels know it by its lse.
    """
    if sinks is None:
        return out, lse
    logits = sinks.to(lse.dtype).unsqueeze(-1)
    total = torch.logaddexp(lse, logits).masked_fill_(lse == -torch.inf, -torch.inf)
    return (out * torch.sigmoid(lse - logits).unsqueeze(-1)).to(out.dtype), total


def _of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of sinks [H] from these queries."""
    if sinks is None:
        return None
    probability = (sinks.to(lse.dtype).unsqueeze(-1) - lse.masked_fill(lse == -torch.inf, torch.inf)).exp_()
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return (probability * delta).sum((0, 2)).neg_().to(sinks.dtype)
