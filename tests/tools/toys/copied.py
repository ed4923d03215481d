"""Kernels whose loops use what a name was in the round before. Triton does not carry the names of the first three."""

import torch
import triton
import triton.language as tl

from tpfuse.kernels.launch import launch
from tpfuse.tools.operator import Operator


@triton.jit
def copied_kernel(out_ptr, first, n):
    stage = first
    before = stage
    for i in range(n):
        tl.store(out_ptr + i, before)
        before = stage
        stage += 1


@triton.jit
def same_start_kernel(out_ptr, first, n):
    before, stage = first, first
    i = 0
    while i < n:
        tl.store(out_ptr + i, before)
        before, stage = stage, stage + 1
        i += 1


@triton.jit
def sometimes_copied_kernel(out_ptr, first, n):
    stage = first
    before = stage
    for i in range(n):
        tl.store(out_ptr + i, before)
        if i % 2 == 0:
            before = stage
        stage += 1


@triton.jit
def carried_kernel(out_ptr, first, n):
    stage = first
    before, last = first - 1, stage
    for i in range(n):
        tl.store(out_ptr + i, before + last)
        before = stage
        stage += 1
        last = stage


def launches(dtype: torch.dtype) -> None:
    out = torch.empty(8, dtype=torch.int32, device="meta")
    for kernel in (copied_kernel, same_start_kernel, sometimes_copied_kernel, carried_kernel):
        launch(kernel, (1,), num_warps=1, num_stages=1, out_ptr=out, first=5, n=8)


OPERATOR = Operator("copied", launches)
