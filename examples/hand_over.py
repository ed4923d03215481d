# TRITON_INTERPRET=1 python examples/hand_over.py
import torch
import triton
import triton.language as tl

from tpfuse.explore import explore


@triton.jit
def hand_over(slots, flags, rank, N: tl.constexpr):  # the numbers of a rank go to the other one, then a signal
    slot = tl.load(slots + 1 - rank).to(tl.pointer_type(tl.float32))
    flag = tl.load(flags + 1 - rank).to(tl.pointer_type(tl.int32))
    tl.store(slot + tl.arange(0, N), tl.full((N,), 10.0 + rank, tl.float32))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def protocol(memory):
    slots, flags = memory.buffer("slots", (256,), torch.float32), memory.signals("flags", 1)
    hand_over[(1,)](slots.addresses, flags.addresses, memory.rank, 256)
    memory.wait_signal(flags, memory.rank, 0, 1, op="hand over")
    assert slots.local.eq(11.0 - memory.rank).all()


if __name__ == "__main__":
    print(explore(protocol, world=2))
