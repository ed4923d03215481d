"""shard_sum under many schedules: no false alarm, no line that is not needed, no wait without an end."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels import shard_sum as shard_sums
from tpfuse.kernels import signals
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.explore import PCT, RaceError, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

Program = Callable[[SimulatedMemory], None]
Connect = Callable[..., Endpoint]
SIZES = (40, 7, 50, 16)  # of a shard: grids of several programs and of one take turns
LARGEST = 50


@pytest.fixture(autouse=True)
def tiny_tiles() -> Iterator[None]:
    """Tiles of 16 elements: small shards have several programs."""
    names = ("shard_sum", "all_reduce")
    rows = [row for row in read_table(TABLE) if row.operator in names and row.family == "interpreted"]
    with override(*(replace(row, blocks={"BLOCK": 16}) for row in rows)):
        yield


class Buckets:
    """Buffers that are filled and summed in turn. The launcher is looked up at each call: mutants are elsewhere."""

    def __init__(self, memory: SimulatedMemory, connect: Connect, rooms: int = 2) -> None:
        self.memory, self.end = memory, connect(memory)
        shape = (LARGEST * memory.world,)
        self.rooms = [memory.buffer(f"gradients {i}", shape, torch.float32) for i in range(rooms)]
        self.squares = torch.full((4,), 7.0)

    def fill(self, seed: int, m: int) -> list[Tensor]:
        """Every rank's gradients; this rank's are in their room."""
        world = self.memory.world
        every = [integers(10 * seed + rank, m * world) for rank in range(world)]
        self.rooms[seed % len(self.rooms)].local[: m * world].copy_(every[self.memory.rank])
        return every

    def sum(self, seed: int, m: int, every: Sequence[Tensor]) -> None:
        """In place where the seed is even; compares with `every`."""
        room, own = self.rooms[seed % len(self.rooms)], slice(self.memory.rank * m, (self.memory.rank + 1) * m)
        out = torch.empty(m) if seed % 2 else room.local[own]
        launcher = importlib.import_module("tpfuse.kernels.shard_sum").shard_sum
        launcher(room.local, room.addresses, out, self.squares, own.start, self.end)
        expected = torch.stack([x[own] for x in every]).sum(0)
        assert torch.equal(out, expected), f"epoch {seed + 1}"
        assert self.squares.sum() == expected.square().sum(), f"squares of epoch {seed + 1}"


def program_of(connect: Connect, sizes: Sequence[int] = SIZES, rooms: int = 2) -> Program:
    """An epoch for each size, in rooms that take turns, as stage 2 has them."""

    def shard_sum(memory: SimulatedMemory) -> None:
        buckets = Buckets(memory, connect, rooms)
        for epoch, m in enumerate(sizes):
            buckets.sum(epoch, m, buckets.fill(epoch, m))

    return shard_sum


@pytest.mark.parametrize(("world", "resident"), [(2, 1), (2, 2), (3, 2)])
def test_no_alarm(connect: Connect, world: int, resident: int) -> None:
    explore(program_of(connect), world, resident=resident)


def test_no_alarm_in_twenty_seeds(connect: Connect) -> None:
    explore(program_of(connect, (24, 7, 20)), 2, resident=2, schedules=map(PCT, range(20)))


def test_one_room_is_too_few(connect: Connect) -> None:
    """What peers may still be reading is written: nothing but another launch says that they have read."""
    with pytest.raises(RaceError, match="race on gradients 0"):
        explore(program_of(connect, (20, 20), rooms=1), 2, resident=2)


def test_any_launch_between_frees_the_room(connect: Connect) -> None:
    """Also one of another kernel, which uses the slots of the channel and the same words."""

    def program(memory: SimulatedMemory) -> None:
        buckets, x = Buckets(memory, connect, rooms=1), torch.ones(20)
        for epoch, m in enumerate(SIZES):
            buckets.sum(epoch, m, buckets.fill(epoch, m))
            all_reduce_forward(x, x, buckets.end, two_shot=epoch % 2 == 0)
        assert torch.equal(x, torch.full((20,), float(memory.world ** len(SIZES))))

    explore(program, 2, resident=2)


def left_by(program: Program, mutants: list[Mutant]) -> list[Mutant]:
    """Those that the program does not fail."""
    return surviving(lambda *copies: program, [signals, shard_sums], 2, mutants=mutants, resident=2)


def test_every_line_is_needed(connect: Connect) -> None:
    mutants = [m for m in mutants_of(signals, shard_sums) if m.module == shard_sums.__name__]
    assert len(mutants) == 2, "\n".join(map(str, mutants))
    left = left_by(program_of(connect), mutants)
    assert not left, "\n".join(map(str, left))


FAULTS = {
    "the epoch before will do": ("barrier(flags_ptr, abort_ptr, epoch,", "barrier(flags_ptr, abort_ptr, epoch - 1,"),
    "another rank's shard": ("= sum_over_ranks(addresses_ptr, start,", "= sum_over_ranks(addresses_ptr, 0,"),
    "one rank's gradients for all": ("shard_pointer(addresses_ptr, source,", "shard_pointer(addresses_ptr, 0,"),
    "a rank is left out": ("tl.static_range(1, WORLD)", "tl.static_range(1, WORLD - 1)"),
    "a shard that is cut short": ("mask = offs < m", "mask = offs < m - 1"),
    "squares of a launch before": ("range(pid + programs, parts,", "range(pid + programs + 1, parts,"),
}  # fmt: skip


def planted(fault: str) -> Mutant:
    source = inspect.getsource(shard_sums)
    before, after = FAULTS[fault]
    assert source.count(before) == 1, before
    changed = source.replace(before, after)
    return Mutant(shard_sums.__name__, str(shard_sums.__file__), (1, 1), before, fault, changed)


def test_faults_that_are_no_deletion(connect: Connect) -> None:
    left = left_by(program_of(connect), [planted(fault) for fault in FAULTS])
    assert not left, "\n".join(map(str, left))


def test_waits_end(connect: Connect) -> None:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new."""

    def late(memory: SimulatedMemory) -> None:
        buckets = Buckets(memory, connect)
        for _ in range(2):
            buckets.sum(0, 50, buckets.fill(0, 50))
            buckets.fill(1, 50)
            with pytest.raises(PeerTimeout), memory.guard("shard_sum"):
                if memory.rank == 0:
                    memory.barrier("elsewhere")
                out, room, start = torch.full((50,), 7.0), buckets.rooms[1], 50 * memory.rank
                for _ in range(2):
                    shard_sums.shard_sum(room.local, room.addresses, out, buckets.squares, start, buckets.end)
                    assert buckets.end.state[0] == 1, "the epoch is not over"
                assert (out == 7).all(), "nothing is summed of what is not here"
            memory.reset()
            memory.barrier()
            assert buckets.end.state.tolist() == [0, 0]

    explore(late, 2, resident=2, timeouts=True)
