"""Attention block by block, by Triton kernels or by torch's operators: `tpfuse.switches` chooses."""

from torch import Tensor

from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.torch_blocks import BlockBackward, BlockForward
from tpfuse.ops.ring_attention.triton_blocks import KernelBackward, KernelForward
from tpfuse.switches import use_triton


def block_forward(q: Tensor, call: RingCall) -> BlockForward | KernelForward:
    """Return the attention of the queries q [B, H, n, D], to which keys and values are added rank by rank."""
    return KernelForward(q, call) if use_triton(q) else BlockForward(q, call)


def block_backward(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, call: RingCall
) -> BlockBackward | KernelBackward:
    """Return the gradients of attention, to which keys and values are added rank by rank."""
    kind = KernelBackward if use_triton(q) else BlockBackward
    return kind(grad_out, q, out, lse, call)
