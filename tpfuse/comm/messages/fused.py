"""Messages by a Triton kernel, which waits for the slot, copies into the target's memory and signals.

On CUDA everything happens in the order of the current stream: neither a send nor a receive makes the host wait. On CPUs
the kernel is interpreted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpfuse.comm.collectives.fused import endpoint_of, most_programs
from tpfuse.comm.messages.base import Message, Route
from tpfuse.comm.messages.symmetric import SymmetricMessages
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.send_message import send_message


class FusedMessages(SymmetricMessages):
    """The routes of ranks whose kernels reach each other's memory.

    A tensor that was sent may be changed by later operations on the same stream. No message can be captured in a CUDA
    graph: each replay would use the slot of the capture.
    """

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int, routes: Sequence[Route]) -> None:
        """Open the routes. Collective."""
        super().__init__(memory, name, nbytes, routes)
        state, programs = memory.signals(f"{name}: state", 2), most_programs(memory)
        programs = min(programs, memory.resident_programs or programs)
        self._endpoint = endpoint_of(memory, self._slots, self._flags, state, programs)

    def send(self, route: int, x: Tensor) -> None:
        ends, number, op = self._message_to_send(route, x)
        _refuse_capture(op, self._memory)
        slot, full, free, epoch = self._place(route, number)
        with self._memory.guard(op, kernel=True, peer=ends.target):
            x = x.detach().contiguous()
            send_message(x, self._endpoint, target=ends.target, slot=slot, full=full, free=free, epoch=epoch)
        self._next[route] += 1

    def receive(self, route: int, shape: Sequence[int], dtype: torch.dtype) -> Message:
        _refuse_capture(f"receive {self._routes[route].name}", self._memory)
        return super().receive(route, shape, dtype)


def _refuse_capture(op: str, memory: SymmetricMemory) -> None:
    if memory.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: messages cannot be captured in a CUDA graph: send and receive outside of it")
