"""collectives: launches of eight ranks, also of messages."""

import torch

from tpfuse.kernels.all_gather import all_gather_forward
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.kernels.all_to_all import all_to_all_forward
from tpfuse.kernels.reduce_scatter import reduce_scatter_forward
from tpfuse.kernels.send_message import send_message
from tpfuse.tools.operator import OneRank, Operator, on_meta


def launches(dtype: torch.dtype, world: int = 8, n: int = 1 << 20) -> None:
    """Launch the last rank of `world` with n elements in a row, on meta tensors."""
    endpoint = on_meta(world, flags=4096, programs=64)
    row, rows = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((n,), (world, n)))
    all_gather_forward(row, rows, endpoint)
    all_to_all_forward(rows, rows, endpoint)
    reduce_scatter_forward(rows, row, endpoint)
    for two_shot in (False, True):
        all_reduce_forward(row, row, endpoint, two_shot=two_shot)
    send_message(row, endpoint, target=0, slot=1, full=0, free=1, epoch=1)


OPERATOR = Operator("collectives", launches, (OneRank("collectives"),))
