"""Messages from one rank to another, by the implementation that serves the group best.

| implementation | what it is                                                                            |
|----------------|---------------------------------------------------------------------------------------|
| direct         | a copy with torch into the target's shared memory (`tpfuse.comm.messages.symmetric`)  |
| fused          | a Triton kernel that copies into the target's memory (`tpfuse.comm.messages.fused`)   |
| collective     | point-to-point messages of Gloo or NCCL (`tpfuse.comm.messages.collective`)           |

    routes = [Route("activations for stage 1", source=0, target=1, slots=2)]
    messages = open_messages(group, device, torch.float32, routes, nbytes=4 * 1000)    # on every rank
    messages.send(0, x)                                                                # on rank 0
    message = messages.receive(0, (1000,), torch.float32)                              # on rank 1
    y = message.tensor.sum()
    messages.release(0, message)
    messages.finish()                                                                  # on rank 0
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from tpfuse.comm.agreement import exchange
from tpfuse.comm.dispatch import Choice, choose_implementation
from tpfuse.comm.messages.base import Message as Message
from tpfuse.comm.messages.base import Messages as Messages
from tpfuse.comm.messages.base import Route as Route
from tpfuse.comm.messages.base import check_routes
from tpfuse.comm.messages.collective import CollectiveMessages
from tpfuse.comm.messages.fused import FusedMessages
from tpfuse.comm.messages.symmetric import DirectMessages, name_of

_SYMMETRIC = {"direct": DirectMessages, "fused": FusedMessages}


def open_messages(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, routes: Sequence[Route], nbytes: int
) -> Messages:
    """Open routes between ranks of the group. Collective: every rank passes the same routes, in one order.

    device: of the tensors that are sent and received. dtype: the one by which `tpfuse.comm.dispatch` chooses the
    implementation; messages may have any dtype. nbytes: the bytes of the largest message. In symmetric memory, the same
    routes opened again are those that are open already, which continue to count. Raise ValueError for a route that the
    group cannot have, and if ranks pass different routes; PeerTimeout.
    """
    check_routes(routes, group.size(), nbytes)
    mine = [*routes], nbytes
    for rank, other in enumerate(exchange(mine, group, op="opening of messages")):
        if other != mine:
            raise ValueError(
                f"messages: rank {group.rank()} opens {mine}, rank {rank} opens {other}: expected the same"
            )
    choice = choose_implementation(device, dtype, group)
    if choice.memory is None:
        return CollectiveMessages(group, device, routes, nbytes)
    kind = _SYMMETRIC[choice.implementation]
    return choice.memory.channel(partial(kind, routes=routes), f"{choice.implementation} {name_of(routes)}", nbytes)


def reason_of(choice: Choice) -> str:
    """Return why messages are carried as `choice` says. Products are measured under `auto`, and messages are not."""
    if choice.state == "default" and choice.implementation == "collective":
        return "the default on GPUs; messages are not measured"
    return choice.reason
