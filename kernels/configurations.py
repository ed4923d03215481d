"""Tile sizes, warps and stages of every kernel: a table per operator, in configurations.toml.

A line of the table applies to some GPU families and element types. It is one row for each of them, which applies to the
sizes that its `at_most` names. `choose_configuration` takes the first row that fits among an operator's rows for a
family and an element type; the last one has no limits. Every row says where and when it was measured. `tpfuse tune`
writes them.

One size is computed from the row itself: `idle`, the percentage of multiprocessors' time that its tiles leave unused,
because the last wave of tiles is not full or tiles extend beyond the edges. So a product can skip a wide tile, whose
loop is the fastest, where a narrower tile keeps more multiprocessors busy.

No row specializes warps: on an H100 Triton 3.6 and 3.7 compile it to wrong results, for products and for attention
alike (2026-11-26; triton-lang/triton#8311), and it gained nothing there.
"""

import contextlib
import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpfuse.kernels.launch import Launch, cdiv, family, forget_plans

TABLE = Path(__file__).with_name("configurations.toml")


@dataclass(frozen=True)
class Configuration:
    """A row of the table. blocks: the constexprs that the kernel takes, by name (BLOCK_M, …)."""

    operator: str
    family: str
    bits: int  # of the element type: 16 or 32
    at_most: Mapping[str, int]
    blocks: Mapping[str, Any]
    num_warps: int
    num_stages: int
    measured: str

    @property
    def key(self) -> tuple[object, ...]:
        """Return the operator, family, bits and limits of the row; no two rows of a table have the same."""
        return self.operator, self.family, self.bits, tuple(sorted(self.at_most.items()))

    @property
    def options(self) -> dict[str, Any]:
        """Return what a launch takes of the row: its blocks, num_warps and num_stages."""
        return {**self.blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> Launch:
        """Return the planned launch of a kernel with these arguments and the row's blocks, warps and stages."""
        return Launch(kernel, grid, {**arguments, **self.blocks}, self.num_warps, self.num_stages)

    def fits(self, bits: int, sizes: Mapping[str, int], *, busy: bool = True) -> bool:
        """Return whether the row is for elements of `bits` bits and these sizes.

        busy: its limit of idle time must be kept too.
        """
        if bits != self.bits:
            return False
        limits = {name: limit for name, limit in self.at_most.items() if busy or name != "idle"}
        return all((self.idle(sizes) if name == "idle" else sizes[name]) <= limit for name, limit in limits.items())

    @property
    def tile(self) -> tuple[object, ...]:
        """Return the shape of the row's tiles of the result, and whether TMA loads them."""
        return tuple(self.blocks.get(name) for name in ("BLOCK_M", "BLOCK_N", "TMA"))

    def idle(self, sizes: Mapping[str, int]) -> float:
        """Return the percentage of `programs` multiprocessors' time that tiles of `chunks` x M x N leave unused."""
        block_m, block_n = int(self.blocks["BLOCK_M"]), int(self.blocks["BLOCK_N"])
        tiles = sizes.get("chunks", 1) * cdiv(sizes["M"], block_m) * cdiv(sizes["N"], block_n)
        done = sizes.get("chunks", 1) * sizes["M"] * sizes["N"] / (block_m * block_n)
        waves = cdiv(tiles, sizes["programs"])
        return 100 * (1 - done / max(waves * sizes["programs"], 1))


def read_table(path: Path) -> list[Configuration]:
    """Return the rows of a table file, in order. Raise ValueError with the file and the line of the operator."""
    return rows_of(path.read_text(encoding="utf-8"), str(path))


def rows_of(text: str, name: str) -> list[Configuration]:
    """Return the rows of a table's text, in order. Raise ValueError that begins with `name`."""
    rows = []
    for operator, lines in tomllib.loads(text).items():
        for number, line in enumerate(lines, 1):
            fields = {"at_most": {}} | line
            try:
                families, widths = fields.pop("families"), fields.pop("bits")
                rows += [Configuration(operator, x, bits, **fields) for x in families for bits in widths]
            except (KeyError, TypeError) as error:
                raise ValueError(f"{name}: line {number} of {operator}: {error}") from None
    return rows


_overriding: dict[tuple[object, ...], Configuration] = {}
_served: list[Configuration] = []


@contextlib.contextmanager
def override(*configurations: Configuration) -> Iterator[list[Configuration]]:
    """Make `choose_configuration` return these instead of the table's rows; yield a list of those it has returned.

    The override applies to the whole process, including backward's threads, so only one tuner may use it at a time.
    """
    assert not _overriding, "a tuner is running already"
    _served.clear()
    _overriding.update({configuration.key: configuration for configuration in configurations})
    forget_plans()
    try:
        yield _served
    finally:
        _overriding.clear()
        forget_plans()


@functools.cache
def _rows(table: Path) -> dict[tuple[str, str], list[Configuration]]:
    """Return the rows of each (operator, family). A file is read once, which takes tens of milliseconds."""
    rows: dict[tuple[str, str], list[Configuration]] = {}
    for row in read_table(table):
        rows.setdefault((row.operator, row.family), []).append(row)
    return rows


@functools.lru_cache(4096)
def _first_that_fits(operator: str, name: str, bits: int, sizes: tuple[tuple[str, int], ...]) -> Configuration:
    for row in _rows(TABLE).get((operator, name), ()):
        if row.fits(bits, dict(sizes)):
            return row
    raise AssertionError(f"configurations.toml has no row of {operator} for {name}, {bits} bits, {dict(sizes)}")


@functools.lru_cache(4096)
def _with_other_tiles(operator: str, name: str, bits: int, sizes: tuple[tuple[str, int], ...]) -> Configuration:
    """Return the first row that fits, at any idle time, with other tiles than `_first_that_fits`; else that row."""
    first = _first_that_fits(operator, name, bits, sizes)
    fitting = (row for row in _rows(TABLE)[operator, name] if row.fits(bits, dict(sizes), busy=False))
    return next((row for row in fitting if row.tile != first.tile and row.tile[2] == first.tile[2]), first)


def forget() -> None:
    """Make `choose_configuration` read the table again after it was written."""
    _rows.cache_clear()
    _first_that_fits.cache_clear()
    _with_other_tiles.cache_clear()
    forget_plans()


def choose_configuration(
    operator: str, device: torch.device, dtype: torch.dtype, *, other_tiles: bool = False, **sizes: int
) -> Configuration:
    """Return the configuration of `operator` for tensors of `dtype` on `device` with these sizes.

    other_tiles: return the second best row of the table, with tiles of another shape, for measurements on this machine;
    the best row where there is no other. Raise ValueError where Triton cannot run on the device.
    """
    find = _with_other_tiles if other_tiles else _first_that_fits
    row = find(operator, family(device), dtype.itemsize * 8, tuple(sizes.items()))
    if _overriding and row.key in _overriding:
        row = _overriding[row.key]
        _served.append(row)
    return row
