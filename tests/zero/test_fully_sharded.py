"""Stage 3 sums gradients over all ranks, sends as many bytes as theory says, and refuses what it cannot shard."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tests.zero.zero_training import (
    ADAMW,
    BATCH,
    CASES,
    LR,
    Case,
    Layout,
    Toy,
    engine_of,
    gpt,
    micro_batches,
    torchs_adamw,
    train_step,
    whole,
)
from tpfuse.choices import Accumulate
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.layers.local_parameter import Borrowed
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import shard
from tpfuse.zero.optimizer import ZeroOptimizer
from tpfuse.zero.unit_updater import UnitUpdater


def gradients(name: str, layout: Layout, accumulate: Accumulate) -> None:
    """Check the gradients of step 2, in which every parameter takes part, accumulated over three micro-batches."""
    expected = CASES[name]()
    expected.loss(torch.arange(BATCH), 2).backward()
    case, engine = engine_of(name, layout, accumulate=accumulate)
    batches = micro_batches(layout, 3)
    for rows in batches[:-1]:
        engine.start(last=False)
        case.loss(rows, 2).backward()
        assert all((member.place.sums is None) == (accumulate == "whole") for member in engine.members)
    engine.start(last=True)
    case.loss(batches[-1], 2).backward()
    engine.finish()
    for member in engine.members:
        parameter = expected.model.get_parameter(member.name)
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        part = wanted[tuple(slice(*each) for each in local_slices(member.sharded))]
        assert (member.gradient - part).abs().amax() <= 1e-13 if part.numel() else member.gradient.shape == part.shape
    assert engine.nonfinite() == []
    engine.members[0].gradient.view(-1)[:1] = math.nan
    rows = len(engine.members[0].gradient)
    assert engine.nonfinite() == ([engine.members[0].name] if rows else [])


@pytest.mark.parametrize(
    ("name", "layout", "accumulate"),
    [
        ("toy", Layout(dp=2), "sharded"),
        ("toy", Layout(dp=2), "whole"),
        *exhaustive(("toy", Layout(dp=4), "sharded"), ("gpt", Layout(tp=2, dp=2), "whole")),
    ],
)
def test_gradients_of_shards_are_sums_over_ranks(name: str, layout: Layout, accumulate: Accumulate) -> None:
    pool(layout.world).run(gradients, name, layout, accumulate)


def shard_size(shape: torch.Size, shards: int) -> int:
    """Return the number of elements of each shard, padding included.

    The first dimension is cut; if a rank would then have more than an eighth too much, a dimension that divides evenly.
    """
    first = -(-shape[0] // shards)
    if first * shards > shape[0] * 9 / 8 and any(size % shards == 0 for size in shape):
        return shape.numel() // shards
    return first * (shape.numel() // shape[0])


def theory(case: Case, layout: Layout, accumulation: int, gathered: int, reduced: int, reductions: int) -> int:
    """Return the bytes of a step, computed from sizes; `gathered` and `reduced` are the bytes of an element.

    reductions: in a step, within a replica; over the replicas there is one.
    """
    shards = layout.dp * layout.cp // layout.replicas
    total, taken = 0, set()
    for unit in (*case.units, case.model):
        parameters = [p for p in unit.parameters() if id(p) not in taken]
        taken |= {id(p) for p in parameters}
        sizes = [shard_size(local_tensor(p).shape, shards) for p in parameters]
        trained = sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad)
        twice = unit is not case.model and unit is not case.units[-1]  # forward and backward
        total += (shards - 1) * gathered * sum(sizes) * accumulation * (1 + twice)
        total += (shards - 1) * reduced * trained * reductions
        total += 2 * (layout.replicas - 1) * reduced * trained // layout.replicas
    return total


def traffic(
    layout: Layout, accumulation: int, dtype: torch.dtype, reduce_dtype: str, reduced: int, accumulate: Accumulate
) -> None:
    plain_mesh = mesh_of(layout.dp, layout.tp, layout.cp)
    before = gpt(dtype, plain_mesh)
    reductions = accumulation if accumulate == "sharded" else 1
    wanted = theory(before, layout, accumulation, dtype.itemsize, reduced, reductions)
    case, engine = engine_of("gpt", layout, dtype, reduce_dtype=reduce_dtype, accumulate=accumulate)
    optimizer = UnitUpdater(engine)
    for step in range(1, 3):
        train_step(case, engine, optimizer, micro_batches(layout, accumulation), step)
        assert engine.traffic.sent == engine.traffic.received == step * wanted > 0


@pytest.mark.parametrize(
    ("layout", "accumulation", "dtype", "reduce_dtype", "reduced", "accumulate"),
    [
        (Layout(dp=4, replicas=2), 3, torch.bfloat16, "parameter", 2, "sharded"),
        *exhaustive(
            (Layout(dp=3), 1, torch.float32, "float32", 4, "sharded"),
            (Layout(dp=2), 3, torch.bfloat16, "float32", 4, "whole"),
            (Layout(tp=2, dp=2), 1, torch.float64, "parameter", 8, "whole"),
        ),
    ],
)
def test_bytes_equal_those_of_theory(
    layout: Layout, accumulation: int, dtype: torch.dtype, reduce_dtype: str, reduced: int, accumulate: Accumulate
) -> None:
    pool(layout.world).run(traffic, layout, accumulation, dtype, reduce_dtype, reduced, accumulate)


def masters(world: int, accumulation: int) -> dict[str, Tensor]:
    """Return float32 masters of a bfloat16 model, trained with gradients accumulated in float32 over micro-batches."""
    case = gpt(torch.bfloat16)
    named = dict(case.model.named_parameters())
    master = {name: p.detach().float().requires_grad_() for name, p in named.items()}
    optimizer = torchs_adamw(master)
    for step in range(3):
        for name, parameter in named.items():
            parameter.data.copy_(master[name])
        for rows in torch.arange(BATCH).chunk(world * accumulation):
            case.loss(rows, step).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None
                wide, parameter.grad = parameter.grad.float(), None
                master[name].grad = wide if master[name].grad is None else master[name].grad + wide
        optimizer.step()
        optimizer.zero_grad()
    return master


def half(accumulation: int) -> dict[str, Tensor]:
    layout = Layout(dp=2)
    case, engine = engine_of("gpt", layout, torch.bfloat16)
    start = dict(gpt(torch.bfloat16).model.named_parameters())
    for member in engine.members:
        assert member.sharded.dtype == torch.float32
        part = start[member.name][tuple(slice(*each) for each in local_slices(member.sharded))]
        assert torch.equal(local_tensor(member.sharded), part.float()), (
            "weights are drawn in the model's dtype, then widened"
        )
    optimizer = UnitUpdater(engine, **ADAMW)
    for step in range(3):
        for index, rows in enumerate(micro_batches(layout, accumulation)):
            engine.start(last=index == accumulation - 1)
            case.loss(rows, step).backward()
        engine.finish()
        optimizer.step(LR)
    return whole(engine)


@pytest.mark.parametrize("accumulation", [3, *exhaustive(1)])
def test_half_parameters_have_float32_masters(accumulation: int) -> None:
    expected = masters(2, accumulation)
    for found in pool(2).run(half, accumulation):
        for name, weight in expected.items():
            assert (found[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name


class Scored(nn.Sequential):
    """A model that is trained by another method than `forward`."""

    def score(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).tanh()).square().sum()


@on_ranks(2)
def test_a_method_that_torch_knows_gathers_parameters_too() -> None:
    model, plain = (Scored(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    engine = shard(model, mesh_of(2, 1), stage=3, units=[model[0]])
    register_fsdp_forward_method(model, "score")
    rows = [normal(rank, 3, 4, dtype=torch.float64) for rank in range(2)]
    engine.start(last=True)
    model.score(rows[dist.get_rank()]).backward()
    engine.finish()
    plain.score(torch.cat(rows)).backward()
    for member in engine.members:
        part = tuple(slice(*each) for each in local_slices(member.sharded))
        torch.testing.assert_close(member.gradient, plain.get_parameter(member.name).grad[part])


@on_ranks(2)
def test_a_penalty_of_shards_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard(model, mesh_of(2, 1), stage=3, units=[model[0]]).start(last=True)
    penalty = sum(parameter.square().sum().full_tensor() for parameter in model.parameters())  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"grad was set, .*; compute a penalty of parameters in the model's forward"):
        (model(normal(0, 2, 4)).sum() + penalty).backward()


@on_ranks(2)
def test_parameters_that_cannot_be_sharded_are_named() -> None:
    mesh = mesh_of(2, 1)

    def message(change: Callable[[Toy], None], **options: Any) -> str:
        model = Toy()
        change(model)
        with pytest.raises(ValueError) as caught:
            shard(model, **{"mesh": mesh, "stage": 3, "units": model.blocks, **options})
        assert "\n" not in str(caught.value) and type(model) is Toy, "the model is unchanged"
        return str(caught.value)

    def scalar(model: Toy) -> None:
        model.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(())))

    def transposed(model: Toy) -> None:
        model.mixing = nn.Parameter(torch.randn(5, 3).T)

    def tie(model: Toy) -> None:
        model.blocks[2].up.weight = model.blocks[0].up.weight

    def alias(model: Toy) -> None:
        model.blocks[2].up.weight.data = model.blocks[0].up.weight.data

    def complex_(model: Toy) -> None:
        model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def taken(model: Toy) -> None:
        model.blocks[0].sum_gradients = Borrowed(False, own=False)

    assert message(taken).startswith(
        "another engine sums the gradients of blocks.0 over tensor-parallel ranks: shard a"
    )
    assert message(scalar).startswith("blocks.1.gain is a scalar")
    assert message(transposed).startswith("mixing is not contiguous")
    assert message(tie).startswith("blocks.0.up.weight and blocks.2.up.weight are one parameter in two units")
    assert message(alias).startswith("blocks.0.up.weight and blocks.2.up.weight are two parameters in one memory")
    assert message(complex_).startswith("phase is torch.complex64: expected parameters of a real floating dtype")
    assert message(lambda model: model.blocks[0].half()).startswith("frozen is torch.float32, blocks.0.up.weight is")
    assert "no parameter that requires" in message(lambda model: model.requires_grad_(False))
    lonely = message(lambda model: None, units=[nn.Linear(2, 2)])
    assert lonely.startswith("shard: a unit is a Linear that is not a part of the model")
    with pytest.raises(ValueError, match="a unit is a ModuleList, which is never called"):
        shard(model := Toy(), mesh, stage=3, units=[model.blocks])
    assert message(lambda model: None, replicas=3).startswith("replicas 3: expected a number that divides the 2")
    assert message(lambda model: None, units=nn.Linear(2, 2)).startswith(
        "shard: units is a Linear: expected modules in"
    )


@on_ranks(2)
def test_units_may_be_named_twice_and_before_those_inside_of_them() -> None:
    model, mesh = Toy(), mesh_of(2, 1)
    first = model.blocks[0]
    engine = shard(model, mesh, stage=3, units=[first, first.up, model.blocks[1], first])
    assert [unit.module for unit in engine._units] == [first.up, model.blocks[1], first, model]
    with pytest.raises(
        ValueError, match=r"^shard: fully_shard has this model, as an engine of stage 3 does: expected a"
    ):
        shard(model, mesh, stage=0)
    engine.close()


@on_ranks(2)
def test_a_pass_after_the_last_one_of_a_step_is_refused() -> None:
    """The norm of the step does not have its gradients."""
    model = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(model, stage=3)
    for end in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        end()
        with pytest.raises(ValueError, match=r"^a backward pass of .* after the last one of a step, the engine has"):
            model(torch.ones(2, 3)).sum().backward()
