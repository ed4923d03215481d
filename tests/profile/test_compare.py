"""`tpfuse profile compare` finds what became slower."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpfuse.cli import run

LAYERS = ("h.0", "h.1")
MS = {"linear_reduce_scatter": 10.0, "all_gather_linear": 20.0, "tiny": 0.01}


def _operator(name: str, layer: str, ms: float) -> dict[str, Any]:
    row: dict[str, Any] = {"operator": name, "layer": layer, "implementation": "direct" if "linear" in name else ""}
    row |= {"total_s": (ms + 1) / 1e3, "computing_s": ms / 1e3, "waiting_s": 1e-3}
    return row | {"communication_s": 0.0, "idle_s": 0.0}


def _document() -> dict[str, Any]:
    ranks = [
        {"rank": rank, "wall_s": 0.1}
        | {"operators": [_operator(name, layer, ms) for name, ms in MS.items() for layer in LAYERS]}
        for rank in range(2)
    ]
    return {"format": 1, "ranks": ranks}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in "AB"]
    for folder in folders:
        folder.mkdir()
        _write(folder, lambda document: None)
    return folders


def _write(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = _document()
    change(document)
    (folder / "summary.json").write_text(json.dumps(document))


def _slow_down(name: str, factor: float = 1.0, waiting: float = 0.0, implementation: str = "") -> Any:
    def change(document: dict[str, Any]) -> None:
        for row in (row for rank in document["ranks"] for row in rank["operators"]):
            if row["operator"] == name:
                row["total_s"] += row["computing_s"] * (factor - 1) + waiting
                row["computing_s"] *= factor
                row["waiting_s"] += waiting
                row["implementation"] = implementation or row["implementation"]

    return change


@pytest.mark.parametrize(
    ("change", "slower"),
    [
        (lambda document: None, []),
        (_slow_down("linear_reduce_scatter", 1.2), ["linear_reduce_scatter"]),
        (_slow_down("all_gather_linear", 1.2, implementation="collective"), ["all_gather_linear"]),
        (lambda document: [rank.update(wall_s=0.12) for rank in document["ranks"]], ["step"]),
        (_slow_down("tiny", 2.0), []),  # it has no weight
        (_slow_down("linear_reduce_scatter", waiting=5e-3), []),  # its peer is slower, not it
    ],
)
def test_what_is_slower_by_20_percent_is_found(
    change: Any, slower: list[str], folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _write(folders[1], change)
    assert run(["profile", "compare", *map(str, folders)]) == bool(slower)
    *lines, last = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.endswith("slower")]
    assert [line.split()[0] for line in found] == slower and all("1.20" in line for line in found)
    assert last == ("B is slower by more than 10%." if slower else "Nothing is slower by more than 10%.")
    assert run(["profile", "compare", *map(str, folders), "--slower", "0.25"]) == 0
    assert run(["profile", "compare", *map(str, reversed(folders))]) == 0


def test_bad_input_is_one_line(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = folders
    _write(second, lambda document: document["ranks"].pop())
    assert run(["profile", "compare", str(first), str(second)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    _write(second, lambda document: document.update(ranks=[]))
    assert run(["profile", "compare", str(second), str(second)]) == 2
    (second / "summary.json").write_text("{")
    assert run(["profile", "compare", str(first), str(second)]) == 2
    (second / "summary.json").unlink()
    assert run(["profile", "compare", str(first), str(second)]) == 2
    assert "which `tpfuse profile` writes" in capsys.readouterr().err
    assert run(["profile", "compare", str(first)]) == 2
