"""Which symmetric memory a group of ranks has: made when it is first asked for, kept as long as the group."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.comm.errors import Unavailable
from tpfuse.comm.settings import settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.comm.symmetric_memory import SymmetricMemory

_memories: WeakKeyDictionary[dist.ProcessGroup, SymmetricMemory | Unavailable] = WeakKeyDictionary()


def connected() -> list[SymmetricMemory]:
    """Every symmetric memory that this process has."""
    return [memory for memory in _memories.values() if isinstance(memory, SymmetricMemory)]


def connect(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    """The symmetric memory of `group` on `device` ("cpu" or this rank's "cuda:…"); collective when first asked for.

    Raises Unavailable with the reason, on every rank alike.
    """
    found = _memories.get(group)
    if found is None:
        try:
            found = SharedMemory(group, settings().timeout)
        except Unavailable as error:
            found = error
        _memories[group] = found
    if isinstance(found, Unavailable):
        raise found
    return found
