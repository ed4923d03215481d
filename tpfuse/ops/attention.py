"""attention: softmax(q kᵀ scale) v over the keys that each query sees, and the log-sum-exp of its scores.

On CUDA it is flash attention by Triton kernels (`tpfuse.kernels.attention_forward`, `attention_backward`), or torch's
own if `chosen_attention` says so. The torch path calls scaled_dot_product_attention if that can express the call, and
otherwise computes the definition, with all probabilities in memory. It cannot express dropout: torch's masks come from
a generator and depend on the layout of heads and batch; ours are a function of the global position (see
`tpfuse.ops.dropout`) and are the same on both paths.

The log-sum-exp is differentiable too: results for several sets of keys can be merged with it.
"""

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.launch import planned
from tpfuse.ops.autograd import autocast, once_differentiable, refuse_tangents
from tpfuse.ops.checks import check_attention, check_cumulative
from tpfuse.ops.dense_attention import AttentionCall, dense_attention, flash_obstacle
from tpfuse.switches import chosen_kernels, use_triton


class AttentionOptions(TypedDict, total=False):
    """The keywords of `attention` that do not change what it returns."""

    causal: bool
    window: int | None
    q_offset: int | None
    k_offset: int
    scale: float | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    head_rows: Tensor | None
    key: Tensor | None
    dropout_width: int | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int | None = None,
    k_offset: int = 0,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    head_rows: Tensor | None = None,
    key: Tensor | None = None,
    dropout_width: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return out, in q's shape and dtype, or with return_lse (out, lse): lse [B, H, Tq] float32 (float64 for float64).

    q: [B, H, Tq, D]; k, v: [B, Hk, Tk, D], H a multiple of Hk, head h of q using head h // (H / Hk); of one float
    dtype, on one device, any strides. The kernels take D from 16 to 256 in multiples of 8.
    Query i has position q_offset + i, key j has k_offset + j. causal: a query does not see keys after its position;
    window: nor keys at a distance of window or more. For a query that sees no key, out is 0 and lse -inf. q_offset:
    default Tk - Tq if causal (the keys before the first query come from a cache), 0 otherwise and with documents.
    scale: default 1 / sqrt(D).

    cu_seqlens_q, cu_seqlens_k: [S + 1] int32, increasing from 0, if the rows of the one batch element are S documents
    one after another; a document's rows see each other alone, and each document has positions of its own. Rows after
    the last document are padding: they see no row and no row sees them. max_seqlen_q, max_seqlen_k: the length of the
    longest document, or more; the kernels then need not allow for longer ones. On CPUs these values are checked; on
    GPUs the kernels do not access memory outside of the rows.

    dropout_p: the probability with which attention probabilities are dropped, with the mask of `tpfuse.ops.dropout`
    under `key` (one of `dropout_keys`) for row head_rows * dropout_width + query position and column key position.
    head_rows: [B, H] ([S, H] with documents) int64, the number of each (sequence, head) in the whole batch;
    dropout_width: the number of positions in the whole sequence, default Tk.

    Under torch.autocast, attention is computed in autocast's dtype. Raise ValueError that names the argument, what was
    received and what is accepted.
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    by_torch, plain, scalars = _checked(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_rows, key,
        causal, window, q_offset, k_offset, scale, max_seqlen_q, max_seqlen_k, dropout_p, dropout_width,
        return_lse, trains,
    )  # fmt: skip
    if by_torch and plain is not None:
        return F.scaled_dot_product_attention(q, k, v, **plain)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_cumulative("attention", "cu_seqlens_q", cu_seqlens_q, q.shape[2], max_seqlen_q)
        check_cumulative("attention", "cu_seqlens_k", cu_seqlens_k, k.shape[2], max_seqlen_k)
    call = AttentionCall(cu_seqlens_q, cu_seqlens_k, head_rows, key, **scalars)
    if by_torch:
        out, lse = dense_attention(q, k, v, call, return_lse=return_lse)
    else:
        refuse_tangents("attention", q, k, v)
        out, lse = _forward(q, k, v, *call.tensors, **scalars)
    return (out, lse) if return_lse else out


