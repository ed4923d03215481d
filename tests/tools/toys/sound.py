"""An operator for the tests, whose kernels have no faults: a copy and y = x wᵀ."""

from typing import Any

import torch
import triton
import triton.language as tl

from tpfuse.kernels import tiles
from tpfuse.kernels.launch import launch
from tpfuse.tools.operator import Operator


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@triton.jit
def product_kernel(x_ptr, w_ptr, y_ptr, k, stride_x, stride_w, stride_y, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    offs, offs_k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, BLOCK_K):
        x = tl.load(x_ptr + offs[:, None] * stride_x + (start + offs_k)[None, :])
        w = tl.load(w_ptr + offs[:, None] * stride_w + (start + offs_k)[None, :])
        acc = tiles.dot(x, w.T, acc)
    tl.store(y_ptr + offs[:, None] * stride_y + offs[None, :], tiles.rounded(acc, y_ptr.dtype.element_ty))


def copy(x: torch.Tensor, y: torch.Tensor) -> None:
    arguments = {"x_ptr": x, "y_ptr": y, "n": x.numel(), "BLOCK": 1024}
    launch(copy_kernel, (x.numel() // 1024,), num_warps=4, num_stages=1, **arguments)


def product(dtype: torch.dtype, block: int, block_k: int, num_warps: int = 4, num_stages: int = 3) -> None:
    x, w, y = (torch.empty(block, 256, dtype=dtype, device="meta") for _ in range(3))
    strides: dict[str, Any] = {f"stride_{name}": 256 for name in "xwy"}
    arguments: dict[str, Any] = {"x_ptr": x, "w_ptr": w, "y_ptr": y, "k": 256, "BLOCK": block, "BLOCK_K": block_k}
    launch(product_kernel, (1,), num_warps=num_warps, num_stages=num_stages, **arguments, **strides)


def launches(dtype: torch.dtype) -> None:
    x, y = (torch.empty(2, 4096, dtype=dtype, device="meta") for _ in range(2))
    copy(x, y)
    copy(y, x)  # the same kernel, which is compiled once
    product(dtype, block=64, block_k=64)


OPERATOR = Operator("sound", launches)
