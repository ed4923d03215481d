"""Visibility, ranges of keys and dropout's mask in attention's kernels, and the arguments that they refuse."""

import random
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.cases import refusals
from tpfuse.kernels.attention_scores import aligned, bounds, dropout_rows, key_range, score_arguments, visible
from tpfuse.kernels.dropout import kept, threshold
from tpfuse.kernels.launch import launch
from tpfuse.ops.dropout import keep_mask


@triton.jit(do_not_specialize=["dropout_key", "threshold"])
def _kept_kernel(
    out_ptr, head_row, q_offset, k_offset, width, dropout_key: tl.int64, threshold: tl.int64,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    offs_m, offs_n = tl.arange(0, M), tl.arange(0, N)
    rows = dropout_rows(tl.cast(head_row, tl.int64), q_offset + offs_m, width, dropout_key)
    keep = kept(rows[:, None], (k_offset + offs_n)[None, :], threshold)
    tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], keep)


@pytest.mark.parametrize("key", [0, 1, 7, -5, 2**62 + 3, -(2**63), 2**63 - 1])
@pytest.mark.parametrize(("p", "head_row"), [(0.0, 3), (0.3, 2**40 + 5), (0.999, 0), (1e-19, 2)])
def test_the_mask_of_dropout_is_the_explicit_one(key: int, p: float, head_row: int) -> None:
    out = torch.empty(32, 64, dtype=torch.bool)
    launch(
        _kept_kernel, (1,), num_warps=4, num_stages=1, out_ptr=out, head_row=head_row, q_offset=11, k_offset=36,
        width=100, dropout_key=key, threshold=threshold(p), M=32, N=64,
    )  # fmt: skip
    rows = head_row * 100 + torch.arange(11, 43)
    assert torch.equal(out, keep_mask(rows, 100, p, key)[:, 36:])


@triton.jit
def _visible_kernel(
    out_ptr, q_offset, k_offset, tk, ahead, behind, HAS_AHEAD: tl.constexpr, HAS_BEHIND: tl.constexpr, N: tl.constexpr
):
    offs = tl.arange(0, N)
    q_pos, k_pos = (q_offset + offs)[:, None], (k_offset + offs)[None, :]
    seen = visible(q_pos, k_pos, k_offset + tk, ahead, behind, HAS_AHEAD, HAS_BEHIND)
    ones = tl.full((N, N), 1, tl.int32)
    tl.store(out_ptr + offs[:, None] * N + offs[None, :], tl.where(seen, ones, 0))