@planned
def _checked(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, head_rows: Tensor | None, key: Tensor | None,
    causal: bool, window: int | None, q_offset: int | None, k_offset: int, scale: float | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, dropout_p: float, dropout_width: int | None,
    return_lse: bool, trains: bool,
) -> tuple[bool, dict[str, Any] | None, dict[str, Any]]:  # fmt: skip
    """Return whether torch computes the call, its options as `AttentionCall.plain` returns them, and all its scalars.

    Raise ValueError as `attention` does, but for values of tensors. trains: whether q, k or v needs a gradient.
    """
    documents = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    # fmt: off
    check_attention(
        "attention", q, k, v, documents, window=window, scale=scale, dropout_p=dropout_p, key=key, head_rows=head_rows
    )
    # fmt: on
    tq, tk = q.shape[2], k.shape[2]
    if q_offset is None:
        q_offset = tk - tq if causal and cu_seqlens_q is None else 0
        if q_offset < 0:
            expected = "expected at least as many keys as queries, or a q_offset"
            raise ValueError(f"attention: {tq} queries and {tk} keys: {expected}")
    if window is not None and window >= max(q_offset + tq - k_offset, k_offset + tk - q_offset):
        window = None  # no key is so far away; kernels count positions in 32 bits
    call = AttentionCall(
        cu_seqlens_q, cu_seqlens_k, head_rows, key,
        causal=causal, window=window, q_offset=q_offset, k_offset=k_offset, scale=scale,
        max_seqlen_q=tq if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=tk if max_seqlen_k is None else max_seqlen_k,
        dropout_p=dropout_p, dropout_width=tk if dropout_width is None else dropout_width,
    )  # fmt: skip
    plain = None if return_lse else call.plain(q, k)
    return chosen_attention(q, k, v, plain is not None, trains) == "torch", plain, call.scalars


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, plain: bool, trains: bool) -> Literal["triton", "torch"]:
    """Return whether Triton's kernels or torch compute attention of these tensors.

    plain: whether scaled_dot_product_attention can express the call; trains: whether a gradient is needed. If plain,
    `kernels auto` trains on a GPU with scaled_dot_product_attention: torch prefers cuDNN on compute capability 9.0 and
    10.0, if its version has no known fault (check_prefer_cudnn_attention in torch's sdp_utils.cpp), and otherwise flash
    attention 2. On an H100 the Triton kernels reach 0.69 to 0.88 of cuDNN's speed forward and 0.73 to 0.84 backward,
    and 1.2 to 1.6 of flash attention 2's (gpu-nvidia-h100-80gb-hbm3.json in benchmarks/results). On an A100, flash
    attention 2 was 1.3 to 2.5 times as fast as Triton's (arXiv:2307.08691).

    The Triton kernels compute plain calls too where torch's operators are worse (`flash_obstacle`); and cuDNN makes a
    plan for each new shape, which takes up to half a second (modelscope/FunASR #3704). In training the same shapes
    occur again, in sampling they do not.
    """
    if not use_triton(q):
        return "torch"
    if chosen_kernels() == "triton" or not plain:
        return "triton"
    if flash_obstacle(q):
        return "triton"
    if any(x.stride(3) != 1 for x in (q, k, v)):  # scaled_dot_product_attention would store all scores
        return "triton"
    return "torch" if trains else "triton"


# The arguments that both operators take after tensors of their own: those of `AttentionCall`.
_CALL = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? head_rows, Tensor? dropout_key, *, bool causal, "
    "SymInt? window, SymInt q_offset, SymInt k_offset, float? scale, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float dropout_p, SymInt dropout_width"
)


@custom_op(
    "tpfuse::attention_forward", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)"
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *tensors: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    options = vars(AttentionCall(*tensors, **scalars))
    return attention_forward(q, k, v, **{name: options[name] for name in options if name != "max_seqlen_k"})


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None, **scalars: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tq, size = q.shape
    lse = q.new_empty((batch, heads, tq), dtype=torch.float32)
    return q.new_empty((batch, tq, heads, size)).transpose(1, 2), lse


@custom_op(
    "tpfuse::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_CALL}) -> (Tensor, Tensor, Tensor)",
)
def _gradients(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *tensors: Any, **scalars: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = vars(AttentionCall(*tensors, **scalars))
    return attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, **options)


@_gradients.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None, **scalars: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv


def _save(
    ctx: Any, inputs: tuple[Tensor | None, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


@once_differentiable
def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    gradients = _gradients(grad_out, grad_lse, *inputs[:3], out, lse, *inputs[3:], **ctx.options)
    return *gradients, None, None, None, None


_forward.register_autograd(_backward, setup_context=_save)
