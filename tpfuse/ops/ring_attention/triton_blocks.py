"""Attention of one rank's queries to the keys of one rank after another, by Triton kernels, merged in float32.

`block_forward` and `block_backward` choose between these and the operators of torch.
"""

import torch
from torch import Tensor

from tpfuse.kernels.attention_merge import attention_merge
from tpfuse.kernels.ring_attention_backward import ring_attention_delta, ring_attention_dkdv, ring_attention_dq
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.torch_blocks import BlockBackward, BlockForward, chosen_operator, gpu_operator
from tpfuse.switches import chosen_kernels, use_triton


class KernelForward:
    """The same as `tpfuse.ops.ring_attention.torch_blocks.BlockForward`, by Triton kernels."""

    def __init__(self, q: Tensor, call: RingCall) -> None:
        self._q, self._call = q, call
        self._state: tuple[Tensor, Tensor] | None = None

    def add(self, source: int, k: Tensor, v: Tensor) -> None:
        """Attend to the keys and values [B, Hk, n, D] of rank `source`."""
        call = self._call
        visible_keys, _ = call.visible_ranges(call.rank, self._q.device)
        out, lse = ring_attention_forward(
            self._q, torch.stack((k, v))[None], call.runs, call.rank, visible_keys, sources=(source,), scale=call.scale,
            dropout_p=call.dropout_p, counters=call.own_counters, dropout_key=call.key, out_dtype=torch.float32,
        )  # fmt: skip
        self._state = (out, lse) if self._state is None else attention_merge(*self._state, out, lse, in_place=True)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in float32)."""
        assert self._state is not None
        out, lse = self._state
        return out.to(self._q.dtype), lse


class KernelBackward:
    """The same as `tpfuse.ops.ring_attention.torch_blocks.BlockBackward`, by Triton kernels."""

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, call: RingCall) -> None:
        self._call, self._dtype = call, q.dtype
        self._queries = q.contiguous(), grad_out.contiguous(), *ring_attention_delta(grad_out, out, lse)
        self._dq: Tensor | None = None

    def add(self, source: int, k: Tensor, v: Tensor, parts: Tensor) -> None:
        """Write to `parts` what these queries contribute to the gradients of k and v, which are of rank `source`.

        parts: [2, B, Hk, n, D] float32.
        """
        call, block = self._call, torch.stack((k, v))
        visible_keys, _ = call.visible_ranges(call.rank, k.device)
        _, visible_queries = call.visible_ranges(source, k.device)
        dq = ring_attention_dq(
            *self._queries, block[None], call.runs, call.rank, visible_keys, (source,), scale=call.scale,
            dropout_p=call.dropout_p, counters=call.own_counters, dropout_key=call.key,
        )  # fmt: skip
        self._dq = dq if self._dq is None else self._dq.add_(dq)
        parts.copy_(
            ring_attention_dkdv(
                block, *self._queries, call.runs, call.rank, source, visible_queries, scale=call.scale,
                dropout_p=call.dropout_p, counters=call.own_counters, dropout_key=call.key,
            )
        )  # fmt: skip

    def gradients(self, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dk, dv) in k's dtype, where these queries alone contribute to them."""
        parts = k.new_empty(2, *k.shape, dtype=torch.float32)
        self.add(source, k, v, parts)
        dk, dv = parts.to(k.dtype).unbind()
        return dk, dv

    def dq(self) -> Tensor:
        """Return the gradient of q, in q's dtype."""
        assert self._dq is not None
        return self._dq.to(self._dtype)


def block_forward(q: Tensor, call: RingCall) -> BlockForward | KernelForward:
    """Return the attention of the queries q [B, H, n, D], to which keys and values are added rank by rank."""
    return KernelForward(q, call) if by_kernels(q, call) else BlockForward(q, call)


def block_backward(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, call: RingCall
) -> BlockBackward | KernelBackward:
    """Return the gradients of attention, to which keys and values are added rank by rank."""
    return (KernelBackward if by_kernels(q, call) else BlockBackward)(grad_out, q, out, lse, call)


def by_kernels(q: Tensor, call: RingCall) -> bool:
    """Return whether the kernels compute: with `kernels auto` only where torch has no operator.

    The reason is that of `tpfuse.ops.attention.chosen_attention`, whose measurements are those of others; in a ring the
    same shapes occur in every call, also without gradients. Not measured here yet. The kernels have no softcap.
    """
    return use_triton(q) and call.softcap is None and (chosen_kernels() == "triton" or chosen_operator(q, call) is None)


def explained_blocks(q: Tensor) -> str:
    """Return what computes blocks for queries like q [B, H, n, D] on a GPU, and why."""
    operator, obstacle = gpu_operator(q)
    ours = "Triton kernels" if use_triton(q) else "the definition"
    if operator is None or (use_triton(q) and chosen_kernels() == "triton"):
        return f"blocks by {ours} ({'chosen' if operator else obstacle})"
    return f"blocks by {operator.name}; by {ours} with documents or dropout"
