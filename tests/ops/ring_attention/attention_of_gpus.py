"""A stand-in for torch's operators of attention on GPUs: cuDNN's and flash attention's.

Faked: that torch chooses them for tensors on the CPU, and their results, which torch's operator for CPUs computes.
Real: their signatures, and the conditions that the GPU's have or that they violate without a word. Not covered: their
rounding and their speed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


class AttentionCall(NamedTuple):
    """A call of an operator of torch that attends. window: (left, right) of flash attention."""

    operator: str
    backward: bool
    rows: int
    keys: int
    causal: bool
    window: tuple[int | None, int | None] = (None, None)


@contextlib.contextmanager
def attention_of_gpus(backend: SDPBackend) -> Iterator[list[AttentionCall]]:
    """Let scaled_dot_product_attention choose `backend`, whose operators run on CPU tensors; yield the calls.

    Those of flash attention run too. They are computed by torch's operator for CPUs. What the real ones would refuse,
    or read wrongly without a word, fails: full dtypes, causal rectangles, for cuDNN one key, for flash attention
    negative windows and rows that see no key, other strides of out or grad_out than q's, other shapes or strides of the
    log-sum-exp than forward returns.
    """
    calls, cpu, aten = list[AttentionCall](), "_scaled_dot_product_flash_attention_for_cpu", torch.ops.aten
    nothing = torch.empty(0)

    def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        check(call, q, k, v)
        options = {"attn_mask": _bias(call), "scale": scale}
        out, lse = getattr(aten, cpu)(q.float(), k.float(), v.float(), 0.0, call.causal, **options)
        return torch.empty_like(q).copy_(out), lse.contiguous()

    def backward(call: AttentionCall, *tensors: Tensor, scale: float) -> tuple[Tensor, ...]:
        grad, q, k, v, out, lse = tensors
        check(call, q, k, v)
        assert grad.dtype == out.dtype == q.dtype and grad.stride() == out.stride() == q.stride()
        assert lse.is_contiguous() and lse.shape == q.shape[:3]
        wide = (x.float() for x in (grad, q, k, v, out))
        options = {"attn_mask": _bias(call), "scale": scale}
        found = getattr(aten, f"{cpu}_backward")(*wide, lse, 0.0, call.causal, **options)
        return tuple(torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), found, strict=True))

    def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        calls.append(call)
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert q.stride(3) == k.stride(3) == v.stride(3) == 1 and not q.shape[3] % 8
        assert (call.rows, call.keys) == (q.shape[2], k.shape[2]) and (not call.causal or call.rows == call.keys)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, *options: Any, scale: float) -> tuple[Any, ...]:
        bias, has_lse, *rest = options
        dropout, causal, mask = (*rest, *(0.0, False, False)[len(rest) :])  # torch leaves defaults out
        assert (bias, has_lse, dropout, mask) == (None, True, 0.0, False) and k.shape[2] > 1
        rows, keys = q.shape[2], k.shape[2]
        out, lse = forward(AttentionCall("cudnn", False, rows, keys, causal), q, k, v, scale)
        return out, lse.unsqueeze(-1), None, None, rows, keys, nothing, nothing, None

    def cudnn_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any, scale: float
    ) -> tuple[Tensor, ...]:
        _seed, _offset, *absent, rows, keys, dropout, causal = options
        assert absent == [None] * 3 and dropout == 0.0 and k.shape[2] > 1 and lse.is_contiguous()
        call = AttentionCall("cudnn", True, rows, keys, causal)
        return backward(call, grad, q, k, v, out, lse.squeeze(-1), scale=scale)

    def flash(q: Tensor, k: Tensor, v: Tensor, *options: Any, scale: float, **window: int | None) -> tuple[Tensor, ...]:
        *absent, rows, keys, dropout, causal, mask = options
        assert (absent, dropout, mask) == ([None] * 2, 0.0, False)
        call = AttentionCall("flash", False, rows, keys, causal, _sizes(**window))
        out, lse = forward(call, *(x.transpose(1, 2) for x in (q, k, v)), scale)  # type: ignore[arg-type]
        return out.transpose(1, 2), lse, nothing, nothing, nothing

    def flash_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any, scale: float,
        **window: int | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *absent, rows, keys, dropout, causal, _state, _unused = options
        assert (absent, dropout) == ([None] * 2, 0.0)
        call = AttentionCall("flash", True, rows, keys, causal, _sizes(**window))
        found = backward(call, *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, scale=scale)
        return tuple(x.transpose(1, 2) for x in found)

    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.library._scoped_library("aten", "IMPL") as library, contextlib.ExitStack() as stack:
        library.impl("_scaled_dot_product_cudnn_attention", cudnn, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
        library.impl("_flash_attention_forward", flash, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        stack.enter_context(mock.patch("torch._fused_sdp_choice", return_value=backend.value))
        stack.enter_context(mock.patch("torch.backends.cuda.is_flash_attention_available", return_value=True))
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        torch.use_deterministic_algorithms(False)
        yield calls


def _sizes(window_size_left: int | None = None, window_size_right: int | None = None) -> tuple[int | None, int | None]:
    assert min(window_size_left or 0, window_size_right or 0) >= 0, "flash attention takes negative sizes for no bound"
    return window_size_left, window_size_right


def _bias(call: AttentionCall) -> Tensor | None:
    """Return what is added to the scores: flash attention's window counts from the diagonal through the last corner."""
    if call.window == (None, None):
        return None
    left, right = (call.keys if size is None else size for size in call.window)
    place = torch.arange(call.keys) - torch.arange(call.rows).unsqueeze(1) - (call.keys - call.rows)
    seen = (place >= -left) & (place <= right)
    assert not call.causal and seen.any(1).all(), "flash attention's log-sum-exp of no keys is inf, not -inf"
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
