"""The older values that weak memory may return: a run with them shows what a race does to the results of a program.

A read may return the last write that is ordered before it, and every later write that is not ordered after it (PTX ISA
8.10.6, causality). Here plain reads return the oldest of these, the newest value that their chain knows
(`tpfuse.explore.clocks`). Atomic operations and volatile loads return the newest value, so that waits end.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from tpfuse.explore.errors import ExploreError
from tpfuse.explore.shadow import Cells, Indices, Region

_ADDRESSES = (torch.int64, torch.uint64)  # words that may be addresses keep the newest value: others end the process


class OlderValues:
    """What one run has written, and the first older value that it has read."""

    def __init__(self) -> None:
        self._writes: dict[Region, list[tuple[int, int, Indices, Cells]]] = defaultdict(list)
        self._first: tuple[torch.dtype, bytes, bytes] | None = None  # an older and the newest value of an element

    def write(self, region: Region, index: Indices, component: int, time: int) -> None:
        """Take note of a write that follows."""
        self._writes[region].append((component, time, index, region.cells[index]))

    @contextmanager
    def shown(self, reads: Iterable[tuple[Region, Indices]], knows: NDArray[np.int64]) -> Iterator[None]:
        """Let a chain that knows this find older values in the elements that it reads within the block."""
        newest: list[tuple[Region, Indices, Cells]] = []
        for region, index in reads:
            unknown = region.checked and region.conflict(knows, index, write=False, atomic=False)
            if unknown and region.dtype not in _ADDRESSES:
                newest.append((region, index, region.cells[index]))
                region.cells[index] = self._older(region, index, knows)
        try:
            yield
        finally:
            for region, index, cells in reversed(newest):
                region.cells[index] = cells

    def _older(self, region: Region, index: Indices, knows: NDArray[np.int64]) -> Cells:
        cells, known = region.cells.copy(), np.zeros(region.count, bool)
        for component, time, places, before in reversed(self._writes[region]):
            if time <= knows[component]:
                known[places] = True
            else:
                cells[places[~known[places]]] = before[~known[places]]
        older: Cells = cells[index]
        other = (older != region.cells[index]).any(1)
        if self._first is None or (other.any() and self._first[1] == self._first[2]):
            at = int(other.argmax())
            self._first = region.dtype, older[at].tobytes(), region.element(int(index[at]))
        return older

    def damage(self, error: ExploreError | None) -> str:
        """Return a line that says what older values did in the run, which ended with this error; "" for none."""
        if self._first is None:
            return ""
        dtype, *values = self._first
        older, newest = (torch.frombuffer(bytearray(x), dtype=dtype).item() for x in values)
        value, result = f"{older} instead of {newest}", "no check of the program fails"
        if values[0] == values[1]:
            value, result = f"{older}, the same", "the result does not change"
        found = result if error is None else " ".join(error.message.split())
        return f"\n  with older values ({value}), which PTX allows: {found}"
