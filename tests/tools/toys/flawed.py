"""Kernels that must not pass the gate. Each has one fault; some of them do not compile."""

import importlib

import torch
import triton
import triton.language as tl

from tpfuse.kernels.launch import launch
from tpfuse.tools.operator import Operator

sound = importlib.import_module("tpfuse.tools.operators.sound")


@triton.jit
def mismatched_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros((3, BLOCK), tl.float32))


def launches(dtype: torch.dtype) -> None:
    x = torch.empty(8193, dtype=dtype, device="meta")
    launch(mismatched_kernel, (1,), num_warps=4, num_stages=1, x_ptr=x, BLOCK=1024)
    sound.copy(x[1:], x[:-1])  # not aligned to 16 bytes
    sound.product(dtype, block=32, block_k=32)  # too few rows for wgmma and tcgen05
    sound.product(dtype, block=256, block_k=32)  # too many registers
    sound.product(dtype, block=128, block_k=64, num_warps=8, num_stages=8)  # too much shared memory


OPERATOR = Operator("flawed", launches)
