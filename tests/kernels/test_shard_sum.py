"""Values of shard_sum, on ranks of a simulated symmetric memory."""

import pytest
import torch

from tests.support.cases import refusals
from tests.support.channels import connect, explore_once, unconnected
from tests.support.tiers import exhaustive
from tpfuse.explore import SimulatedMemory
from tpfuse.kernels import reference
from tpfuse.kernels.shard_sum import shard_sum
from tpfuse.testing.inputs import normal

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TILES = {"shard_sum": {"BLOCK": 16}}  # small shards have several programs

pytestmark = pytest.mark.usefixtures("tiny_tiles")


@pytest.mark.parametrize(("world", "dtype"), [(2, BF16), (3, F32), *exhaustive((1, F16), (1, F32), (2, F32), (3, F16))])
def test_sums_in_rank_order_in_float32(world: int, dtype: torch.dtype) -> None:
    """The bits agree for shards of one program and of several on one channel; the other elements do not change."""

    def program(memory: SimulatedMemory) -> None:
        endpoint, rank = connect(memory), memory.rank
        for m, depth in {64: 2 + 16, 1: 1 + 16, 37: 1 + 16, 0: 0, 100: 3 + 16, 16: 1 + 16}.items():
            buffer = memory.buffer(f"gradients {m}", (world * m + 5,), dtype)
            every = [normal(10 * m + r, world * m + 5, dtype=dtype) for r in range(world)]
            buffer.local.copy_(every[rank])
            out, squares = torch.full((m + 2,), 7.0), torch.full((5,), 7.0).double()
            found = shard_sum(buffer.local, buffer.addresses, out[1:-1], squares, rank * m, endpoint)
            expected = reference.shard_sum([x[rank * m : (rank + 1) * m] for x in every])
            assert torch.equal(out[1:-1], expected) and (out[0], out[-1]) == (7, 7)
            assert found == depth, "the tiles of a program, and the elements of a tile"
            error = (depth + len(squares) + m) * 2.0**-53
            torch.testing.assert_close(squares.sum(), expected.double().square().sum(), rtol=error, atol=0)
            assert not squares[min(-(-m // 16), endpoint.programs) :].any(), "a part for each program, the rest 0"
            assert torch.equal(buffer.local, every[rank])
        assert endpoint.state.tolist() == [5, 0], "nothing is launched for no elements"

    explore_once(program, world)


def test_in_place_and_the_same_in_every_run() -> None:
    def program(memory: SimulatedMemory) -> None:
        endpoint, rank = connect(memory), memory.rank
        buffer, runs = memory.buffer("gradients", (3 * 50,), torch.float32), []
        every = [normal(r, 3 * 50) for r in range(3)]
        shard = slice(rank * 50, (rank + 1) * 50)
        for _ in range(3):
            buffer.local.copy_(every[rank])
            squares = torch.empty(3).double()
            shard_sum(buffer.local, buffer.addresses, buffer.local[shard], squares, shard.start, endpoint)
            expected = every[rank].clone()
            expected[shard] = reference.shard_sum([x[shard] for x in every])
            assert torch.equal(buffer.local, expected)
            runs.append(squares)
            memory.barrier()
        assert all(torch.equal(squares, runs[0]) for squares in runs)

    explore_once(program, 3)


def test_values_that_are_not_finite_are_in_the_sum_and_in_the_squares() -> None:
    def program(memory: SimulatedMemory) -> None:
        buffer = memory.buffer("gradients", (80,), torch.bfloat16)
        out, squares = torch.empty(40), torch.empty(3, dtype=torch.float64)
        buffer.local.fill_(1)
        if memory.rank == 1:
            buffer.local[3], buffer.local[73] = torch.nan, torch.inf
        shard_sum(buffer.local, buffer.addresses, out, squares, 40 * memory.rank, connect(memory))
        assert (out.isnan() == (torch.arange(40) == 3)).all() if memory.rank == 0 else out[33] == torch.inf
        assert squares.isnan().sum() == (memory.rank == 0) and squares.isinf().sum() == (memory.rank == 1)

    explore_once(program, 2)


test_bad_input = refusals(
    shard_sum,
    {"gradients": torch.zeros(24), "addresses": torch.zeros(3, dtype=torch.int64), "out": torch.zeros(8)}
    | {"squares": torch.zeros(2).double(), "start": 8, "endpoint": unconnected(16, flag_count=6)},
    "shard_sum: ",
    ({"gradients": torch.zeros(3, 8)}, r"gradients has shape \(3, 8\): expected \(24,\)"),
    ({"gradients": torch.zeros(24).double()}, "gradients is torch.float64: expected float32 or float16 or bfloat16"),
    ({"gradients": torch.zeros(48)[::2]}, r"gradients has strides \(2,\): expected contiguous"),
    ({"gradients": torch.zeros(24, device="meta")}, "gradients is on meta, the channel on cpu"),
    ({"addresses": torch.zeros(2).long()}, r"the addresses of gradients has shape \(2,\): expected \(3,\)"),
    ({"addresses": torch.zeros(3)}, "the addresses of gradients is torch.float32: expected int64"),
    ({"out": torch.zeros(8).half()}, "out is torch.float16: expected float32"),
    ({"out": torch.zeros(16)[::2]}, r"out has strides \(2,\): expected contiguous"),
    ({"out": torch.zeros(2, 4)}, r"out has shape \(2, 4\): expected \(8,\)"),
    ({"squares": torch.zeros(1).double()}, "squares has 1 elements: expected at least 2"),
    ({"squares": torch.zeros(4)}, "squares is torch.float32: expected float64"),
    ({"start": 17}, r"the shard \[17, 25\) is not inside gradients \[24\]"),
    ({"start": -8}, r"the shard \[-8, 0\) is not inside gradients \[24\]"),
    (
        {"out": torch.zeros(1).expand(2**30 + 1)},
        "a shard of 1073741825 elements: expected at most .*: pass it in pieces",
    ),
    ({"endpoint": unconnected(16, flag_count=2)}, "too few flags: one program needs 3"),
)
