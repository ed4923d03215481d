"""Pictures show the newest rows of one machine, exactly, and a picture without rows is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from benchmarks.harness import Row
from benchmarks.plots import PICTURES, Missing

ROOT = Path(__file__).resolve().parents[2]
OLD: Row = {"date": "2026-01-01", "machine": "new CPU, 2 cores"}
NEW: Row = {"date": "2026-01-02", "machine": "new CPU, 2 cores"}
OTHER: Row = {"date": "2026-01-03", "machine": "other CPU, 2 cores"}


def _ms(median: float) -> dict[str, float]:
    return {"median": median, "p20": median - 1, "p80": median + 2}


def _mlp(head: Row, sizes: list[int], tpfuse: float, **more: Any) -> Row:
    times = {"tpfuse_ms": _ms(tpfuse), "torch_ms": _ms(2 * tpfuse), "one_process_ms": _ms(3 * tpfuse)}
    return head | {"subject": "mlp", "sizes": sizes, "ranks": 2} | times | more


TENSOR_PARALLEL = [
    _mlp(OLD, [768, 128], 7.0),
    _mlp(NEW, [768, 128], 5.0),
    _mlp(NEW, [768, 128], 6.0, ranks=4),
    _mlp(OLD, [1024, 768], 100.0),
    _mlp(OTHER, [1024, 768], 50.0),
    _mlp(NEW, [], 90.0, subject="gpt"),
]


def _write(folder: Path, name: str, rows: list[Row]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_newest_row_of_the_last_rows_machine_is_shown(tmp_path: Path) -> None:
    _write(tmp_path, "tensor_parallel", TENSOR_PARALLEL)
    heading, panels = plots.picture("tensor_parallel", tmp_path)
    assert heading.splitlines()[1] == "new CPU, 2 cores, 2026-01-01 and 2026-01-02"
    names = ("tpfuse, 2 ranks", "torch, 2 ranks over Gloo", "one process, 2 threads")
    assert list(panels.values()) == [
        {name: _ms(count * x) for count, name in enumerate(names, 1)} for x in (90.0, 100.0, 5.0)
    ]


def test_a_picture_without_rows_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are drawn, and the same rows give the same bytes."""
    _write(tmp_path, "tensor_parallel", TENSOR_PARALLEL)
    _write(tmp_path, "zero", [OTHER | {"subject": "training", "ranks": 4}])
    _write(tmp_path, "ring_attention", [])
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    for out in ("one", "two"):
        monkeypatch.setattr(plots, "IMAGES", tmp_path / out)
        (tmp_path / out).mkdir()
        plots.main()
        assert sorted(path.name for path in (tmp_path / out).iterdir()) == ["tensor_parallel.png"]
        assert capsys.readouterr().out.splitlines() == [
            "tensor_parallel.png is drawn from tensor_parallel.jsonl",
            "zero.png is left out: zero.jsonl has no row with subject training, ranks 2 from other CPU, 2 cores",
            "collectives.png is left out: collectives.jsonl does not exist",
            "ring_attention.png is left out: ring_attention.jsonl has no rows",
        ]
    one, two = ((tmp_path / out / "tensor_parallel.png").read_bytes() for out in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_exist_on_the_page_and_have_rows(name: str) -> None:
    """A picture of docs/ shows only measurements that the repository has."""
    try:
        assert plots.picture(name, plots.RESULTS)[1]
    except Missing as missing:
        pytest.fail(str(missing))
    assert (plots.IMAGES / f"{name}.png").is_file()
    assert f"(images/{name}.png)" in (ROOT / "docs" / "figures.md").read_text()
