"""Attention of one rank's queries to the keys of one rank after another, by torch's own operators.

Each piece (`tpfuse.ops.ring_attention.pieces`) is computed by what is behind torch's scaled_dot_product_attention on
CPUs, which returns the log-sum-exp of the scores and takes it for the gradients, so that results of pieces are merged
in float32 and gradients of pieces add up. With dropout, which that has not got, and on other devices it is the
definition, tile by tile. Half types are computed in float32: nothing is rounded between blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfuse.ops.dropout import keep_mask
from tpfuse.ops.ring_attention.call import RingCall, computed
from tpfuse.ops.ring_attention.pieces import Piece

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_TILE_SCORES = 2**24  # scores of all heads that the definition holds at once
_NO_ROWS = float("-inf")


class BlockForward:
    """out and lse of some queries, while keys and values are added rank by rank."""

    def __init__(self, q: Tensor, call: RingCall) -> None:
        """q: [B, H, n, D]."""
        self._q, self._call, self._dtype = _rows(q), call, q.dtype
        self._out: Tensor | None = None
        self._lse = self._q.new_empty(0)

    def add(self, source: int, k: Tensor, v: Tensor) -> None:
        """The keys and values [B, Hk, n, D] of rank `source`."""
        k, v = _rows(k), _rows(v)
        for piece in self._call.pieces(source):
            out, lse = _attend(self._q, k, v, piece, source, self._call)
            if self._out is None and out.shape == self._q.shape:
                self._out, self._lse = out, lse
                continue
            total, total_lse = self._state()
            total, total_lse = total[:, :, piece.rows], total_lse[:, :, piece.rows]
            share = torch.sigmoid(lse - total_lse).nan_to_num_(0.0)  # -inf - -inf: neither has seen a key
            total.lerp_(out, share.unsqueeze(-1))
            torch.logaddexp(total_lse, lse, out=total_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse in float32, or float64)."""
        out, lse = self._state()
        return out.to(self._dtype), lse

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._out is None:
            batch, heads, length, size = self._q.shape
            self._out = self._q.new_zeros(batch, length, heads, size).transpose(1, 2)
            self._lse = self._q.new_full((batch, heads, length), _NO_ROWS)
        return self._out, self._lse


