"""The kernel that sends messages, under many schedules: no false alarm, no unneeded line, no wait without an end."""

from collections.abc import Iterator

import pytest

from tests.support.message_rings import ring, rounds_both_ways, send_both_ways, without_rank_0
from tpfuse.comm.messages import fused, symmetric
from tpfuse.explore import SimulatedMemory
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace
from tpfuse.kernels import send_message, signals

KERNEL = send_message.send_message_kernel
TILES = {"all_gather": {"BLOCK": 2}}  # four float32: small messages have several tiles

pytestmark = pytest.mark.usefixtures("tiny_tiles")


class TestSendMessage(ProtocolSuite):
    modules = (signals, send_message, symmetric, fused)
    needed = (send_message,)  # test_direct_protocol.py deletes the lines of symmetric.py
    worlds = ((2, 2), (3, 2), (2, 1))
    faults = (
        Fault("a wait for an older release", replace(send_message.send_message, "wrapped(epoch - 1)", by="epoch - 2")),
        Fault("another one's word", replace(KERNEL, "here + free", by="here + full", call="wait_signal")),
        Fault("signalled by each program", replace(KERNEL, "ended == tl.num_programs(0)", by="ended > 0")),
        Fault("the count is kept", replace(KERNEL, "tl.store(state_ptr + 1, 0)", by="pass")),
        Fault("a tile that is left out", replace(KERNEL, "tl.cdiv(n, BLOCK)", by="n // BLOCK", call="range")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        routes = ring(memory.world, 1)
        messages = current(fused).FusedMessages(memory, "messages", 48, routes)
        send_both_ways(messages, memory.rank, routes, 3)

    def short_program(self, memory: SimulatedMemory) -> Iterator[int]:
        routes = ring(memory.world, 2)
        messages = current(fused).FusedMessages(memory, "messages", 48, routes)
        return rounds_both_ways(messages, memory.rank, routes)

    def late_program(self, memory: SimulatedMemory) -> None:
        routes = ring(memory.world, 2)
        without_rank_0(current(fused).FusedMessages(memory, "late", 48, routes), memory, routes)
