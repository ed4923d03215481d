"""Every schedule of ring attention, compared with full attention in float64 (`whole_sequences`)."""

import functools
import itertools
import math
import random
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.ring_attention.whole_sequences import (
    BF16,
    F32,
    F64,
    MASKS,
    NAMES,
    SIZE,
    Case,
    Truth,
    Way,
    Whole,
    check,
    check_call,
    heads_for,
    new_truth,
    run,
    shards_of,
    truth_of,
    ways,
)
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.ops.attention import attention
from tpfuse.ops.dropout import dropout_keys
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.collective import CollectiveRing
from tpfuse.ops.ring_attention.layout import BALANCES, Balance, SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.ops.ring_attention.schedule import schedule_for
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool


@pytest.mark.parametrize(
    ("world", "name", "stride"),
    [
        (2, "direct", 11), (3, "direct", 5), (4, "direct", 11), (3, "collective", 11),
        *exhaustive((4, "direct", 5), (8, "direct", 11), (4, "collective", 5)),
    ],
)  # fmt: skip
@on_ranks("world")
def test_every_schedule_balance_and_mask(name: Implementation, stride: int) -> None:
    """Check every stride-th combination; a stride coprime to the numbers of options meets every pair of options."""
    products = itertools.product(ways(dist.get_world_size()), MASKS, (False, True))
    with use(implementation=name):
        for way, mask, grouped in itertools.islice(products, 0, None, stride):
            case = replace(mask, **heads_for(way, grouped))
            check_call(way, case, 1)


@pytest.mark.parametrize(
    ("world", "name", "dtype"), [(2, "direct", BF16), (3, "direct", F32), *exhaustive((3, "collective", BF16))], ids=str
)
@on_ranks("world")
def test_shorter_dtypes(name: Implementation, dtype: torch.dtype) -> None:
    with use(implementation=name):
        for (i, way), mask in zip(enumerate(ways(dist.get_world_size())), itertools.cycle(MASKS), strict=False):
            case = replace(mask, dtype=dtype, **heads_for(way, i % 2 == 1))
            check_call(way, case, 2)


@pytest.mark.parametrize(
    ("world", "dtype", "grouped", "chosen"),
    [(2, F32, True, (0,)), *exhaustive((2, BF16, False, (1, 2, 4)), (4, BF16, False, (0, 5)))],
)
@on_ranks("world")
def test_fused_schedules(dtype: torch.dtype, grouped: bool, chosen: tuple[int, ...]) -> None:
    """Check few and small cases, since kernels are interpreted. chosen: the indices of the schedules."""
    world = dist.get_world_size()
    some = [Way("ring"), Way("all_gather"), Way("ring", "striped"), Way("all_gather", "contiguous")]
    some += [Way("ulysses", ulysses=world), *([Way("ulysses_ring", ulysses=2)] if world == 4 else [])]
    with use(implementation="fused"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no fallback
        for i in chosen:
            way, mask = some[i], MASKS[(3 * i + world) % len(MASKS)]
            heads = {"heads": 2 * way.ulysses, "kv_heads": way.ulysses if grouped else 2 * way.ulysses}
            case = replace(mask, dtype=dtype, **heads)
            check_call(way, case, 9)


def _errors(name: Implementation) -> dict[tuple[str, str], float]:
    """Return this rank's sum of squared errors, by schedule and name of the result."""
    case, found = Case(160, heads=8, kv_heads=8, dtype=BF16), {}
    truth = truth_of(case, 3)
    with use(implementation=name):
        for way in (Way("ring"), Way("all_gather"), Way("ulysses", ulysses=dist.get_world_size())):
            result, layout = run(way, case, truth.inputs), way.layout(case.length)
            for key in ("out", "q", "k", "v"):
                error = result[key].double() - layout.shard(truth.whole[key], dist.get_rank(), 2)
                found[way.schedule, key] = error.square().sum().item()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["direct", "collective"])
def test_the_error_of_bfloat16_does_not_grow_with_the_ring(name: Implementation) -> None:
    (alone,), ranks = pool(1).run(_errors, name), pool(8).run(_errors, name)
    for key, error in alone.items():
        assert math.sqrt(sum(rank[key] for rank in ranks)) <= 1.5 * math.sqrt(error), key


