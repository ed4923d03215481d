"""ZeRO's stages with compiled kernels, on ranks that have a GPU each or share one.

CPU ranks run the same tests, so that this file is tested where there is no GPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zero.zero_training import torchs_adamw
from tpfuse.comm import collectives
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import GpuRankPool, RankPool, pool
from tpfuse.zero import shard
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.offload import MemoryStore
from tpfuse.zero.optimizer import ZeroOptimizer

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = pytest.mark.timeout(600)
STEPS, LR, CLIP = 4, 1e-2, 1.0
CASES = [(0, True, False), (1, True, False), (1, False, False), (2, True, False), (1, True, True)]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    running = GpuRankPool(request.param)
    yield running
    running.close()


def _model(dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 129), nn.Tanh(), nn.Linear(129, 9))
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape) / 8)
    return model.to(dtype)


def _loss(model: nn.Module, step: int, rank: int, world: int, like: Tensor) -> Tensor:
    x = normal(100 * step + rank, 7, 33).to(like)
    return model(x).float().square().sum() / (7 * world)


def _plainly(world: int, dtype: torch.dtype, clip: bool) -> list[Tensor]:
    """Train with torch on one CPU rank with all ranks' inputs, in float32 as the masters of a half type."""
    model = _model(dtype).float()
    named = dict(model.named_parameters())
    optimizer = torchs_adamw(named, LR, betas=(0.9, 0.999), eps=1e-8)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            _loss(model, step, rank, world, named["0.weight"]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _train(device: str, dtype: torch.dtype, stage: int, sums: bool, offload: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = _model(dtype).to(device)
    with use(implementation="fused"):
        buckets = shard(model, stage=stage, bucket_bytes=20_000)
        store = MemoryStore("cpu", 2**12, pinned=device == "cuda") if offload else None
        optimizer = BucketUpdater(buckets, weight_decay=0.1, store=store)
        for step in range(STEPS):
            buckets.start(last=True)
            _loss(model, step, rank, world, next(model.parameters())).backward()
            buckets.finish(sums=sums)
            factor = 1.0
            if sums:
                factor = min(1.0, CLIP / (buckets.norm() + 1e-6))
            optimizer.step(LR, factor)
    expected = _plainly(world, dtype, sums)
    for found, wanted in zip(model.parameters(), expected, strict=True):
        apart = (found.detach().float().cpu() - wanted).abs()
        # A step changes a weight by at most LR, and in bfloat16 a small gradient may have the other sign.
        assert apart.max() <= LR / 10 if dtype is torch.float32 else apart.mean() <= LR / 2
        whole = collectives.all_gather(found.detach().view(1, -1), dist.group.WORLD)
        assert (whole == whole[0]).all(), "ranks differ"
    buckets.close()


def _loop(device: str, micro_batches: range, stage: int, options: dict[str, Any]) -> list[Tensor]:
    """Train in a loop of one's own, whose step has these micro-batches on this rank, and return the weights."""
    model = _model(torch.float32).to(device)
    with use(implementation="fused"):
        optimizer = ZeroOptimizer(model, stage=stage, lr=LR, weight_decay=0.1, bucket_bytes=20_000, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in micro_batches:
                last = number == micro_batches[-1]
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    _loss(model, step, number, len(micro_batches), model[0].weight).backward()
            optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
        weights = [p.detach().cpu() for p in model.parameters()]
        optimizer.engine.close()
    return weights


def _loop_on_ranks(device: str, stage: int, options: dict[str, Any]) -> list[Tensor]:
    rank = dist.get_rank()
    return _loop(device, range(2 * rank, 2 * rank + 2), stage, options)


def _check_loop(ranks: RankPool, world: int, device: str, stage: int, options: dict[str, Any]) -> None:
    expected = _loop("cpu", range(2 * world), 0, options)
    first, *others = ranks.run(_loop_on_ranks, device, stage, options)
    for number, (found, wanted) in enumerate(zip(first, expected, strict=True)):
        apart = (found - wanted).abs()
        # Muon multiplies the middle matrix in bfloat16, which a GPU sums in another order.
        other_sums = device == "cuda" and number == 2 and "algorithm" in options
        assert (apart.mean() if other_sums else apart.max()) <= LR / 10
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True)), "ranks differ"


# Gradients that accumulate in shards, Muon on the middle matrix, and moments in bfloat16.
LOOPS = [(2, {}), (1, {"algorithm": "muon", "matrices": {"2.weight": 1}}), (2, {"state_dtype": "bfloat16"})]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("stage", "options"), LOOPS, ids=str)
def test_a_loop_on_gpus_equals_one_cpu_rank(ranks: RankPool, stage: int, options: dict[str, Any]) -> None:
    _check_loop(ranks, ranks.world, "cuda", stage, options)


@pytest.mark.exhaustive
def test_a_loop_on_cpus_equals_one_cpu_rank() -> None:
    for stage, options in LOOPS:
        _check_loop(pool(2), 2, "cpu", stage, options)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("stage", "sums", "offload"), CASES)
def test_training_on_gpus_equals_one_cpu_rank(
    ranks: RankPool, dtype: torch.dtype, stage: int, sums: bool, offload: bool
) -> None:
    ranks.run(_train, "cuda", dtype, stage, sums, offload)


def test_training_on_cpus_equals_one_cpu_rank() -> None:
    pool(2).run(_train, "cpu", torch.bfloat16, 1, True, True)
