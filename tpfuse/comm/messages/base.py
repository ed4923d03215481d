"""Messages between two ranks: what the implementations share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.comm.layout import check_local


@dataclass(frozen=True)
class Route:
    """A one-way sequence of messages from one rank of a group to another.

    name: what is sent, for errors, traces and flight records, such as "activations for stage 1". source, target: ranks
    of the group, by their numbers in it; they are different. slots: the number of messages that may be under way, or
    received and not yet released, at once.
    """

    name: str
    source: int
    target: int
    slots: int


@dataclass(frozen=True, eq=False)
class Message:
    """A message that was received. number: its position in its route, from 0."""

    tensor: Tensor
    number: int


class Messages(ABC):
    """The routes of one group, opened together by `open_messages`.

    The number of a message follows from the order of `send` on the source and of `receive` on the target. Only one
    thread at a time may use the routes of a group. If a rank does not come, a wait raises PeerTimeout, which names that
    rank and the message. Then, in shared memory, every rank calls `SymmetricMemory.reset`, and all routes begin with
    message 0 again; the messages that were sent before are lost.
    """

    def __init__(self, rank: int, routes: Sequence[Route], nbytes: int) -> None:
        """Take routes that `check_routes` has checked. nbytes: the bytes of the largest message."""
        self._rank, self._routes, self._nbytes = rank, tuple(routes), nbytes
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Set the number of every route's next message to 0."""
        self._next = [0] * len(self._routes)
        self._held: dict[tuple[int, int], Message] = {}  # by route and number: received, and not yet released
        self._unfinished = False  # whether messages were sent or received since `finish`

    def begin(self) -> None:
        """Begin an exchange of messages, which `finish` ends.

        Raise RuntimeError if an error has ended the one before: its messages may be left, in the place of later ones.
        """
        self._renew()
        if self._unfinished:
            raise RuntimeError(
                "an error has ended the step before, and some of its messages may be left: call reset() of"
                " tpfuse.symmetric_memory(group, device) on every rank, or without symmetric memory start the ranks"
                " anew"
            )

    @abstractmethod
    def send(self, route: int, x: Tensor) -> None:
        """Send x, of any shape and dtype, as the next message of a route that begins at this rank.

        x must stay as it is until the current stream has come past this call, and with Gloo and NCCL until `finish` has
        returned. Raise ValueError if this rank is not the route's source or x is too large, and PeerTimeout if the
        target does not release the slot in time.
        """

    @abstractmethod
    def receive(self, route: int, shape: Sequence[int], dtype: torch.dtype) -> Message:
        """Wait for the next message of a route that ends at this rank, and return it.

        shape, dtype: those of the tensor that was sent. The tensor may be read until `release`. Raise ValueError if
        this rank is not the route's target or has not released enough messages, and PeerTimeout.
        """

    def release(self, route: int, message: Message) -> None:
        """Say that the current stream reads the message no longer. Each message is released once, in any order.

        Raise ValueError for a message that is not held.
        """
        self._renew()
        if self._held.get((route, message.number)) is not message:
            raise ValueError(
                f"release of {self._routes[route].name}, message {message.number}: it was released already, or was"
                " received on another route or before a reset"
            )
        del self._held[route, message.number]
        self._free(route, message.number)

    def finish(self) -> None:
        """Wait until no tensor that this rank has sent is needed any longer. Raise PeerTimeout."""
        self._unfinished = False  # most implementations have copied what was sent

    def _renew(self) -> None:  # noqa: B027 - only symmetric memory can be reset
        """Begin anew after a reset."""

    @abstractmethod
    def _free(self, route: int, number: int) -> None:
        """Let the source use the slot of a message again."""

    def _message_to_send(self, index: int, x: Tensor) -> tuple[Route, int, str]:
        """Return (the route, the number of its next message, the name of the operation). Raise ValueError."""
        self._renew()
        route = self._routes[index]
        check_local(f"send {route.name}", x=x)
        if route.source != self._rank:
            raise ValueError(f"send {route.name}: this is rank {self._rank}, but rank {route.source} sends it")
        if x.nbytes > self._nbytes:
            raise ValueError(
                f"send {route.name}: {x.dtype} {tuple(x.shape)} has {x.nbytes} bytes: the routes were opened for"
                f" {self._nbytes}"
            )
        self._unfinished = True
        return route, self._next[index], f"send {route.name}, message {self._next[index]}"

    def _message_to_receive(self, index: int, nbytes: int) -> tuple[Route, int, str]:
        """Return (the route, the number of its next message, the name of the operation). Raise ValueError."""
        self._renew()
        route, number = self._routes[index], self._next[index]
        if route.target != self._rank:
            raise ValueError(f"receive {route.name}: this is rank {self._rank}, but rank {route.target} receives it")
        if nbytes > self._nbytes:
            raise ValueError(f"receive {route.name}: {nbytes} bytes: the routes were opened for {self._nbytes}")
        if (index, number - route.slots) in self._held:
            raise ValueError(
                f"receive {route.name}, message {number}: message {number - route.slots} is not released yet, and the"
                f" route has {route.slots} slots: release it before, or open the route with more slots"
            )
        self._unfinished = True
        return route, number, f"receive {route.name}, message {number}"

    def _received(self, index: int, tensor: Tensor) -> Message:
        """Return the next message of a route with this tensor, and count it."""
        message = Message(tensor, self._next[index])
        self._held[index, message.number] = message
        self._next[index] += 1
        return message


def check_routes(routes: Sequence[Route], world: int, nbytes: int) -> None:
    """Raise ValueError for a route that a group of `world` ranks cannot have, and unless nbytes is at least 1."""
    if nbytes < 1:
        raise ValueError(f"messages of at most {nbytes} bytes: expected at least 1")
    for route in routes:
        ends = {route.source, route.target}
        if len(ends) < 2 or not ends <= set(range(world)):
            raise ValueError(
                f"route {route.name!r} from rank {route.source} to rank {route.target}: expected two different ranks of"
                f" a group of {world}"
            )
        if route.slots < 1:
            raise ValueError(f"route {route.name!r} with {route.slots} slots: expected at least 1")