def _check_dropout(name: Implementation, way: Way, case: Case, width: int | None) -> None:
    """Compare with `attention` in float64, with head_rows of another part of the batch.

    width: that of the matrix of which the masks are a part, by default the sequence's.
    """
    batch = 2 if case.documents is None else len(case.documents) - 1
    rows = 5 + 64 * torch.arange(batch).unsqueeze(1) + torch.arange(case.heads)
    key = dropout_keys(torch.empty(0), 7, 3, 2)[1]
    dropout = {"dropout_p": 0.3, "key": key, "head_rows": rows, "dropout_width": width}
    plain = truth_of(case, 4)
    leaves = {name: x.double().clone().requires_grad_() for name, x in plain.inputs.items() if name != "grad"}
    options = case.options | dropout
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), options.pop("cu_seqlens"))
    out, lse = attention(**leaves, **options, return_lse=True)
    out.backward(plain.inputs["grad"].double())
    whole = {"out": out.detach(), "lse": lse.detach()} | {name: x.grad for name, x in leaves.items()}
    # Dropout scales the kept elements, and so their errors.
    truth = Truth(plain.inputs, whole, {name: 2 * bound for name, bound in plain.bounds.items()})
    with use(implementation=name):
        check(way, case, run(way, case, truth.inputs, **dropout), truth)


@pytest.mark.parametrize(
    ("world", "name", "balances", "masks"),
    [
        (3, "direct", ("zigzag",), (0, 4)), (2, "direct", ("striped",), (2,)),
        *exhaustive((4, "direct", BALANCES, (0, 2))),
        *exhaustive((3, "collective", BALANCES, (0,)), (4, "collective", BALANCES, (4,))),
    ],
)  # fmt: skip
@on_ranks("world")
def test_dropout_drops_what_it_drops_on_one_rank(
    name: Implementation, balances: tuple[Balance, ...], masks: tuple[int, ...]
) -> None:
    for way, mask, width in itertools.product(ways(dist.get_world_size()), masks, (None, 50)):
        if way.balance in balances:
            _check_dropout(name, way, replace(MASKS[mask], **heads_for(way, grouped=True)), width)


@pytest.mark.exhaustive
@on_ranks(2)
def test_dropout_of_the_fused_ring() -> None:
    _check_dropout("fused", Way("ring"), replace(MASKS[4], dtype=F32, heads=4, kv_heads=1), 50)


def _with_softcap_and_sinks(case: Case, softcap: float | None) -> tuple[Truth, Tensor, Tensor]:
    """Return the truth by torch's softmax over the scores and a sink, the sinks, and their gradient."""
    inputs, sinks = case.inputs(5), normal(5, case.heads, dtype=F64).requires_grad_()
    q, k, v = (inputs[name].double().clone().requires_grad_() for name in ("q", "k", "v"))
    keys, values = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    scores = q @ keys.mT / SIZE**0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    sink = sinks[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores.masked_fill(case.hidden, -torch.inf), sink], -1)
    out = (scores.softmax(-1)[..., :-1] @ values) * ~case.hidden.all(-1, keepdim=True)
    lse = scores.logsumexp(-1).masked_fill(case.hidden.all(-1), -torch.inf)
    out.backward(inputs["grad"].double())
    whole = {"out": out.detach(), "lse": lse.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
    assert sinks.grad is not None
    bounds = dict.fromkeys(NAMES, 1e-12 if case.dtype == F64 else 1e-5)
    return Truth(inputs, {name: x for name, x in whole.items() if x is not None}, bounds), sinks.detach(), sinks.grad


@pytest.mark.parametrize(
    ("world", "name", "dtype", "stride"),
    [(3, "direct", F64, 2), *exhaustive((4, "collective", F64, 1), (2, "direct", F64, 1), (2, "fused", F32, 5))],
)
@on_ranks("world")
def test_softcaps_and_sinks(name: Implementation, dtype: torch.dtype, stride: int) -> None:
    """Try every stride-th schedule; the fused kernels attend with sinks, and leave softcaps to blocks of torch."""
    bound = 1e-12 if dtype == F64 else 1e-5
    with use(implementation=name):
        for i, way in list(enumerate(ways(dist.get_world_size())))[::stride]:
            case = replace(MASKS[i % len(MASKS)], dtype=dtype, **heads_for(way, i % 2 == 1))
            softcap = None if i % 3 == 2 or (name == "fused" and not i) else 1.5
            truth, sinks, expected = _with_softcap_and_sinks(case, softcap)
            own = sinks.clone().requires_grad_()
            check(way, case, run(way, case, truth.inputs, softcap=softcap, sinks=own), truth)
            assert own.grad is not None
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad, expected, rtol=bound, atol=bound)


