"""Time ring attention of CPU ranks: tpfuse, torch's ring templates, a plain ring of messages, and one process, by
turns.

    python -m benchmarks.bench_ring_attention [--ranks 4] [--tokens 4096] [--rounds 9]

Causal attention, forward and backward, batch 1, float32. All candidates but the single process shard the sequence in
zigzag order, so that ranks have equal work. Ranks have one thread each; the single process computes the whole sequence
by torch's scaled_dot_product_attention with --threads. Every result is compared with that one first. The templates are
torch's private ones (torch's public `context_parallel` does not run on CPUs), with their own load balance, over Gloo.
The plain ring is the usual implementation: batch_isend_irecv to the neighbour, blocks merged by their log-sum-exp, and
the gradients of keys and values travel with their block.

`benchmarks.cpu_ranks` says how candidates alternate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as templates

from benchmarks.cpu_ranks import ALONE, alternate, calls, pools, report
from benchmarks.harness import OURS, Parser, write_row
from tpfuse.choices import Implementation
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import ContextSchedule, Group, ring_attention
from tpfuse.switches import use
from tpfuse.testing.ranks import RankPool

TEMPLATES, PLAIN = "torch templates", "plain ring"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CpSubject:
    """Causal attention of `tokens` tokens and `heads` heads of size `size`, batch 1."""

    tokens: int = 4096
    heads: int = 8
    size: int = 64


class Templates(Function):
    """torch's ring, forward and backward, each with torch's load balance: the layout is zigzag."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        out, lse = templates._templated_ring_attention(group, 2, _flash, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        gradients = templates._templated_ring_attention_backward(
            ctx.group, 2, _flash_backward, grad, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return *gradients[:3], None


