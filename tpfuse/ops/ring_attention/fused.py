"""Ring attention as Triton programs that attend to the blocks of other ranks while they arrive.

Forward is one launch, backward two (`tpfuse.kernels.ring_attention_forward`, `ring_attention_backward`): the state of
the softmax stays in registers through all blocks, and every gradient is one sum in registers at its owner. A rank's
slot holds all ranks' blocks of some heads at once; if not all heads fit, there are several rounds of some heads each.
On CPUs the kernels are interpreted.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tpfuse.comm.channel import slot_size
from tpfuse.comm.collectives.fused import check_slot, open_channel
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.block_exchange import BlockExchange, part_starts
from tpfuse.kernels.launch import multiprocessors
from tpfuse.kernels.ring_attention_backward import queries_words, ring_attention_backward
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.ops.ring_attention.call import RingCall, joined_heads

ROUND_BYTES = 2**28  # the size of a slot's half; a head that needs more has a larger slot: not measured yet
_COPIERS = 8  # the most copiers of a launch


class FusedRing:
    """Attention of one group's ranks. Tensors are float32, float16 or bfloat16, on the memory's device."""

    def __init__(self, memory: SymmetricMemory, round_bytes: int = ROUND_BYTES) -> None:
        self.memory, self._round_bytes = memory, round_bytes

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        op, parts = call.described("ring_attention", q, k), []
        if any(each.requires_grad for each in (q, k, v)):
            self._head_bytes(q, k, backward=True)  # an error that backward would raise after all of forward
        visible_keys, _ = call.visible_ranges(call.rank, q.device)
        for heads, q_heads, exchange in self._rounds(q, k, call, backward=False):
            with self.memory.guard(op, kernel=True):
                counters = call.heads(q_heads).own_counters
                parts.append(
                    ring_attention_forward(
                        q[:, q_heads], torch.stack((k[:, heads], v[:, heads])), call.runs, call.rank, visible_keys,
                        exchange=exchange, scale=call.scale, dropout_p=call.dropout_p, counters=counters,
                        dropout_key=call.key,
                    )
                )  # fmt: skip
        out, lse = (joined_heads(each) for each in zip(*parts, strict=True))
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: RingCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        op, parts = call.described("ring_attention backward", q, k), []
        visible_keys, visible_queries = call.visible_ranges(call.rank, q.device)
        for heads, q_heads, exchange in self._rounds(q, k, call, backward=True):
            round_call = call.heads(q_heads)
            of_ranks = [round_call.counters(rank) for rank in range(call.runs.world)]
            counters = torch.stack([each for each in of_ranks if each is not None]) if call.dropout_p else None
            with self.memory.guard(op, kernel=True):
                parts.append(
                    ring_attention_backward(
                        grad_out[:, q_heads], q[:, q_heads], k[:, heads], v[:, heads], out[:, q_heads], lse[:, q_heads],
                        call.runs, call.rank, visible_keys, visible_queries, exchange=exchange, scale=call.scale,
                        dropout_p=call.dropout_p, counters_of_all=counters, dropout_key=call.key,
                    )
                )  # fmt: skip
        dq, dk, dv = (joined_heads(each) for each in zip(*parts, strict=True))
        return dq, dk, dv

    def _rounds(
        self, q: Tensor, k: Tensor, call: RingCall, *, backward: bool
    ) -> Iterator[tuple[slice, slice, BlockExchange]]:
        """Yield the heads of k and of q that each launch takes, and the exchange that moves the blocks."""
        heads, group = k.shape[1], q.shape[1] // max(k.shape[1], 1)
        head_bytes = self._head_bytes(q, k, backward=backward)
        most = min(max(self._round_bytes // max(head_bytes, 1), 1), max(heads, 1))
        exchange = self._exchange(most * head_bytes, call.ring)
        for start in range(0, max(heads, 1), most):
            yield slice(start, start + most), slice(start * group, (start + most) * group), exchange

    def _head_bytes(self, q: Tensor, k: Tensor, *, backward: bool) -> int:
        """Return the bytes of a slot for one head of k. Raise ValueError if the largest slot does not have them."""
        words = [2 * k[:, :1].nbytes // 4]
        if backward:
            words.append(queries_words(q[:, : q.shape[1] // max(k.shape[1], 1)]))
        nbytes = 4 * self.memory.world * part_starts(words)[-1]
        what = "the backward pass of one head of k" if backward else "one head of k"
        check_slot(f"ring_attention {k.dtype} {list(k.shape)}: {what}", nbytes)
        return nbytes

    def _exchange(self, nbytes: int, ring: bool) -> BlockExchange:
        name = "ring attention" if ring else "all_gather attention"
        return self.memory.channel(partial(_open_exchange, ring=ring), name, slot_size(nbytes))


def _open_exchange(memory: SymmetricMemory, name: str, nbytes: int, *, ring: bool) -> BlockExchange:
    _, endpoint = open_channel(memory, name, nbytes, multiprocessors(memory.device))
    ready = memory.signals(f"{name}: ready", 2 * _COPIERS * memory.world).local
    return BlockExchange(endpoint, ready, ring)
