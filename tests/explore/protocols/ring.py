"""A ring: each rank sends its numbers to its right neighbour by a kernel, and their sum to rank 0 by the host."""

import torch
import triton
import triton.language as tl
from tpfuse_tests_ring_signals import advance, signal, wait_signal

N = 4


@triton.jit
def ring_kernel(slots_ptr, flags_ptr, state_ptr, out_ptr, rank, WORLD: tl.constexpr, N: tl.constexpr):
    pid = tl.program_id(0)
    epoch = tl.load(state_ptr) + 1
    right = tl.load(slots_ptr + (rank + 1) % WORLD).to(tl.pointer_type(tl.float32))
    slot = tl.load(slots_ptr + rank).to(tl.pointer_type(tl.float32))
    flags = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
    flags_right = tl.load(flags_ptr + (rank + 1) % WORLD).to(tl.pointer_type(tl.int32))
    offs = pid * N + tl.arange(0, N)
    tl.store(right + offs, 10.0 * epoch + rank + tl.zeros((N,), tl.float32))
    signal(flags_right + pid, epoch)
    if wait_signal(flags + pid, epoch):
        tl.store(out_ptr + offs, tl.load(slot + offs))
    advance(state_ptr)


def program(memory, programs=2):
    rank, world = memory.rank, memory.world
    slots = memory.buffer("slots", (programs * N,), torch.float32)
    flags, state = memory.signals("flags", programs), memory.signals("state", 2)
    sums, here = memory.buffer("sums", (world,), torch.float32), memory.signals("here", world)
    epoch = 0
    for step in range(1, 4):
        out = torch.zeros(programs * N)
        ring_kernel[(programs,)](slots.addresses, flags.addresses, state.local, out, rank, world, N)
        assert (out == 10.0 * step + (rank - 1) % world).all(), f"wrong numbers in step {step}"
        epoch += 1  # noqa: SIM113
        sums.peers[0][rank] = out.sum()
        memory.signal(here, 0, rank, epoch)
        if rank == 0:
            for peer in range(world):
                memory.wait_signal(here, 0, peer, epoch, op="ring", peer=peer)
            total = programs * N * (10.0 * step * world + sum(range(world)))
            assert sums.local.sum() == total, f"wrong sum in step {step}"
        memory.barrier()  # before slots and sums are written again
