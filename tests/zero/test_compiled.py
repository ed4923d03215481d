"""torch.compile of a model whose parameters an engine has taken over: the same training, to the bit, at every stage."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import flat_group
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.ranks import on_ranks
from tpfuse.testing.tiers import exhaustive
from tpfuse.zero.flat_adamw import FlatAdamW
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.sharded_adamw import ShardedAdamW

STEPS, MICRO_BATCHES = 3, 2


def _model(tp: int) -> GPT:
    mesh = mesh_of(dist.get_world_size() // tp, tp)
    model = GPT(GPTConfig(61, 8, 32, 1, 4), device_mesh=mesh["tp"] if tp > 1 else None)
    initialize(model, 1)
    return model


def _engine(model: GPT, stage: int, tp: int) -> tuple[GradientBuckets | FullySharded, FlatAdamW | ShardedAdamW]:
    mesh = mesh_of(dist.get_world_size() // tp, tp)
    if stage == 3:
        sharded = FullySharded(model, mesh=mesh, units=model.transformer.h)
        return sharded, ShardedAdamW(sharded)
    data, world = flat_group(mesh, "dp"), dist.group.WORLD
    buckets = GradientBuckets(model, stage=stage, data_group=data, world_group=world, bucket_bytes=20_000)
    return buckets, FlatAdamW(buckets)


def _trained(stage: int, tp: int, compiled: bool) -> tuple[list[float], list[Tensor]]:
    """Train for STEPS; return (losses, this rank's weights)."""
    model = _model(tp)
    engine, optimizer = _engine(model, stage, tp)
    forward: nn.Module = model
    if compiled:
        torch._dynamo.reset()
        # fully_shard's hooks cannot be traced; the hooks of the buckets take gradients after the graph.
        forward = torch.compile(model, backend="aot_eager", fullgraph=stage < 3)
    losses = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            engine.start(last=number == MICRO_BATCHES - 1)
            seed = 100 * step + 10 * number + dist.get_rank() // tp
            ids = integers(seed, 2, 8, low=0, high=60, dtype=torch.int64)
            loss = forward(ids, ids.roll(-1, 1), loss_weight=0.1)
            loss.backward()
            losses.append(loss.item())
        engine.finish()
        optimizer.step(1e-2)
    weights = [local_tensor(parameter).detach().clone() for parameter in model.parameters()]
    if isinstance(engine, GradientBuckets):
        engine.close()
    return losses, weights


@pytest.mark.parametrize(("stage", "world", "tp"), [(2, 2, 1), *exhaustive((0, 2, 1), (1, 2, 1), (2, 2, 2), (3, 4, 2))])
@on_ranks("world")
def test_compiled_models_train_alike(stage: int, tp: int) -> None:
    (losses, weights), (compiled_losses, compiled_weights) = (_trained(stage, tp, on) for on in (False, True))
    assert losses == compiled_losses
    for weight, compiled in zip(weights, compiled_weights, strict=True):
        assert torch.equal(weight, compiled)
    initial = next(local_tensor(parameter) for parameter in _model(tp).parameters())
    assert stage == 3 or not torch.equal(weights[0], initial)
