"""Attention of one rank's queries to the keys of one rank after another, by torch's own operators.

Each rectangle of `tpfuse.ops.ring_attention.rectangles` is computed by an operator that torch's
scaled_dot_product_attention calls. It returns the log-sum-exp of the scores and takes that of all keys for the
gradients, so that the results of rectangles can be merged in float32 and their gradients added.

On CPUs half types are computed in float32: nothing is rounded between blocks. On GPUs the operator is that of cuDNN or
flash attention, which take half types alone: each block's result and gradients are rounded once, before they are added
in float32, as in other rings of flash attention (TransformerEngine, torch's context parallelism). cuDNN's has no
windows: what the edge of a window cuts is computed by flash attention, and all else by cuDNN. No operator has our
dropout or a softcap, and documents are known on the device alone: `chosen_operator` says when attention is computed by
its definition, tile by tile, or by the kernels of `tpfuse.ops.ring_attention.triton_blocks`.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from tpfuse.comm.sum_order import summed_dtype
from tpfuse.kernels.attention_merge import attention_merge
from tpfuse.ops.dense_attention import flash_obstacle
from tpfuse.ops.dropout import keep_mask
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.rectangles import LEAST, Rectangle
from tpfuse.switches import use_triton

_aten = torch.ops.aten
_TILE_SCORES = 2**24  # the most scores, of all heads together, that the definition holds at once
_NO_ROWS = float("-inf")
_Gradients = tuple[Tensor, Tensor, Tensor]


class AttentionOperator(NamedTuple):
    """An operator of torch that attends to one rectangle; on GPUs all rectangles with a mask are bands.

    forward takes (q, k, v, rectangle, scale), with the rectangle's rows and keys, and returns (out, lse [B, H, rows],
    the natural logarithm); backward takes (grad_out, q, k, v, out, lse, rectangle, scale), with out and lse of all
    keys, and returns (dq, dk, dv).
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Rectangle, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rectangle, float], _Gradients]


def _cpu(q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scale: float) -> tuple[Tensor, Tensor]:
    mask, causal = _added(q, rectangle), rectangle.causal
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse if mask is None else lse.masked_fill_((mask == _NO_ROWS).all(1), _NO_ROWS)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rectangle: Rectangle, scale: float
) -> _Gradients:
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, rectangle.causal, attn_mask=_added(q, rectangle), scale=scale
    )
    return dq, dk, dv


def _added(q: Tensor, rectangle: Rectangle) -> Tensor | None:
    """Return what to add to the scores of a rectangle with a mask, [rows, keys]; None for another rectangle."""
    mask = None if rectangle.visible is None else rectangle.mask()
    return None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, _NO_ROWS)


def _suits_cudnn(rectangle: Rectangle) -> bool:
    """Return whether cuDNN computes a rectangle: it has no windows, and cannot attend to one key."""
    rows, keys = rectangle.stop_row - rectangle.first_row, rectangle.stop_key - rectangle.first_key
    return rectangle.visible is None and min(rows, keys) >= LEAST


def _cudnn(q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scale: float) -> tuple[Tensor, Tensor]:
    if not _suits_cudnn(rectangle):
        return _flash(q, k, v, rectangle, scale)
    out, lse, *_rest = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, rectangle.causal, scale=scale
    )
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rectangle: Rectangle, scale: float
) -> _Gradients:
    if not _suits_cudnn(rectangle):
        return _flash_backward(grad, q, k, v, out, lse, rectangle, scale)
    # cuDNN before 9.26 takes the log-sum-exp for contiguous, whatever its strides are (NVIDIA/cudnn-frontend #304).
    lse, causal = lse.contiguous().unsqueeze(-1), rectangle.causal
    seed = q.new_empty((), dtype=torch.int64)  # of dropout: not read
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scale: float) -> tuple[Tensor, Tensor]:
    left, right = rectangle.window
    out, lse, *_rest = _aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, rectangle.causal, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rectangle: Rectangle, scale: float
) -> _Gradients:
    left, right = rectangle.window
    lse = lse.contiguous()  # the kernel has no strides for it
    state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # of dropout: not read
    dq, dk, dv = _aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, None, None, q.shape[2], k.shape[2], 0.0,
        rectangle.causal, state, unused, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


