"""The common behaviour of tensor-parallel products, apart from their numbers (test_parallel_products.py).

The switch or measurements choose the implementation; ranks may arrive in any order; sums are in rank order; unequal
numbers of rows are refused.
"""

import contextlib
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.linear.parallel_products import PRODUCTS, Case
from tests.support.cases import naming
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm import autotune as tuner
from tpfuse.comm.autotune import autotune
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels import configurations
from tpfuse.kernels.launch import forget_plans, multiprocessors
from tpfuse.ops.linear import dispatch
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.collective import CollectiveLinear
from tpfuse.ops.linear.direct import DirectLinear
from tpfuse.ops.linear.dispatch import FUSED, parallel_linear
from tpfuse.ops.linear.engine_gather import EngineGather
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks

F32, BF16 = torch.float32, torch.bfloat16
K, N = 5, 3


def _ones(dtype: torch.dtype, rows: int = 2) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, K, dtype=dtype), torch.ones(N, K, dtype=dtype)


@pytest.mark.parametrize(("dtype", "by_kernels"), [(F32, FusedLinear), (torch.float64, DirectLinear)])
@on_ranks(2)
def test_the_implementation_follows_the_switch(dtype: torch.dtype, by_kernels: type) -> None:
    """One object serves all calls of a group, except by collectives, which have no state."""
    (x, _), group = _ones(dtype), dist.new_group()
    chosen = {"auto": DirectLinear, "direct": DirectLinear, "collective": CollectiveLinear, "fused": by_kernels}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, expected in chosen.items():
            with use(implementation=name):  # type: ignore[arg-type]
                one = parallel_linear(x, group)
                assert type(one) is expected, name
                assert (parallel_linear(x, group) is one) == (name != "collective")
        with use(kernels="triton"):
            assert type(parallel_linear(x, group)) is by_kernels


