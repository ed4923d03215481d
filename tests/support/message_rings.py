"""Rings of messages, in tests: every rank sends to both of its neighbours, one of which may be missing."""

from collections.abc import Iterator

import pytest
import torch

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.messages.base import Messages, Route
from tpfuse.explore import SimulatedMemory
from tpfuse.testing.inputs import integers


def ring(world: int, slots: int) -> list[Route]:
    """Return the routes of every rank to both of its neighbours."""
    return [Route(f"{rank} {step}", rank, (rank + step) % world, slots) for step in (1, -1) for rank in range(world)]


def send_both_ways(messages: Messages, rank: int, routes: list[Route], count: int) -> None:
    """Send `count` messages on each route, as many as it has slots before the first one is received.

    The last one of these is released first.
    """
    slots = routes[0].slots
    for first in range(0, count, slots):
        numbers = range(first, min(first + slots, count))
        for number in numbers:
            for index, route in enumerate(routes):
                if route.source == rank:
                    messages.send(index, integers(10 * number + index, 5 + number))
        for index, route in enumerate(routes):
            if route.target == rank:
                held = [messages.receive(index, (5 + number,), torch.float32) for number in numbers]
                for number, message in zip(numbers, held, strict=True):
                    assert torch.equal(message.tensor, integers(10 * number + index, 5 + number)), (index, number)
                for message in held[::-1]:
                    messages.release(index, message)


def rounds_both_ways(messages: Messages, rank: int, routes: list[Route]) -> Iterator[int]:
    """Fill the slots of each route three times, and yield how often after each."""
    for turn in range(3):
        send_both_ways(messages, rank, routes, routes[0].slots)
        yield turn


def without_rank_0(messages: Messages, memory: SimulatedMemory, routes: list[Route]) -> None:
    """Send to rank 0, which stays away, and reset the memory; then all routes, of two slots, work from message 0 on."""
    if memory.rank == 0:
        with pytest.raises(PeerTimeout), memory.guard("elsewhere"):
            memory.barrier("elsewhere")
    else:
        index = next(i for i, route in enumerate(routes) if (route.source, route.target) == (memory.rank, 0))
        with pytest.raises(PeerTimeout, match="message 2"):
            for number in range(3):
                messages.send(index, integers(number, 5))
    memory.reset()
    send_both_ways(messages, memory.rank, routes, 4)
