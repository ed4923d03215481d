"""`tpfuse profile compare` finds what became slower."""

import copy
import json
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
        (folder / "summary.json").write_text(json.dumps(_document()))
    return folders


def _change(folder: Path, change: Any) -> None:
    document = copy.deepcopy(_document())
    change(document)
    (folder / "summary.json").write_text(json.dumps(document))


def _slow_down(name: str, factor: float) -> Any:
    def change(document: dict[str, Any]) -> None:
        for rank in document["ranks"]:
            for row in rank["operators"]:
                if row["operator"] == name:
                    row["total_s"] += row["computing_s"] * (factor - 1)
                    row["computing_s"] *= factor

    return change


def test_equal_profiles_pass(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "compare", *map(str, folders)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "Nothing is slower by more than 10%."
    assert "linear_reduce_scatter" in said and "tiny" not in said


def test_an_operator_that_is_slower_by_20_percent_is_found(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _change(folders[1], _slow_down("linear_reduce_scatter", 1.2))
    assert run(["profile", "compare", *map(str, folders)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("slower")] == ["linear_reduce_scatter"]
    assert "1.20" in next(line for line in lines if line.endswith("slower"))
    assert lines[-1] == "B is slower by more than 10%."
    assert run(["profile", "compare", *map(str, reversed(folders))]) == 0
    assert run(["profile", "compare", *map(str, folders), "--slower", "0.25"]) == 0


def test_a_slower_step_is_found(folders: list[Path]) -> None:
    _change(folders[1], lambda document: [rank.update(wall_s=0.12) for rank in document["ranks"]])
    assert run(["profile", "compare", *map(str, folders)]) == 1


@pytest.mark.parametrize("name", ["tiny", "linear_reduce_scatter"])
def test_what_does_not_count(name: str, folders: list[Path]) -> None:
    """An operator of no weight may double, and one may wait longer: its peer is slower, not it."""

    def change(document: dict[str, Any]) -> None:
        if name == "tiny":
            _slow_down("tiny", 2.0)(document)
            return
        for rank in document["ranks"]:
            for row in rank["operators"]:
                row["total_s"] += 5e-3
                row["waiting_s"] += 5e-3

    _change(folders[1], change)
    assert run(["profile", "compare", *map(str, folders)]) == 0


def test_another_implementation_is_compared(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    def change(document: dict[str, Any]) -> None:
        _slow_down("all_gather_linear", 1.5)(document)
        for rank in document["ranks"]:
            for row in rank["operators"]:
                row["implementation"] = row["implementation"] and "collective"

    _change(folders[1], change)
    assert run(["profile", "compare", *map(str, folders)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("slower")]
    assert line.split()[0] == "all_gather_linear" and "1.50" in line


def test_bad_input_is_one_line(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = folders
    _change(second, lambda document: document["ranks"].pop())
    assert run(["profile", "compare", str(first), str(second)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    _change(second, lambda document: document.update(ranks=[]))
    assert run(["profile", "compare", str(second), str(second)]) == 2
    (second / "summary.json").write_text("{")
    assert run(["profile", "compare", str(first), str(second)]) == 2
    (second / "summary.json").unlink()
    assert run(["profile", "compare", str(first), str(second)]) == 2
    assert "which `tpfuse profile` writes" in capsys.readouterr().err
    assert run(["profile", "compare", str(first)]) == 2