CPU = AttentionOperator("flash attention for CPUs", _cpu, _cpu_backward)
GPU = {
    SDPBackend.CUDNN_ATTENTION: AttentionOperator(
        "cuDNN attention, with flash attention at the edges of windows", _cudnn, _cudnn_backward
    ),
    SDPBackend.FLASH_ATTENTION: AttentionOperator("flash attention", _flash, _flash_backward),
}


def chosen_operator(q: Tensor, call: RingCall) -> AttentionOperator | None:
    """Return the operator that computes every rectangle of the call; None if there is none.

    On GPUs there is none for documents: rectangles are cut on the host, which does not know their lengths. Flash
    attention takes lengths on the device, but without a bound for them it starts as many programs for each document as
    for a whole rank, and its diagonals end at the last key of a document, which striped tokens and windows need not.
    """
    if call.dropout_p or call.softcap is not None or q.device.type not in ("cpu", "cuda"):
        return None
    if q.is_cpu:
        return CPU
    return gpu_operator(q)[0] if call.cu_seqlens is None else None


def gpu_operator(q: Tensor) -> tuple[AttentionOperator | None, str]:
    """Return (the operator for queries like q [B, H, n, D] on a GPU, ""), or (None, the reason why there is none).

    It is that of scaled_dot_product_attention: torch knows what its versions of cuDNN and the GPU can do, and which is
    faster.
    """
    obstacle = flash_obstacle(q)
    if "TORCH_CUDNN_SDPA_AVOID_RECOMPILE" in os.environ:  # cuDNN's backward pass then takes other strides of lse
        obstacle = obstacle or "TORCH_CUDNN_SDPA_AVOID_RECOMPILE is set"
    if not torch.backends.cuda.is_flash_attention_available():
        obstacle = obstacle or "torch is built without flash attention"
    if obstacle:
        return None, obstacle
    backend = SDPBackend(torch._fused_sdp_choice(q, q, q))
    operator = GPU.get(backend)
    return operator, "" if operator else f"scaled_dot_product_attention takes {backend.name} here"


