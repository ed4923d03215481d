"""Properties that all tensor-parallel products share, other than their numbers (see test_parallel_products.py).

The tests cover the choice of the implementation, ranks that arrive in any order, sums in rank order, and the error for
ranks with unequal numbers of rows.
"""

import contextlib
import itertools
import random
import time
import warnings
from collections.abc import Callable
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
from tpfuse.ops.linear.parallel_linear import ParallelLinear
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "collective", "fused")
F32, BF16 = torch.float32, torch.bfloat16
K, N = 5, 3


def _served(dtype: torch.dtype) -> list[tuple[type, bool]]:
    """Return the implementation under each switch, and whether a second call returns the same object."""
    x, group, found = torch.ones(2, K, dtype=dtype), dist.new_group(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("auto", *IMPLEMENTATIONS):
            with use(implementation=name):  # type: ignore[arg-type]
                one = parallel_linear(x, group)
                found.append((type(one), parallel_linear(x, group) is one))
        with use(kernels="triton"):
            found.append((type(parallel_linear(x, group)), True))
    return found


METHODS = ("all_gather", "all_gather_backward", "reduce_scatter", "reduce_scatter_backward", "all_reduce")


def _measured(slow: str, file: str) -> tuple[list[str], list[str], bool, int]:
    """Let each call of one of two implementations take a millisecond longer, by a clock of this test.

    Return the decisions of a `autotune` block, the implementations that compute after it, whether results and
    gradients, which are whole numbers, are those of the other implementation, and the number of cases.
    """
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
        for kind in (DirectLinear, CollectiveLinear):
            for name in METHODS:
                method = getattr(kind, name)

                def recorded(*args: Any, method: Any = method, **options: Any) -> Any:
                    calls.append(method.__qualname__)
                    return method(*args, **options)

                patch.setattr(kind, name, recorded)
        with autotune(600, file=file) as found:
            step()
        calls.clear()
        results = step()
        computed = list(calls)
    with use(implementation="collective" if slow == "direct" else "direct"):
        same = all(torch.equal(one, other) for one, other in zip(results, step(), strict=True))
    taken = sorted({decision.taken for decision in found.decisions.values()})
    return taken, sorted({call.partition(".")[0] for call in computed}), same, len(found.decisions)


@pytest.mark.parametrize(("slow", "taken"), [("direct", "collective"), ("collective", "direct")])
def test_the_faster_implementation_computes_forward_and_backward(tmp_path: Path, slow: str, taken: str) -> None:
    kind = CollectiveLinear if taken == "collective" else DirectLinear
    found = pool(2).run(_measured, slow, str(tmp_path / "decisions.json"))
    assert found == [([taken], [kind.__name__], True, 5)] * 2


def _fused_ways(wanted: str, file: str) -> tuple[list[str], int, int, bool]:
    """Return the decisions if one candidate is timed as the fastest, and whether the results are right.

    Between them, return for the call after the measurement the number of gathers by copy engines and the number of
    launches with other tiles.
    """
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
        with autotune(600, file=Path(file)) as found, torch.no_grad():
            measured = all_gather_linear(x, weight, None, group)
            sent.clear(), tiles.clear()
            forget_plans()  # so that the tiles are chosen again
            again = all_gather_linear(x, weight, None, group)
    same = torch.equal(measured, again) and torch.equal(again, torch.cat([x] * group.size()) @ weight.t())
    return [decision.taken for decision in found.decisions.values()], len(sent), len(tiles), same


@pytest.mark.parametrize("wanted", ["fused with copiers, other tiles", "fused with copy engines"])
def test_fused_products_use_the_variant_that_was_fastest(tmp_path: Path, wanted: str) -> None:
    found = pool(2).run(_fused_ways, wanted, str(tmp_path / "decisions.json"))
    assert found == [([wanted], int("engines" in wanted), int("tiles" in wanted), True)] * 2


def _held(memory: SymmetricMemory) -> tuple[int, set[str]]:
    """Return the bytes of this rank's buffers, and the names of the channels."""
    return sum(buffer.local.nbytes for buffer in memory._buffers.values()), {name for name, _ in memory._channels}


def _channels(file: str, leaves: str) -> list[tuple[int, set[str]]]:
    """Measure a product, for which copiers are timed as the fastest, after a direct one was used.

    Return what the memory holds at first, within the block and after it; without the last if the block ends by an error
    on this rank. leaves: how the second rank leaves the block.
    """
    group = dist.new_group()
    memory = symmetric_memory(group, torch.device("cpu"))
    x, weight = torch.ones(len(file), K), torch.ones(N, K)
    with use(implementation="direct"):
        all_gather_linear(x, weight, None, group)
    held = [_held(memory)]
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(InterruptedError, PeerTimeout):
        patch.setitem(dispatch.CANDIDATES, "cpu", ("direct", "fused with copiers", "fused with copy engines"))
        patch.setattr(tuner, "_milliseconds", lambda run, device: 1.0 + (run.args[0] != "fused with copiers"))
        with autotune(600, file=Path(file)), torch.no_grad():
            all_gather_linear(x, weight, None, group)
            held.append(_held(memory))
            if leaves == "by an error":
                assert isinstance(memory, SharedMemory)
                dist.barrier(group)  # the other rank has measured too, and waits from now on
                memory.control.timeout = 0.3
                if group.rank() == 1:
                    raise InterruptedError
        held.append(_held(memory))
        all_gather_linear(x, weight, None, group)
        assert _held(memory) == held[-1]
    return held


def test_channels_that_only_losing_candidates_used_are_closed(tmp_path: Path) -> None:
    direct, copiers, engines = "direct linear", "all_gather_linear", "all_gather_linear by engines"
    flags = 2 * 2 * multiprocessors(torch.device("cpu"))
    of_engines = 2 * 2**16 + 4 * (flags + 2 + 2 + 1)  # slots, flags, state, ready and stamp
    for (before, first), (within, second), (after, last) in pool(2).run(_channels, str(tmp_path), "at the end"):
        assert (first, second, last) == ({direct}, {direct, copiers, engines}, {direct, copiers})
        assert within - after == of_engines and after > before


def test_a_rank_that_leaves_the_block_by_an_error_closes_nothing(tmp_path: Path) -> None:
    """And the other rank, which waits for it, does not hang."""
    one, other = pool(2).run(_channels, f"{tmp_path} left", "by an error")
    assert len(one) == len(other) == 2 and one[1] == other[1]


def test_the_implementation_follows_the_switch() -> None:
    expected = [DirectLinear, DirectLinear, CollectiveLinear, FusedLinear, FusedLinear]
    kept = [kind is not CollectiveLinear for kind in expected]  # which has no state, and is made for each call
    assert pool(2).run(_served, F32) == [list(zip(expected, kept, strict=True))] * 2
    expected[3:] = [DirectLinear, DirectLinear]
    assert pool(2).run(_served, torch.float64) == [list(zip(expected, kept, strict=True))] * 2


def _warned() -> list[str]:
    """Return the warnings of two groups, whose first ranks are 0 and 2."""
    group = [dist.new_group([0, 1]), dist.new_group([2])][dist.get_rank() // 2]
    x = torch.ones(2, K, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with use(implementation="fused"):
                all_gather_linear(x, torch.ones(N, K, dtype=torch.float64), None, group)
            for name in ("auto", "direct", "collective"):
                with use(implementation=name):  # type: ignore[arg-type]
                    all_gather_linear(x, torch.ones(N, K, dtype=torch.float64), None, group)
    return [str(warning.message) for warning in caught]


def test_a_fallback_is_reported_once_by_one_rank() -> None:
    messages = ["tensor-parallel products are direct: there are no kernels for float64"]
    assert pool(3).run(_warned) == [messages, [], messages]


def _case(rows: int, *middle: int, dtype: torch.dtype = F32) -> Case:
    """Return a case of integers, other ones for each number of rows."""
    return Case(dtype, (rows, *middle), k=K, n=N, whole_numbers=True, seed=rows)


def _late(name: Implementation, iterations: int) -> None:
    """Run products on ranks that arrive in any order, repeatedly in the same memory."""
    group, late = dist.group.WORLD, random.Random(dist.get_rank())
    calls = list(itertools.product((1, 3, 8), PRODUCTS.values()))
    with use(implementation=name):
        for i in range(iterations):
            if late.random() < 0.1:
                time.sleep(late.random() * 2e-3)
            rows, product = calls[i % len(calls)]
            with naming(f"iteration {i}, {product.function.__name__}, {rows} rows"):
                product.check(_case(rows), group, backward=name != "fused" or i % 8 == 0)


def _in_rounds() -> None:
    """Run products in rounds of one row in the backward of an all-gather, and of two or three rows elsewhere."""
    group = dist.group.WORLD
    small = DirectLinear(symmetric_memory(group, torch.device("cpu")), (1 + group.size()) * K * 8)
    with pytest.MonkeyPatch.context() as patch:
        _serve_by(small, patch)
        for product in PRODUCTS.values():
            for case in (_case(17), _case(3, 2, 2, dtype=torch.float64), _case(7, 2, dtype=BF16)):
                with naming((product.function.__name__, case)):
                    product.check(case, group)


def _serve_by(products: ParallelLinear, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "parallel_linear", lambda x, group: products)


def _uneven(name: Implementation, known: tuple[int, ...]) -> list[str]:
    """Return the errors if the last rank has one row more; known: the numbers of rows that ranks agreed on before."""
    group, rank, world = dist.new_group(), dist.get_rank(), dist.get_world_size()
    messages = []
    with use(implementation=name):
        for product in PRODUCTS.values():
            for rows in known:
                product.check(_case(rows), group)
            odd = _case(4 if rank == world - 1 else 3)
            with pytest.raises(ValueError) as caught:
                product.run(odd, product.leaves(odd, group), group)
            messages.append(str(caught.value))
            for rows in (3, 4):
                product.check(_case(rows), group)
    return messages


@pytest.mark.parametrize(
    ("name", "known"), [("direct", (3,)), ("collective", (3, 4)), *exhaustive(("collective", ()), ("fused", ()))]
)
def test_unequal_numbers_of_rows_are_refused(name: Implementation, known: tuple[int, ...]) -> None:
    world = 2 if name == "fused" else 3
    for rank, messages in enumerate(pool(world).run(_uneven, name, known)):
        for operator, text in zip(PRODUCTS, messages, strict=True):
            times = world if operator == "linear_reduce_scatter" else 1
            shapes = {side: [(4 if side == world - 1 else 3) * times] for side in range(world)}
            others = range(world - 1) if rank == world - 1 else [world - 1]
            sides = [f"rank {side} runs {operator} torch.float32 {shapes[side]}"[:-1] for side in (*others, rank)]
            assert sides[-1] in text and any(side in text for side in sides[:-1]), text


def _sums(name: Implementation, dtype: torch.dtype) -> None:
    """Check products of one feature: they have one term, so only the order of the sum over ranks matters."""
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

    # Sums of these are exact in float32, but not all of them in bfloat16.
    grad = integers(5, 5 * world, 7, low=-100, high=100)
    for wanted in (True, False):
        bias, last = bias.detach().requires_grad_(), weight[rank].detach().requires_grad_(wanted)
        with use(implementation=name):
            linear_reduce_scatter(x[rank], last, bias, group).backward(grad[own].to(dtype))
        assert torch.equal(bias.grad, grad.sum(0).to(dtype))


def _never_waits(name: Implementation) -> None:
    """Run the products on each rank in a group of its own."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    set_settings(timeout=0.5)
    try:
        with use(implementation=name):
            for product in PRODUCTS.values():
                with naming(product.function.__name__):
                    product.check(_case(4), group)
    finally:
        set_settings(timeout=60.0)


# (the check, the number of ranks, its arguments)
Row = tuple[Callable[..., None], int, tuple[Any, ...]]
FIRST: list[Row] = [
    *((_late, world, arguments) for world, *arguments in ((3, "direct", 60), (2, "collective", 30))),
    (_in_rounds, 3, ()),
    *((_sums, 3, arguments) for arguments in (("direct", BF16), ("collective", F32))),
    *((_never_waits, 2, (name,)) for name in IMPLEMENTATIONS),
]
MORE: list[Row] = [(_late, 2, ("fused", 18)), (_in_rounds, 2, ()), (_sums, 3, ("fused", BF16))]


@pytest.mark.parametrize(("check", "world", "arguments"), [*FIRST, *exhaustive(*MORE)])
def test_results_are_exact(check: Callable[..., None], world: int, arguments: tuple[Any, ...]) -> None:
    pool(world).run(check, *arguments)
