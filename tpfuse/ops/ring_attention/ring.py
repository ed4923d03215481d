"""The interface of the implementations of ring attention, and attention of one rank alone."""

from typing import Protocol

from torch import Tensor

from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.triton_blocks import block_backward, block_forward


class Ring(Protocol):
    """Attention of one group's ranks. Methods are not differentiable; all ranks call the same ones in the same order.

    q [B, H, n, D], k and v [B, Hk, n, D]: this rank's tokens, of one dtype. Methods raise Disagreement if ranks
    have other shapes, dtypes or options, and PeerTimeout if a rank does not come.
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
        block = block_forward(q, call)
        block.add(0, k, v)
        return block.result()

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        block = block_backward(grad_out, q, out, lse, call)
        dk, dv = block.gradients(0, k, v)
        return block.dq(), dk, dv
