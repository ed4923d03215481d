"""Values of the collectives, on ranks of a simulated symmetric memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.cases import refusals
from tests.support.channels import connect, explore_once, unconnected
from tests.support.tiers import exhaustive
from tpfuse.explore import RoundRobin, Sequential, SimulatedMemory, explore
from tpfuse.kernels.all_gather import all_gather_forward
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.kernels.all_to_all import all_to_all_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.reduce_scatter import reduce_scatter_forward
from tpfuse.testing.inputs import integers, normal

EPOCHS = [(torch.float32, n) for n in (63, 0, 1000, 1)]
EPOCHS += [(dtype, 100) for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.float64, torch.int64)]
TILES = {name: {"BLOCK": 16} for name in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")}


@pytest.mark.parametrize("world", [3, *exhaustive(1, 4)])
def test_every_size_and_dtype_one_after_another(collective: Any, world: int) -> None:
    def program(memory: SimulatedMemory) -> None:
        endpoint = connect(memory)
        for epoch, (dtype, n) in enumerate(EPOCHS):
            xs = [integers(10 * epoch + rank, world, n, dtype=dtype) for rank in range(world)]
            out = collective.run(xs[memory.rank], endpoint)
            assert torch.equal(out, collective.plain(xs, memory.rank)), (dtype, n)
        assert endpoint.state.tolist() == [len(EPOCHS), 0], "every launch is an epoch, also for no elements"

    explore_once(program, world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *exhaustive(torch.float16)])
def test_sums_in_rank_order_rounded_once(sum_collective: Any, dtype: torch.dtype) -> None:
    """The bits agree, which no other order and no other rounding gives; so one shot and two give the same too."""

    def program(memory: SimulatedMemory) -> None:
        xs = [normal(rank, 4, 999, dtype=dtype) for rank in range(4)]
        expected = sum_collective.plain(xs, memory.rank)
        assert torch.equal(sum_collective.run(xs[memory.rank], connect(memory)), expected)
        if dtype == torch.float32:
            assert not torch.equal(sum_collective.plain(xs[::-1], memory.rank), expected), "another order is seen"

    explore_once(program, 4)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # it should give infinity
def test_signs_of_zero_infinities_and_nan_stay(sum_collective: Any) -> None:
    special = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan, 65504.0])

    def program(memory: SimulatedMemory) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            xs = [special.to(dtype).repeat(2, 1) for _ in range(2)]
            out = sum_collective.run(xs[memory.rank], connect(memory))
            expected = sum_collective.plain(xs, memory.rank)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())
            assert torch.equal(out[:4].signbit(), expected[:4].signbit())

    explore_once(program, 2)


@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.bool, 48), (torch.uint8, 7), (torch.complex64, 7), (torch.float8_e4m3fn, 48)]
)
def test_every_dtype_is_moved(dtype: torch.dtype, n: int) -> None:
    def program(memory: SimulatedMemory) -> None:
        endpoint = connect(memory)
        raw = [integers(rank, 3, n * dtype.itemsize, low=0, high=1, dtype=torch.uint8) for rank in range(3)]
        x = raw[memory.rank].view(dtype)
        gathered, exchanged = torch.empty_like(x), torch.empty_like(x)
        all_gather_forward(x[0], gathered, endpoint)
        assert torch.equal(gathered.view(torch.uint8), torch.stack([row[0] for row in raw]))
        all_to_all_forward(x, exchanged, endpoint)
        assert torch.equal(exchanged.view(torch.uint8), torch.stack([row[memory.rank] for row in raw]))

    explore_once(program, 3)


@pytest.mark.usefixtures("tiny_tiles")
def test_ranks_with_different_alignments() -> None:
    """A rank that moves narrower words than another has the same tiles."""

    def program(memory: SimulatedMemory) -> None:
        endpoint, first = connect(memory), (0, 1, 2)[memory.rank]
        xs = [integers(rank, 200, dtype=torch.int16) for rank in range(3)]
        x = torch.empty(203, dtype=torch.int16)[first : first + 200].copy_(xs[memory.rank])
        out = torch.empty(603, dtype=torch.int16)[first : first + 600].view(3, 200)
        all_gather_forward(x, out, endpoint)
        assert torch.equal(out, torch.stack(xs))

    explore(program, 3)


@pytest.mark.usefixtures("tiny_tiles")
def test_in_place() -> None:
    def program(memory: SimulatedMemory) -> None:
        endpoint, rank = connect(memory), memory.rank
        xs = [integers(r, 3, 50) for r in range(3)]
        gathered, exchanged, scattered = (xs[rank].clone() for _ in range(3))
        all_gather_forward(gathered[rank], gathered, endpoint)
        assert torch.equal(gathered, torch.stack([x[r] for r, x in enumerate(xs)]))
        all_to_all_forward(exchanged, exchanged, endpoint)
        assert torch.equal(exchanged, torch.stack([x[rank] for x in xs]))
        reduce_scatter_forward(scattered, scattered[rank], endpoint)
        assert torch.equal(scattered[rank], xs[0][rank] + xs[1][rank] + xs[2][rank])
        for two_shot in (False, True):
            x = xs[rank][0].clone()
            all_reduce_forward(x, x, endpoint, two_shot=two_shot)
            assert torch.equal(x, xs[0][0] + xs[1][0] + xs[2][0])

    explore(program, 3, schedules=[Sequential(), RoundRobin()])


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize(("flag_count", "n"), [(6, 70), *exhaustive((17, 300))])
def test_as_many_programs_as_there_are_flags(collective: Any, flag_count: int, n: int) -> None:
    def program(memory: SimulatedMemory) -> None:
        endpoint = connect(memory, flag_count=flag_count, programs=50)
        for seed in (0, 3):
            xs = [integers(seed + rank, 3, n) for rank in range(3)]
            assert torch.equal(collective.run(xs[memory.rank], endpoint), collective.plain(xs, memory.rank))

    explore_once(program, 3)


ROW, ROWS = torch.zeros(8), torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda end: all_gather_forward(ROWS, ROWS, end), r"all_gather: x has shape \(3, 8\): expected \(24,\)"),
        (lambda end: all_gather_forward(ROW, ROWS[:2], end), r"all_gather: out has shape \(2, 8\): expected \(3, 8\)"),
        (lambda end: all_gather_forward(ROW, ROWS.half(), end), r"out is torch.float16: expected float32"),
        (lambda end: all_gather_forward(ROW.repeat(2)[::2], ROWS, end), r"x has strides \(2,\): expected contiguous"),
        (lambda end: all_gather_forward(ROW.to("meta"), ROWS, end), "x is on meta, the channel on cpu"),
        (
            lambda end: all_gather_forward(torch.zeros(100), torch.zeros(3, 100), end),
            "all_gather: 400 bytes to stage, a slot holds 256: pass it in pieces",
        ),
        (lambda end: all_to_all_forward(ROWS[:2], ROWS, end), r"all_to_all: x has shape \(2, 8\): expected \(3, 5\)"),
        (lambda end: reduce_scatter_forward(ROWS, ROWS[0, :7], end), r"out has shape \(7,\): expected \(8,\)"),
        (lambda end: reduce_scatter_forward(ROWS.bool(), ROW.bool(), end), r"x is torch.bool: expected float32 or"),
        (lambda end: all_reduce_forward(ROW, ROWS[:1], end, two_shot=False), r"out has shape \(1, 8\)"),
        (
            lambda end: all_reduce_forward(ROW, ROW, end, two_shot=True),
            "all_reduce: too few flags: one program needs 6, the channel has 5",
        ),
    ],
)
def test_bad_input(call: Callable[[Endpoint], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(unconnected())


test_invalid_endpoints_are_refused = refusals(
    Endpoint,
    vars(unconnected()),
    "endpoint: ",
    ({"rank": 3}, "rank 3 of 3: expected 0 <= rank < world"),
    ({"slot_bytes": 24}, "slot_bytes 24: expected a multiple of 16"),
    ({"slot_bytes": 2**31}, r"slot_bytes 2147483648: .* up to 2\^30"),
    ({"programs": 0}, "programs 0: expected at least 1"),
    ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots has shape \(2,\): expected \(3,\)"),
    ({"flags": torch.zeros(3)}, "flags is torch.float32: expected int64"),
    ({"state": torch.zeros(3, dtype=torch.int32)}, r"state has shape \(3,\): expected \(2,\)"),
    ({"abort": torch.zeros(1, dtype=torch.int32, device="meta")}, "abort is on meta, slots on cpu"),
)
