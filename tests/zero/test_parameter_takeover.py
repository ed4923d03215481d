"""Engines take over parameters that other objects hold too, and notice later changes of the model."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.comm.layout import local_tensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import shard
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.optimizer import ZeroOptimizer
from tpfuse.zero.unit_updater import UnitUpdater


class _Listed(nn.Module):
    """A model whose forward pass reads one of its parameters from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.linear = nn.Linear(3, 3)
        self.listed = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.listed[0])
        return out


def _step(engine: GradientBuckets | FullySharded, model: nn.Module, x: Tensor) -> None:
    engine.start(last=True)
    model(x).square().sum().backward()
    engine.finish()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_stays_the_object_that_others_hold(stage: int) -> None:
    torch.manual_seed(0)
    model, x = _Listed(), normal(0, 4, 3)
    model(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    before = dict(model.named_parameters())
    model.scale.note = "kept"  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    model.scale.register_hook(lambda gradient: seen.append(gradient.clone()))
    model.scale.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[no-untyped-call]
    buckets = shard(model, stage=stage)
    optimizer = BucketUpdater(buckets)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.scale.note == "kept"  # type: ignore[attr-defined]
    _step(buckets, model, x)
    for bucket in buckets.buckets:
        for segment in bucket.layout.segments:
            torch.testing.assert_close(bucket.layout.view(bucket.reduced_shard, segment), expected[segment.name])
    torch.testing.assert_close(seen, [expected["scale"]] * 2)
    held = model.scale.detach().clone()
    optimizer.step(1e-2)
    assert not torch.equal(model.listed[0], held) and model.listed[0] is model.scale


@on_ranks(2)
def test_hooks_of_sharded_parameters_are_called() -> None:
    layer = ColumnParallelLinear(3, 4, device_mesh=tensor_mesh())
    seen: list[tuple[str, torch.Size]] = []
    layer.weight.register_hook(lambda gradient: seen.append((type(gradient).__name__, gradient.shape)))
    layer.bias.note = "kept"  # type: ignore[union-attr]
    before = dict(layer.named_parameters())
    buckets = shard(layer, mesh_of(1, 2), stage=0)
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())
    assert layer.bias.note == "kept"  # type: ignore[union-attr]
    for _ in range(2):
        _step(buckets, layer, normal(0, 2, 3))
        assert seen == [("DTensor", torch.Size((4, 3)))]
        seen.clear()
        with pytest.raises(ValueError, match=r"^(weight|bias)\.grad is in the memory of ZeRO's gradient buckets"):
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    layer.bias.register_post_accumulate_grad_hook(lambda _: seen.append(("bias", layer.bias.shape)))  # type: ignore
    _step(buckets, layer, normal(0, 2, 3))
    assert ("bias", torch.Size((4,))) in seen
    layer.to(torch.bfloat16)
    with pytest.raises(ValueError, match="weight was converted or moved"):
        buckets.start(last=True)


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


