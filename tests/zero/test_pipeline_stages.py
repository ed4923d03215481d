"""The engines under a pipeline: many passes of several stages in one step, and parameters that two stages share."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support.meshes import mesh_of
from tests.support.staged_model import (
    FOUR,
    INTERLEAVED,
    TIED,
    TOKENS,
    V_SHAPE,
    VOCABULARY,
    WIDTH,
    Block,
    Layout,
    Passes,
    Reference,
    Staged,
    check_close,
    engine_of,
    model_of,
    parts,
    run_step,
)
from tests.support.tiers import pairwise
from tests.support.zero_training import ADAMW, LR
from tpfuse.comm import collectives
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.parallel.pipeline.shared_parameters import SharedParameters
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import adamw, shard
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.micro_batches import RankGroups

STEPS = 3
Owned = list[tuple[str, str, Any]]


def train(layout: Layout, zero: int, batches: int, split: bool) -> Owned:
    """Train STEPS steps, compare gradients, norms and weights; return what this rank saves."""
    reference = Reference(layout, batches)
    engine = engine_of(model_of(layout, reference), layout, zero)
    optimizer = adamw(engine, **ADAMW)
    for step in range(STEPS):
        run_step(layout, engine, reference, split, batches, step)
        engine.finish()
        gradients = {name: p.grad for name, p in reference.named.items() if p.grad is not None}
        for name, found, expected in parts(engine, gradients):
            check_close(name, found, expected, gradients[name])
        squared = collectives.all_reduce(engine.squared_norm(), engine.world_group)
        expected = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()
        assert (squared - expected).abs() <= 1e-12 * expected
        assert engine.nonfinite() == []
        reference.optimizer.step()
        optimizer.step(LR)
        for name, parameter in engine.model.named_parameters():
            whole = reference.named[name].detach()
            part = whole[tuple(slice(*each) for each in local_slices(parameter))]
            check_close(name, local_tensor(parameter), part, whole)
    return [(each.name, each.kind, each.slices) for each in optimizer.rectangles() if each.is_owner]


def check_saved_once(layout: Layout, owned: list[Owned]) -> None:
    """Check that the ranks save each element of each parameter and moment exactly once."""
    model = Staged(range(layout.count), layout.count)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        saved = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
        for name, its_kind, slices in (each for rank in owned for each in rank):
            if its_kind == kind:
                saved[name][tuple(slice(*each) for each in slices)] += 1
        for name, count in saved.items():
            assert (count == 1).all(), name


CASES = [
    (Layout(dp=2), 1, 2, True),
    (Layout(dp=2), 3, 2, True),
    (Layout(V_SHAPE), 0, 2, True),
    (Layout(INTERLEAVED), 2, 5, False),
    (Layout(tp=2), 2, 2, True),
]
LAYOUTS = [Layout(), Layout(dp=2), Layout(tp=2), Layout(INTERLEAVED, 2), Layout(V_SHAPE), Layout(V_SHAPE, 2)]
LAYOUTS += [Layout(V_SHAPE, 1, 2), Layout(FOUR)]
NAMES, ROWS = pairwise(first=0, layout=LAYOUTS, zero=range(4), batches=[5, 1, 2], split=[True, False])


@pytest.mark.parametrize(NAMES, [*CASES, *(row for row in ROWS if row.values not in CASES)])
def test_stages_train_like_the_whole_model(layout: Layout, zero: int, batches: int, split: bool) -> None:
    """Check layouts, ZeRO's stages, numbers of micro-batches, and whole and split backward passes."""
    check_saved_once(layout, pool(layout.world).run(train, layout, zero, batches, split))


@on_ranks(4)
def test_buckets_are_reduced_with_the_last_arrival_and_tied_ones_at_the_end() -> None:
    layout, counts = Layout(dp=2), []
    reference = Reference(layout, 5)
    engine = engine_of(model_of(layout, reference), layout, 1)
    assert isinstance(engine, GradientBuckets)
    for name in list(engine.trained):
        if name.endswith(("seldom", "never")):  # without a gradient a bucket is complete in finish() only
            engine.trained[name].requires_grad_(False)
    engine = engine_of(engine.model, layout, 1)
    tied = [bucket.layout.kind == "tied" for bucket in engine.buckets]
    assert tied == sorted(tied) and tied.count(True) == 1 and len(tied) > 3
    run_step(
        layout, engine, reference, False, 5, 1, lambda kind, *_: kind == "backward" and counts.append(engine._next)
    )
    assert counts == [0] * 4 + [tied.count(False)], "all gradients arrive once more in the last backward pass"
    engine.finish()
    assert engine._next == len(tied)


@on_ranks(4)
def test_stage_3_reduces_a_unit_with_its_last_gradient() -> None:
    layout, counts = Layout(dp=2), []
    reference = Reference(layout, 3)
    model = model_of(layout, reference)
    for name, parameter in model.named_parameters():
        if name.endswith(("seldom", "never")):  # without a gradient a unit is complete after the last pass
            parameter.requires_grad_(False)
    engine = engine_of(model, layout, 3)
    assert isinstance(engine, FullySharded)
    first, second = [block for block in model.blocks if isinstance(block, Block)]

    def watch(kind: str, _: int, batch: int) -> None:
        if (kind, batch) == ("forward", 0):  # now the parameters are gathered; the hook is called after the engine's
            first.up.bias.register_post_accumulate_grad_hook(lambda _: counts.append(len(engine._unreduced)))

    run_step(layout, engine, reference, False, 3, 1, watch)
    before = [3, 3]  # two blocks, and the model with what is in no block
    assert counts == [*before, 2], "in the last pass the second block is reduced before the gradients of the first one"
    assert not engine._unreduced
    engine.finish()
    assert isinstance(second.up.bias, DTensor), "the parameters are free"


