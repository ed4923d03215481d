"""Shadow memory: the last accesses to each element of a symmetric buffer, with their times."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpfuse.explore.clocks import Clocks

RED_ZONE = 256  # bytes before and after a buffer that must not be accessed
Indices = NDArray[np.int64]
Cells = NDArray[np.uint8]  # the bytes of elements, a row for each


class Conflict(NamedTuple):
    """An earlier access that is not ordered before the present one. site: its number."""

    element: int
    component: int  # the component of the chain that made the access
    time: int
    site: int


class _Accesses:
    """The last access of one kind by one chain to each element, and the latest time among them."""

    def __init__(self, count: int) -> None:
        self.times: NDArray[np.int64] = np.zeros(count, np.int64)
        self.sites: NDArray[np.int32] = np.zeros(count, np.int32)
        self.latest = 0


class Region:
    """A rank's part of a symmetric buffer. checked: whether accesses must be ordered, which abort words need not.

    Two accesses to an element conflict if one is a plain write, or if one is plain, the other atomic, and one of them
    writes. It is enough to keep the last plain write: an earlier one is ordered before it, or was reported.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        generation: int = 0,
        checked: bool = True,
    ) -> None:
        self.key, self.rank, self.shape, self.dtype, self.checked = key, rank, shape, dtype, checked
        self.identity = key, generation, rank
        self.count, self.step, self.freed = shape.numel(), dtype.itemsize, False
        self._memory = torch.zeros(self.count * self.step + 2 * RED_ZONE, dtype=torch.uint8)
        self._bytes = self._memory.numpy()
        inside = self._memory[RED_ZONE : RED_ZONE + self.count * self.step]
        self.cells: Cells = inside.numpy().reshape(self.count, self.step)
        self.tensor: Tensor = inside.view(dtype).view(shape)
        self.base = self._memory.data_ptr() + RED_ZONE
        self.end = self.base + self.count * self.step
        self.low, self.high = self.base - RED_ZONE, self.end + RED_ZONE
        self.words: NDArray[np.int32] = inside.numpy().view(np.int32) if dtype == torch.int32 else np.zeros(0, np.int32)
        if checked:
            self._writer: NDArray[np.int32] = np.zeros(self.count, np.int32)
            self._written: NDArray[np.int64] = np.zeros(self.count, np.int64)
            self._wrote: NDArray[np.int32] = np.zeros(self.count, np.int32)
        self._tables: dict[tuple[bool, bool], dict[int, _Accesses]] = {
            (write, atomic): {} for write in (False, True) for atomic in (False, True)
        }

    def elements(self, addresses: NDArray[np.uint64], size: int) -> Indices:
        """Return the elements to which accesses of `size` bytes at these addresses belong."""
        index: Indices = (addresses.astype(np.int64) - self.base).ravel() // self.step
        if size <= self.step:
            return index
        return (index[:, None] + np.arange(size // self.step)).ravel()

    def element(self, index: int) -> bytes:
        """Return the bytes of an element."""
        return bytes(self.cells[index])

    def number(self, index: int) -> int | float:
        """Return the value of an element; types that numpy has not as an integer."""
        kind = "f" if self.dtype in (torch.float32, torch.float64) else "i"
        number: int | float = np.frombuffer(self.element(index), f"{kind}{self.step}")[0].item()
        return number

    def content(self, addresses: NDArray[np.uint64], size: int) -> bytes:
        """Return the bytes that accesses of `size` bytes at these addresses read."""
        places = (addresses.astype(np.int64) - self.low).ravel()[:, None] + np.arange(size)
        return bytes(self._bytes[places])

    def accesses(self) -> Iterator[tuple[str, NDArray[np.int32], NDArray[np.int64]]]:
        """Yield the last accesses to each element: their kind, the components that made them, and the times."""
        yield "plain write", self._writer, self._written
        for (write, atomic), table in self._tables.items():
            for component, row in table.items():
                kind = f"{'atomic' if atomic else 'plain'} {'write' if write else 'read'}"
                yield kind, np.full(self.count, component, np.int32), row.times

    def name(self, element: int) -> str:
        """Return the description of an element: the buffer's key, the index and the rank."""
        index = ", ".join(str(int(i)) for i in np.unravel_index(element, self.shape or (1,)))
        return f"{self.key}[{index}] of rank {self.rank}"

    def access(
        self, clocks: Clocks, index: Indices, chain: int, site: int, *, write: bool, atomic: bool
    ) -> Conflict | None:
        """Record an access; return an earlier unordered one with which it conflicts, or None."""
        conflict = self.conflict(clocks.knows[chain], index, write=write, atomic=atomic)
        component = chain + atomic
        now = clocks.time(component)
        if write and not atomic:
            self._writer[index], self._written[index], self._wrote[index] = component, now, site
        else:
            row = self._tables[write, atomic].get(component)
            if row is None:
                row = self._tables[write, atomic][component] = _Accesses(self.count)
            row.times[index], row.sites[index], row.latest = now, site, now
        return conflict

    def conflict(self, knows: NDArray[np.int64], index: Indices, *, write: bool, atomic: bool) -> Conflict | None:
        """Return an access with which one by a chain that knows this would conflict, or None."""
        unordered = self._written[index] > knows[self._writer[index]]
        if unordered.any():
            element = int(index[unordered][0])
            return Conflict(element, int(self._writer[element]), int(self._written[element]), int(self._wrote[element]))
        for (wrote, was_atomic), table in self._tables.items():
            if (atomic and was_atomic) or not (write or wrote):
                continue
            for component, row in table.items():
                if row.latest > knows[component] and (unordered := row.times[index] > knows[component]).any():
                    element = int(index[unordered][0])
                    return Conflict(element, component, int(row.times[element]), int(row.sites[element]))
        return None
