"""Asynchronous products of matrices (wgmma): the layouts of their operands, and those that run.

A warpgroup, four warps, multiplies A [64, depth] by B [depth, columns]. B is in shared memory, and A there or in
registers. A matrix descriptor gives the place of a matrix in shared memory. All is as in the PTX ISA 8.7,
"Asynchronous Warpgroup Level Matrix Instructions": the canonical layouts, the descriptor's format, the fragments, and
what is undefined.

A product is computed when its warpgroup waits for its group: as late as it may be. Until then any access to its
registers is a fault, except by products of the same shape with the same sums. A register that was changed since the
last wgmma.fence is a fault too; one that was only read since then is not noticed.
"""

from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tpfuse.explore.ptx.faults import Unsupported, WgmmaHazard
from tpfuse.explore.ptx.shared_memory import Array, CheckedSharedMemory
from tpfuse.explore.ptx.warps import left_matrices, sum_matrices, sum_registers, unpacked

WARPGROUP = 128  # threads
_CHUNK = 16  # bytes that swizzling keeps together
_SWIZZLED = {0: 1, 1: 8, 2: 4, 3: 2}  # the chunks in a row of the pattern, by the descriptor's bits 62 and 63


def swizzled(addresses: Array, width: int) -> Array:
    """Return the addresses of chunks in a pattern of `width` chunks a row: bits from 7 on change those from 4 on."""
    result: Array = addresses ^ (addresses >> 3 & (width - 1) * _CHUNK)
    return result