class BlockForward:
    """Attention of some queries, to which keys and values are added rank by rank."""

    def __init__(self, q: Tensor, call: RingCall) -> None:
        """q: [B, H, n, D]."""
        self._operator = chosen_operator(q, call)
        self._q, self._call, self._dtype = _queries(q, self._operator), call, q.dtype
        self._out: Tensor | None = None
        self._lse = self._q.new_empty(0)

    def add(self, source: int, k: Tensor, v: Tensor) -> None:
        """Attend to the keys and values [B, Hk, n, D] of rank `source`."""
        k, v = _keys(k, self._operator), _keys(v, self._operator)
        for rectangle in self._call.rectangles(source, bands=_is_of_gpu(self._operator)):
            out, lse = _attend(self._operator, self._q, k, v, rectangle, source, self._call)
            if self._out is None and out.shape == self._q.shape:
                self._out, self._lse = out, lse
                continue
            total, total_lse = self._state()
            _merge(total[:, :, rectangle.rows], total_lse[:, :, rectangle.rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in float32 or float64)."""
        if self._out is None:
            self._state()
        assert self._out is not None
        return self._out.to(self._dtype), self._lse

    def _state(self) -> tuple[Tensor, Tensor]:
        wide = summed_dtype(self._dtype)
        if self._out is None:
            batch, heads, length, size = self._q.shape
            self._out = self._q.new_zeros(batch, length, heads, size, dtype=wide).transpose(1, 2)
            self._lse = self._q.new_full((batch, heads, length), _NO_ROWS, dtype=wide)
        self._out = self._out.to(wide)
        return self._out, self._lse


class BlockBackward:
    """The gradient of some queries, and their contributions to the gradients of keys and values, rank by rank."""

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, call: RingCall) -> None:
        """Take tensors [B, H, n, D] and lse [B, H, n]; out and lse are those of attention to all keys."""
        self._operator = chosen_operator(q, call)
        self._grad, self._q, self._out = (_queries(x, self._operator) for x in (grad_out, q, out))
        self._lse = lse.masked_fill(lse == _NO_ROWS, 0.0)  # rows that see no key are only in rectangles with a mask
        self._call, self._dtype = call, q.dtype
        self._dq: Tensor | None = None

    def add(self, source: int, k: Tensor, v: Tensor, parts: Tensor) -> None:
        """Write to `parts` what these queries contribute to the gradients of k and v, which are of rank `source`.

        parts: [2, B, Hk, n, D] float32 or float64. Keys that no query sees are not written: `RingCall.visible_keys`.
        """
        k, v = _keys(k, self._operator), _keys(v, self._operator)
        written: tuple[int, int] | None = None
        for rectangle in self._call.rectangles(source, bands=_is_of_gpu(self._operator)):
            gradients = self._of_rectangle(rectangle, source, k, v)
            for part, gradient in zip(parts, gradients, strict=True):
                now = _accumulate(part, gradient, rectangle.first_key, rectangle.stop_key, written)
            written = now

    def gradients(self, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dk, dv) in k's dtype, where these queries alone contribute to them."""
        rectangles = self._call.rectangles(source, bands=_is_of_gpu(self._operator))
        if len(rectangles) == 1 and rectangles[0].keys == slice(0, k.shape[2]):
            k, v = _keys(k, self._operator), _keys(v, self._operator)
            dk, dv = self._of_rectangle(rectangles[0], source, k, v)
        else:
            parts = k.new_zeros(2, *k.shape, dtype=summed_dtype(k.dtype))
            self.add(source, k, v, parts)
            dk, dv = parts.unbind()
        return dk.to(self._dtype), dv.to(self._dtype)

    def dq(self) -> Tensor:
        """Return the gradient of q, in q's dtype."""
        return (torch.zeros_like(self._q) if self._dq is None else self._dq).to(self._dtype)

    def _of_rectangle(self, rectangle: Rectangle, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of q through a rectangle, and return (dk, dv) of the rectangle's keys."""
        call, rows = self._call, rectangle.rows
        grad, q, out, lse = (x[:, :, rows] for x in (self._grad, self._q, self._out, self._lse))
        k, v = k[:, :, rectangle.keys], v[:, :, rectangle.keys]
        if self._operator is None:
            dq, dk, dv = _define_backward(grad, q, k, v, out, lse, _tiles(q, rectangle, source, call), call)
        else:
            dq, dk, dv = self._operator.backward(grad, q, k, v, out, lse, rectangle, call.scale)
        if self._dq is None and dq.shape == self._q.shape:
            self._dq = dq
        else:
            wide = summed_dtype(self._dtype)
            self._dq = torch.zeros_like(self._q, dtype=wide) if self._dq is None else self._dq.to(wide)
            self._dq[:, :, rows] += dq
        return dk, dv


def _accumulate(
    part: Tensor, gradient: Tensor, first: int, stop: int, written: tuple[int, int] | None
) -> tuple[int, int]:
    """Add `gradient` to the keys [first, stop) of `part` and return the keys that are written afterwards.

    written: the keys that are written before; all others hold arbitrary values.
    """
    begin, end = written or (first, first)
    part[:, :, end:first].zero_()  # gaps to either side
    part[:, :, stop:begin].zero_()
    begin, end = min(begin, stop), max(end, first)
    part[:, :, first:begin] = gradient[:, :, : max(begin - first, 0)]
    inner = slice(max(first, begin), min(stop, end))
    part[:, :, inner] += gradient[:, :, inner.start - first : inner.stop - first]
    part[:, :, max(end, first) : stop] = gradient[:, :, max(end, first) - first :]
    return min(first, begin), max(stop, end)


def _queries(x: Tensor, operator: AttentionOperator | None) -> Tensor:
    """Return q, out or grad_out [B, H, n, D] as the operator takes it.

    On GPUs all of them, and therefore rows of them, have the same strides, in memory [B, n, H, D]: torch may keep
    cuDNN's plan for a backward pass by the strides of q, k and v alone, although it holds for those of out and grad_out
    too, and built for cuDNN before 9.5.1 it refuses strides that differ (pytorch/pytorch #176915).
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2) if _is_of_gpu(operator) else _rows(x)


def _keys(x: Tensor, operator: AttentionOperator | None) -> Tensor:
    """Return k or v [B, Hk, n, D] as the operator takes it."""
    return x.contiguous() if _is_of_gpu(operator) else _rows(x)


def _is_of_gpu(operator: AttentionOperator | None) -> bool:
    return operator is not None and operator is not CPU


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows, in the dtype in which it is computed."""
    x = x.to(summed_dtype(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add to `total` and total_lse, in float32 or float64, the result of attention to other keys."""
    if out.dtype != total.dtype and use_triton(out):
        rows_lse = total_lse.contiguous()
        attention_merge(total, rows_lse, out, lse, in_place=True)
        total_lse.copy_(rows_lse)
        return
    weight = torch.sigmoid(lse - total_lse).nan_to_num_(0.0)  # -inf - -inf: neither has seen a key
    total.lerp_(out.to(total.dtype), weight.unsqueeze(-1))
    torch.logaddexp(total_lse, lse, out=total_lse)


def _attend(
    operator: AttentionOperator | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rectangle: Rectangle,
    source: int,
    call: RingCall,
) -> tuple[Tensor, Tensor]:
    q, k, v = q[:, :, rectangle.rows], k[:, :, rectangle.keys], v[:, :, rectangle.keys]
    if operator is None:
        parts = [_define(q, k, v, tile, call) for tile in _tiles(q, rectangle, source, call)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    return operator.forward(q, k, v, rectangle, call.scale)


@dataclass(frozen=True)
class _Tile:
    """Some rows of a rectangle.

    mask: [rows, keys] bool, or None if every row sees every key. factors: dropout's, [B, H, rows, keys], or None.
    """

    rows: slice
    mask: Tensor | None
    factors: Tensor | None

    def dropped(self, x: Tensor) -> Tensor:
        """Return x [B, H, rows, keys] times the factors of dropout."""
        return x if self.factors is None else x * self.factors


def _tiles(q: Tensor, rectangle: Rectangle, source: int, call: RingCall) -> Iterator[_Tile]:
    k_pos = call.runs.positions(source, q.device)[rectangle.keys]
    mask = rectangle.mask()
    step = max(_TILE_SCORES // max(q.shape[:2].numel() * len(k_pos), 1), 1)
    for start in range(0, q.shape[2], step):
        rows, factors = slice(start, start + step), None
        if call.dropout_p:
            assert call.own_counters is not None and call.key is not None
            counters = call.own_counters[:, :, rectangle.rows][:, :, rows].unsqueeze(-1)
            keep = keep_mask(counters + k_pos, 1, call.dropout_p, call.key).squeeze(-1)
            factors = keep.to(q.dtype) / (1.0 - call.dropout_p)
        yield _Tile(rows, None if mask is None else mask[rows].to(q.device), factors)


def _define(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, call: RingCall) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a tile's rows, by the definition."""
    scores = _scores(q[:, :, tile.rows], k, tile.mask, call)
    lse = scores.logsumexp(-1)
    finite_lse = lse.masked_fill(lse == _NO_ROWS, 0.0).unsqueeze(-1)
    return tile.dropped((scores - finite_lse).exp_()) @ _repeated(v, q), lse


def _define_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Iterator[_Tile], call: RingCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), computed by the definition, tile by tile."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = k.shape[0], k.shape[1], -1, *k.shape[2:]
    for tile in tiles:
        rows = tile.rows
        scores = _scores(q[:, :, rows], k, tile.mask, call)
        p = (scores - lse[:, :, rows].unsqueeze(-1)).exp_()
        dv += (tile.dropped(p).mT @ grad[:, :, rows]).view(groups).sum(2)
        delta = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        ds = p * (tile.dropped(grad[:, :, rows] @ _repeated(v, q).mT) - delta) * call.scale
        if call.softcap is not None:
            ds *= 1 - (scores.clamp_(min=-call.softcap) / call.softcap).square_()  # masked scores are -inf
        dq[:, :, rows] = ds @ _repeated(k, q)
        dk += (ds.mT @ q[:, :, rows]).view(groups).sum(2)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, call: RingCall) -> Tensor:
    scores = (q @ _repeated(k, q).mT) * call.scale
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    return scores if mask is None else scores.masked_fill_(~mask, _NO_ROWS)


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Return k [B, Hk, n, D] with its heads repeated to q's number."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
