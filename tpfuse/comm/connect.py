"""The symmetric memory of each group of ranks: made when it is first requested, kept as long as the group."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.errors import Unavailable
from tpfuse.comm.settings import settings
from tpfuse.comm.shared_memory import LocalMemory, SharedMemory
from tpfuse.comm.symmetric_memory import SymmetricMemory

_Connection = SymmetricMemory | Unavailable
_memories: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Connection]] = WeakKeyDictionary()


def connected() -> list[SymmetricMemory]:
    """Returns every symmetric memory that this process has."""
    memories = (memory for by_device in _memories.values() for memory in by_device.values())
    return [memory for memory in memories if isinstance(memory, SymmetricMemory)]


def connect(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    """Returns the symmetric memory of `group` on `device`, "cpu" or this rank's "cuda:…".

    The first call for a group and a type of device is collective. Raises Unavailable, with the same reason on every
    rank.
    """
    by_device = _memories.setdefault(group, {})
    connection = by_device.get(device.type)
    if connection is None:
        try:
            connection = _connect(group, device)
        except Unavailable as error:
            connection = error
        by_device[device.type] = connection
    if isinstance(connection, Unavailable):
        raise connection
    return connection


def _connect(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if group.size() == 1:
        return LocalMemory(device)
    if device.type == "cuda":
        return CudaMemory(group, device, settings().timeout)
    if device.type == "cpu":
        return SharedMemory(group, settings().timeout)
    raise Unavailable(f"tensors on {device}: expected a CPU or a CUDA GPU")
