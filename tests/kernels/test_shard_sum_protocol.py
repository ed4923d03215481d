"""shard_sum under many schedules: no false alarm, no unneeded line, no wait without an end."""

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.channels import connect
from tpfuse.explore import RaceError, SimulatedMemory, explore
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace, without_rank_0
from tpfuse.kernels import shard_sum as shard_sums
from tpfuse.kernels import signals
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.testing.inputs import integers

SIZES = (40, 7, 50, 16)  # elements of a shard: grids of several programs and of one alternate
LARGEST = 50
TILES = {"shard_sum": {"BLOCK": 16}, "all_reduce": {"BLOCK": 16}}

pytestmark = pytest.mark.usefixtures("tiny_tiles")


class Buckets:
    """Buffers that are filled and summed in turn."""

    def __init__(self, memory: SimulatedMemory, buffers: int = 2) -> None:
        self.memory, self.end = memory, connect(memory)
        shape = (LARGEST * memory.world,)
        self.buffers = [memory.buffer(f"gradients {i}", shape, torch.float32) for i in range(buffers)]
        self.squares = torch.full((4,), 7.0).double()

    def fill(self, seed: int, m: int) -> list[Tensor]:
        """Return every rank's gradients, and write this rank's into its buffer."""
        world = self.memory.world
        every = [integers(10 * seed + rank, m * world) for rank in range(world)]
        self.buffers[seed % len(self.buffers)].local[: m * world].copy_(every[self.memory.rank])
        return every

    def sum(self, seed: int, m: int, every: Sequence[Tensor]) -> None:
        """Sums, in place where the seed is even, and compares with the sum of `every`."""
        buffer, shard = self.buffers[seed % len(self.buffers)], slice(self.memory.rank * m, (self.memory.rank + 1) * m)
        out = torch.empty(m) if seed % 2 else buffer.local[shard]
        current(shard_sums).shard_sum(buffer.local, buffer.addresses, out, self.squares, shard.start, self.end)
        expected = torch.stack([x[shard] for x in every]).sum(0)
        assert torch.equal(out, expected), f"epoch {seed + 1}"
        assert self.squares.sum() == expected.square().sum(), f"squares of epoch {seed + 1}"


def sums(memory: SimulatedMemory, sizes: Sequence[int], buffers: int = 2) -> None:
    """Run an epoch for each size, in alternating buffers, as in stage 2."""
    buckets = Buckets(memory, buffers)
    for epoch, m in enumerate(sizes):
        buckets.sum(epoch, m, buckets.fill(epoch, m))


def rounds(memory: SimulatedMemory, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Run epochs with the inputs of the first two in turn."""
    buckets = Buckets(memory)
    for epoch, m in enumerate(sizes):
        buckets.sum(epoch % 2, m, buckets.fill(epoch % 2, m))
        yield epoch + 1, epoch % 2


KERNEL, SUM = shard_sums.shard_sum_kernel, shard_sums.sum_over_ranks


class TestShardSum(ProtocolSuite):
    modules = (signals, shard_sums)
    needed = (shard_sums,)
    worlds = ((2, 2), (2, 1), (3, 2))
    faults = (
        Fault("the epoch before will do", replace(KERNEL, "epoch", by="epoch - 1", call="barrier")),
        Fault("another rank's shard", replace(KERNEL, "start", by="0", call="sum_over_ranks")),
        Fault("one rank's gradients for all", replace(SUM, "FIRST", by="0", call="shard_pointer")),
        Fault("a rank is left out", replace(SUM, "FIRST + HALF < WORLD", by="FIRST + HALF < WORLD - 1")),
        Fault("a shard that is cut short", replace(KERNEL, "offs < m", by="offs < m - 1")),
        Fault("squares of a launch before", replace(KERNEL, "parts", by="programs", call="range")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        sums(memory, SIZES)

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return rounds(memory, (24, 7) * 2)

    def late_program(self, memory: SimulatedMemory) -> None:
        buckets = Buckets(memory)
        for _ in range(2):
            buckets.sum(0, 50, buckets.fill(0, 50))
            buckets.fill(1, 50)
            out, buffer, start = torch.full((50,), 7.0), buckets.buffers[1], 50 * memory.rank
            arguments = buffer.local, buffer.addresses, out, buckets.squares, start, buckets.end
            run = partial(current(shard_sums).shard_sum, *arguments)
            without_rank_0(memory, "shard_sum", buckets.end.state, run)
            assert (out == 7).all(), "nothing is summed of what is not here"


def test_one_buffer_is_too_few() -> None:
    """The second step overwrites gradients that peers may still be reading: only another launch prevents it."""
    with pytest.raises(RaceError, match="race on gradients 0"):
        explore(lambda memory: sums(memory, (20, 20), buffers=1), 2, resident=2)


@pytest.mark.exhaustive
def test_any_launch_between_frees_the_buffer() -> None:
    """A launch of another kernel, which uses the slots of the channel and the same words, is enough."""

    def program(memory: SimulatedMemory) -> None:
        buckets, x = Buckets(memory, buffers=1), torch.ones(20)
        for epoch, m in enumerate(SIZES):
            buckets.sum(epoch, m, buckets.fill(epoch, m))
            all_reduce_forward(x, x, buckets.end, two_shot=epoch % 2 == 0)
        assert torch.equal(x, torch.full((20,), float(memory.world ** len(SIZES))))

    explore(program, 2, resident=2)
