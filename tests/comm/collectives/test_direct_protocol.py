"""Collectives by torch operations, rank by rank in one process: every access is ordered, under many schedules."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.channels import epochs_of
from tpfuse.comm import channel
from tpfuse.comm.collectives import direct
from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import SimulatedMemory
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace
from tpfuse.testing.inputs import integers


class TestDirectCollectives(ProtocolSuite):
    modules = (channel, direct)
    needed = (channel, direct)
    worlds = ((3, 1), (2, 1), (1, 1))  # Three ranks take two shots, two ranks one.
    faults = (
        Fault("one half", replace(channel.Channel.next_slots, "self.next_epoch % 2", by="0")),
        Fault("an epoch too old", replace(channel.Channel.wait_for, "epoch", by="epoch - 1", call="wait_signal")),
        Fault(
            "what is under way is not finished first",
            replace(direct.DirectCollectives._run, "self._finish_pending()", by="pass"),
        ),
        Fault(
            "signalled before it is staged",
            replace(
                direct.DirectCollectives._staged,
                "slots[self.memory.rank].copy_(piece)\nyield channel, channel.signal(), start, size, piece, slots",
                by="epoch = channel.signal()\nslots[self.memory.rank].copy_(piece)\n"
                "yield channel, epoch, start, size, piece, slots",
            ),
        ),
    )

    def program(self, memory: SimulatedMemory) -> None:
        list(self.rounds(memory, 1))

    def short_program(self, memory: SimulatedMemory) -> Iterator[object]:
        return self.rounds(memory, 4)

    def rounds(self, memory: SimulatedMemory, count: int) -> Iterator[object]:
        """Run several epochs of every collective, in slots of three or four elements a row; then some under way."""
        current(direct).ONE_SHOT_BYTES = 12
        rank, world = memory.rank, memory.world
        collectives = current(direct).DirectCollectives(memory, 16 * world, 32 * world)
        for n in (5, 1, 11) * count:
            whole = integers(n, world, world, n)
            mine = whole[rank].clone()
            gathered, turned = torch.empty(world, n), torch.empty(world, n)
            part, total, top = torch.empty(n), torch.empty(world * n), torch.empty(world * n)
            collectives.all_gather(mine[0], gathered)
            assert torch.equal(gathered, whole[:, 0])
            collectives.all_to_all(mine, turned)
            assert torch.equal(turned, whole[:, rank])
            collectives.reduce_scatter(mine, part)
            assert torch.equal(part, whole.sum(0)[rank])
            collectives.all_reduce(mine.view(-1), total)
            assert torch.equal(total, whole.sum(0).view(-1))
            collectives.all_reduce_max(mine.view(-1), top)
            assert torch.equal(top, whole.amax(0).view(-1))
            if n == 11:
                outs = [torch.empty(world, n) for _ in range(3)]  # There are fewer halves.
                handles = [collectives.all_gather(mine[0], out, later=True) for out in outs]
                for handle in handles:
                    handle.wait()
                assert all(torch.equal(out, whole[:, 0]) for out in outs)
                yield epochs_of(memory)

    def late_program(self, memory: SimulatedMemory) -> None:
        collectives = current(direct).DirectCollectives(memory, 64, 64)
        whole, out = integers(1, memory.world, 20), torch.empty(20)
        under_way = collectives.all_reduce(whole[memory.rank], torch.empty(20), later=True)
        if memory.rank == 0:
            with pytest.raises(PeerTimeout), memory.guard("elsewhere"):
                memory.barrier("elsewhere")
        else:
            with pytest.raises(PeerTimeout):
                collectives.all_reduce(whole[memory.rank], out)
        memory.reset()
        if not under_way.done:
            with pytest.raises(PeerTimeout, match="begun before a reset"):
                under_way.wait()
        collectives.all_reduce(whole[memory.rank], out)
        assert torch.equal(out, whole.sum(0))
