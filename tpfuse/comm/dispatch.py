"""The choice of what serves a group's tensors, with its reason, and the symmetric memory of the group.

`tpfuse.switches` has the table of implementations and the switches. Each family of operations (collectives, products,
ring attention, reducers) has `Implementations` of its own, which return the object that the choice means.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.choices import Implementation, Kernels
from tpfuse.comm.agreement import exchange
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.errors import Unavailable
from tpfuse.comm.limits import keep_to_openmp
from tpfuse.comm.settings import settings
from tpfuse.comm.shared_memory import LocalMemory, SharedMemory
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.switches import chosen_implementation, chosen_kernels

_T = TypeVar("_T")


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it is taken."""

    implementation: Literal["fused", "direct", "collective"]
    reason: str
    memory: SymmetricMemory | None = None  # the symmetric memory that it works on; None for `collective`
    # chosen: by a switch. default: `auto` takes it as long as nothing was measured (`tpfuse.comm.autotune`). fallback:
    # it replaces the one that was chosen, or the one that ranks have if they can reach each other's memory.
    state: Literal["chosen", "default", "fallback"] = "chosen"


_Key = tuple[str, torch.dtype, Implementation, Kernels]
_choices: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Choice]] = WeakKeyDictionary()
_memories: WeakKeyDictionary[dist.ProcessGroup, dict[str, SymmetricMemory | Unavailable]] = WeakKeyDictionary()


def choose_implementation(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup, wanted: Implementation | None = None
) -> Choice:
    """Return the implementation for tensors of `dtype` on `device`; it is the same on every rank of the group.

    The first call for a device is collective. wanted: by default what `tpfuse.use` chose; if it is not possible, it is
    replaced. Raise ValueError if `fused` was chosen for CPU tensors and this process does not interpret kernels.
    """
    by_key = _choices.setdefault(group, {})
    key = device.type, dtype, wanted or chosen_implementation(), chosen_kernels()
    choice = by_key.get(key)
    if choice is None:
        if device.type == "cpu":
            keep_to_openmp()
        memory, obstacle = None, ""
        try:
            memory = None if key[2] == "collective" else symmetric_memory(group, device)
        except Unavailable as error:
            obstacle = str(error)
        choice = choice_for(*key, obstacle)
        choice = by_key[key] = choice if choice.implementation == "collective" else replace(choice, memory=memory)
    return choice


def choice_for(device_type: str, dtype: torch.dtype, wanted: Implementation, kernels: Kernels, obstacle: str) -> Choice:
    """Return the choice, without a memory, of ranks that share memory or cannot because of `obstacle`.

    The function is pure: `tpfuse doctor` shows the choice before there are ranks. Raise ValueError as
    `choose_implementation` does.
    """
    if wanted == "collective":
        return Choice("collective", "chosen")
    if obstacle:
        return Choice("collective", f"the ranks share no memory: {obstacle}", state="fallback")
    wants_kernels = wanted == "fused" or (wanted == "auto" and kernels == "triton")
    if wants_kernels and device_type == "cpu" and not INTERPRETED:
        raise ValueError("fused kernels on a CPU are interpreted: set TRITON_INTERPRET=1 before the program starts")
    no_kernels = "there are no kernels for float64" if wants_kernels and dtype == torch.float64 else ""
    if wants_kernels and not no_kernels:
        return Choice("fused", "chosen" if wanted == "fused" else "chosen by kernels triton")
    if wanted == "direct" and device_type == "cpu":
        return Choice("direct", "chosen")
    if wanted == "direct":
        return Choice("collective", f"direct is for CPU ranks, not for {device_type}", state="fallback")
    state: Literal["chosen", "default", "fallback"] = "fallback" if wanted == "fused" else "default"
    if no_kernels and wanted == "auto":
        state = "chosen"  # by kernels triton
    if device_type == "cpu":
        return Choice("direct", no_kernels or "CPU ranks of one host", state=state)
    return Choice("collective", no_kernels or "nothing is measured yet", state=state)


class Implementations(Generic[_T]):
    """The objects of one family of operations: one for each memory of a group and choice, made when first needed.

    Those of `collective` are made for each call: they hold nothing but the group, which would live as long as they do.
    """

    def __init__(
        self, collective: Callable[[dist.ProcessGroup], _T], **symmetric: Callable[[SymmetricMemory], _T]
    ) -> None:
        """Take what makes an object of a group, and by the name of an implementation what makes one of a memory."""
        self._collective, self._symmetric = collective, symmetric
        self._objects: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, SymmetricMemory], _T]]
        self._objects = WeakKeyDictionary()

    def of(self, choice: Choice, group: dist.ProcessGroup) -> _T:
        """Return the group's object. The first call for a choice is collective."""
        name, memory = choice.implementation, choice.memory
        if memory is None:
            return self._collective(group)
        of_group = self._objects.setdefault(group, {})
        if (name, memory) not in of_group:
            of_group[name, memory] = self._symmetric[name](memory)
        return of_group[name, memory]


def connected(group: dist.ProcessGroup | None = None) -> list[SymmetricMemory]:
    """Return every symmetric memory that this process has, or that of one group."""
    families = list(_memories.values()) if group is None else [_memories.get(group, {})]
    memories = (memory for by_device in families for memory in by_device.values())
    return [memory for memory in memories if isinstance(memory, SymmetricMemory)]


def meet(op: str, *groups: dist.ProcessGroup) -> None:
    """Wait until all ranks of each group have come to `op`, by the hosts alone.

    A collective that has a deadline of torch's alone, or that only some ranks may have begun by mistake, comes after
    this call. Raise PeerTimeout, which names `op` and the missing rank, and Disagreement if a rank is in another
    operation of the group.
    """
    for group in groups:
        memory = next(iter(connected(group)), None)
        if memory is None:
            exchange(None, group, op=op, within=settings().timeout)
        else:
            memory.barrier(op)


def symmetric_memory(group: dist.ProcessGroup, device: torch.device | str) -> SymmetricMemory:
    """Return the symmetric memory of `group` on `device`, "cpu" or this rank's "cuda:…", kept as long as the group.

    The first call for a group and a type of device is collective. Raise ValueError without a group, and Unavailable,
    with the same reason on every rank.
    """
    if group is None:  # as dist.group.WORLD is before init_process_group
        raise ValueError("symmetric_memory: group is None: expected a process group, as init_process_group makes it")
    device = torch.device(device)
    by_device = _memories.setdefault(group, {})
    memory = by_device.get(device.type)
    if memory is None:
        try:
            memory = _connected(group, device)
        except Unavailable as error:
            memory = error
        by_device[device.type] = memory
    if isinstance(memory, Unavailable):
        raise memory
    return memory


def _connected(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if group.size() == 1:
        return LocalMemory(device)
    if device.type == "cuda":
        return CudaMemory(group, device, settings().timeout)
    if device.type == "cpu":
        return SharedMemory(group, settings().timeout)
    raise Unavailable(f"tensors on {device}: expected a CPU or a CUDA GPU")