CHANGES: list[tuple[Callable[[nn.Module], object], str]] = [
    (lambda model: model.to(torch.bfloat16), "0.weight was converted or moved, as model.to"),
    (_assign, "0.weight was replaced by another tensor, as load_state_dict"),
    (lambda model: model.append(nn.Linear(3, 3)), "2.weight is new in the model"),  # type: ignore[operator]
    (lambda model: setattr(model, "1", nn.Identity()), "1.weight is not in the model any more"),
    (lambda model: model[1].bias.requires_grad_(False), "1.bias.requires_grad is False now"),  # type: ignore
]


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_a_model_that_was_changed_is_an_error_until_new_buckets_are_made(change: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    buckets = shard(model, stage=0)
    make, message = CHANGES[change]
    make(model)
    with pytest.raises(ValueError, match=f"{message}.*: make a new engine and a new optimizer"):
        buckets.start(last=True)
    x, plain = normal(0, 2, 3, dtype=model[0].weight.dtype), copy.deepcopy(model)
    buckets = shard(model, stage=0)
    _step(buckets, model, x)
    plain(x).square().sum().backward()
    for bucket in buckets.buckets:
        for segment in bucket.layout.segments:
            sums = bucket.layout.view(bucket.reduced_shard, segment)
            torch.testing.assert_close(sums.to(x.dtype), plain.get_parameter(segment.name).grad)


@pytest.mark.parametrize(
    ("world", "stage", "dtype"), [(1, 0, torch.bfloat16), (1, 1, torch.float32), (2, 2, torch.bfloat16)]
)
@on_ranks("world")
def test_values_loaded_between_updates_are_trained(stage: int, dtype: torch.dtype) -> None:
    """Check that the second update starts from weights that were loaded between two updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).to(dtype)
    buckets = shard(model, stage=stage)
    optimizer = BucketUpdater(buckets, weight_decay=0.0)
    x = normal(0, 4, 5, dtype=dtype)
    _step(buckets, model, x)
    optimizer.step(1e-2)
    loaded = {name: normal(seed, *p.shape, dtype=dtype) for seed, (name, p) in enumerate(model.named_parameters())}
    model.load_state_dict(loaded)
    _step(buckets, model, x)
    optimizer.step(0.0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded[name]), name
    with torch.no_grad():
        model[0].bias.fill_(3.0)
    _step(buckets, model, x)
    optimizer.step(1e-2)
    assert (model[0].bias - 3.0).abs().max() <= 0.03
    torch.testing.assert_close(model[1].weight, loaded["1.weight"], rtol=0, atol=0.03)


def test_code_that_computes_with_a_taken_gradient_raises_an_error() -> None:
    model, x = nn.Linear(3, 3), normal(0, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    buckets = shard(model, stage=0)
    before = model.weight.detach().clone()
    message = r"^(weight|bias)\.grad is in the memory of ZeRO's gradient buckets: .* call start\(\) before each"
    buckets.start(last=True)
    model(x).sum().backward()
    for finished in (False, True):
        if finished:
            buckets.finish()
        with pytest.raises(ValueError, match=message):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        with pytest.raises(ValueError, match=message):
            model(x).sum().backward()
        model.zero_grad(set_to_none=False)  # is permitted
    assert torch.equal(model.weight, before)


GRADIENT_CHANGES: list[Callable[[nn.Module], object]] = [
    lambda model: setattr(model[0].weight, "grad", torch.ones_like(model[0].weight)),  # type: ignore[index]
    lambda model: setattr(model[1].bias, "grad", None),  # type: ignore[index]
    lambda model: model.zero_grad(),
    lambda model: model.zero_grad(set_to_none=False),
]


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_change_of_a_gradient_before_the_update_is_an_error(stage: int) -> None:
    """Also between two passes, after a local one, and after the norm was taken. Discarding the step forgets it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), normal(0, 2, 4)
    optimizer = ZeroOptimizer(model, mesh_of(2, 1), stage=stage, units=[model[0]])
    message = r"^[01]\.(weight|bias)\.grad was set, cleared or zeroed by other code, but the update takes the sums"

    def run(local: bool = False) -> None:
        with optimizer.no_sync() if local else contextlib.nullcontext():
            model(x).square().sum().backward()

    for change in GRADIENT_CHANGES:
        for when in ("before a pass", "after the pass", "after the norm"):
            with pytest.raises(ValueError, match=message):
                run(local=stage < 2 and when == "before a pass")
                if when == "after the norm":
                    optimizer.clip_grad_norm_(1.0)
                change(model)
                if when == "before a pass":
                    run()
                optimizer.step()
            optimizer.zero_grad()
    for change in (lambda: model.zero_grad(), lambda: model.zero_grad(set_to_none=False), optimizer.zero_grad):
        run(local=True)
        run(local=True)
        run()
        optimizer.step()
        change()
        optimizer.zero_grad()