@on_ranks(2)
def test_autocast_to_the_dtype_of_the_tensors_changes_nothing() -> None:
    rows, found = torch.arange(8).view(2, 4), []
    dropout = {"dropout_p": 0.3, "key": torch.tensor(3), "head_rows": rows}
    case = Case(dtype=BF16)
    for enabled in (True, False):
        with torch.autocast("cpu", BF16, enabled=enabled):
            found.append(run(Way("ring"), case, case.inputs(6), **dropout))
    assert all(torch.equal(found[0][key], found[1][key]) for key in NAMES)


@pytest.mark.parametrize(("world", "name"), [(4, "direct"), *exhaustive((4, "collective"), (2, "fused"))])
@on_ranks("world")
def test_two_runs_agree_to_the_bit(name: Implementation) -> None:
    late = random.Random(dist.get_rank())
    for way in ways(dist.get_world_size()):
        if way.balance != "zigzag":
            continue
        case = replace(MASKS[4], dtype=BF16, **heads_for(way, grouped=True))
        results = []
        for _ in range(2):
            time.sleep(late.random() * 3e-3)
            with use(implementation=name):
                results.append(run(way, case, case.inputs(5)))
        assert all(torch.equal(results[0][key], results[1][key]) for key in NAMES), way


@pytest.mark.parametrize(
    ("world", "name", "stride"), [(3, "direct", 7), *exhaustive((4, "direct", 5), (3, "collective", 4))], ids=str
)
@on_ranks("world")
def test_ranks_without_visible_keys_and_ranks_with_few_tokens(name: Implementation, stride: int) -> None:
    """Check every stride-th combination, also with queries twice as large and half of the scale."""
    world = dist.get_world_size()
    blind = [Case(48, documents=documents) for documents in ((0, 3, 9), (0, 0), (0, 0, 1))]
    short = [Case(length, causal=causal) for length in (world, world + 1, 2 * world) for causal in (True, False)]
    with use(implementation=name):
        products = itertools.product(ways(world), (*blind, *short))
        for way, each in itertools.islice(products, 0, None, stride):
            case = replace(each, **heads_for(way, grouped=False))
            truth = truth_of(case, 6)
            check(way, case, run(way, case, truth.inputs), truth)
            scaled = truth.inputs | {"q": truth.inputs["q"] * 2}  # with half of the scale, only dQ differs
            result = run(way, case, scaled, scale=0.5 / SIZE**0.5)
            check(way, case, result | {"q": 2 * result["q"]}, truth)


@pytest.mark.parametrize("name", ["direct", *exhaustive("collective")])
@on_ranks(4)
def test_views_of_a_packed_projection(name: Implementation) -> None:
    """Give views of [B, n, 3, H, D] as q, k and v, and a gradient with other strides than the output."""
    case = MASKS[0]
    truth = truth_of(case, 7)
    for way in ways(dist.get_world_size()):
        if way.ulysses in (1, 2, 4):
            shards = shards_of(way, case, truth.inputs)
            packed = torch.stack([shards[x].transpose(1, 2) for x in "qkv"], dim=2).requires_grad_()
            q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
            options = {"schedule": way.schedule, "balance": way.balance, "length": case.length}
            with use(implementation=name):
                out, lse = ring_attention(q, k, v, group=way.group, return_lse=True, **options)
                out.backward(shards["grad"].transpose(2, 3).contiguous().transpose(2, 3))
            gradients = dict(zip("qkv", (x.transpose(1, 2) for x in packed.grad.unbind(2)), strict=True))
            check(way, case, {"out": out.detach(), "lse": lse} | gradients, truth)


@pytest.mark.parametrize("name", ["direct", *exhaustive("collective")])
@on_ranks(3)
def test_only_inputs_that_need_a_gradient_get_one_and_inference_mode_computes_none(name: Implementation) -> None:
    for way, wanted in itertools.product(ways(dist.get_world_size()), ("q", "k", "v", "kv", "")):
        case = replace(MASKS[0], **heads_for(way, grouped=False))
        truth = truth_of(case, 8)
        shards = shards_of(way, case, truth.inputs)
        grad = shards.pop("grad")
        for key in wanted:
            shards[key].requires_grad_()
        options = {"schedule": way.schedule, "balance": way.balance, "length": case.length}
        with use(implementation=name):
            out = ring_attention(**shards, group=way.group, **options)
            assert out.requires_grad == bool(wanted)
            if wanted:
                out.backward(grad)
            with torch.inference_mode():
                again = ring_attention(**shards, group=way.group, **options)
        assert torch.equal(again, out) and not again.requires_grad
        assert all((x.grad is not None) == (key in wanted) for key, x in shards.items())
        found = {"out": out.detach()} | {key: shards[key].grad for key in wanted}
        check(way, case, found, truth, tuple(found))


