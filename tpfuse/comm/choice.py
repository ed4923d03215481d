"""The choice of the implementation that serves a group's tensors, with its reason.

`tpfuse.switches` has the table of implementations and the switch.
"""

from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tpfuse.choices import Implementation, Kernels
from tpfuse.comm.connect import connect
from tpfuse.comm.errors import Unavailable
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.kernels.launch import INTERPRETED
from tpfuse.switches import chosen_implementation, chosen_kernels


@dataclass(frozen=True)
class Choice:
    """An implementation, why it is taken, and the symmetric memory that it works on (None for `collective`).

    fallback: it replaces the one that was chosen, or the one that ranks have if they can reach each other's memory.
    provisional: `auto` was chosen, and this is taken as long as nothing was measured (`tpfuse.comm.autotune`).
    """

    implementation: Literal["fused", "direct", "collective"]
    reason: str
    memory: SymmetricMemory | None
    fallback: bool = False
    provisional: bool = False


_Key = tuple[str, torch.dtype, Implementation, Kernels]
_choices: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Choice]] = WeakKeyDictionary()


def choose_implementation(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> Choice:
    """Returns the implementation for tensors of `dtype` on `device`; it is the same on every rank of the group.

    The first call for a device is collective. An implementation that `tpfuse.use` chose and that is not
    possible is replaced. Raises ValueError if `fused` was chosen for CPU tensors and this process does not interpret
    kernels.
    """
    by_key = _choices.setdefault(group, {})
    key = device.type, dtype, chosen_implementation(), chosen_kernels()
    choice = by_key.get(key)
    if choice is None:
        choice = by_key[key] = _choose(device, dtype, group, key[2], key[3])
    return choice


def _choose(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup, wanted: Implementation, kernels: Kernels
) -> Choice:
    memory, obstacle = None, ""
    try:
        memory = None if wanted == "collective" else connect(group, device)
    except Unavailable as error:
        obstacle = str(error)
    choice = decide(device.type, dtype, wanted, kernels, obstacle)
    return choice if choice.implementation == "collective" else replace(choice, memory=memory)


def decide(device_type: str, dtype: torch.dtype, wanted: Implementation, kernels: Kernels, obstacle: str) -> Choice:
    """Returns the choice, without a memory, of ranks that share memory or cannot because of `obstacle`.

    `choose_implementation` decides by it, and `tpfuse doctor` shows it before there are ranks. Raises ValueError as
    `choose_implementation` does.
    """
    if wanted == "collective":
        return Choice("collective", "chosen", None)
    if obstacle:
        return Choice("collective", f"the ranks share no memory: {obstacle}", None, fallback=True)
    wants_kernels = wanted == "fused" or (wanted == "auto" and kernels == "triton")
    if wants_kernels and device_type == "cpu" and not INTERPRETED:
        raise ValueError("fused kernels on a CPU are interpreted: set TRITON_INTERPRET=1 before the program starts")
    no_kernels = "there are no kernels for float64" if wants_kernels and dtype == torch.float64 else ""
    if wants_kernels and not no_kernels:
        return Choice("fused", "chosen" if wanted == "fused" else "chosen by kernels triton", None)
    if device_type == "cpu":
        reason = "chosen" if wanted == "direct" else "CPU ranks of one host"
        provisional = wanted == "auto" and not wants_kernels
        return Choice("direct", no_kernels or reason, None, fallback=wanted == "fused", provisional=provisional)
    if wanted == "direct":
        return Choice("collective", f"direct is for CPU ranks, not for {device_type}", None, fallback=True)
    reason = no_kernels or "nothing is measured yet"
    return Choice("collective", reason, None, fallback=wanted == "fused", provisional=not no_kernels)