@on_ranks(3)
def test_a_fallback_is_reported_once_by_the_first_rank_of_each_group() -> None:
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    x, weight = _ones(torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("fused", "auto", "direct", "collective") * 2:
            with use(implementation=name):  # type: ignore[arg-type]
                all_gather_linear(x, weight, None, group)
    message = "tensor-parallel products are direct: there are no kernels for float64"
    assert [str(warning.message) for warning in caught] == ([] if rank == 1 else [message])


METHODS = ("all_gather", "all_gather_backward", "reduce_scatter", "reduce_scatter_backward", "all_reduce")


@pytest.mark.parametrize(("slow", "taken"), [("direct", "collective"), ("collective", "direct")])
@on_ranks(2)
def test_the_faster_implementation_computes_forward_and_backward(
    slow: str, taken: Implementation, tmp_path: Path
) -> None:
    """Each call of the slow one takes a millisecond longer, by a clock of this test. Results are whole numbers."""
    group = dist.new_group()
    rows = len(slow)  # other cases for each parameter of the test: decisions last as long as the job, which runs both
    shapes = ((rows, K), (N, K), (K, N))
    x, weight, back = (integers(seed, *shape, low=-2, high=2).requires_grad_() for seed, shape in enumerate(shapes))
    calls: list[str] = []

    def step() -> list[Tensor]:
        x.grad = weight.grad = back.grad = None
        hidden = all_gather_linear(x, weight, None, group, activation="relu")
        out = linear_reduce_scatter(hidden, back, None, group) + linear_all_reduce(hidden, back, None, group)[:rows]
        out.square().sum().backward()
        assert x.grad is not None and weight.grad is not None and back.grad is not None
        return [out.detach(), x.grad, weight.grad, back.grad]

    def milliseconds(run: Callable[[], object], device: torch.device) -> float:
        before = len(calls)
        run()
        return 1.0 + sum(call.lower().startswith(slow) for call in calls[before:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "_milliseconds", milliseconds)
        for kind, name in itertools.product((DirectLinear, CollectiveLinear), METHODS):
            method = getattr(kind, name)

            def recorded(*args: Any, method: Any = method, **options: Any) -> Any:
                calls.append(method.__qualname__)
                return method(*args, **options)

            patch.setattr(kind, name, recorded)
        with autotune(600, file=tmp_path / "decisions.json") as found:
            step()
        calls.clear()
        results = step()
        kind = CollectiveLinear if taken == "collective" else DirectLinear
        assert {call.partition(".")[0] for call in calls} == {kind.__name__}
    assert [decision.taken for decision in found.decisions.values()] == [taken] * len(METHODS)
    with use(implementation=taken):
        assert all(torch.equal(one, other) for one, other in zip(results, step(), strict=True))


@pytest.mark.parametrize("wanted", ["fused with copiers, other tiles", "fused with copy engines"])
@on_ranks(2)
def test_fused_products_use_the_variant_that_was_timed_as_the_fastest(wanted: str, tmp_path: Path) -> None:
    group, sent, tiles = dist.new_group(), [], []
    x, weight = integers(1, len(wanted), K), integers(2, N, K)
    send, find = EngineGather.send, configurations._with_other_tiles

    def recorded(*args: Any, **options: Any) -> None:
        sent.append(args)
        send(*args, **options)

    def found_tiles(*key: Any) -> Any:
        tiles.append(key)
        return find(*key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.CANDIDATES, "cpu", ("direct", *FUSED))
        patch.setattr(configurations, "_with_other_tiles", found_tiles)
        patch.setattr(EngineGather, "send", recorded)
        patch.setattr(tuner, "_milliseconds", lambda run, device: 1.0 + (run.args[0] != wanted))
        with autotune(600, file=tmp_path / "decisions.json") as found, torch.no_grad():
            measured = all_gather_linear(x, weight, None, group)
            sent.clear(), tiles.clear()
            forget_plans()  # so that the tiles are chosen again
            again = all_gather_linear(x, weight, None, group)
    assert [decision.taken for decision in found.decisions.values()] == [wanted]
    assert (len(sent), len(tiles)) == (int("engines" in wanted), int("tiles" in wanted))
    assert torch.equal(measured, again) and torch.equal(again, torch.cat([x] * group.size()) @ weight.t())


def _held(memory: SymmetricMemory) -> tuple[int, set[str]]:
    """Return the bytes of this rank's buffers, and the names of the channels."""
    return sum(buffer.local.nbytes for buffer in memory._buffers.values()), {name for name, _ in memory._channels}


DIRECT, COPIERS, ENGINES = "direct linear", "all_gather_linear", "all_gather_linear by engines"


@contextlib.contextmanager
def _copiers_win(file: Path) -> Iterator[tuple[SharedMemory, Callable[[], None]]]:
    """Measure candidates within the block, of which copiers are the fastest. Yield the memory and the product."""
    group = dist.new_group()
    memory = symmetric_memory(group, torch.device("cpu"))
    assert isinstance(memory, SharedMemory)
    x, weight = _ones(F32, len(str(file)))

    def product() -> None:
        all_gather_linear(x, weight, None, group)

    with use(implementation="direct"):
        product()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.CANDIDATES, "cpu", ("direct", "fused with copiers", "fused with copy engines"))
        patch.setattr(tuner, "_milliseconds", lambda run, device: 1.0 + (run.args[0] != "fused with copiers"))
        with autotune(600, file=file), torch.no_grad():
            yield memory, product


@on_ranks(2)
def test_channels_that_only_losing_candidates_used_are_closed(tmp_path: Path) -> None:
    flags = 2 * 2 * multiprocessors(torch.device("cpu"))
    of_engines = 2 * 2**16 + 4 * (flags + 2 + 2 + 1)  # slots, flags, state, ready and stamp
    with _copiers_win(tmp_path / "closed") as (memory, product):
        before, first = _held(memory)
        product()
        within, second = _held(memory)
    after, last = _held(memory)
    assert (first, second, last) == ({DIRECT}, {DIRECT, COPIERS, ENGINES}, {DIRECT, COPIERS})
    assert within - after == of_engines and after > before
    product()
    assert _held(memory) == (after, last)


@on_ranks(2)
def test_a_rank_that_leaves_the_block_by_an_error_closes_nothing(tmp_path: Path) -> None:
    """And the other rank, which waits for it, does not hang."""
    rank = dist.get_rank()
    with (
        pytest.raises(InterruptedError if rank == 1 else PeerTimeout),
        _copiers_win(tmp_path / "left by an error") as (memory, product),
    ):
        product()
        within = _held(memory)
        dist.barrier()  # the other rank has measured too, and waits from now on
        memory.control.timeout = 0.3
        if rank == 1:
            raise InterruptedError
    assert within[1] == {DIRECT, COPIERS, ENGINES} and _held(memory)[0] == within[0]


def _case(rows: int, *middle: int, dtype: torch.dtype = F32) -> Case:
    """Return a case of integers, other ones for each number of rows."""
    return Case(dtype, (rows, *middle), k=K, n=N, whole_numbers=True, seed=rows)


@pytest.mark.parametrize(
    ("world", "name", "known"),
    [
        (3, "direct", (3,)), (3, "collective", (3, 4)),
        *exhaustive((3, "collective", ()), (2, "fused", ())),
    ],
)  # fmt: skip
@on_ranks("world")
def test_unequal_numbers_of_rows_are_refused(world: int, name: Implementation, known: tuple[int, ...]) -> None:
    """The last rank has one row more. known: the numbers of rows that the ranks agreed on before."""
    group, rank = dist.new_group(), dist.get_rank()
    others = range(world - 1) if rank == world - 1 else [world - 1]
    with use(implementation=name):
        for operator, product in PRODUCTS.items():
            for rows in known:
                product.check(_case(rows), group)
            odd = _case(4 if rank == world - 1 else 3)
            with pytest.raises(ValueError) as caught:
                product.run(odd, product.leaves(odd, group), group)
            times = world if operator == "linear_reduce_scatter" else 1
            shapes = {side: [(4 if side == world - 1 else 3) * times] for side in range(world)}
            sides = [f"rank {side} runs {operator} torch.float32 {shapes[side]}"[:-1] for side in (*others, rank)]
            text = str(caught.value)
            assert sides[-1] in text and any(side in text for side in sides[:-1]), text
            for rows in (3, 4):
                product.check(_case(rows), group)


@pytest.mark.parametrize(
    ("world", "name", "calls"), [(3, "direct", 60), (2, "collective", 30), *exhaustive((2, "fused", 18))], ids=str
)
@on_ranks("world")
def test_ranks_may_arrive_in_any_order_and_calls_use_one_memory(name: Implementation, calls: int) -> None:
    group, late = dist.group.WORLD, random.Random(dist.get_rank())
    each = itertools.cycle(itertools.product((1, 3, 8), PRODUCTS.items()))
    with use(implementation=name):
        for i, (rows, (operator, product)) in zip(range(calls), each, strict=False):
            if late.random() < 0.1:
                time.sleep(late.random() * 2e-3)
            with naming(f"call {i}, {operator}, {rows} rows"):
                product.check(_case(rows), group, backward=name != "fused" or i % 8 == 0)


@pytest.mark.parametrize("world", [3, *exhaustive(2)])
@on_ranks("world")
def test_small_slots_are_used_in_rounds() -> None:
    """A round has one row in the backward pass of an all-gather, and two or three rows elsewhere."""
    group = dist.group.WORLD
    small = DirectLinear(symmetric_memory(group, torch.device("cpu")), (1 + group.size()) * K * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "parallel_linear", lambda x, group: small)
        for product in PRODUCTS.values():
            for case in (_case(17), _case(3, 2, 2, dtype=torch.float64), _case(7, 2, dtype=BF16)):
                with naming((product.function.__name__, case)):
                    product.check(case, group)


ROUNDED = [("direct", BF16), ("collective", F32), *exhaustive(("fused", BF16))]


@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
@on_ranks(3)
def test_sums_over_ranks_are_in_rank_order(name: Implementation, dtype: torch.dtype) -> None:
    """Products of one feature have one term, so only the order of the sum over ranks matters."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, weight = normal(1, world, 5 * world, 1, dtype=dtype), normal(2, world, 7, 1, dtype=dtype)
    bias, residual = normal(3, 7, dtype=dtype), normal(4, 5 * world, 7, dtype=dtype)
    total = torch.zeros(5 * world, 7)
    for products in x * weight.transpose(1, 2):
        total += products.float()
    expected = ((total + bias) + residual).to(dtype)
    own = slice(5 * rank, 5 * rank + 5)
    with use(implementation=name):
        out = linear_reduce_scatter(x[rank], weight[rank], bias, group, residual=residual[own])
        whole = linear_all_reduce(x[rank], weight[rank], bias, group, residual=residual)
        leaf = torch.ones(5, 7, dtype=dtype, requires_grad=True)
        all_gather_linear(leaf, weight[rank].t(), None, group).backward(x[rank])
    assert torch.equal(out, expected[own])
    assert name == "collective" or torch.equal(whole, expected), "Gloo's all-reduce has an order of its own"
    assert torch.equal(leaf.grad, total.to(dtype)[own])


@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
@on_ranks(3)
def test_gradients_of_the_bias_are_summed_in_float32(name: Implementation, dtype: torch.dtype) -> None:
    """The sums are exact in float32, but not all of them in bfloat16."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, weight = normal(1, 5 * world, 1, dtype=dtype), normal(2, 7, 1, dtype=dtype)
    grad, own = integers(5, 5 * world, 7, low=-100, high=100), slice(5 * rank, 5 * rank + 5)
    for wanted in (True, False):
        bias, last = normal(3, 7, dtype=dtype).requires_grad_(), weight.detach().requires_grad_(wanted)
        with use(implementation=name):
            linear_reduce_scatter(x, last, bias, group).backward(grad[own].to(dtype))
        assert torch.equal(bias.grad, grad.sum(0).to(dtype))


@pytest.mark.parametrize("name", ["direct", "collective", "fused"])
@on_ranks(2)
def test_a_rank_in_a_group_of_its_own_waits_for_no_other(name: Implementation) -> None:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    set_settings(timeout=0.5)
    try:
        with use(implementation=name):
            for product in PRODUCTS.values():
                with naming(product.function.__name__):
                    product.check(_case(4), group)
    finally:
        set_settings(timeout=60.0)
