"""Messages by torch.distributed (Gloo or NCCL), for ranks without symmetric memory, such as those of several hosts.

Gloo tells the routes of a group apart by tags. NCCL has no tags, and delivers the messages between two ranks in the
order in which both have begun them, so that each route has a process group of its own. No test runs the part for NCCL:
no machine with two GPUs was at hand.

A message arrives in new memory. The slots of a route only limit how many tensors a source keeps: the send of message k
waits until message k - slots has left. After a PeerTimeout the group cannot be used again.
"""

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm import handle, trace, waits
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.handle import announce, is_lost_peer, write_group_record
from tpfuse.comm.member_groups import free_number, new_group
from tpfuse.comm.messages.base import Message, Messages, Route
from tpfuse.comm.settings import settings

_opened: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # the number of routes so far


class _Transfer:
    """One end of a message under way, which keeps the tensor that is sent or received.

    group: the group of the routes; peer: the other end's number in it. flow: a text that both ends share.
    """

    def __init__(self, op: str, work: dist.Work, x: Tensor, group: dist.ProcessGroup, peer: int, flow: str) -> None:
        self._op, self._work, self._x, self._group, self._peer, self._flow = op, work, x, group, peer, flow
        # As in `CollectiveHandle`: NCCL's watchdog has its own deadline, and a wait with one would block the host.
        self._deadline = (timedelta(seconds=settings().timeout),) if dist.get_backend(group) == "gloo" else ()

    def wait(self) -> None:
        """Block the caller (on CUDA the current stream) until the transfer has ended. Raise PeerTimeout."""
        ranks, started = dist.get_process_group_ranks(self._group), time.monotonic()
        try:
            with trace.span("communication", self._op, peer=ranks[self._peer], flow=self._flow):
                self._work.wait(*self._deadline)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            rank, waited = ranks[self._group.rank()], time.monotonic() - started
            waits.give_up(ranks[self._peer])
            peer = waits.last_that_gave_up(ranks[self._peer], handle.PATIENCE)
            missing = PeerTimeout(self._op, step=-1, rank=rank, peer=peer, waited=waited)
            write_group_record(self._group, missing)
            raise missing from error


class CollectiveMessages(Messages):
    """The routes of a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, routes: Sequence[Route], nbytes: int) -> None:
        """Open the routes. Collective."""
        super().__init__(group.rank(), routes, nbytes)
        self._group, self._device = group, device
        self._ranks = dist.get_process_group_ranks(group)
        announce(group)
        self._first_tag = _opened.get(group, 0)
        _opened[group] = self._first_tag + len(routes)
        self._sent: list[deque[_Transfer]] = [deque() for _ in routes]
        self._groups = [group] * len(routes)
        if dist.get_backend(group) != "gloo":
            self._open_groups()

    def _open_groups(self) -> None:
        """Open a group of two ranks for each route of this rank.

        Every rank opens its groups in the order of the routes, and sends a word through each of them: NCCL makes a
        communicator when it is first used, and the host then waits for the other rank. If the routes made theirs later,
        two ranks could wait for each other.
        """
        number = free_number(self._group, "opening of messages")
        for index, route in enumerate(self._routes):
            if self._rank in (route.source, route.target):
                ends = [self._ranks[route.source], self._ranks[route.target]]
                self._groups[index] = new_group(ends, self._group, number + index)
                word = torch.zeros(1, device=self._device)
                self._begin(index, f"opening of {route.name}", word).wait()

    def send(self, route: int, x: Tensor) -> None:
        """See `Messages.send`. x is kept, and must not be changed, until `finish` has returned."""
        ends, _, op = self._message_to_send(route, x)
        sent = self._sent[route]
        if len(sent) == ends.slots:
            sent[0].wait()
            sent.popleft()
        sent.append(self._begin(route, op, x.detach().contiguous()))
        self._next[route] += 1

    def receive(self, route: int, shape: Sequence[int], dtype: torch.dtype) -> Message:
        """See `Messages.receive`. The memory of the tensor is not used again after `release`."""
        out = torch.empty(shape, dtype=dtype, device=self._device)
        _, _, op = self._message_to_receive(route, out.nbytes)
        self._begin(route, op, out).wait()
        return self._received(route, out)

    def finish(self) -> None:
        for sent in self._sent:
            while sent:
                sent[0].wait()
                sent.popleft()
        super().finish()

    def _free(self, route: int, number: int) -> None:
        pass

    def _begin(self, index: int, op: str, x: Tensor) -> _Transfer:
        """Begin to send or to receive x, as this rank's end of a route does."""
        route, group, tag = self._routes[index], self._groups[index], self._first_tag + index
        flow = f"{self._ranks}: route {tag}, message {self._next[index]}"
        if route.source == self._rank:
            work, peer = dist.isend(x, self._ranks[route.target], group=group, tag=tag), route.target
            if trace.is_observed():
                trace.signal(flow)
        else:
            work, peer = dist.irecv(x, self._ranks[route.source], group=group, tag=tag), route.source
        assert work is not None, "both ends of a route are ranks of its group"
        return _Transfer(op, work, x, self._group, peer, flow)
