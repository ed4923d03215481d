"""Time the kernels of ring attention with all blocks present, beside plain attention of the same work, on one GPU.

It measures the cost of three things: keys are in one block for each rank, they are found by intervals of positions, and
the softmax is carried from block to block. A rank's queries attend to the keys of all ranks, and nothing waits. The
peer is `kernels/attention_forward.py` and `attention_backward.py` on the same queries and keys, with the keys
concatenated.

    forward     one launch for all blocks
    backward    one launch for dq of all blocks, and one launch for each block's dk and dv: where the blocks are present
                already these kernels give a block's part of dk and dv, and where they travel one launch gives the whole

"torch blocks" is what a ring of messages computes with `kernels auto`: each block by the operator that
scaled_dot_product_attention takes, merged in float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import OURS, Bench, BenchCase, Built, TimedMode
from benchmarks.timing import Candidate, verdict
from tpfuse.kernels import reference
from tpfuse.kernels.attention_backward import attention_backward
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.kernels.ring_attention_backward import ring_attention_delta, ring_attention_dkdv, ring_attention_dq
from tpfuse.kernels.ring_attention_forward import ring_attention_forward
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.torch_blocks import BlockBackward, BlockForward
from tpfuse.testing.compare import Expected, unwritten_memory_is_nan
from tpfuse.tools.operators.ring_attention import RingAttentionShape

PLAIN, TORCH = "attention", "torch blocks"
Forward = Callable[[], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class _LastRank:
    """The last rank's queries, and all keys, both in blocks and concatenated."""

    def __init__(self, shape: RingAttentionShape, bench: Bench) -> None:
        world, n, self.shape = shape.world, shape.n, shape
        self.q, self.grad, self.blocks = shape.inputs(bench).values()
        self.k, self.v = self.blocks.permute(1, 2, 3, 0, 4, 5).reshape(2, 1, shape.Hk, world * n, shape.D).unbind()
        runs = SequenceLayout(world * n, world, "contiguous").runs
        self.call = RingCall(runs, world - 1, shape.causal, None, shape.D**-0.5)
        self.visible_keys, _ = self.call.visible_ranges(world - 1, bench.device)
        self.sources = tuple(range(world))
        self.visible_queries = [self.call.visible_ranges(source, bench.device)[1] for source in self.sources]
        self.options = {"causal": shape.causal, "q_offset": (world - 1) * n}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp by the kernel of ring attention."""
        runs, rank = self.call.runs, self.call.rank
        return ring_attention_forward(self.q, self.blocks, runs, rank, self.visible_keys, sources=self.sources)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) by the kernels of ring attention's backward pass."""
        runs, rank = self.call.runs, self.call.rank
        sums = ring_attention_delta(self.grad, out, lse)
        dq = ring_attention_dq(self.q, self.grad, *sums, self.blocks, runs, rank, self.visible_keys, self.sources)
        parts = [
            ring_attention_dkdv(block, self.q, self.grad, *sums, runs, rank, source, self.visible_queries[source])
            for source, block in enumerate(self.blocks)
        ]
        dk, dv = torch.cat(parts, 3).unbind()
        return dq, dk, dv

    def plain_forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp by the kernels of plain attention."""
        return attention_forward(self.q, self.k, self.v, **self.options)

    def plain_backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) by the kernels of plain attention."""
        return attention_backward(self.grad, self.q, self.k, self.v, out, lse, **self.options)

    def torch_forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp by torch's operator, block by block."""
        block = BlockForward(self.q, self.call)
        for source, (k, v) in enumerate(self.blocks):
            block.add(source, k, v)
        return block.result()

    def torch_backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) by torch's operator, block by block."""
        block = BlockBackward(self.grad, self.q, out, lse, self.call)
        parts = torch.zeros_like(self.blocks, dtype=torch.float32)
        for source, (k, v) in enumerate(self.blocks):
            block.add(source, k, v, parts[source])
        dk, dv = torch.cat(parts.unbind(), 3).unbind()
        return block.dq(), dk, dv

    def check(self, forward: Forward, backward: Backward, memory: AbstractContextManager[object]) -> None:
        """Raise AssertionError where one head of keys, with its queries, is not as close to float64 as it must."""
        group = self.shape.H // self.shape.Hk
        inputs = {"q": self.q[:, :group], "k": self.k[:, :1], "v": self.v[:, :1]}
        expected = Expected(lambda q, k, v: self._reference(q, k, v), inputs, self.grad[:, :group])
        with memory:
            out, lse = forward()
            dq, dk, dv = backward(out, lse)
        for name, x, heads in (("out", out, group), ("q", dq, group), ("k", dk, 1), ("v", dv, 1)):
            expected.check(name, x[:, :heads].to(self.q.dtype))

    def _reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = reference.attention(q, k, v, **self.options)[0]
        return out


def _build(shape: RingAttentionShape, bench: Bench) -> Built:
    rank = _LastRank(shape, bench)
    forward = (
        Candidate(OURS, lambda _: rank.forward()),
        Candidate(PLAIN, lambda _: rank.plain_forward()),
        Candidate(TORCH, lambda _: rank.torch_forward()),
    )
    backward = (
        Candidate(OURS, lambda state: rank.backward(*state), rank.forward),
        Candidate(PLAIN, lambda state: rank.plain_backward(*state), rank.plain_forward),
        Candidate(TORCH, lambda state: rank.torch_backward(*state), rank.torch_forward),
    )
    costs, candidates = shape.costs(), {"forward": forward, "backward": backward}
    works = [TimedMode(mode, costs[mode].flops, costs[mode].moved, x) for mode, x in candidates.items()]

    def check() -> dict[str, str]:
        ours = partial(rank.check, rank.forward, rank.backward, unwritten_memory_is_nan())
        # Memory is NaN only with deterministic algorithms, for which torch's operators are not taken.
        by_torch = partial(rank.check, rank.torch_forward, rank.torch_backward, nullcontext())
        return {OURS: verdict(ours), TORCH: verdict(by_torch)}

    return check, works


def _case(shape: RingAttentionShape, asked: bool) -> BenchCase:
    sizes = f"H {shape.H}/{shape.Hk}, {shape.n} tokens each, D {shape.D}, {'causal' if shape.causal else 'full'}"
    return BenchCase("carried_attention", f"{shape.name}, {sizes}", partial(_build, shape), asked)


def cases(tiny: bool) -> list[BenchCase]:
    """Return cases of 16k tokens on 8 ranks, and one of 64k tokens on 4 ranks."""
    if tiny:
        shapes = (
            RingAttentionShape("2 ranks", 2, 20, 2, 1, 16),
            RingAttentionShape("3 ranks", 3, 20, 2, 2, 16, causal=False),
        )
        return [_case(x, True) for x in shapes]
    sizes = [(d, causal) for d in (64, 128) for causal in (True, False)]
    chosen_cases = [_case(RingAttentionShape("8 ranks", 8, 2048, 16, 16, d, causal), True) for d, causal in sizes]
    return [*chosen_cases, _case(RingAttentionShape("4 ranks", 4, 16384, 32, 8, 128), False)]
