"""Messages by torch operations, rank by rank in one process: every access is ordered, under many schedules."""

from collections.abc import Iterator

from tests.support.message_rings import ring, rounds_both_ways, send_both_ways, without_rank_0
from tpfuse.comm.messages import symmetric
from tpfuse.explore import SimulatedMemory
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace

SYMMETRIC = symmetric.SymmetricMessages


class TestDirectMessages(ProtocolSuite):
    modules = (symmetric,)
    needed = (symmetric,)
    worlds = ((2, 1), (3, 1))
    faults = (
        Fault(
            "the slot of another message",
            replace(SYMMETRIC._place, "self._first_slot[route] + index", by="self._first_slot[route]"),
        ),
        Fault(
            "slots that two routes share",
            replace(
                SYMMETRIC.__init__, "self._first_slot.append(taken[route.target])", by="self._first_slot.append(0)"
            ),
        ),
        Fault("a release of the epoch before", replace(SYMMETRIC._free, "epoch", by="epoch - 1", call="signal")),
        Fault("a wait for the epoch before", replace(SYMMETRIC.receive, "epoch", by="epoch - 1", call="wait_signal")),
        Fault(
            "a wait for an older release",
            replace(symmetric.DirectMessages.send, "epoch - 1", by="epoch - 2", call="wait_signal"),
        ),
    )

    def program(self, memory: SimulatedMemory) -> None:
        for slots in (1, 2):
            routes = ring(memory.world, slots)
            messages = current(symmetric).DirectMessages(memory, f"{slots}", 48, routes)
            send_both_ways(messages, memory.rank, routes, 5)

    def short_program(self, memory: SimulatedMemory) -> Iterator[int]:
        routes = ring(memory.world, 2)
        messages = current(symmetric).DirectMessages(memory, "messages", 48, routes)
        return rounds_both_ways(messages, memory.rank, routes)

    def late_program(self, memory: SimulatedMemory) -> None:
        routes = ring(memory.world, 2)
        without_rank_0(current(symmetric).DirectMessages(memory, "late", 48, routes), memory, routes)