@pytest.mark.parametrize("zero", [0, 2, 3])
@on_ranks(2)
def test_a_step_that_is_discarded_leaves_nothing(zero: int) -> None:
    """Check that gradients of a whole step, and of one that fails in the middle, are not in the next step's sums."""
    layout = Layout(V_SHAPE)
    reference = Reference(layout, 2)
    engine = engine_of(model_of(layout, reference), layout, zero)

    def fail(kind: str, stage: int, batch: int) -> None:
        if (kind, batch) == ("weight", 0):
            raise InterruptedError

    run_step(layout, engine, reference, True, 2, 0)
    with pytest.raises(ValueError, match=r"begun the last micro-batch of a step: call finish\(\) first"):
        engine.start(last=False, again=True)  # gradients have arrived
    engine.discard()
    with pytest.raises(InterruptedError):
        run_step(layout, engine, reference, True, 2, 0, fail)
    engine.abandon()
    run_step(layout, engine, reference, True, 2, 0)
    engine.finish()
    gradients = {name: p.grad for name, p in reference.named.items() if p.grad is not None}
    for name, found, expected in parts(engine, gradients):
        check_close(name, found, expected, gradients[name])


@on_ranks(4)
def test_stage_3_gathers_and_reduces_once_in_a_step() -> None:
    layout = Layout(INTERLEAVED, dp=2)
    reference = Reference(layout, 5)
    engine = engine_of(model_of(layout, reference), layout, 3)
    assert isinstance(engine, FullySharded)
    bytes_of_shards = sum(local_tensor(member.sharded).nbytes for member in engine.members)  # all shapes are even
    for step in range(1, 3):
        run_step(layout, engine, reference, True, 5, 1)
        assert all(not isinstance(each, DTensor) for each in engine.model.parameters()), "gathered until finish()"
        engine.finish()
        assert engine.traffic.received == 2 * step * bytes_of_shards, "the all-gather and the reduce-scatter"
        assert all(isinstance(each, DTensor) for each in engine.model.parameters())
        engine.clear_gradients()
    with torch.no_grad():
        engine.model(torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64), 2 - (dist.get_rank() > 1), torch.ones(1), 1)
    first = next(block for block in engine.model.blocks if isinstance(block, Block))
    assert isinstance(first.norm.weight, DTensor), "outside of a step each unit frees its parameters"


@on_ranks(4)
def test_split_passes_accumulate_half_gradients_in_float32() -> None:
    layout = Layout(dp=2)
    reference, sums = Reference(layout, 5), []
    for split in (False, True):
        engine = engine_of(model_of(layout, reference).bfloat16(), layout, 3)
        assert isinstance(engine, FullySharded)
        engine.start(last=True, backwards=5)
        rows, pp = torch.ones(2), layout.mesh.get_local_rank("pp")
        passes = Passes(engine.model, split)  # type: ignore[arg-type]
        for batch in range(5):
            x = normal(batch, 2, TOKENS, WIDTH).bfloat16()
            x = integers(batch, 2, TOKENS, low=0, high=9, dtype=torch.int64) if pp == 0 else x
            passes.forward((pp, batch), x, rows, 1)
            passes.backward((pp, batch), normal(batch, 2, TOKENS, VOCABULARY if pp else WIDTH).bfloat16())
        for batch in range(5):
            passes.weight((pp, batch))
        engine.finish()
        sums.append({member.name: member.gradient for member in engine.members})
    assert all(torch.equal(sums[0][name], found) for name, found in sums[1].items())


@on_ranks(2)
def test_wrong_use_is_refused() -> None:
    layout, mesh = Layout(V_SHAPE), mesh_of(1, 2)
    reference = Reference(layout, 2)
    first = dist.get_rank() == 0
    engine = shard(model_of(layout, reference), layout.mesh, stage=0)
    for options in ({"last": False, "backwards": 2}, {"last": True, "backwards": 0}):
        with pytest.raises(ValueError, match="expected at least 1, and 1 without last"):
            engine.start(**options)  # type: ignore[arg-type]
    if first:  # `uses` is missing, so the third gradient of the embedding is one too many
        with pytest.raises(ValueError, match=r"embed.weight.grad is in the memory of ZeRO's gradient buckets"):
            run_step(layout, engine, reference, False, 2, 1)

    def message(model: Staged, mesh: DeviceMesh | None, name: str, ends: tuple[int, int] | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            shard(model, mesh, stage=0, shared=SharedParameters(tied=[name], ends=ends))
        return str(caught.value)

    assert message(Staged([0], 2), None, TIED).startswith("embed.weight is tied to a parameter of another rank: expe")
    assert message(Staged([0], 2), None, "embed.bias").startswith("tied parameter embed.bias: the model has no")
    assert message(Staged([0], 2), mesh, TIED, (0, 1)).startswith('shard: mesh has no dimension "pp", along which')
    partial, sharded = Staged([0], 2), Staged([0], 2, mesh["tp"])
    assert message(sharded, mesh, "blocks.0.never").startswith(
        "blocks.0.never is tied and replicated: expected a shard on each"
    )
    partial.embed.sum_gradients = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^embed.weight is tied, and its gradients are partial sums"):
        GradientBuckets(partial, RankGroups(ends=dist.group.WORLD), tied=[TIED])
    lonely = shard(Staged([0], 2), mesh_of(2, 1), stage=3)
    with pytest.raises(ValueError, match=r'start\(backwards=2\): expected 1, because the mesh has no dimension "pp"'):
        lonely.start(last=True, backwards=2)
