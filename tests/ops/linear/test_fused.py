"""Copy engines and programs move shards and partial sums with the same results, to the bit."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import exhaustive
from tpfuse.comm.collectives import fused as fused_collectives
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.explore import RaceError, SimulatedMemory, explore
from tpfuse.kernels import engine_gather as kernel_engine_gather
from tpfuse.kernels import launch as launching
from tpfuse.kernels.launch import launch
from tpfuse.ops.linear import engine_gather
from tpfuse.ops.linear import fused as fused_linear
from tpfuse.ops.linear.engine_gather import EngineGather
from tpfuse.ops.linear.engine_scatter import EngineScatter
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks


def _memory() -> SymmetricMemory:
    group = dist.group.WORLD
    assert group is not None
    return symmetric_memory(group, torch.device("cpu"))


def _everything(products: FusedLinear, dtype: torch.dtype, rows: int) -> list[Tensor]:
    """Return outputs and gradients of both kinds of layers, for one weight and for several."""
    rank, world = products.memory.rank, products.memory.world
    x, y = normal(1 + rank, rows, 2, 24, dtype=dtype), normal(20 + rank, world * rows, 2, 40, dtype=dtype)
    gate, down = normal(3, 36, 24, dtype=dtype), normal(4, 24, 40, dtype=dtype)
    found: list[Tensor | None] = []
    for weights, activation in (([gate], "swiglu"), ([gate, gate[:20]], "gelu")):
        pairs = products.all_gather(x, weights, [None] * len(weights), activation, True)
        lefts = [normal(5 + rank, *kept.shape, dtype=dtype) for _, kept in pairs if kept is not None]
        grad_x, grad_weights = products.all_gather_backward(lefts, x, weights, [True] * len(weights), True)
        found += [grad_x, *grad_weights]
        for pair in pairs:
            found += pair
    found.append(products.reduce_scatter(y, down, None, None))
    for needs_x in (True, False):
        found += products.reduce_scatter_backward(x, y, down, (needs_x, True, True))
    found.append(products.all_reduce(y[: world * rows - 1], down, None, None))
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize(("world", "dtype", "rows"), [(2, torch.bfloat16, 7), *exhaustive((3, torch.float32, 33))])
@on_ranks("world")
def test_copy_engines_give_the_same_results_as_programs(dtype: torch.dtype, rows: int) -> None:
    programs = FusedLinear(_memory())
    engines, sent = programs.variant(engines=True, other_tiles=False), {"gathers": 0, "scatters": 0}

    def counted(name: str, send: Any) -> Any:
        def counting(*args: Any, **how: Any) -> None:
            sent[name] += 1
            send(*args, **how)

        return counting

    expected = _everything(programs, dtype, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineGather, "send", counted("gathers", EngineGather.send))
        patch.setattr(EngineScatter, "send", counted("scatters", EngineScatter.send))
        found = _everything(engines, dtype, rows)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    assert sent == {"gathers": 6, "scatters": 4}


@on_ranks(2)
def test_engines_and_programs_take_turns() -> None:
    """Gather shards around the limit, by programs and by engines in any order."""
    products = FusedLinear(_memory(), engine_bytes=4 * 24 * 5)
    rank, world = products.memory.rank, products.memory.world
    weight = integers(1, 10, 24)
    for step, rows in enumerate((5, 4, 5, 5, 3, 4, 6, 5)):
        whole = integers(10 + step, world, rows, 24)
        ((out, _),) = products.all_gather(whole[rank], [weight], [None], None, False)
        assert torch.equal(out, whole.flatten(0, 1) @ weight.t())


def test_the_explorer_finds_no_error() -> None:
    """Signal must order the accesses of copies too."""

    def program(memory: SimulatedMemory) -> None:
        products = FusedLinear(memory, engine_bytes=4 * 8 * 3)
        weight = integers(1, 5, 8)
        for step, rows in enumerate((3, 3, 2, 3)):
            whole = integers(step, memory.world, rows, 8)
            ((out, _),) = products.all_gather(whole[memory.rank], [weight], [None], None, False)
            assert torch.equal(out, whole.flatten(0, 1) @ weight.t())
            with products._gathering(whole[memory.rank], keep=True, multiplied=False) as gather:
                assert torch.equal(products._gather_only(gather), whole.flatten(0, 1))

    explore(program, 2, resident=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_gather, "open_copies", lambda end, stamp: stamp.copy_(end.state[:1] + 1))
        with pytest.raises(RaceError, match="nothing orders"):
            explore(program, 2, resident=3)


@pytest.mark.parametrize(
    ("most", "rounds"), [(2 * 5 * 4 * 5, 3 + 2 + 2), (2**30, 3)], ids=["5 rows of each owner per round", "one round"]
)
@on_ranks(2)
def test_products_that_slots_cannot_hold_take_several_rounds(most: int, rounds: int) -> None:
    """For all_reduce, the ranks do not divide the rows."""
    products, launched = FusedLinear(_memory()), []
    rank, world = products.memory.rank, products.memory.world
    weight, bias = integers(1, 5, 8), integers(2, 5)
    with pytest.MonkeyPatch.context() as patch:
        real = products._multiply_and_scatter_round
        patch.setattr(fused_linear, "MOST_BYTES", most)
        patch.setattr(products, "_multiply_and_scatter_round", lambda *args: (launched.append(1), real(*args))[1])
        for rows in (14 * world, 7 * world):
            xs, residual = integers(3, world, rows, 8), integers(4, rows // world, 5)
            expected = (xs.sum(0) @ weight.t()).view(world, -1, 5)[rank] + bias + residual
            assert torch.equal(products.reduce_scatter(xs[rank], weight, bias, residual), expected)
        xs, residual = integers(5, world, 9 * world + 1, 8), integers(6, 9 * world + 1, 5)
        expected = xs.sum(0) @ weight.t() + bias + residual
        assert torch.equal(products.all_reduce(xs[rank], weight, bias, residual), expected)
    assert len(launched) == rounds


@on_ranks(2)
def test_a_gather_that_slots_cannot_hold_is_refused_in_forward() -> None:
    """That of backward too: unless it is not needed."""
    products, x, weight = FusedLinear(_memory()), torch.ones(8, 4), torch.ones(9, 4, requires_grad=True)
    gathering = (products.all_gather, [weight], [None], None, False)
    calls = {
        r"^all_gather_linear torch.float32 \[8, 4\]: x takes 128 bytes": gathering,
        r"^linear_reduce_scatter torch.float32 \[8, 9\]: the gradient of this rank's rows takes 144 bytes": (
            products.reduce_scatter, weight, None, None,
        ),
        r"^linear_all_reduce torch.float32 \[8, 9\]: the sum of a rank's rows takes 144 bytes": (
            products.all_reduce, weight, None, None,
        ),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_collectives, "MOST_BYTES", 127)
        for message, (call, *arguments) in calls.items():
            with pytest.raises(ValueError, match=message):
                call(x, *arguments)
        products.reduce_scatter(x, weight.detach(), None, None)


class Stream:
    """A stream in place of a GPU's, which records in order what waits for it and when it is the current one."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def wait_stream(self, other: "Stream") -> None:
        self._calls.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self._calls.append(f"{self.name}:")

    def __exit__(self, *_: object) -> None:
        self._calls.append("current:")


