"""Messages in symmetric memory: the source writes a message where the target reads it.

Message k of a route uses slot k % slots of the route, in the target's memory, for the (k // slots + 1)-th time, which
is its epoch. The target hands out the slot itself, without a copy. Each slot has two int32 words:

    full    in the target's memory, written by the source alone: the epoch of the message that is there
    free    in the source's memory, written by the target alone: the epoch of the message that was released last

The source waits until `free` is the epoch before, writes the slot and sets `full`; the target waits for `full`, reads
the slot and sets `free`. As each slot has words of its own, messages are released in any order.

The implementations differ in how the source writes: with torch (`DirectMessages`), or by a kernel (`FusedMessages`).
"""

import math
import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tpfuse.comm.messages.base import Message, Messages, Route
from tpfuse.comm.symmetric_memory import SymmetricMemory

_ALIGNMENT = 16  # bytes


def name_of(routes: Sequence[Route]) -> str:
    """Return the name of the routes' buffers. Ranks that open other routes find that their names differ."""
    return f"messages on {len(routes)} routes, {zlib.crc32(repr(tuple(routes)).encode()):08x}"


class SymmetricMessages(Messages):
    """The routes of one group in symmetric memory."""

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int, routes: Sequence[Route]) -> None:
        """Open the routes. Collective. name: of their buffers; nbytes: the bytes of the largest message."""
        super().__init__(memory.rank, routes, nbytes)
        self._memory, self._generation = memory, memory.generation
        *self._first_word, self._count = accumulate((route.slots for route in routes), initial=0)
        taken = [0] * memory.world  # the slots in each rank's memory
        self._first_slot = []
        for route in routes:
            self._first_slot.append(taken[route.target])
            taken[route.target] += route.slots
        slot_bytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._slots = memory.buffer(f"{name}: slots", (max(taken), slot_bytes), torch.uint8)
        self._flags = memory.signals(f"{name}: flags", 2 * self._count)

    def receive(self, route: int, shape: Sequence[int], dtype: torch.dtype) -> Message:
        """See `Messages.receive`. On CUDA the current stream waits, and not the host."""
        ends, number, op = self._message_to_receive(route, math.prod(shape) * dtype.itemsize)
        memory = self._memory
        slot, full, _, epoch = self._place(route, number)
        with memory.guard(op, kernel=memory.device.type == "cuda", peer=ends.source):
            memory.wait_signal(self._flags, memory.rank, full, epoch, peer=ends.source, op=op)
        return self._received(route, self._view(memory.rank, slot, shape, dtype))

    def _renew(self) -> None:
        if self._generation != self._memory.generation:
            self._generation = self._memory.generation
            self._begin_anew()

    def _free(self, route: int, number: int) -> None:
        _, _, free, epoch = self._place(route, number)
        self._memory.signal(self._flags, self._routes[route].source, free, epoch)

    def _place(self, route: int, number: int) -> tuple[int, int, int, int]:
        """Return (the slot in the target's memory, the words `full` and `free`, the epoch) of a message."""
        turn, index = divmod(number, self._routes[route].slots)
        word = self._first_word[route] + index
        return self._first_slot[route] + index, word, self._count + word, turn + 1

    def _view(self, rank: int, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the beginning of a slot in a rank's memory as a tensor."""
        size = math.prod(shape) * dtype.itemsize
        return self._slots.peers[rank][slot, :size].view(dtype).view(torch.Size(shape))


class DirectMessages(SymmetricMessages):
    """The routes of CPU ranks that share memory. A tensor that was sent may be changed as soon as `send` returns."""

    def send(self, route: int, x: Tensor) -> None:
        ends, number, op = self._message_to_send(route, x)
        memory, flags = self._memory, self._flags
        slot, full, free, epoch = self._place(route, number)
        with memory.guard(op, peer=ends.target):
            memory.wait_signal(flags, memory.rank, free, epoch - 1, peer=ends.target, op=op)
            self._view(ends.target, slot, x.shape, x.dtype).copy_(x.detach())
            memory.signal(flags, ends.target, full, epoch)
        self._next[route] += 1
