"""The training steps that `benchmarks.bench_zero` times: tpfuse's stages, and torch's data parallelism over Gloo.

All candidates train the GPT of `tpfuse.models.gpt`, with plain parameters, from the same weights on the same batches.
Gradients are clipped: by clip_grad_norm_ for torch; tpfuse computes the norm from its shards. The limit is so low that
every step is clipped.

torch's gradients are views of DDP's buckets, its AdamW is the fused one (on CPUs four times as fast as foreach), and
its ZeroRedundancyOptimizer keeps parameters as views of buckets: each of these makes the peer faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cpu_ranks import Call, whole
from benchmarks.harness import OURS
from benchmarks.torch_gpt import decay_groups
from tpfuse.choices import Accumulate
from tpfuse.comm.mesh import build_mesh
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.zero import adamw, shard
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.engine import Engine, RankGroups
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.unit_updater import UnitUpdater

ALONE, DDP, ZERO, SHARD = "alone", "DDP", "DDP + ZeRO", "fully_shard"
STAGES = tuple(f"{OURS} stage {stage}" for stage in range(4))
LR, DECAY, CLIP = 1e-3, 0.1, 0.1
# With this eps an update depends on the size of a gradient: rounding changes it little, and a missing factor or
# rank changes it much.
RATES: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-4}
CHECKED = 3  # the number of steps that are compared with plain AdamW
TOLERANCE = 1e-3  # relative, for a norm and for the length of all updates
Step = Callable[[int], float]  # number of the step -> norm of the gradient before clipping


@dataclass(frozen=True)
class Training:
    """A GPT on bytes, and the batch of one rank. With several micro-batches the candidates are `ACCUMULATING`."""

    n_layer: int = 6
    n_embd: int = 768
    n_head: int = 12
    tokens: int = 64
    sequences: int = 4
    micro_batches: int = 1

    def model(self) -> GPT:
        """Return the model, always with the same weights."""
        model = GPT(GPTConfig(256, self.tokens, self.n_embd, self.n_layer, self.n_head))
        initialize(model, 1)
        return model

    def loss(
        self, model: nn.Module, number: int, ranks: Sequence[int], share: float = 1.0, part: int | None = None
    ) -> Tensor:
        """Return the mean over the tokens of these ranks in step `number`, times a share; part: a micro-batch of it."""
        ids = torch.cat([self._batch(number, rank) for rank in ranks])
        weight = share / (len(ids) * self.tokens)
        if part is not None:
            ids = ids.chunk(self.micro_batches)[part]
        loss: Tensor = model(ids[:, :-1], ids[:, 1:], loss_weight=weight)
        return loss

    def _batch(self, number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randint(256, (self.sequences, self.tokens + 1), generator=generator)

    def calls(self) -> dict[str, Call]:
        """Return a checked step of each candidate, the baseline first. Every rank must call it."""
        together, own = _plain(self, range(dist.get_world_size())), _plain(self, [dist.get_rank()])
        calls: dict[str, Call] = {}
        for name, make in (CANDIDATES if self.micro_batches == 1 else ACCUMULATING).items():
            model = self.model()
            step = make(self, model)
            norms = [step(number) for number in range(CHECKED)]
            (own if name == ALONE else together).check(name, norms, model)
            calls[name] = partial(step, CHECKED)
        return calls


def _alone(subject: Training, model: GPT) -> Step:
    engine = GradientBuckets(model, RankGroups(None, None, None), stage=0)
    return _engine_step(subject, model, engine, adamw(engine, weight_decay=DECAY, **RATES), None)


def _by_mesh(stage: int, accumulate: Accumulate, subject: Training, model: GPT) -> Step:
    mesh = build_mesh("cpu", dp=dist.get_world_size(), tp=1)
    engine = shard(model, mesh, stage=stage, units=model.transformer.h, accumulate=accumulate)
    return _engine_step(subject, model, engine, adamw(engine, weight_decay=DECAY, **RATES), dist.group.WORLD)


def _engine_step(
    subject: Training,
    model: GPT,
    engine: Engine,
    optimizer: BucketUpdater | UnitUpdater,
    group: dist.ProcessGroup | None,
) -> Step:
    rank, share = dist.get_rank(), 1.0 if group is None else 1 / group.size()

    def step(number: int) -> float:
        for part in range(subject.micro_batches):
            engine.start(last=part == subject.micro_batches - 1)
            subject.loss(model, number, [rank], share, part).backward()  # type: ignore[no-untyped-call]
        engine.finish()
        norm = engine.norm()
        optimizer.step(LR, min(1.0, CLIP / (norm + 1e-6)))
        return norm

    return step


def _torch_step(
    subject: Training, called: nn.Module, model: GPT, optimizer: torch.optim.Optimizer, ranks: Sequence[int]
) -> Step:
    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        subject.loss(called, number, ranks).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        return float(whole(norm))

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(model, DECAY), lr=LR, fused=True, **RATES)


def _data_parallel(subject: Training, model: GPT) -> Step:
    called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _torch_step(subject, called, model, _adamw(model), [dist.get_rank()])


def _zero_redundancy(subject: Training, model: GPT) -> Step:
    called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        decay_groups(model, DECAY), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True, **RATES
    )
    return _torch_step(subject, called, model, optimizer, [dist.get_rank()])


def _fully_shard(subject: Training, model: GPT) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return _torch_step(subject, model, model, _adamw(model), [dist.get_rank()])


CANDIDATES: dict[str, Callable[[Training, GPT], Step]] = {
    ALONE: _alone,
    **{name: partial(_by_mesh, stage, "sharded") for stage, name in enumerate(STAGES)},
    DDP: _data_parallel,
    ZERO: _zero_redundancy,
    SHARD: _fully_shard,
}
ACCUMULATING: dict[str, Callable[[Training, GPT], Step]] = {
    f"{STAGES[stage]}, {accumulate}": partial(_by_mesh, stage, accumulate)
    for stage, accumulate in ((2, "whole"), (2, "sharded"), (3, "whole"), (3, "sharded"))
}


@dataclass(frozen=True)
class Plain:
    """The result of AdamW's first steps on the batches of some ranks: norms, parameters before and after."""

    norms: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    def check(self, name: str, norms: list[float], model: nn.Module) -> None:
        """Raise AssertionError where a candidate took other steps."""
        for actual, expected in zip(norms, self.norms, strict=True):
            assert abs(actual - expected) <= TOLERANCE * expected, f"{name}: norms {norms}, plain AdamW's {self.norms}"
            assert actual > CLIP, f"{name}: a gradient of norm {actual} is not clipped"
        parameters = _parameters(model)
        error = sum(float((parameters[key] - x).double().square().sum()) for key, x in self.after.items())
        length = sum(float((self.before[key] - x).double().square().sum()) for key, x in self.after.items())
        apart = (error / length) ** 0.5
        assert apart <= TOLERANCE, f"{name}: {apart:.1e} of the way from where plain AdamW comes to"


def _plain(subject: Training, ranks: Sequence[int]) -> Plain:
    model = subject.model()
    before = _parameters(model)
    step = _torch_step(subject, model, model, _adamw(model), ranks)
    norms = [step(number) for number in range(CHECKED)]
    return Plain(norms, before, _parameters(model))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(x.detach()).clone() for name, x in model.named_parameters()}
