"""Channels of kernels that communicate, in tests: connected ones on simulated ranks, and an unconnected one.

def program(memory):                     # runs on every rank
    endpoint = connect(memory, programs=4)
    all_gather_forward(x, out, endpoint)

explore_once(program, world=3)
"""

from collections.abc import Callable

import torch

from tpfuse.comm.collectives.fused import endpoint_of
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.explore import RoundRobin, SimulatedMemory, explore
from tpfuse.kernels.endpoint import Endpoint


def connect(memory: SymmetricMemory, slot_bytes: int = 32768, flag_count: int = 64, programs: int = 3) -> Endpoint:
    """Return this rank's end of a new channel."""
    slots = memory.buffer("slots", (2, slot_bytes), torch.uint8)
    return endpoint_of(memory, slots, memory.signals("flags", flag_count), memory.signals("state", 2), programs)


def unconnected(slot_bytes: int = 256, flag_count: int = 5, programs: int = 2) -> Endpoint:
    """Return rank 1's end of a channel of three ranks that is not connected, aborted so that launches do nothing."""
    table, words = torch.zeros(3, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    return Endpoint(1, 3, table, slot_bytes, table, flag_count, words, words[:1], programs=programs)


def epochs_of(memory: SimulatedMemory) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a program yields after a round on channels of `memory.channel`: their epochs, and the next halves."""
    epochs = tuple(channel.next_epoch for channel in memory._channels.values())
    return epochs, tuple(epoch % 2 for epoch in epochs)


def explore_once(program: Callable[[SimulatedMemory], object], world: int) -> None:
    """Run `program` on `world` simulated ranks under one schedule, for the values that it computes."""
    explore(program, world, schedules=[RoundRobin()])