def test_hooks_see_the_gradient_of_each_pass() -> None:
    """They may also change it, in place or not, whichever passes are local."""
    for stage in (0, 2):
        model, plain, x, seen = nn.Linear(3, 3), nn.Linear(3, 3), normal(0, 2, 3), []
        plain.load_state_dict(model.state_dict())

        def see(parameter: Tensor, seen: list[Tensor] = seen) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
            parameter.grad.mul_(3.0)
            parameter.grad = parameter.grad * 2.0

        model.weight.register_post_accumulate_grad_hook(see)  # type: ignore[no-untyped-call]
        optimizer = ZeroOptimizer(model, stage=stage)
        for index in range(4):
            (gradient,) = torch.autograd.grad(plain(index * x).square().sum(), plain.weight)
            with optimizer.no_sync() if index < 3 else contextlib.nullcontext():
                model(index * x).square().sum().backward()
            assert torch.equal(seen[index], gradient)
        plain.bias.grad = sum(2 * plain(index * x).detach().sum(0) for index in range(4))  # type: ignore[assignment]
        plain.weight.grad = 6.0 * sum(seen)  # type: ignore[assignment]
        torch.testing.assert_close(
            optimizer.clip_grad_norm_(1.0).float(), nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        )


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_hooks_of_a_sharded_model_change_the_gradient_of_each_rank(when: str) -> None:
    """Hooks of a parameter that stage 3 has replaced run too, and one that is removed runs no more."""
    rank, x = dist.get_rank(), normal(0, 2, 2, 3)
    model, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())

    def clamp(gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.2, 0.3)

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def hook() -> Any:
        model.bias.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        return model.weight.register_hook(clamp)

    handle = hook() if when == "before" else None
    optimizer = ZeroOptimizer(model, stage=3, lr=0.0)
    handle = handle or hook()
    for step in range(2):
        gradients = [torch.autograd.grad(plain(part).square().sum(), list(plain.parameters())) for part in x]
        weights = [weight if step else clamp(weight) for weight, _ in gradients]
        plain.weight.grad, plain.bias.grad = sum(weights) / 2, sum(bias for _, bias in gradients) / 4
        model(x[rank]).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(optimizer.clip_grad_norm_(1.0).float(), expected)
        optimizer.step()
        optimizer.zero_grad()
        handle.remove()


def test_hooks_change_only_the_gradient_of_their_parameter() -> None:
    """The two terms of a sum get one gradient from autograd."""

    def half(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model = nn.ParameterList(torch.zeros(4) for _ in range(2))
    for parameter in model:
        parameter.register_post_accumulate_grad_hook(half)
    optimizer = ZeroOptimizer(model, stage=0)
    for sync in (optimizer.no_sync, contextlib.nullcontext):
        with sync():
            (model[0] + model[1] + 1.0).square().sum().backward()
    norm = 32**0.5  # eight elements, of which each has twice the half of 2; the two roots are rounded
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(norm, rel=2 * torch.finfo(torch.float64).eps)


def test_a_backward_pass_of_parameters_updated_since_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    buckets = shard(model, stage=0)
    optimizer, x = BucketUpdater(buckets), normal(0, 2, 3)
    _step(buckets, model, x)
    loss = model(x).sum()
    optimizer.step(1e-3)
    buckets.start(last=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_stage_3_notices_changes_of_its_parameters() -> None:
    mesh, x = mesh_of(2, 1), normal(0, 2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    old = torch.optim.AdamW(model.parameters())
    engine = shard(model, mesh, stage=3, units=list(model))
    optimizer = UnitUpdater(engine)
    with pytest.raises(ValueError, match=r"^0\.weight was replaced by its shards when stage 3 took the model"):
        old.step()
    for _ in range(2):
        _step(engine, model, x)
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(ValueError, match=r"^0\.weight\.grad is in ZeRO's shards, summed over the ranks: with"):
                clip(model.parameters(), 1.0)
        optimizer.step(1e-2)
        with torch.no_grad():
            model(x)  # leaves its units gathered
    weight = local_tensor(model[0].weight).clone()
    model.load_state_dict(model.state_dict())
    _step(engine, model, x)
    assert torch.equal(local_tensor(engine.members[0].sharded), weight)
    _assign(model)
    with pytest.raises(ValueError, match=r"0\.weight was replaced by another tensor.*shard a new model"):
        engine.start(last=True)


def test_gradients_that_buckets_cannot_hold_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight is torch\.complex64: expected parameters of a real floating dtype"):
        shard(nn.Linear(2, 2, bias=False, dtype=torch.complex64), stage=0)
    untied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    untied[1].weight.data = untied[0].weight.data  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^0\.weight and 1\.weight are two parameters in one memory: tie them as"):
        shard(untied, stage=0)
    untied[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^0\.weight and 1\.weight are two parameters in one memory: tie them as"):
        shard(untied, stage=0)
    model = nn.Linear(2, 2)
    model.register_buffer("seen", model.weight.detach())
    with pytest.raises(ValueError, match=r"^seen is a buffer in the memory of weight, which gets other memory"):
        shard(model, stage=0)
    with pytest.raises(ValueError, match=r"^shard: weight is on the meta device: expected values"):
        shard(nn.Linear(2, 2, device="meta"), stage=0)
    model = nn.Embedding(4, 3, sparse=True)
    buckets = shard(model, stage=0)
    buckets.start(last=True)
    with pytest.raises(ValueError, match=r"weight has a sparse gradient: expected a dense one"):
        model(torch.tensor([1])).sum().backward()
