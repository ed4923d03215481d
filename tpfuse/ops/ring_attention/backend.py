"""attend_ring: attention of each rank's tokens to the tokens of all ranks of a ring that they see.

Only this rank's q, k and v are kept for backward, with its output and log-sum-exp. `tpfuse.comm.dispatch` chooses the
implementation for a group; users call `tpfuse.ops.ring_attention.ring_attention`.
"""

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from tpfuse.comm.dispatch import choose_implementation
from tpfuse.kernels.attention_scores import check_scores
from tpfuse.ops.attention import check_tensors
from tpfuse.ops.autograd import once_differentiable
from tpfuse.ops.ring_attention.blocks import block_backward, block_forward
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.collective import CollectiveRing
from tpfuse.ops.ring_attention.direct import DirectRing
from tpfuse.ops.ring_attention.fused import FusedRing


class Ring(Protocol):
    """Attention of one group's ranks. Methods are not differentiable; all ranks call the same ones in the same order.

    q [B, H, n, D], k and v [B, Hk, n, D]: this rank's tokens, of one dtype. Methods raise ValueError if ranks have
    unequal numbers of tokens, and PeerTimeout if a rank does not come.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        """Return (out [B, H, n, D] in q's dtype, lse [B, H, n] float32 or float64) of attention to all ranks' keys."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); dk and dv are sums over the queries of all ranks."""


class LocalRing:
    """Attention of a rank to its own keys alone (see `Ring`)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        block = block_forward(q, call)
        block.add(0, k, v)
        return block.result()

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        block = block_backward(grad_out, q, out, lse, call)
        dk, dv = block.gradients(0, k, v)
        return block.dq(), dk, dv


_Kind = type[CollectiveRing] | type[DirectRing] | type[FusedRing]
_implementations: WeakKeyDictionary[dist.ProcessGroup, dict[_Kind, Ring]] = WeakKeyDictionary()


def ring_of(x: Tensor, group: dist.ProcessGroup | None) -> Ring:
    """Return the implementation for x's device and dtype. The first call for a group is collective."""
    if group is None:
        return LocalRing()
    choice = choose_implementation(x.device, x.dtype, group)
    of_group = _implementations.setdefault(group, {})
    if choice.memory is not None and choice.implementation != "collective":
        kind = DirectRing if choice.implementation == "direct" else FusedRing
        return of_group.get(kind) or of_group.setdefault(kind, kind(choice.memory))
    return of_group.get(CollectiveRing) or of_group.setdefault(CollectiveRing, CollectiveRing(group))


def attend_ring(
    q: Tensor, k: Tensor, v: Tensor, call: RingCall, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `Ring.forward`, out differentiable; group: call.runs.world ranks, None for one rank."""
    out, lse = _RingAttention.apply(q, k, v, call, group)  # type: ignore[no-untyped-call]
    return out, lse


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = ring_of(q, group).forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.call, ctx.group = call, group
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *ring_of(q, ctx.group).backward(grad_out, q, k, v, out, lse, ctx.call), None, None


def check_call(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    dropout_p: float,
    key: Tensor | None,
    head_rows: Tensor | None,
) -> None:
    """Raise ValueError that names the argument, what was received and what is accepted."""
    sequences = check_tensors(operator, q, k, v, cu_seqlens=cu_seqlens)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"{operator}: k has {k.shape[2]} tokens, q has {q.shape[2]}: expected the same number")
    check_scores(operator, q, sequences, window, scale, dropout_p, key, head_rows, key_name="key")
