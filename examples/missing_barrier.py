# python examples/missing_barrier.py
import torch
import triton
import triton.language as tl

from tpfuse.explore import RaceError, explore
from tpfuse.explore.ptx import compiled


@triton.jit
def hand_over(slots, flags, rank, N: tl.constexpr, BARRIER: tl.constexpr):  # as in hand_over.py
    slot = tl.load(slots + 1 - rank).to(tl.pointer_type(tl.float32))
    flag = tl.load(flags + 1 - rank).to(tl.pointer_type(tl.int32))
    tl.store(slot + tl.arange(0, N), tl.full((N,), 10.0, tl.float32) + rank)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def protocol(memory, barrier):
    slots, flags = memory.buffer("slots", (256,), torch.float32), memory.signals("flags", 1)
    hand_over[(1,)](slots.addresses, flags.addresses, memory.rank, 256, barrier)
    memory.wait_signal(flags, memory.rank, 0, 1, op="hand over")
    assert slots.local.eq(11.0 - memory.rank).all()


for barrier in (True, False):
    try:
        print(explore(lambda memory, barrier=barrier: protocol(memory, barrier), world=2, launches=compiled))
    except RaceError as error:
        print(error.message)
