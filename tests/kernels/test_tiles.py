"""Rounding, products and the order of tiles of the shared device functions."""

import pytest
import torch
import triton
import triton.language as tl

from tpfuse.kernels.launch import launch
from tpfuse.kernels.tiles import dot, grouped_tile, rounded
from tpfuse.testing.inputs import integers, normal


@triton.jit
def _round_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, rounded(x, out_ptr.dtype.element_ty), mask=offs < n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_agrees_with_torch(dtype: torch.dtype) -> None:
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, 65520]
    )
    x = torch.cat([special, normal(1, 1000) * 100])
    out = torch.empty_like(x, dtype=dtype)
    launch(_round_kernel, (1,), num_warps=4, num_stages=1, x_ptr=x, out_ptr=out, n=len(x), BLOCK=1024)
    expected = x.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.where(~out.isnan(), 0), expected.where(~out.isnan(), 0))
    assert torch.equal(out.signbit()[:4], x.signbit()[:4])


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tile = offs[:, None] * SIZE + offs[None, :]
    acc = tl.full((SIZE, SIZE), 1.0, tl.float32)
    tl.store(out_ptr + tile, dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile), acc))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    a, b = integers(1, 32, 32, high=90, dtype=dtype), integers(2, 32, 32, high=90, dtype=dtype)
    out = torch.empty(32, 32)
    launch(_dot_kernel, (1,), num_warps=4, num_stages=1, a_ptr=a, b_ptr=b, out_ptr=out, SIZE=32)
    assert torch.equal(out, a.float() @ b.float() + 1)


@triton.jit
def _order_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    tile = tl.program_id(0)
    pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + tile, pid_m * tiles_n + pid_n)


@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 1), (4, 3), (7, 5), (3, 1), (1, 6)])
def test_every_tile_has_one_position(tiles_m: int, tiles_n: int) -> None:
    out = torch.empty(tiles_m * tiles_n, dtype=torch.int32)
    launch(
        _order_kernel, (len(out),), num_warps=1, num_stages=1, out_ptr=out, tiles_m=tiles_m, tiles_n=tiles_n, GROUP_M=4
    )
    assert torch.equal(out.sort().values, torch.arange(len(out), dtype=torch.int32))
    assert out[: min(4, tiles_m)].tolist() == [m * tiles_n for m in range(min(4, tiles_m))]
