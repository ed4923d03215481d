"""A product and a reduce-scatter: partial sums are pushed into slots, between two barriers of words that go 0, 1, 0."""

import torch
import triton
import triton.language as tl

M, N, K, BLOCK = 4, 8, 8, 16  # rows of a rank, columns, inner dimension, elements of a program that reduces


@triton.jit
def barrier(pads, pid, rank, W: tl.constexpr):
    tl.debug_barrier()
    for peer in range(W):
        if peer != rank:
            there = tl.load(pads + peer).to(tl.pointer_type(tl.int32)) + pid * W + rank
            while tl.atomic_cas(there, 0, 1, sem="release", scope="sys") != 0:
                pass
    here = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    for peer in range(W):
        if peer != rank:
            while tl.atomic_cas(here + pid * W + peer, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit
def push(a, b, slots, rank, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    owner = (tl.program_id(0) + rank + 1) % W  # its own last
    offs_m, offs_n, offs_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    rows = owner * M + offs_m
    acc = tl.dot(tl.load(a + rows[:, None] * K + offs_k[None, :]), tl.load(b + offs_k[:, None] * N + offs_n[None, :]))
    slot = tl.load(slots + owner).to(tl.pointer_type(tl.float32))
    tl.store(slot + rank * M * N + offs_m[:, None] * N + offs_n[None, :], acc)


@triton.jit
def reduce(slots, pads, out, rank, W: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    barrier(pads, pid, rank, W)
    slot = tl.load(slots + rank).to(tl.pointer_type(tl.float32))
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for source in range(W):
        acc += tl.load(slot + source * SIZE + offs)
    tl.store(out + offs, acc)
    barrier(pads, pid, rank, W)


def program(memory, iterations=3):
    rank, W = memory.rank, memory.world
    slots = memory.buffer("slots", (W * M * N,), torch.float32)
    pads = memory.signals("pads", 64)
    for iteration in range(iterations):
        draw = torch.Generator().manual_seed(iteration)
        a = torch.randint(-8, 9, (W, W * M, K), generator=draw).float()
        b = torch.randint(-8, 9, (W, K, N), generator=draw).float()
        out = torch.zeros(M, N)
        push[(W,)](a[rank].contiguous(), b[rank].contiguous(), slots.addresses, rank, W, M, N, K)
        reduce[(M * N // BLOCK,)](slots.addresses, pads.addresses, out, rank, W, M * N, BLOCK)
        assert torch.equal(out, (a @ b).sum(0).chunk(W)[rank]), f"wrong result in iteration {iteration}"
