"""The update that `benchmarks.bench_zero` times: from whole gradients on every rank to new parameters on every rank.

The candidates of tpfuse are one sweep over the buckets of stage 1, or, as clipping requires it, two sweeps with the
norm between them (without the all-reduce of that one number). The peers are reduce-scatter, torch's fused AdamW on the
shard and all-gather over Gloo, of the whole or of pieces as large as buckets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cpu_ranks import Call
from benchmarks.harness import OURS
from benchmarks.zero_training import DECAY, LR, RATES, TOLERANCE, engine_of

WHOLE, PIECES = "Gloo, whole", "Gloo, in pieces"
SWEEP, NORM_FIRST = f"{OURS} one sweep", f"{OURS} norm first"
_PIECE = 25 * 2**20  # approximate bytes of a piece
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, where it exists
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Update:
    """An update of `matrices` matrices of size x size: 50M parameters."""

    matrices: int = 12
    size: int = 2048

    def drawn(self, seed: int) -> Tensor:
        """Return flat random numbers: the gradient of rank `seed`, or the parameters before the update for -1."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randn(self.matrices * self.size**2, generator=generator)

    def calls(self) -> dict[str, Call]:
        """Return a checked update by each candidate, the baseline first. Every rank must call it."""
        world = dist.get_world_size()
        before, gradient = self.drawn(-1), self.drawn(dist.get_rank())
        total, after = self.drawn(0), before.clone()
        for rank in range(1, world):
            total += self.drawn(rank)
        _adamw_of(after, total)()
        candidates = {
            WHOLE: _by_gloo(before, gradient, 1),
            PIECES: _by_gloo(before, gradient, max(2, gradient.nbytes // _PIECE)),
            SWEEP: _ours(self, before, gradient, norm=False),
            NORM_FIRST: _ours(self, before, gradient, norm=True),
        }
        for name, (call, parameters) in candidates.items():
            call()
            apart = float((parameters() - after).abs().max())
            # The rounding error of a sum near zero depends on its order, and grows with the number of ranks.
            assert apart <= LR * TOLERANCE * world / 2, f"{name}: {apart:.1e} from where AdamW comes to with the sum"
        return {name: call for name, (call, _) in candidates.items()}


def _ours(subject: Update, before: Tensor, gradient: Tensor, *, norm: bool) -> tuple[Call, Callable[[], Tensor]]:
    """Return a step of the engine without its backward pass, and a function that returns the parameters.

    `before` and `gradient` are copied.
    """
    shape = subject.matrices, subject.size, subject.size
    model = nn.ParameterList([nn.Parameter(x.clone()) for x in before.view(shape)])
    engine, optimizer = engine_of(model, 1, dist.group.WORLD)
    for bucket in engine.buckets:
        assert bucket.accumulated is not None
        for segment in bucket.layout.segments:
            bucket.layout.view(bucket.accumulated, segment).copy_(gradient.view(shape)[int(segment.name)])

    def call() -> None:
        engine.start(last=True)
        for bucket in engine.buckets:  # this has the effect of a backward pass that accumulated the gradients
            bucket.take_all()
        engine.finish(sums=norm)
        if norm:  # the sums replace the gradients, which therefore grow from call to call
            engine.squared_norm().item()
        optimizer.step(LR)

    return call, lambda: torch.cat([x.detach().flatten() for x in model])


def _by_gloo(before: Tensor, gradient: Tensor, pieces: int) -> tuple[Call, Callable[[], Tensor]]:
    """Return a call that updates the parameters over Gloo, and a function that returns the parameters.

    All reduce-scatters are under way while the first shard is updated, and all-gathers while the next shards are
    updated.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters, gradients = before.clone().chunk(pieces), gradient.chunk(pieces)
    shards = [piece.chunk(world)[rank].clone() for piece in parameters]
    sums = [torch.empty_like(shard) for shard in shards]
    updates = [_adamw_of(*pair) for pair in zip(shards, sums, strict=True)]

    def call() -> None:
        summing = [_reduce_scatter(*pair, async_op=True) for pair in zip(sums, gradients, strict=True)]
        gathering = []
        for work, update, piece, shard in zip(summing, updates, parameters, shards, strict=True):
            work.wait()
            update()
            gathering.append(_all_gather(piece, shard, async_op=True))
        for work in gathering:
            work.wait()

    return call, lambda: torch.cat(parameters)


def _adamw_of(parameter: Tensor, gradient: Tensor) -> Call:
    """Return a step of torch's AdamW in place."""
    leaf = nn.Parameter(parameter)
    leaf.grad = gradient
    return torch.optim.AdamW([leaf], lr=LR, weight_decay=DECAY, fused=True, **RATES).step
