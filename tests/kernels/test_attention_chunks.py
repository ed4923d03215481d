from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.kernels.attention_chunks import attention_forward_chunks
from tpfuse.kernels.attention_forward import attention_forward
from tpfuse.ops.dropout import keep_mask
from tpfuse.testing.compare import Yardstick
from tpfuse.testing.inputs import normal
from tpfuse.testing.tiers import exhaustive

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BLOCK_N = 32  # of the interpreted rows of configurations.toml: chunks of a multiple of it are walked like the whole


def _inputs(tq: int, tk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = normal(1, 2, 2, tq, 24, dtype=dtype)
    return q, normal(2, 2, 1, tk, 24, dtype=dtype), normal(3, 2, 1, tk, 24, dtype=dtype)


def _chunked(x: Tensor, length: int, order: Sequence[int]) -> list[Tensor]:
    return [x[:, :, index * length : (index + 1) * length] for index in order]


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, length: int, order: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor]:
    offsets = [index * length for index in order]
    return attention_forward_chunks(q, _chunked(k, length, order), _chunked(v, length, order), offsets, **options)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"window": 50, "q_offset": 90, "scale": 0.4}, BF16),
        *exhaustive(({"q_offset": 64}, F16), ({"causal": False}, F32)),
    ],
)
def test_chunks_of_whole_blocks_give_the_same_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = (x[:1] for x in _inputs(40, 4 * BLOCK_N, dtype))
    whole = attention_forward(q, k, v, **options)
    for length, order in ((2 * BLOCK_N, (0, 1)), (BLOCK_N, (0, 1, 2, 3)), (4 * BLOCK_N, (0,))):
        out, lse = _in_chunks(q, k, v, length, order, **options)
        assert torch.equal(out, whole[0]) and torch.equal(lse, whole[1])
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"causal": False, "window": 30, "q_offset": 10}, F32),
        *exhaustive(({"q_offset": 20}, F16), ({"q_offset": 20}, BF16)),
    ],
)
def test_chunks_of_any_length_in_any_order(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = _inputs(63, 99, dtype)
    out, lse = _in_chunks(q, k, v, 33, (2, 0, 1), **options)
    inputs = {"q": q, "k": k, "v": v}
    Yardstick(lambda **x: reference.attention(**x, **options)[0], inputs, torch.zeros_like(q)).check("out", out)
    wide = {name: x.float() for name, x in inputs.items()}
    grad = torch.zeros(q.shape[:3])
    Yardstick(lambda **x: reference.attention(**x, **options)[1], wide, grad).check("out", lse)


def test_dropout() -> None:
    q, k, v = _inputs(63, 99, torch.float32)
    head_rows = torch.tensor([[7, 5], [2, 100]])
    dropped: dict[str, Any] = {"dropout_p": 0.4, "dropout_key": torch.tensor(12345678901), "head_rows": head_rows}
    out, lse = _in_chunks(q, k, v, 33, (1, 0, 2), q_offset=36, **dropped)
    keep = keep_mask(head_rows.unsqueeze(-1) * 99 + torch.arange(36, 99), 99, 0.4, 12345678901)
    inputs = {"q": q, "k": k, "v": v}
    mask = keep.double() / 0.6

    def dropped_out(**x: Tensor) -> Tensor:
        return reference.attention(**x, q_offset=36, dropout_mask=mask)[0]

    Yardstick(dropped_out, inputs, torch.zeros_like(q)).check("out", out)
    assert torch.equal(lse, _in_chunks(q, k, v, 33, (1, 0, 2), q_offset=36)[1])


def test_chunks_that_nobody_sees() -> None:
    q, k, v = _inputs(63, 99, torch.float16)
    out, lse = _in_chunks(q, k, v, 33, (2, 1), q_offset=0)
    expected = attention_forward(q, k[:, :, 33:66], v[:, :, 33:66], k_offset=33)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert (lse[:, :, :33] == -torch.inf).all() and not out[:, :, :33].any()


def test_chunks_lie_anywhere() -> None:
    q, k, v = _inputs(63, 99, torch.bfloat16)
    expected = _in_chunks(q, k, v, 33, (0, 1, 2))
    keys, values = ([torch.nan * torch.zeros(2, 40, 1, 32, dtype=x.dtype) for _ in range(3)] for x in (k, v))
    views = [[x[:, 4:37, :, 8:].transpose(1, 2) for x in memory] for memory in (keys, values)]
    for memory, whole in zip(views, (k, v), strict=True):
        for part, chunk in zip(memory, _chunked(whole, 33, (0, 1, 2)), strict=True):
            part.copy_(chunk)
    out, lse = attention_forward_chunks(q, views[0], views[1], [0, 33, 66])
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("tq", [0, 5])
def test_empty(tq: int) -> None:
    q, k, v = _inputs(tq, 0, torch.float32)
    out, lse = attention_forward_chunks(q, [k, k], [v, v], [0, 0])
    assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()
    out, _ = attention_forward_chunks(q[:0], [k[:0]], [v[:0]], [0])
    assert out.shape == (0, *q.shape[1:])


def test_bad_input_is_refused() -> None:
    q, k, v = _inputs(5, 7, torch.float32)

    def refused(message: str, keys: list[Tensor], values: list[Tensor], k_offsets: list[int]) -> None:
        with pytest.raises(ValueError, match=f"attention_forward_chunks: {message}"):
            attention_forward_chunks(q, keys, values, k_offsets)

    refused("keys is empty: expected at least one chunk", [], [], [])
    refused("values has 1 entries: expected 2, as keys", [k, k], [v], [0, 7])
    refused("k_offsets has 1 entries: expected 2", [k, k], [v, v], [0])
    refused(r"keys\[1\] has shape \(2, 1, 6, 24\): expected \(2, 1, 7, 24\)", [k, k[:, :, :6]], [v, v], [0, 7])
    refused(r"values\[1\] is torch.float16, q is torch.float32", [k, k], [v, v.half()], [0, 7])
    packed = torch.zeros(2, 1, 7, 48)[..., :24]
    refused(r"keys\[1\] has strides \(336, 336, 48, 1\): expected \(168, 168, 24, 1\)", [k, packed], [v, v], [0, 7])
    odd = torch.zeros(2, 1, 7, 32)[..., 1:25]
    refused(r"values\[0\] has .*: expected contiguous rows that start at multiples of 16 bytes", [k], [odd], [0])
