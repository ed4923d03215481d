"""Asynchronous products of matrices (wgmma): the layouts of their operands, and those that run.

A warpgroup, four warps, multiplies A [64, depth] by B [depth, columns]. B is in shared memory, and A there or in
registers. A matrix descriptor gives the place of a matrix in shared memory. All is as in the PTX ISA 8.7,
"Asynchronous Warpgroup Level Matrix Instructions": the canonical layouts, the descriptor's format, the fragments, and
what is undefined.

A product is computed when its warpgroup waits for its group: as late as it may be. Until then any access to its
registers is a fault, except by products of the same shape with the same sums. A register that was changed since the
last wgmma.fence is a fault too; one that was only read since then is not noticed.
"""

from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.ptx.faults import Unsupported, WgmmaHazard
from tpfuse.explore.ptx.shared_memory import CheckedSharedMemory
from tpfuse.explore.ptx.warps import left_matrices, sum_matrices, sum_registers, unpacked

Array = NDArray[Any]
WARPGROUP = 128  # threads
_CHUNK = 16  # bytes that swizzling keeps together
_SWIZZLED = {0: 1, 1: 8, 2: 4, 3: 2}  # the chunks in a row of the pattern, by the descriptor's bits 62 and 63


@cache
def _offsets(rows: int, leading: int, stride: int, width: int, transposed: bool) -> Array:
    """Return the offset in bytes of each chunk, before swizzling.

    K-major: [rows, 2]. Transposed (MN-major): [16, rows / 8]. leading, stride: the two offsets in bytes of the
    descriptor. width: chunks in a row of the swizzling pattern; 1 without swizzling.
    """
    swizzled = width > 1
    if not transposed:
        row, chunk = np.arange(rows)[:, None], np.arange(2)
        return row % 8 * _CHUNK * width + row // 8 * stride + chunk * (_CHUNK if swizzled else leading)
    depth, chunk = np.arange(16)[:, None], np.arange(rows // 8)
    if swizzled:
        across = chunk % width * _CHUNK + chunk // width * leading
        return depth % 8 * _CHUNK * width + depth // 8 * stride + across
    return depth % 8 * _CHUNK + depth // 8 * leading + chunk * stride


def swizzled(addresses: Array, width: int) -> Array:
    """Return the addresses of chunks in a pattern of `width` chunks a row: bits from 7 on change those from 4 on."""
    result: Array = addresses ^ (addresses >> 3 & (width - 1) * _CHUNK)
    return result


def chunk_addresses(descriptor: int, rows: int, transposed: bool) -> Array:
    """Return the address of each chunk of a matrix in shared memory, as `_offsets` orders them."""
    start, leading, stride = ((descriptor >> place & 0x3FFF) * 16 for place in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Unsupported("a matrix descriptor with a base offset is not supported")
    width = _SWIZZLED[descriptor >> 62 & 3]
    return swizzled(start + _offsets(rows, leading, stride, width, transposed), width)


def numbers(chunks: Array, kind: str, transposed: bool) -> Array:
    """Return a matrix [warpgroups, rows, depth] in float32 of its chunks [warpgroups, …, 16], which are bytes."""
    matrix = unpacked(kind, np.ascontiguousarray(chunks).reshape(*chunks.shape[:2], -1).view(np.uint32))
    return matrix.swapaxes(1, 2) if transposed else matrix


def sums_of(registers: Array) -> Array:
    """Return D [warpgroups, 64, columns] of its registers [columns / 2, threads], four for each 8 columns."""
    tiles = sum_matrices(registers.reshape(-1, 4, registers.shape[1]))
    return tiles.transpose(1, 2, 0, 3).reshape(registers.shape[1] // WARPGROUP, 64, -1)


def registers_of(sums: Array) -> Array:
    """Return the registers [columns / 2, threads] of D: the inverse of `sums_of`."""
    tiles = sums.reshape(4 * len(sums), 16, -1, 8).transpose(2, 0, 1, 3)
    return sum_registers(tiles).reshape(sums.shape[2] // 2, -1)


class Multiplicand(NamedTuple):
    """A or B of a product. registers: of the fragments of A, or None. chunks: addresses [warpgroups, …, …] or None."""

    registers: list[Any] | None
    chunks: Array | None
    transposed: bool
    negated: bool

    def some(self, chosen: Array) -> "Multiplicand":
        """Return the part of the chosen warpgroups, given by position."""
        return self if self.chunks is None else self._replace(chunks=self.chunks[chosen])


class Product(NamedTuple):
    """A product that runs. warpgroups: their numbers. group: the number of its commit group in each of them.

    shape: of the opcode, with the types. sums, inputs: slots. adds: for each warpgroup whether D is added.
    """

    warpgroups: Array
    group: Array
    shape: tuple[str, ...]
    sums: tuple[int, ...]
    inputs: tuple[int, ...]
    left: Multiplicand
    right: Multiplicand
    adds: Array
    at: int

    def some(self, chosen: Array) -> "Product":
        """Return the part of the chosen warpgroups, given by position."""
        return self._replace(
            warpgroups=self.warpgroups[chosen],
            group=self.group[chosen],
            left=self.left.some(chosen),
            right=self.right.some(chosen),
            adds=self.adds[chosen],
        )


class Products:
    """The products of a program that run. slots: the registers that nobody may access meanwhile."""

    def __init__(self, threads: int) -> None:
        self.running: list[Product] = []
        self.slots: set[int] = set()
        self._committed = np.zeros(threads // WARPGROUP, np.int64)
        self._fenced: list[list[Any] | None] = [None] * (threads // WARPGROUP)  # all registers at the last fence

    def fence(self, warpgroups: Array, registers: list[Any]) -> None:
        """Let products after this see the registers as they are now."""
        seen = list(registers)
        for warpgroup in warpgroups:
            self._fenced[warpgroup] = seen

    def commit(self, warpgroups: Array) -> None:
        """Let the products since the last group be the next group."""
        self._committed[warpgroups] += 1

    def check(self, slots: frozenset[int], warpgroups: Array) -> None:
        """Raise WgmmaHazard if an instruction of some warpgroups accesses a register of a product that runs."""
        for product in self.running:
            if not slots.isdisjoint(product.sums + product.inputs) and np.isin(product.warpgroups, warpgroups).any():
                raise WgmmaHazard("a register is accessed while a wgmma that nobody has waited for uses it", product.at)

    def begin(self, product: Product, registers: list[Any], shared: CheckedSharedMemory) -> None:
        """Begin a product, whose group is given by this."""
        for other in self.running:
            together = np.isin(other.warpgroups, product.warpgroups).any()
            same = (other.shape, other.sums) == (product.shape, product.sums)
            if together and not (same or set(other.sums).isdisjoint(product.sums)):
                raise WgmmaHazard("a wgmma of another shape still uses its sums", other.at)
            if together and not set(other.sums).isdisjoint(product.inputs):
                raise WgmmaHazard("the sums of a wgmma that nobody has waited for are inputs", other.at)
        for warpgroup in product.warpgroups:
            self._check_fence(warpgroup, {*product.sums, *product.inputs} - self.slots, registers)
        for matrix in (product.left, product.right):
            if matrix.chunks is None:
                continue
            for warpgroup, chunks in zip(product.warpgroups, matrix.chunks, strict=True):
                shared.begin_read(chunks.ravel(), range(4 * warpgroup, 4 * warpgroup + 4), _CHUNK)
        self.running.append(product._replace(group=self._committed[product.warpgroups]))
        self.slots.update(product.sums, product.inputs)

    def _check_fence(self, warpgroup: int, slots: set[int], registers: list[Any]) -> None:
        seen, threads = self._fenced[warpgroup], slice(WARPGROUP * warpgroup, WARPGROUP * (warpgroup + 1))
        if seen is None:
            raise WgmmaHazard("no wgmma.fence comes before the first wgmma of a warpgroup")
        for slot in slots:
            now, then = registers[slot], seen[slot]
            if now is not then:
                now, then = (x[threads] if np.ndim(x) else x for x in (now, then))
                if np.any(now != then):
                    raise WgmmaHazard("a register of a wgmma has changed, and no wgmma.fence comes between")

    def finish(self, warpgroups: Array, left: int, registers: list[Any], shared: CheckedSharedMemory) -> None:
        """Compute the products of some warpgroups but for those of the last `left` groups."""
        remaining, due = [], []
        for product in self.running:
            chosen = product.group < self._committed[product.warpgroups] - left
            chosen &= np.isin(product.warpgroups, warpgroups)
            if chosen.any():
                due.append(product.some(np.flatnonzero(chosen)))
            if not chosen.all():
                remaining.append(product.some(np.flatnonzero(~chosen)))
        self.running = remaining
        self.slots = set().union(*(x.sums + x.inputs for x in remaining))
        # Registers are unpacked once for products with the same sums that follow one another.
        for _, chain in groupby(due, key=lambda x: (x.sums, x.warpgroups.tolist())):
            self._compute(list(chain), registers, shared)

    def _compute(self, chain: list[Product], registers: list[Any], shared: CheckedSharedMemory) -> None:
        first = chain[0]
        threads = (first.warpgroups[:, None] * WARPGROUP + np.arange(WARPGROUP)).ravel()
        total = len(self._fenced) * WARPGROUP
        whole = len(threads) == total
        every = [np.broadcast_to(registers[slot], total) for slot in first.sums]
        sums = sums_of(np.stack(every if whole else [x[threads] for x in every]))
        for product in chain:
            left, right = (self._matrix(product, x, threads, total, shared) for x in (product.left, product.right))
            result = left @ right.swapaxes(1, 2) + np.where(product.adds[:, None, None], sums, np.float32(0))
            sums = result.astype(np.float32, copy=False)
        for slot, before, column in zip(first.sums, every, registers_of(sums), strict=True):
            after = column
            if not whole:
                after = before.copy()
                after[threads] = column
            registers[slot] = after
            for warpgroup in first.warpgroups:  # a product with the same sums needs no fence after this one
                seen = self._fenced[warpgroup]
                assert seen is not None
                seen[slot] = after

    @staticmethod
    def _matrix(
        product: Product, matrix: Multiplicand, threads: Array, total: int, shared: CheckedSharedMemory
    ) -> Array:
        """Return a multiplicand [warpgroups, rows, depth] in float32. Shared memory is read now."""
        kind = product.shape[-1]
        if matrix.chunks is None:
            assert matrix.registers is not None
            fragments = np.stack([np.broadcast_to(x, total)[threads] for x in matrix.registers])
            result = left_matrices(kind, fragments[None]).reshape(len(product.warpgroups), 64, -1)
        else:
            result = numbers(shared.chunks(matrix.chunks), kind, matrix.transposed)
            for warpgroup, chunks in zip(product.warpgroups, matrix.chunks, strict=True):
                shared.end_read(chunks.ravel(), range(4 * warpgroup, 4 * warpgroup + 4), _CHUNK)
        result = -result if matrix.negated else result
        # float32 products are three of tf32 with small errors: as on a GPU each instruction rounds once.
        return result.astype(np.float64) if kind == "tf32" else result
