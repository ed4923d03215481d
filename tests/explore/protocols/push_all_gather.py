"""An all-gather and a product: each rank pushes its chunks to all others and signals epochs; a barrier ends a round."""

import torch
import triton
import triton.language as tl

C, M, K, N = 2, 4, 8, 4  # chunks per rank, rows of a chunk, columns of x, columns of w


@triton.jit
def push(x, slots, flags, epoch, rank, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr):
    pid = tl.program_id(0)  # of W - 1 peers and C chunks
    chunk = pid % C
    peer = (rank + pid // C + 1) % W
    slot = tl.load(slots + peer).to(tl.pointer_type(tl.float32))
    flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
    offs = tl.arange(0, SIZE)
    tl.store(slot + (rank * C + chunk) * SIZE + offs, tl.load(x + chunk * SIZE + offs))
    tl.debug_barrier()
    tl.atomic_xchg(flag + rank * C + chunk, epoch, sem="release", scope="sys")


@triton.jit
def multiply(
    x, slot, flags, w, out, epoch, rank,
    W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = (pid + rank * C) % (W * C)  # its own chunks first
    source = tile // C
    offs_m, offs_k, offs_n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    if source != rank:
        while tl.atomic_add(flags + tile, 0, sem="acquire", scope="sys") != epoch:
            pass
        a = tl.load(slot + tile * M * K + offs_m[:, None] * K + offs_k[None, :])
    else:
        a = tl.load(x + (tile % C) * M * K + offs_m[:, None] * K + offs_k[None, :])
    acc = tl.dot(a, tl.load(w + offs_k[:, None] * N + offs_n[None, :]))
    tl.store(out + (tile * M + offs_m[:, None]) * N + offs_n[None, :], acc)


def program(memory, iterations=3):
    rank, W = memory.rank, memory.world
    slots = memory.buffer("slots", (W * C * M * K,), torch.float32)
    flags = memory.signals("flags", W * C)
    for epoch in range(1, iterations + 1):
        draw = torch.Generator().manual_seed(epoch)
        xs = [torch.randint(-8, 9, (C * M, K), generator=draw).float() for _ in range(W)]
        w = torch.randint(-8, 9, (K, N), generator=draw).float()
        out = torch.zeros(W * C * M, N)
        push[((W - 1) * C,)](xs[rank], slots.addresses, flags.addresses, epoch, rank, W, C, M * K)
        multiply[(W * C,)](xs[rank], slots.local, flags.local, w, out, epoch, rank, W, C, M, K, N)
        assert torch.equal(out, torch.cat(xs) @ w), f"wrong result in iteration {epoch}"
        memory.barrier()  # before a peer pushes again what is still read here