@contextlib.contextmanager
def _streams(products: FusedLinear, calls: list[str]) -> Iterator[None]:
    """Run the products as on a GPU within the block, with a stream for engines; `calls` receives the driver calls."""
    engine, current = Stream("engines", calls), Stream("current", calls)

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        before = len(calls)
        launch(kernel, *arguments, **options)
        calls[before:] = [kernel.fn.__name__]  # without the copies of the interpreter

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in NAMES:
                calls.append(NAMES[func])
            return func(*args, **(kwargs or {}))

    def signal(*arguments: Any) -> None:
        calls.append("word")
        real_signal(*arguments)

    @contextlib.contextmanager
    def guard(op: str, *, kernel: bool) -> Iterator[None]:
        calls.append("guard")
        with real_guard(op, kernel=kernel):
            yield
        calls.append("end")

    real_signal, real_guard = products.memory.signal, products.memory.guard
    with pytest.MonkeyPatch.context() as patch, Copies():
        patch.setattr(products.memory, "device", SimpleNamespace(type="cuda"))
        patch.setattr(products.memory, "signal", signal)
        patch.setattr(products.memory, "guard", guard)
        patch.setattr(fused_linear, "_engine_stream", lambda device: engine)
        patch.setattr(torch.cuda, "current_stream", lambda device: current)
        patch.setattr(torch.cuda, "stream", lambda stream: stream)
        for module in (kernel_engine_gather, launching):
            patch.setattr(module, "launch", launched)
        yield


