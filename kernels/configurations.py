"""Tile sizes, warps and stages of every kernel: a table per operator and GPU family, in configurations.toml.

A row holds for the sizes that its `at_most` names; of an operator's rows for a family the first that fits is taken, and
the last one has no limits. Every row says where and when it was measured. `tpfuse tune` writes them.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpfuse.kernels.launch import family

TABLE = Path(__file__).with_name("configurations.toml")


@dataclass(frozen=True)
class Configuration:
    """One row. blocks: the constexprs that the kernel takes, by name (BLOCK_M, …)."""

    operator: str
    family: str
    bits: int  # of the element type: 16 or 32
    at_most: Mapping[str, int]
    blocks: Mapping[str, Any]
    num_warps: int
    num_stages: int
    measured: str

    def fits(self, bits: int, sizes: Mapping[str, int]) -> bool:
        """Whether the row is for elements of `bits` bits and these sizes."""
        return bits == self.bits and all(sizes[name] <= limit for name, limit in self.at_most.items())


def read_table(path: Path) -> list[Configuration]:
    """The rows of a table file, in order. Raises ValueError that names the file and the row."""
    rows = []
    with path.open("rb") as file:
        document = tomllib.load(file)
    for operator, families in document.items():
        for name, entries in families.items():
            for index, entry in enumerate(entries):
                try:
                    rows.append(Configuration(operator, name, **({"at_most": {}} | entry)))
                except TypeError as error:
                    raise ValueError(f"{path}: row {index + 1} of {operator}.{name}: {error}") from None
    return rows


@functools.cache
def _rows(operator: str, name: str) -> tuple[Configuration, ...]:
    return tuple(row for row in read_table(TABLE) if (row.operator, row.family) == (operator, name))


def choose(operator: str, device: torch.device, dtype: torch.dtype, **sizes: int) -> Configuration:
    """The configuration of `operator` for tensors of `dtype` on `device` with these sizes.

    Raises ValueError where Triton cannot run on the device.
    """
    name, bits = family(device), dtype.itemsize * 8
    for row in _rows(operator, name):
        if row.fits(bits, sizes):
            return row
    raise AssertionError(f"configurations.toml has no row of {operator} for {name}, {bits} bits, {sizes}")
