"""Each internal of torch's `fully_shard` that stage 3 uses does its work; a failure says what a torch has changed."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.meshes import mesh_of
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.traffic import Traffic
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import fsdp_internals as internals
from tpfuse.zero.collectives_with_traffic import Counted


def _sharded(param_dtype: torch.dtype | None = None) -> tuple[Any, FSDPModule, FSDPModule]:
    """Return a model of two units, which has no parameters of its own, and the units."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), mesh_of(2, 1)["dp"]
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    first, second, _ = (fully_shard(module, mesh=mesh, mp_policy=policy) for module in (*model, model))
    first.set_modules_to_forward_prefetch([second])
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=param_dtype))  # from now on torch takes it for the root of the units
    return model, first, second


def _recorded(unit: FSDPModule, around: Callable[..., None], operation: Any) -> list[str]:
    """Return a list of what will happen: "before", the operation, and "after"."""
    found: list[str] = []

    def call(own: Callable[..., None], *arguments: Any) -> None:
        found.append("before")
        own(*arguments)
        found.append("after")

    around(unit, call)
    counted = cast(Any, Counted(operation, Traffic(), found.append))
    unit.set_custom_all_gather(counted) if operation == "all_gather" else unit.set_custom_reduce_scatter(counted)
    return found


@on_ranks(2)
def test_a_unit_is_gathered_by_its_groups_unshard_alone() -> None:
    model, first, second = _sharded()
    found = _recorded(second, internals.around_gather, "all_gather")
    first(normal(0, 3, 5))
    assert found == ["before", "all_gather", "after"], "fully_shard does not gather ahead by group.unshard"
    model(normal(0, 3, 5)).sum().backward()
    assert found.count("all_gather") == 2, "a unit is not gathered again for its backward pass"
    text = " ".join(found).replace("before all_gather after", "").replace("before after", "")
    assert not text.split(), "fully_shard gathers by something else than group.unshard"
    assert internals._group(model) is None, "a module without parameters of its own has a group"


@on_ranks(2)
def test_a_unit_is_reduced_by_its_groups_post_backward_alone() -> None:
    model, first, _ = _sharded()
    found = _recorded(first, internals.around_reduce, "reduce_scatter")
    for times in (1, 2):
        model(normal(0, 3, 5)).sum().backward()
        assert found.count("reduce_scatter") == times
    text = " ".join(found).replace("before reduce_scatter after", "").replace("before after", "")
    assert not text.split(), "fully_shard reduces by something else than group.post_backward"


@on_ranks(2)
def test_what_is_gathered_can_be_freed_at_any_time() -> None:
    model, first, second = _sharded()
    x = normal(0, 3, 5)
    with torch.no_grad():
        plain = model[0](x)  # it gathers the second unit ahead
        local_tensor(model[1].weight).zero_()
        internals.free(second)
        assert torch.equal(model[1](plain), model[1].bias.full_tensor().expand(3, 5)), "it was not gathered again"
        first.set_reshard_after_forward(False)
        first(x)
        assert not isinstance(model[0].weight, DTensor)
        shard = next(iter(internals.padded_shards(first)))
        local_tensor(shard).zero_()

        def call(gather: Callable[..., None], async_op: bool = False) -> None:
            internals.free(first)
            gather(async_op)

        internals.around_gather(first, call)
        assert torch.equal(first(x), model[0].bias.expand(3, 5)), "group._to_sharded does nothing in a forward pass"
        internals.free(first)
        assert isinstance(model[0].weight, DTensor), "group._to_sharded does not give the module its shards"


@on_ranks(2)
def test_the_end_of_a_backward_pass_reduces_what_passes_have_left() -> None:
    model, _, _ = _sharded()
    model.set_requires_gradient_sync(False)
    model(normal(dist.get_rank(), 3, 5)).sum().backward()
    assert model[0].weight.grad is None
    model.set_requires_gradient_sync(True)
    internals.end_backward(model)
    reduced = [isinstance(x.grad, DTensor) for x in model.parameters()]
    assert all(reduced), "_root_post_backward_final_callback does not reduce"


@on_ranks(2)
def test_a_shard_is_read_from_the_memory_to_which_it_was_moved() -> None:
    model, first, _ = _sharded()
    shards = internals.padded_shards(first)
    assert [*shards] == [*model[0].parameters()] and {x.numel() for x in shards.values()} == {3 * 5, 3}, "5 rows: 3 + 2"
    for shard, padded in shards.items():
        moved = padded.clone()
        internals.move_shard(first, shard, moved)
        assert local_tensor(shard).data_ptr() == moved.data_ptr()
        moved.fill_(2.0)
    with torch.no_grad():
        assert (first(torch.ones(1, 5)) == 12.0).all(), "an all-gather does not read _sharded_param_data"
    assert all((x == 2.0).all() for x in internals.padded_shards(first).values()), "the shards were copied elsewhere"


@on_ranks(2)
def test_gradients_of_a_half_type_wait_in_float32_and_can_be_replaced() -> None:
    model, first, _ = _sharded(torch.bfloat16)
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(normal(0, 3, 5).bfloat16()).sum().backward()
    weight, bias = model[0].parameters()
    found = internals.whole_gradients(first)
    assert all(x is not None and x.dtype == torch.float32 for x in found.values()), "they wait elsewhere"
    assert found[bias].shape == (5,), "they are not whole"  # type: ignore[union-attr]
    internals.set_whole_gradients(first, {weight: found[weight], bias: None})
    first.unshard()
    internals.complete_gradients(first, {weight: model[0].weight, bias: model[0].bias})
    first.reshard()
    model.set_requires_gradient_sync(True)
    internals.end_backward(model)
    assert not bias.grad.full_tensor().any() and weight.grad.full_tensor().any(), "it reduces something else"


def test_what_older_torches_lack_came_at_once() -> None:
    assert hasattr(FSDPModule, "set_reduce_scatter_unused_params") == internals.FROM_2_13
