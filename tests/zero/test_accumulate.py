"""Between micro-batches, stages 2 and 3 keep shards of gradients, which are as many bytes as `fully_shard` keeps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive, needs_torch
from tpfuse.choices import Accumulate
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import shard
from tpfuse.zero.compression import Bf16Compression
from tpfuse.zero.fsdp_internals import whole_gradients
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.optimizer import ZeroOptimizer
from tpfuse.zero.reducer.direct import GRADIENT_BUFFERS, DirectReducer

MICRO_BATCHES, WIDTH, BUCKET = 4, 32, 1000


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def loss_of(model: nn.Module, micro_batch: int) -> Tensor:
    loss: Tensor = model(normal(micro_batch + 10 * dist.get_rank(), 3, WIDTH)).square().mean()
    return loss


def held_by(engine: FullySharded) -> int:
    """Return the bytes of gradients that `fully_shard` holds, in shards and whole."""
    held = [member.place.sums for member in engine.members]
    for unit in engine._units:
        held += [*whole_gradients(unit.module).values(), *(x.grad for x in unit.gathered.values())]
    return sum(local_tensor(x).nbytes for x in held if x is not None)


def held_in(engine: GradientBuckets) -> int:
    """Return the bytes of gradients and sums that the buckets hold, but for those of the buffers that are sent."""
    (reducer,) = engine.reducers
    assert isinstance(reducer, DirectReducer)
    buffers = [each[0][reducer.memory.rank] for each in reducer._gradient_buffers]
    assert len(buffers) == GRADIENT_BUFFERS and max(x.numel() for x in buffers) <= WIDTH * (WIDTH + 1) + 32
    waiting = [x for bucket in engine.buckets for x in (*bucket.accumulated, *bucket._waiting.values())]
    return sum(x.nbytes for x in (*reducer._separate_sums.values(), *waiting))


def most(stage: int, accumulate: Accumulate = "sharded", discards: bool = False) -> tuple[float, list[Any]]:
    """Return the most that a rank holds between micro-batches, in shares of all gradients, and its sums of the step.

    discards: whether a step is discarded before, after its first micro-batch.
    """
    model, found = made(), []
    whole = sum(parameter.nbytes for parameter in model.parameters())
    mesh, options = mesh_of(dist.get_world_size(), 1), {"units": list(model), "bucket_bytes": BUCKET}
    engine = shard(model, mesh, stage=stage, accumulate=accumulate, **options)  # type: ignore[arg-type]
    if discards:
        engine.start(last=False)
        if stage == 3 or dist.get_rank():  # at stage 2 the gradients of a rank may be missing
            loss_of(model, 7).backward()  # type: ignore[no-untyped-call]
        engine.discard()
    for index in range(MICRO_BATCHES):
        engine.start(last=index == MICRO_BATCHES - 1)
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        found.append(held_by(engine) if isinstance(engine, FullySharded) else held_in(engine))
    engine.finish()
    if isinstance(engine, FullySharded):
        return max(found[:-1]) / whole, [member.gradient for member in engine.members]
    return max(found[:-1]) / whole, [bucket.reduced_shard for bucket in engine.buckets]


@on_ranks(2)
def test_a_rank_holds_at_most_the_gradients_that_fully_shard_holds() -> None:
    """Stage 2 has buffers of three buckets besides. The sums are the same to the bit, also after a discarded step."""
    for stage in (2, 3):
        (share, sums), (_, again) = most(stage), most(stage, discards=True)
        assert share <= 0.5 * 1.02, "buckets are padded"
        assert all(torch.equal(x, y) for x, y in zip(sums, again, strict=True))
        more, wholes = most(stage, "whole")
        assert more >= 1.0 + 0.5 * (stage == 2)
        for x, y in zip(sums, wholes, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


def replicated() -> None:
    """Two micro-batches are reduced within a replica, and the last one, which sums over the replicas, has no pass."""
    model, plain, world = made(), made(), dist.get_world_size()
    engine = shard(model, mesh_of(world, 1), stage=3, units=list(model), replicas=2)
    assert isinstance(engine, FullySharded)
    engine.start(last=False)
    loss_of(model, 7).backward()  # type: ignore[no-untyped-call]
    engine.discard()
    received = engine.traffic.received
    for index in range(2):
        engine.start(last=False)
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        assert all(member.place.sums is None for member in engine.members), "they wait for the other replica"
        for rank in range(world):
            plain(normal(index + 10 * rank, 3, WIDTH)).square().mean().backward()
    engine.start(last=True)
    engine.finish()
    for member in engine.members:
        part = tuple(slice(*each) for each in local_slices(member.sharded))
        torch.testing.assert_close(member.gradient, plain.get_parameter(member.name).grad[part])  # type: ignore[index]
    if world == 2:
        sums = sum(member.gradient.nbytes for member in engine.members)
        assert engine.traffic.received - received == sums, "there was more than one sum over the replicas"


@needs_torch(2, 13, "older ones sum over the replicas in each micro-batch")
@pytest.mark.parametrize("world", [2, *exhaustive(4)])
def test_sums_wait_for_other_replicas_until_the_last_micro_batch(world: int) -> None:
    pool(world).run(replicated)


@on_ranks(2)
def test_gradients_that_come_after_a_reduced_pass_are_in_the_sums() -> None:
    """A caller hands them over, in no backward pass, and `finish` reduces them."""
    model = made()
    engine = shard(model, mesh_of(2, 1), stage=2, bucket_bytes=BUCKET)
    assert isinstance(engine, GradientBuckets)
    engine.start(last=True)
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    for parameter in (layer.weight for layer in model):  # without its bias a bucket waits for more
        parameter.grad = torch.full_like(parameter, 1000.0)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)
    engine.finish()
    for bucket in engine.buckets:
        for segment, part in bucket.layout.segments_in(bucket.shard):
            sums = bucket.reduced_shard[part.start - bucket.shard.start :][: len(part)]
            assert (sums - 2000.0 * segment.name.endswith("weight")).abs().max() < 500.0, segment.name


def test_virtual_ranks_refuse_what_they_cannot_order() -> None:
    """A step has the micro-batches of all virtual ranks of this rank, no more and no fewer."""
    engine = shard(made(), stage=1, virtual_ranks=2, micro_batches=2)
    engine.start(last=False)
    said = "expected 4 micro-batches on each rank, of 2 virtual ranks with 2 each"
    with pytest.raises(ValueError, match=rf"start\(last=True\) of micro-batch 2 of a step: {said}"):
        engine.start(last=True)
    engine.abandon()
    for _ in range(3):
        engine.start(last=False)
    with pytest.raises(ValueError, match=rf"start\(last=False\) of micro-batch 4 of a step: {said}"):
        engine.start(last=False)
    for options in ({"compression": Bf16Compression()}, {"gradient_dtype": "parameter"}, {"reduce_dtype": "parameter"}):
        with pytest.raises(ValueError, match="virtual_ranks: expected gradients in float32, without compression"):
            shard(made(), stage=1, virtual_ranks=2, **options)
    with pytest.raises(ValueError, match="ZeroOptimizer does not know which micro-batches virtual ranks have"):
        ZeroOptimizer(made(), stage=1, virtual_ranks=2)