@triton.jit
def _key_range_kernel(
    out_ptr, q_first, q_last, k_offset, tk, ahead, behind,
    HAS_AHEAD: tl.constexpr, HAS_BEHIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ends = key_range(q_first, q_last, k_offset, tk, ahead, behind, HAS_AHEAD, HAS_BEHIND, BLOCK)
    for index in tl.static_range(4):
        tl.store(out_ptr + index, ends[index])


def _seen(q_pos: Tensor, k_pos: Tensor, causal: bool, window: int | None) -> Tensor:
    distance = q_pos[:, None] - k_pos[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("q_offset", "k_offset", "tk"), [(0, 0, 32), (20, 0, 30), (3, 17, 9), (-5, 2, 32)])
def test_visible(causal: bool, window: int | None, q_offset: int, k_offset: int, tk: int) -> None:
    ahead, behind = bounds(causal, window)
    out = torch.empty(32, 32, dtype=torch.int32)
    launch(
        _visible_kernel, (1,), num_warps=4, num_stages=1, out_ptr=out, q_offset=q_offset, k_offset=k_offset, tk=tk,
        ahead=ahead or 0, behind=behind or 0, HAS_AHEAD=ahead is not None, HAS_BEHIND=behind is not None, N=32,
    )  # fmt: skip
    positions = torch.arange(32)
    expected = _seen(q_offset + positions, k_offset + positions, causal, window) & (positions < tk)
    assert torch.equal(out.bool(), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("windowed", [True, False])
def test_the_range_of_keys_is_the_smallest(causal: bool, windowed: bool) -> None:
    block, draw = 16, random.Random(1)
    for _ in range(75):
        q_first, k_offset, tk = draw.randint(-20, 100), draw.randint(-20, 60), draw.randint(0, 100)
        q_last = q_first + draw.randint(0, 40)
        window = draw.randint(1, 50) if windowed else None
        ahead, behind = bounds(causal, window)
        out = torch.empty(4, dtype=torch.int32)
        launch(
            _key_range_kernel, (1,), num_warps=1, num_stages=1, out_ptr=out, q_first=q_first, q_last=q_last,
            k_offset=k_offset, tk=tk, ahead=ahead or 0, behind=behind or 0, HAS_AHEAD=ahead is not None,
            HAS_BEHIND=behind is not None, BLOCK=block,
        )  # fmt: skip
        start, full_start, full_stop, stop = out.tolist()
        assert start <= full_start <= full_stop <= stop
        seen = _seen(torch.arange(q_first, q_last + 1), k_offset + torch.arange(tk), causal, window)
        some, every = seen.any(dim=0).nonzero().flatten().tolist(), seen.all(dim=0)
        assert start % block == 0 and full_start in (stop, full_start // block * block)
        if some:
            assert start == some[0] // block * block and stop == some[-1] + 1
        assert every[full_start:full_stop].all()
        for first in range(start, stop - block + 1, block):
            inside = full_start <= first < full_stop
            assert inside == bool(every[first : first + block].all()), (first, start, full_start, full_stop, stop)


def test_rows_that_cannot_be_loaded_16_bytes_at_a_time_are_copied() -> None:
    x = torch.zeros(2, 3, 10, 48, dtype=torch.float16)
    for same in (x, x[:, 1:, ::3], x.transpose(1, 2), x[..., 8:40]):
        assert aligned(same) is same
    for other in (x[..., 1:41], x.transpose(2, 3), x[..., ::2], torch.zeros(2, 3, 10, 20)[..., :16]):
        copied = aligned(other)
        assert copied is not other and torch.equal(copied, other) and copied.is_contiguous()


def test_rows_that_are_too_far_apart_for_32_bits_are_copied() -> None:
    for stride, far in ((2**22 - 8, False), (2**22, True), (2**30, True), (2**31 + 8, True)):
        x = torch.empty_strided((2, 3, 10, 48), (480, 48, stride, 1), device="meta")
        assert (aligned(x) is not x) == far and aligned(x).stride(2) == (48 if far else stride)


Q, K, LENGTHS = torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 7, 16), torch.zeros(3, dtype=torch.int32)
GOOD = {"q": Q, "k": K, "v": K, "causal": True, "window": None, "q_offset": 0, "k_offset": 0, "scale": None}
GOOD |= {"cu_seqlens_q": None, "cu_seqlens_k": None, "dropout_p": 0.0, "dropout_key": torch.tensor(0)}
GOOD |= {"head_rows": None, "dropout_width": None}
BOTH = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}

test_bad_input_is_refused = refusals(
    partial(score_arguments, "attention"),
    GOOD,
    ".*",
    ({"q": Q.long()}, r"q is torch.int64: expected float32"),
    ({"k": K.half(), "v": K.half()}, r"k is torch.float16, q is torch.float32"),
    ({"q": Q[0]}, r"q is torch.float32 \(4, 5, 16\): expected floats"),
    ({"k": K.expand(2, 2, 7, 16)}, r"k has shape \(2, 2, 7, 16\): expected \[1, Hk, Tk, 16\]"),
    ({"k": torch.zeros(1, 2, 7, 24)}, r"k has shape \(1, 2, 7, 24\)"),
    ({"v": K[:, :, :6]}, r"v has shape \(1, 2, 6, 16\): expected \(1, 2, 7, 16\)"),
    (dict.fromkeys("kv", torch.zeros(1, 3, 7, 16)), r"k has 3 heads, q 4: expected a divisor"),
    (dict.fromkeys("kv", K[:, :0]), r"k has 0 heads, q 4"),
    *(
        (dict.fromkeys("qkv", torch.zeros(1, 1, 2, size)), f"head size {size}: expected a multiple of 8 from 16 to 256")
        for size in (8, 20, 264)
    ),
    ({"window": 0}, "window 0: expected at least 1"),
    ({"scale": -1.0}, "scale -1.0: expected a positive"),
    ({"dropout_p": 1.0}, "dropout_p 1.0: expected 0 <= dropout_p < 1"),
    ({"dropout_p": 0.1}, "head_rows is None: expected the number"),
    ({"dropout_p": 0.1, "head_rows": LENGTHS.long()}, r"head_rows has shape \(3,\): expected \(1, 4\)"),
    ({"dropout_p": 0.1, "head_rows": LENGTHS}, "head_rows is torch.int32: expected int64"),
    ({"cu_seqlens_q": LENGTHS}, "cu_seqlens_k is None: expected both"),
    (BOTH | {"cu_seqlens_q": LENGTHS.long()}, "cu_seqlens_q is torch.int64: expected int32"),
    (BOTH | {"cu_seqlens_k": LENGTHS[:2]}, r"cu_seqlens_k has shape \(2,\): expected \(3,\)"),
    (BOTH | {"cu_seqlens_q": LENGTHS[:0]}, r"cu_seqlens_q has shape \(0,\): expected \[S \+ 1\]"),
    (dict.fromkeys("qkv", torch.zeros(2, 2, 7, 16)) | BOTH, "q has batch size 2: expected 1"),
    (dict.fromkeys("kv", K.to("meta")), "k is on meta, q on cpu: expected one device"),
)