def _shift(block: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Send the block to the next rank; return the block that the previous rank sends, and the messages under way."""
    rank, world, arriving = group.rank(), group.size(), torch.empty_like(block)
    messages = [
        dist.P2POp(dist.isend, block, group=group, group_peer=(rank + 1) % world),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % world),
    ]
    return arriving, dist.batch_isend_irecv(messages)


def _halves(rank: int, source: int, n: int) -> tuple[slice, slice]:
    """Return the queries that see any of a source's keys, and those keys.

    For the own keys both are whole. For another source's keys one of the two is a half.
    """
    everything = slice(0, n)
    if source == rank:
        return everything, everything
    return (everything, slice(0, n // 2)) if source < rank else (slice(n // 2, n), everything)


class PlainRing(Function):
    """A ring that computes a block while the next one arrives; in backward its gradients travel with it."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        rank, world = group.rank(), group.size()
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        block = torch.stack((k, v))
        for step in range(world):
            arriving, messages = _shift(block, group) if step + 1 < world else (block, [])
            rows, keys = _halves(rank, (rank - step) % world, q.shape[2])
            part, part_lse = _flash(q[:, :, rows], block[0][:, :, keys], block[1][:, :, keys], 0.0, step == 0)
            share = torch.sigmoid(part_lse - lse[:, :, rows]).unsqueeze(-1)
            out[:, :, rows] += share * (part - out[:, :, rows])
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
            for message in messages:
                message.wait()
            block = arriving
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = ctx.group.rank(), ctx.group.size()
        dq, block = torch.zeros_like(q), torch.stack((k, v))
        gradients, under_way = torch.zeros_like(block), []
        for step in range(world):
            arriving, messages = _shift(block, ctx.group) if step + 1 < world else (block, [])
            rows, keys = _halves(rank, (rank - step) % world, q.shape[2])
            inputs = (grad[:, :, rows], q[:, :, rows], block[0][:, :, keys], block[1][:, :, keys])
            results = out[:, :, rows], lse[:, :, rows].contiguous()
            part_q, *part = _flash_backward(*inputs, *results, 0.0, step == 0)
            dq[:, :, rows] += part_q
            for message in under_way:
                message.wait()
            gradients[:, :, :, keys] += torch.stack(part)
            gradients, under_way = _shift(gradients, ctx.group)
            for message in messages:
                message.wait()
            block = arriving
        for message in under_way:
            message.wait()
        return dq, *gradients.unbind(), None


def _ours(
    q: Tensor, k: Tensor, v: Tensor, name: Implementation, schedule: ContextSchedule, group: Group, length: int
) -> Tensor:
    with use(implementation=name):
        return ring_attention(q, k, v, group=group, schedule=schedule, length=length)


def _candidates(subject: CpSubject) -> dict[str, Attention]:
    """Return the candidates that take part in the ring, on every rank."""
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    schedules: dict[ContextSchedule, Group] = {"ring": group, "all_gather": group}
    if subject.heads % world == 0:
        schedules["ulysses"] = group
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        schedules["ulysses_ring"] = mesh["ring"].get_group(), mesh["ulysses"].get_group()
    names: tuple[Implementation, ...] = ("direct", "collective")
    attentions: dict[str, Attention] = {
        f"{OURS} {schedule} {name}": partial(_ours, name=name, schedule=schedule, group=of, length=subject.tokens)
        for name in names
        for schedule, of in schedules.items()
    }
    return attentions | {
        TEMPLATES: lambda q, k, v: Templates.apply(q, k, v, group),
        PLAIN: lambda q, k, v: PlainRing.apply(q, k, v, group),
    }


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _inputs(subject: CpSubject) -> list[Tensor]:
    """Return q, k, v, and the gradient of the output."""
    generator = torch.Generator().manual_seed(subject.tokens)
    return [torch.randn(1, subject.heads, subject.tokens, subject.size, generator=generator) for _ in range(4)]


def _forward_and_backward(attention: Attention, inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Return a call that returns out, dQ, dK and dV."""
    *leaves, grad = inputs
    leaves = [x.clone().requires_grad_() for x in leaves]

    def call() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = attention(*leaves)
        out.backward(grad)  # type: ignore[no-untyped-call]
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return call


def prepare(subject: CpSubject, alone: bool) -> list[str]:
    """Fill `calls` with checked candidates and return their names. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    calls.clear()
    inputs, rank, world = _inputs(subject), dist.get_rank(), dist.get_world_size()
    whole = _forward_and_backward(_whole, inputs)
    if alone:
        calls[ALONE] = whole
        return [ALONE]
    layout = SequenceLayout(subject.tokens, world)
    expected = [layout.shard(x, rank, 2) for x in whole()]
    shards = [layout.shard(x, rank, 2) for x in inputs]
    for name, attention in _candidates(subject).items():
        calls[name] = call = _forward_and_backward(attention, shards)
        for actual, expected_result in zip(call(), expected, strict=True):
            torch.testing.assert_close(
                actual, expected_result, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    return list(calls)


def measure(
    subject: CpSubject, ranks: RankPool, alone: RankPool, rounds: int, seconds: float = 0.3
) -> tuple[dict[str, list[float]], float]:
    """Return what `alternate` does, for all candidates."""
    where = {name: each for each in (alone, ranks) for name in each.run(prepare, subject, each is alone)[0]}
    return alternate(where, rounds, seconds)


def main() -> None:
    """Print a table, and keep it."""
    parser = Parser(__doc__)
    parser.option("--ranks", 4, "number of ranks")
    parser.option("--threads", 2, "number of threads of the single process")
    parser.option("--tokens", CpSubject.tokens, "length of the sequence in tokens")
    parser.option("--rounds", 9, "number of rounds")
    arguments = parser.parse_args()
    subject, world = CpSubject(arguments.tokens), arguments.ranks
    with pools(world, arguments.threads) as (ranks, alone):
        times, others = measure(subject, ranks, alone, arguments.rounds)
    row = {"ranks": world, **vars(subject)}
    write_row(
        "ring_attention",
        row | report(f"{world} ranks, {subject.tokens} tokens", times, others, ALONE),
        arguments.keep,
    )


if __name__ == "__main__":
    main()