class BlockBackward:
    """The gradient of some queries, and of what is added rank by rank the parts that these queries give."""

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, call: RingCall) -> None:
        """[B, H, n, D], lse [B, H, n]; out and lse of all keys."""
        self._grad, self._q, self._out = _rows(grad_out), _rows(q), _rows(out)
        self._lse = lse.masked_fill(lse == _NO_ROWS, 0.0)  # such rows are in no piece but with a mask
        self._call, self._dtype = call, q.dtype
        self._dq: Tensor | None = None

    def add(self, source: int, k: Tensor, v: Tensor, parts: Tensor) -> None:
        """k, v: of rank `source`; parts: [2, B, Hk, n, D] float32 or float64: their gradients' parts.

        Written where they are not 0 for certain: `RingCall.span`.
        """
        k, v = _rows(k), _rows(v)
        written: tuple[int, int] | None = None
        for piece in self._call.pieces(source):
            dq, *gradients = _attend_backward(
                self._grad, self._q, k, v, self._out, self._lse, piece, source, self._call
            )  # fmt: skip
            self._add_dq(dq, piece)
            for part, gradient in zip(parts, gradients, strict=True):
                now = _accumulate(part, gradient, piece.first_key, piece.stop_key, written)
            written = now

    def gradients(self, source: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What `add` writes, in k's dtype, where nobody else has a part of it."""
        found = self._call.pieces(source)
        if len(found) == 1 and found[0].keys == slice(0, k.shape[2]):
            dq, dk, dv = _attend_backward(
                self._grad, self._q, _rows(k), _rows(v), self._out, self._lse, found[0], source, self._call
            )
            self._add_dq(dq, found[0])
        else:
            parts = self._q.new_zeros(2, *k.shape)
            self.add(source, k, v, parts)
            dk, dv = parts.unbind()
        return dk.to(k.dtype), dv.to(v.dtype)

    def dq(self) -> Tensor:
        """The gradient of q, in its dtype."""
        return (torch.zeros_like(self._q) if self._dq is None else self._dq).to(self._dtype)

    def _add_dq(self, dq: Tensor, piece: Piece) -> None:
        if self._dq is None and dq.shape == self._q.shape:
            self._dq = dq
            return
        if self._dq is None:
            self._dq = torch.zeros_like(self._q)
        self._dq[:, :, piece.rows] += dq


def _accumulate(
    part: Tensor, gradient: Tensor, first: int, stop: int, written: tuple[int, int] | None
) -> tuple[int, int]:
    """Adds to the keys [first, stop) of part, of which those in `written` are written; returns what is then."""
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
    """In the dtype that is computed in, with contiguous rows."""
    x = x.to(computed(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, source: int, call: RingCall) -> tuple[Tensor, Tensor]:
    q, k, v = q[:, :, piece.rows], k[:, :, piece.keys], v[:, :, piece.keys]
    if call.dropout_p or not q.is_cpu:
        parts = [_define(q, k, v, tile, call.scale) for tile in _tiles(q, piece, source, call)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    mask, additive = _masks(q, piece)
    out, lse = _flash(q, k, v, 0.0, piece.causal, attn_mask=additive, scale=call.scale)
    return out, lse if mask is None else lse.masked_fill_(~mask.any(1), _NO_ROWS)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, source: int, call: RingCall
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the piece's rows and keys."""
    grad, q, out, lse = grad[:, :, piece.rows], q[:, :, piece.rows], out[:, :, piece.rows], lse[:, :, piece.rows]
    k, v = k[:, :, piece.keys], v[:, :, piece.keys]
    if call.dropout_p or not q.is_cpu:
        return _define_backward(grad, q, k, v, out, lse, _tiles(q, piece, source, call), call.scale)
    _, additive = _masks(q, piece)
    found: tuple[Tensor, Tensor, Tensor] = _flash_backward(
        grad, q, k, v, out, lse, 0.0, piece.causal, attn_mask=additive, scale=call.scale
    )
    return found


def _masks(q: Tensor, piece: Piece) -> tuple[Tensor | None, Tensor | None]:
    """What is seen of a piece with a mask, and what is added to its scores."""
    if piece.seen is None:
        return None, None
    mask = piece.mask()
    assert mask is not None
    return mask, torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, _NO_ROWS)


@dataclass(frozen=True)
class _Tile:
    """Rows of a piece, what they see [rows, keys], and dropout's factors [B, H, rows, keys]; None: all, and none."""

    rows: slice
    mask: Tensor | None
    factors: Tensor | None

    def dropped(self, x: Tensor) -> Tensor:
        """x [B, H, rows, keys] with its factors."""
        return x if self.factors is None else x * self.factors


def _tiles(q: Tensor, piece: Piece, source: int, call: RingCall) -> Iterator[_Tile]:
    k_pos = call.runs.positions(source, q.device)[piece.keys]
    mask = piece.mask()
    step = max(_TILE_SCORES // max(q.shape[:2].numel() * len(k_pos), 1), 1)
    for start in range(0, q.shape[2], step):
        rows, factors = slice(start, start + step), None
        if call.dropout_p:
            assert call.own_counters is not None and call.key is not None
            counters = call.own_counters[:, :, piece.rows][:, :, rows].unsqueeze(-1)
            keep = keep_mask(counters + k_pos, 1, call.dropout_p, call.key).squeeze(-1)
            factors = keep.to(q.dtype) / (1.0 - call.dropout_p)
        yield _Tile(rows, None if mask is None else mask[rows].to(q.device), factors)


def _define(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of a tile's rows, by the definition."""
    scores = _scores(q[:, :, tile.rows], k, tile.mask, scale)
    lse = scores.logsumexp(-1)
    seen = lse.masked_fill(lse == _NO_ROWS, 0.0).unsqueeze(-1)
    return tile.dropped((scores - seen).exp_()) @ _repeated(v, q), lse


def _define_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Iterator[_Tile], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), by the definition, tile by tile."""
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
    """k [B, Hk, n, D] with as many heads as q."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
