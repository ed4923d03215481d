"""Endpoints of kernels that communicate: of a group of one rank, and on meta tensors."""

import torch
from torch import Tensor

from tpfuse.kernels.endpoint import Endpoint

EPOCHS = 3  # launches of a case, so that each half of a slot is used again
_FLAGS = 256


def of_one_rank(device: torch.device, programs: int, slot_bytes: int = 1 << 16) -> tuple[Endpoint, list[Tensor]]:
    """Return the endpoint of a group of one rank, and the memory at its addresses, to be kept until the last launch."""
    slots = torch.empty(2, slot_bytes, dtype=torch.uint8, device=device)
    flags, state, abort = (torch.zeros(n, dtype=torch.int32, device=device) for n in (_FLAGS, 2, 1))
    addresses = [torch.tensor([x.data_ptr()], device=device) for x in (slots, flags)]
    return Endpoint(0, 1, addresses[0], slot_bytes, addresses[1], _FLAGS, state, abort, programs), [slots, flags]


def on_meta(world: int, flags: int, programs: int, slot_bytes: int = 1 << 30) -> Endpoint:
    """Return the endpoint of the last rank of a group, whose launches are recorded. flags: their number."""
    slot_table, flag_table = (torch.empty(world, dtype=torch.int64, device="meta") for _ in range(2))
    state, abort = (torch.empty(n, dtype=torch.int32, device="meta") for n in (2, 1))
    return Endpoint(world - 1, world, slot_table, slot_bytes, flag_table, flags, state, abort, programs)