@on_ranks(2)
def test_a_batch_may_be_empty() -> None:
    for name in ("direct", "collective"):
        for schedule in ("ring", "all_gather", "ulysses"):
            q = torch.ones(0, 2, 4, 16, requires_grad=True)
            with use(implementation=name):
                out = ring_attention(q, q, q, group=dist.group.WORLD, schedule=schedule)
                out.sum().backward()
            assert out.shape == q.shape and q.grad is not None


@functools.cache
def _second_group() -> dist.ProcessGroup:
    return dist.new_group()


@pytest.mark.parametrize(
    ("world", "name", "rounds"), [(3, "direct", 2), *exhaustive((3, "collective", 3), (2, "fused", 2))], ids=str
)
@on_ranks("world")
def test_calls_in_two_groups_and_products_run_between_forward_and_backward(name: Implementation, rounds: int) -> None:
    rank, world, length, dtype = dist.get_rank(), dist.get_world_size(), 20, F32 if name == "fused" else F64
    way, layout = Way("ring"), SequenceLayout(length, world)
    weight = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    for call in range(rounds):
        case, runs = Case(length, dtype=dtype, heads=2, kv_heads=1), []
        for i, group in enumerate((dist.group.WORLD, _second_group())):
            truth = new_truth(case, 200 + 2 * call + i)
            leaves = {key: layout.shard(x, rank, 2).requires_grad_() for key, x in truth.inputs.items()}
            grad = leaves.pop("grad").detach()
            with use(implementation=name):
                out, lse = ring_attention(**leaves, group=group, schedule="ring", length=length, return_lse=True)
                all_gather_linear(torch.ones(2, 3, dtype=dtype), weight, None, group).sum().backward()
            runs.append((truth, leaves, grad, out, lse))
        for truth, leaves, grad, out, lse in runs:
            out.backward(grad)
            found: Whole = {"out": out.detach(), "lse": lse} | {key: x.grad for key, x in leaves.items()}
            check(way, case, found, truth)


class _Largest(TorchDispatchMode):
    """Keeps the size in bytes of the largest storage of a result."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.nbytes = max(self.nbytes, *sizes, 0)
        return result


@on_ranks(4)
def test_backward_over_messages_makes_no_tensor_that_grows_with_the_number_of_ranks() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v, grad = (normal(i, 1, 2, 8, SIZE, dtype=BF16) for i in range(4))
    call = RingCall(SequenceLayout(8 * world, world).runs, rank, causal=True, window=None, scale=1.0)
    ring = CollectiveRing(dist.group.WORLD)
    out, lse = ring.forward(q, k, v, call)
    with _Largest() as largest:
        ring.backward(grad, q, k, v, out, lse, call)
    assert largest.nbytes == 2 * k.numel() * F32.itemsize  # the contributions to the gradients of one rank's k and v


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
@pytest.mark.parametrize("changed", ["key", "head_rows", "cu_seqlens"])
@on_ranks(2)
def test_options_changed_in_place_before_backward_are_refused(changed: str, schedule: str) -> None:
    case = MASKS[4 if changed == "cu_seqlens" else 0]
    options = case.options | {"schedule": schedule, "length": case.length}
    if changed != "cu_seqlens":
        rows = torch.arange(2 * case.heads).view(2, -1)
        options |= {"dropout_p": 0.3, "head_rows": rows, "key": torch.tensor(1)}
    shards = shards_of(Way(schedule), case, case.inputs(1))
    out = ring_attention(shards["q"].requires_grad_(), shards["k"], shards["v"], group=dist.group.WORLD, **options)
    options[changed].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("direct", ["ulysses", "ring", "ring", "ring"]),
        ("collective", ["ulysses", "ulysses", "all_gather", "ring"]),
        ("fused", ["all_gather"] * 4),
    ],
    ids=["direct", "collective", "fused"],
)
def test_auto_chooses_by_heads_and_size(name: Implementation, expected: list[str]) -> None:
    shapes = (((1, 4, 8, 16), 4), ((1, 4, 8, 16), 1), ((1, 3, 8, 16), 3), ((1, 3, 2**21, 128), 3))
    assert [schedule_for(name, shape, heads, F32, 2)[0] for shape, heads in shapes] == expected
    assert schedule_for(name, *shapes[0], F32, 1)[0] == "ring"