def _driver_calls(step: str) -> list[str]:
    """Return the driver calls of one operator with engines, after others that allocated its buffers."""
    products, calls = FusedLinear(_memory(), engine_bytes=1), []
    world = products.memory.world
    x, weight, grad = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(4 * world, 6)

    def run() -> None:
        if step == "backward":
            products.all_gather_backward([grad], x, [weight], [True], True)
        elif step == "scatter":
            products.variant(engines=True, other_tiles=False).reduce_scatter(grad, weight.t(), None, None)
        elif step == "backward that fails":
            with pytest.raises(ValueError, match="weight has shape"):
                products.all_gather_backward([grad], x, [weight[1:]], [True], True)
        else:
            products.all_gather(x, [weight] * int(step), [None] * int(step), None, False)

    products.all_gather(x, [weight], [None], None, False)
    products.all_gather_backward([grad], x, [weight], [True], True)
    products.variant(engines=True, other_tiles=False).reduce_scatter(grad, weight.t(), None, None)
    with _streams(products, calls):
        run()
    return calls


NAMES = {torch.ops.aten.copy_.default: "copy", torch.ops.aten.mm.default: "mm"}
BEFORE, AFTER = "engines waits for current", "current waits for engines"
PRODUCT, SCATTER = "all_gather_gemm_forward_kernel", "gemm_reduce_scatter_forward_kernel"


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
@on_ranks("world")
def test_driver_calls_of_a_gather(world: int) -> None:
    """There are 2 n - 1 calls between the two waits of the streams for n ranks, 15 at tp 8.

    Without a product that waits there are n + 2, 10 at tp 8. One guard contains everything that reads the gathered
    rows.
    """
    signalled = ["guard", BEFORE, "engines:", "open_copies_kernel", *["copy", "word"] * (world - 1)]
    kept = ["guard", BEFORE, "engines:", "open_copies_kernel", *["copy"] * world, "close_copies_kernel", "current:"]
    assert _driver_calls("1") == [*signalled, "current:", PRODUCT, AFTER, "end"]
    assert _driver_calls("2") == [*signalled, "copy", "current:", PRODUCT, AFTER, "mm", "end"]
    assert _driver_calls("backward") == [*kept, SCATTER, AFTER, "mm", "end"]


@on_ranks(2)
def test_driver_calls_of_a_scatter() -> None:
    """There are 3 n calls between the two waits of the streams for n ranks, 24 at tp 8."""
    opened, sent = [BEFORE, "engines:", "open_copies_kernel", "current:"], ["await_part_kernel", "copy", "word"]
    calls = ["guard", *opened, SCATTER, "engines:", *sent, "current:", "sum_parts_kernel", AFTER, "end"]
    assert _driver_calls("scatter") == calls


@on_ranks(2)
def test_copies_are_waited_for_if_the_overlapped_product_fails() -> None:
    calls = _driver_calls("backward that fails")
    assert calls[:2] == ["guard", BEFORE] and calls[-1] == AFTER and SCATTER not in calls


def test_copies_have_the_highest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            self.priority = priority

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert fused_linear._engine_stream(torch.device("cuda")).priority == -5
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1: copies of shards will not overlap"):
        fused_linear._engine_stream(torch.device("cuda"))
