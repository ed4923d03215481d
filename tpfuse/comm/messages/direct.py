"""Messages between the CPU ranks of a host: the source copies them into the target's memory with torch."""

from torch import Tensor

from tpfuse.comm.messages.symmetric import SymmetricMessages


class DirectMessages(SymmetricMessages):
    """The routes of CPU ranks that share memory. A tensor that was sent may be changed as soon as `send` returns."""

    def send(self, route: int, x: Tensor) -> None:
        """See `Messages.send`."""
        ends, number, op = self._message_to_send(route, x)
        memory, flags = self._memory, self._flags
        slot, full, free, epoch = self._place(route, number)
        with memory.guard(op, peer=ends.target):
            memory.wait_signal(flags, memory.rank, free, epoch - 1, peer=ends.target, op=op)
            self._view(ends.target, slot, x.shape, x.dtype).copy_(x.detach())
            memory.signal(flags, ends.target, full, epoch)
        self._next[route] += 1
