"""Fixtures that the tests of communicating kernels share."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.kernels import launch as launching
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.inputs import integers

SUMS = ("reduce_scatter", "one_shot", "two_shot")


def _summed(rows: list[Tensor]) -> Tensor:
    """Return the sum of the rows in rank order, half types in float32, rounded once."""
    half = rows[0].dtype in (torch.bfloat16, torch.float16)
    total = rows[0].float() if half else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.to(rows[0].dtype)


@dataclass(frozen=True)
class Collective:
    """A collective of every rank's x [world, n].

    takes_all, gives_all: whether the operator takes all rows of x or the first one, and returns all rows or one. plain:
    (every rank's input, rank) -> the expected result.
    """

    name: str
    operator: str
    takes_all: bool
    gives_all: bool
    plain: Callable[[list[Tensor], int], Tensor]
    options: Mapping[str, bool] = field(default_factory=dict)

    def run(self, x: Tensor, endpoint: Endpoint) -> Tensor:
        """Call the launcher, which is looked up at each call: for mutants it is another module's."""
        launcher = getattr(importlib.import_module(f"tpfuse.kernels.{self.operator}"), f"{self.operator}_forward")
        out = torch.empty_like(x if self.gives_all else x[0])
        launcher(x if self.takes_all else x[0], out, endpoint, **self.options)
        return out


def _sum_of_first_rows(xs: list[Tensor], rank: int) -> Tensor:
    return _summed([x[0] for x in xs])


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("all_gather", "all_gather", False, True, lambda xs, rank: torch.stack([x[0] for x in xs])),
        Collective("all_to_all", "all_to_all", True, True, lambda xs, rank: torch.stack([x[rank] for x in xs])),
        Collective("reduce_scatter", "reduce_scatter", True, False, lambda xs, rank: _summed([x[rank] for x in xs])),
        Collective("one_shot", "all_reduce", False, False, _sum_of_first_rows, {"two_shot": False}),
        Collective("two_shot", "all_reduce", False, False, _sum_of_first_rows, {"two_shot": True}),
    )
}


@pytest.fixture(params=COLLECTIVES)
def collective(request: pytest.FixtureRequest) -> Collective:
    """Yield every collective in turn."""
    return COLLECTIVES[request.param]


@pytest.fixture(params=SUMS)
def sum_collective(request: pytest.FixtureRequest) -> Collective:
    """Yield every collective that sums, in turn."""
    return COLLECTIVES[request.param]


@pytest.fixture
def collectives() -> dict[str, Collective]:
    """Return all collectives by name."""
    return COLLECTIVES


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the list to which the grid and the arguments of every launch of a planned kernel are added."""
    seen: list[dict[str, Any]] = []
    start = launching.launch

    def spy(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        seen.append({"grid": grid} | arguments)
        start(kernel, grid, **arguments)

    monkeypatch.setattr(launching, "launch", spy)
    return seen


def _layouts(seed: int, rows: int, columns: int) -> dict[str, Tensor]:
    around = torch.full((rows + 5, 3 * columns + 7), torch.nan)
    around[2 : rows + 2, 1 : 3 * columns + 1 : 3] = integers(seed, rows, columns)
    wide = torch.full((rows + 8, columns + 8), torch.nan)
    wide[4 : rows + 4, :columns] = integers(seed, rows, columns)
    return {
        "transposed": integers(seed, columns, rows).t(),
        "strided": around[2 : rows + 2, 1 : 3 * columns + 1 : 3],
        "rows of a wider one": wide[4 : rows + 4, :columns],
        "columns of a higher one": wide.t().contiguous().t()[4 : rows + 4, :columns],
        "one row": integers(seed, 1, columns).expand(rows, columns),
        "one column": integers(seed, rows, 1).expand(rows, columns),
    }


KINDS = tuple(_layouts(0, 1, 1))


@pytest.fixture(params=["strided", *exhaustive(*(kind for kind in KINDS if kind != "strided"))])
def layout(request: pytest.FixtureRequest) -> Callable[[int, int, int], Tensor]:
    """Return layout(seed, rows, columns), a matrix of whole numbers with every kind of strides in turn.

    The memory around its elements is NaN.
    """
    return lambda seed, rows, columns: _layouts(seed, rows, columns)[request.param]


@pytest.fixture
def tiny_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace the interpreted rows' block sizes by the module's TILES, operator -> block sizes.

    Small tensors then have several tiles and several programs.
    """
    tiles: dict[str, dict[str, int]] = request.module.TILES
    rows = [row for row in read_table(TABLE) if row.operator in tiles and row.family == "interpreted"]
    with override(*(replace(row, blocks=row.blocks | tiles[row.operator]) for row in rows)):
        yield
