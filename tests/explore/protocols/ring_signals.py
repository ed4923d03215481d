"""Signals for ring.py: semantics and scopes in every form of source code, and one call that has several lines."""

import triton
import triton.language as tl


@triton.jit
def signal(flag_ptr, epoch):
    tl.debug_barrier()
    tl.atomic_xchg(
        flag_ptr,
        epoch,
        sem="release",
        scope="sys",
    )


@triton.jit
def wait_signal(flag_ptr, epoch, SCOPE: tl.constexpr = "sys"):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE) < epoch:
        pass
    return True


@triton.jit
def advance(state_ptr):
    epoch = tl.load(state_ptr) + 1
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + 1, 1) + 1 == tl.num_programs(0):
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, epoch)
