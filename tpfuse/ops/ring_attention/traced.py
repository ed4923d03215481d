"""Ring attention for torch.compile: operators of torch.library, each a node of the graph.

The compiler sees only shapes. When a node runs, it finds the groups by their names and makes the plan, and so `auto`
chooses then. A graph has one layout for all schedules: results [B, H, n, D] are in memory [B, n, H, D], as models have
them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from tpfuse.comm.mesh import named_group
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.ops.autograd import once_differentiable
from tpfuse.ops.ring_attention.attend import backward, forward
from tpfuse.ops.ring_attention.placement import Group, RingOptions, RingPlan, placement

_TENSORS = ("sinks", "cu_seqlens", "head_rows", "key")
# The arguments that both operators take after tensors of their own: those of `RingOptions`, and the groups' names.
_OPTIONS = (
    "Tensor? sinks, Tensor? cu_seqlens, Tensor? head_rows, Tensor? key, *, str ring, str? ulysses, bool causal, "
    "str schedule, str balance, SymInt? length, SymInt? window, float? scale, float dropout_p, SymInt? dropout_width, "
    "float? softcap"
)


def attend_traced(q: Tensor, k: Tensor, v: Tensor, group: Group, options: RingOptions) -> tuple[Tensor, Tensor]:
    """Return (out, lse), out differentiable."""
    ring, ulysses = group if isinstance(group, tuple) else (group, None)
    names = {"ring": ring.group_name, "ulysses": None if ulysses is None else ulysses.group_name}
    tensors = options["sinks"], options["cu_seqlens"], options["head_rows"], options["key"]
    scalars: dict[str, Any] = {name: value for name, value in options.items() if name not in _TENSORS}
    out, lse = _forward(q, k, v, *tensors, **names, **scalars)
    return out, lse


def _plan(q: Tensor, k: Tensor, tensors: Any, ring: str, ulysses: str | None, **scalars: Any) -> RingPlan:
    group = named_group(ring) if ulysses is None else (named_group(ring), named_group(ulysses))
    options: Any = dict(zip(_TENSORS, tensors, strict=True)) | scalars
    return placement(q, k, group, options)


@custom_op(
    "tpfuse::ring_attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    plan = _plan(q, k, tensors, **options)
    out, lse, _ = forward(q, k, v, plan, with_lse=True)
    return _heads_inside(out), lse.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    return _empty_like(q), q.new_empty(q.shape[:3], dtype=summed_dtype(q.dtype))


@custom_op(
    "tpfuse::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *tensors: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _plan(q, k, tensors, **options)
    *gradients, dsinks = backward(grad_out, (q, k, v, out, lse), plan, exchanged=False)
    dq, dk, dv = map(_heads_inside, gradients)
    if dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr():
        dv = dv.clone()  # results of an operator share no memory
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return _empty_like(q), _empty_like(k), _empty_like(v), dsinks


def _heads_inside(x: Tensor) -> Tensor:
    """Return x [B, H, n, D] in memory as [B, n, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape in the layout of `_heads_inside`."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


def _save(
    ctx: Any, inputs: tuple[Tensor | None, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


@once_differentiable
def _gradients(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *tensors, out, lse = ctx.saved_tensors
    *gradients, dsinks = _backward(grad_out, q, k, v, out, lse, *tensors, **ctx.options)
    return *gradients, None if tensors[0] is None else dsinks, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
