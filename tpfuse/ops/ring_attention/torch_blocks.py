"""Attention of one rank's queries to the keys of one rank after another, by torch's own operators.

Each rectangle of `tpfuse.ops.ring_attention.rectangles` is computed by the operator that torch's
scaled_dot_product_attention calls on CPUs. It returns the log-sum-exp of the scores and takes it for the gradients, so
that the results of rectangles can be merged in float32 and their gradients added. It has no dropout: with dropout, and
on other devices, attention is computed by its definition, tile by tile. Half types are computed in float32: nothing is
rounded between blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.ops.dropout import keep_mask
from tpfuse.ops.ring_attention.call import RingCall, computed
from tpfuse.ops.ring_attention.rectangles import Rectangle

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_TILE_SCORES = 2**24  # the most scores, of all heads together, that the definition holds at once
_NO_ROWS = float("-inf")


class BlockForward:
    """Attention of some queries, to which keys and values are added rank by rank."""

    def __init__(self, q: Tensor, call: RingCall) -> None:
        """q: [B, H, n, D]."""
        self._q, self._call, self._dtype = _rows(q), call, q.dtype
        self._out: Tensor | None = None
        self._lse = self._q.new_empty(0)

    def add(self, source: int, k: Tensor, v: Tensor) -> None:
        """Attend to the keys and values [B, Hk, n, D] of rank `source`."""
        k, v = _rows(k), _rows(v)
        for rectangle in self._call.rectangles(source):
            out, lse = _attend(self._q, k, v, rectangle, source, self._call)
            if self._out is None and out.shape == self._q.shape:
                self._out, self._lse = out, lse
                continue
            total, total_lse = self._state()
            total, total_lse = total[:, :, rectangle.rows], total_lse[:, :, rectangle.rows]
            weight = torch.sigmoid(lse - total_lse).nan_to_num_(0.0)  # -inf - -inf: neither has seen a key
            total.lerp_(out, weight.unsqueeze(-1))
            torch.logaddexp(total_lse, lse, out=total_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out in q's dtype, lse in float32 or float64)."""
        out, lse = self._state()
        return out.to(self._dtype), lse

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._out is None:
            batch, heads, length, size = self._q.shape
            self._out = self._q.new_zeros(batch, length, heads, size).transpose(1, 2)
            self._lse = self._q.new_full((batch, heads, length), _NO_ROWS)
        return self._out, self._lse


class BlockBackward:
    """The gradient of some queries, and their contributions to the gradients of keys and values, rank by rank."""

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, call: RingCall) -> None:
        """Take tensors [B, H, n, D] and lse [B, H, n]; out and lse are those of attention to all keys."""
        self._grad, self._q, self._out = _rows(grad_out), _rows(q), _rows(out)
        self._lse = lse.masked_fill(lse == _NO_ROWS, 0.0)  # rows that see no key are only in rectangles with a mask
        self._call, self._dtype = call, q.dtype
        self._dq: Tensor | None = None

    def add(self, source: int, k: Tensor, v: Tensor, parts: Tensor) -> None:
        """Write to `parts` what these queries contribute to the gradients of k and v, which are of rank `source`.

        parts: [2, B, Hk, n, D] float32 or float64. Keys that no query sees are not written: `RingCall.visible_keys`.
        """
        k, v = _rows(k), _rows(v)
        written: tuple[int, int] | None = None
        for rectangle in self._call.rectangles(source):
            gradients = self._of_rectangle(rectangle, source, k, v)
            for part, gradient in zip(parts, gradients, strict=True):
                now = _accumulate(part, gradient, rectangle.first_key, rectangle.stop_key, written)
            written = now

    def gradients(self, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dk, dv) in k's dtype, where these queries alone contribute to them."""
        rectangles = self._call.rectangles(source)
        if len(rectangles) == 1 and rectangles[0].keys == slice(0, k.shape[2]):
            dk, dv = self._of_rectangle(rectangles[0], source, _rows(k), _rows(v))
        else:
            parts = self._q.new_zeros(2, *k.shape)
            self.add(source, k, v, parts)
            dk, dv = parts.unbind()
        return dk.to(k.dtype), dv.to(v.dtype)

    def dq(self) -> Tensor:
        """Return the gradient of q, in q's dtype."""
        return (torch.zeros_like(self._q) if self._dq is None else self._dq).to(self._dtype)

    def _of_rectangle(self, rectangle: Rectangle, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of q through a rectangle, and return (dk, dv) of the rectangle's keys."""
        call, rows = self._call, rectangle.rows
        grad, q, out, lse = (x[:, :, rows] for x in (self._grad, self._q, self._out, self._lse))
        k, v = k[:, :, rectangle.keys], v[:, :, rectangle.keys]
        if call.dropout_p or not q.is_cpu:
            dq, dk, dv = _define_backward(grad, q, k, v, out, lse, _tiles(q, rectangle, source, call), call.scale)
        else:
            _, additive = _masks(q, rectangle)
            dq, dk, dv = _flash_backward(
                grad, q, k, v, out, lse, 0.0, rectangle.causal, attn_mask=additive, scale=call.scale
            )
        if self._dq is None and dq.shape == self._q.shape:
            self._dq = dq
        else:
            self._dq = torch.zeros_like(self._q) if self._dq is None else self._dq
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


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows, in the dtype in which it is computed."""
    x = x.to(computed(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, source: int, call: RingCall
) -> tuple[Tensor, Tensor]:
    q, k, v = q[:, :, rectangle.rows], k[:, :, rectangle.keys], v[:, :, rectangle.keys]
    if call.dropout_p or not q.is_cpu:
        parts = [_define(q, k, v, tile, call.scale) for tile in _tiles(q, rectangle, source, call)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    mask, additive = _masks(q, rectangle)
    out, lse = _flash(q, k, v, 0.0, rectangle.causal, attn_mask=additive, scale=call.scale)
    return out, lse if mask is None else lse.masked_fill_(~mask.any(1), _NO_ROWS)


def _masks(q: Tensor, rectangle: Rectangle) -> tuple[Tensor | None, Tensor | None]:
    """Return a rectangle's mask [rows, keys] bool and the tensor to add to its scores, or None for both."""
    if rectangle.visible is None:
        return None, None
    mask = rectangle.mask()
    assert mask is not None
    return mask, torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, _NO_ROWS)


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


def _define(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a tile's rows, by the definition."""
    scores = _scores(q[:, :, tile.rows], k, tile.mask, scale)
    lse = scores.logsumexp(-1)
    finite_lse = lse.masked_fill(lse == _NO_ROWS, 0.0).unsqueeze(-1)
    return tile.dropped((scores - finite_lse).exp_()) @ _repeated(v, q), lse


def _define_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Iterator[_Tile], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), computed by the definition, tile by tile."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = k.shape[0], k.shape[1], -1, *k.shape[2:]
    for tile in tiles:
        rows = tile.rows
        p = (_scores(q[:, :, rows], k, tile.mask, scale) - lse[:, :, rows].unsqueeze(-1)).exp_()
        dv += (tile.dropped(p).mT @ grad[:, :, rows]).view(groups).sum(2)
        delta = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        ds = p * (tile.dropped(grad[:, :, rows] @ _repeated(v, q).mT) - delta) * scale
        dq[:, :, rows] = ds @ _repeated(k, q)
        dk += (ds.mT @ q[:, :, rows]).view(groups).sum(2)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q @ _repeated(k, q).mT) * scale
    return scores if mask is None else scores.masked_fill_(~mask, _NO_ROWS)


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Return k [B, Hk, n, D] with its heads repeated to q's number."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