@lru_cache(1024)
def chunk_addresses(descriptor: int, rows: int, transposed: bool) -> Array:
    """Return the address of each chunk of a matrix in shared memory.

    K-major: [rows, 2]. Transposed (MN-major): [16, rows / 8].
    """
    start, leading, stride = ((descriptor >> place & 0x3FFF) * 16 for place in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Unsupported("a matrix descriptor with a base offset is not supported")
    width = _SWIZZLED[descriptor >> 62 & 3]
    if transposed:
        row, chunk = np.arange(16)[:, None], np.arange(rows // 8)
        across, down = (leading, stride) if width > 1 else (stride, leading)
        offsets = chunk % width * _CHUNK + chunk // width * across + row // 8 * down
    else:
        row, chunk = np.arange(rows)[:, None], np.arange(2)
        offsets = row // 8 * stride + chunk * (_CHUNK if width > 1 else leading)
    return swizzled(start + row % 8 * _CHUNK * width + offsets, width)


class Multiplicand(NamedTuple):
    """A or B of a product. given: the fragments of A [4, threads] if in registers, or the addresses of chunks."""

    in_registers: bool
    given: Array
    transposed: bool
    negated: bool


class Product(NamedTuple):
    """A product that runs. group: the number of its commit group in its warpgroup.

    shape: of the opcode, with the type. sums, inputs: slots. adds: whether D is added. at: the instruction's index.
    """

    warpgroup: int
    group: int
    shape: tuple[str, str]
    sums: tuple[int, ...]
    inputs: tuple[int, ...]
    left: Multiplicand
    right: Multiplicand
    adds: bool
    at: int


class Products:
    """The products of a program that run. slots: the registers that nobody may access meanwhile."""

    def __init__(self, threads: int) -> None:
        self.running: list[Product] = []
        self.slots: set[int] = set()
        self._committed = [0] * (threads // WARPGROUP)
        self._fenced: list[list[Any]] = [[]] * (threads // WARPGROUP)  # all registers at the last fence

    def fence(self, warpgroups: list[int], registers: list[Any]) -> None:
        """Let products after this see the registers as they are now."""
        for warpgroup in warpgroups:
            self._fenced[warpgroup] = list(registers)

    def commit(self, warpgroups: list[int]) -> None:
        """Let the products since the last group be the next group."""
        for warpgroup in warpgroups:
            self._committed[warpgroup] += 1

    def check(self, slots: frozenset[int], warpgroups: Array) -> None:
        """Raise WgmmaHazard if an instruction of some warpgroups accesses a register of a product that runs."""
        if self.slots.isdisjoint(slots):
            return
        for x in self.running:
            if x.warpgroup in warpgroups and not slots.isdisjoint(x.sums + x.inputs):
                message = "a register is accessed while a wgmma that nobody has waited for uses it"
                raise WgmmaHazard(message, site=x.at)

    def begin(self, product: Product, registers: list[Any], shared: CheckedSharedMemory) -> None:
        """Begin a product, whose group is given by this."""
        fresh = {*product.sums, *product.inputs}
        for other in self.running:
            if other.warpgroup == product.warpgroup:
                same = (other.shape, other.sums) == (product.shape, product.sums)
                if not (same or set(other.sums).isdisjoint(product.sums)):
                    raise WgmmaHazard("a wgmma of another shape still uses its sums", site=other.at)
                if not set(other.sums).isdisjoint(product.inputs):
                    raise WgmmaHazard("the sums of a wgmma that nobody has waited for are inputs", site=other.at)
                fresh -= {*other.sums, *other.inputs}
        seen = self._fenced[product.warpgroup]
        if not seen:
            raise WgmmaHazard("no wgmma.fence comes before the first wgmma of a warpgroup")
        threads = slice(WARPGROUP * product.warpgroup, WARPGROUP * (product.warpgroup + 1))
        for slot in fresh:
            now, then = registers[slot], seen[slot]
            if now is not then:
                now, then = (x[threads] if np.ndim(x) else x for x in (now, then))
                if np.any(now != then):
                    raise WgmmaHazard("a register of a wgmma has changed, and no wgmma.fence comes between")
        for matrix in (product.left, product.right):
            if not matrix.in_registers:
                shared.begin_read(matrix.given, _warps(product))
        self.running.append(product._replace(group=self._committed[product.warpgroup]))
        self.slots.update(product.sums, product.inputs)

    def finish(self, warpgroups: list[int], left: int, registers: list[Any], shared: CheckedSharedMemory) -> None:
        """Compute the products of some warpgroups but for those of the last `left` groups."""
        due: list[Product] = []
        remaining: list[Product] = []
        for x in self.running:
            ends = x.warpgroup in warpgroups and x.group < self._committed[x.warpgroup] - left
            (due if ends else remaining).append(x)
        self.running = remaining
        self.slots = set().union(*(x.sums + x.inputs for x in remaining))
        # Registers are unpacked once for products with the same sums that follow one another.
        for slots, chain in groupby(due, key=lambda x: x.sums):
            self._compute(slots, list(chain), registers, shared)

    def _compute(
        self, slots: tuple[int, ...], chain: list[Product], registers: list[Any], shared: CheckedSharedMemory
    ) -> None:
        """Compute products with the same sums: registers [columns / 2, threads], four for each 8 columns."""
        threads = len(self._fenced) * WARPGROUP
        packed = np.stack([np.broadcast_to(registers[slot], threads) for slot in slots]).reshape(-1, 4, threads)
        sums = sum_matrices(packed).transpose(1, 2, 0, 3).reshape(len(self._fenced), 64, -1)
        for product in chain:
            left, right = (_matrix(product, x, shared) for x in (product.left, product.right))
            result = left @ right.T
            sums[product.warpgroup] = result + sums[product.warpgroup] if product.adds else result
        after = sum_registers(sums.reshape(-1, 16, len(slots) // 4, 8).transpose(2, 0, 1, 3))
        fenced = [self._fenced[x] for x in {product.warpgroup for product in chain}]
        for slot, register in zip(slots, after.reshape(len(slots), threads), strict=True):
            for each in (registers, *fenced):  # a product with the same sums needs no fence after this one
                each[slot] = register


def _warps(product: Product) -> range:
    return range(4 * product.warpgroup, 4 * product.warpgroup + 4)


def _matrix(product: Product, matrix: Multiplicand, shared: CheckedSharedMemory) -> Array:
    """Return a multiplicand [rows, depth] in float32. Shared memory is read now."""
    kind = product.shape[1]
    if matrix.in_registers:
        result = left_matrices(kind, matrix.given[None]).reshape(64, -1)
    else:
        chunks = shared.end_read(matrix.given, _warps(product))
        result = unpacked(kind, chunks.reshape(len(chunks), -1).view(np.uint32))
        result = result.T if matrix.transposed else result
    result = -result if matrix.negated else result
    # float32 products are three of tf32 with small errors: as on a GPU each instruction rounds once.
    return result.astype(np.float64) if kind == "tf32" else result
