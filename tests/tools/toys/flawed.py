"""Kernels that must not pass the gate. Each has one fault; some of them do not compile."""

import importlib

import torch
import triton
import triton.language as tl

from tpfuse.kernels import activations, tiles
from tpfuse.kernels.launch import launch
from tpfuse.tools.operator import Operator

sound = importlib.import_module("tpfuse.tools.operators.sound")


@triton.jit
def prologue_kernel(x_ptr, w_ptr, y_ptr, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        x = tl.load(x_ptr + offs_m[:, None] * k + (start + offs_k)[None, :])
        w = tl.load(w_ptr + offs_n[:, None] * k + (start + offs_k)[None, :])
        grad = activations.activation_gradient(x.to(tl.float32), x.to(tl.float32), "gelu_tanh")
        acc = tiles.dot(tiles.rounded(grad, x.dtype), w.T, acc)
    tl.store(y_ptr + offs_m[:, None] * BLOCK_N + offs_n[None, :], tiles.rounded(acc, y_ptr.dtype.element_ty))


@triton.jit
def mismatched_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros((3, BLOCK), tl.float32))


def launches(dtype: torch.dtype) -> None:
    x = torch.empty(8193, dtype=dtype, device="meta")
    launch(mismatched_kernel, (1,), num_warps=4, num_stages=1, x_ptr=x, BLOCK=1024)
    sound.copy(x[1:], x[:-1])  # not aligned to 16 bytes
    x, w, y = (torch.empty(64, columns, dtype=dtype, device="meta") for columns in (256, 256, 64))
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}  # each element of x needs more instructions than products
    launch(prologue_kernel, (1,), num_warps=4, num_stages=3, x_ptr=x, w_ptr=w, y_ptr=y, k=256, **blocks)
    sound.product(dtype, block=32, block_k=32)  # too few rows for wgmma and tcgen05
    sound.product(dtype, block=256, block_k=32)  # too many registers
    sound.product(dtype, block=128, block_k=64, num_warps=8, num_stages=8)  # too much shared memory


OPERATOR = Operator("flawed", launches)
