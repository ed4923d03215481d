"""Pictures show the newest rows of one machine, exactly, and a picture without rows is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import colors
from matplotlib import pyplot as plt

from benchmarks import plots
from benchmarks.harness import Row
from benchmarks.plots import COLOUR, PEER, PICTURES, Bar, Line, Missing, Panel, Picture, draw

ROOT = Path(__file__).resolve().parents[2]
OLD: Row = {"date": "2026-01-01", "machine": "new CPU, 2 cores"}
NEW: Row = {"date": "2026-01-02", "machine": "new CPU, 2 cores"}
OTHER: Row = {"date": "2026-01-03", "machine": "other CPU, 2 cores"}


def _ms(median: float) -> dict[str, float]:
    return {"median": median, "p20": median - 1, "p80": median + 2}


def _bars(**medians: float) -> tuple[Bar, ...]:
    return tuple(Bar(name.replace("_", " "), x, x - 1, x + 2) for name, x in medians.items())


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


def _three(tpfuse: float) -> tuple[Bar, ...]:
    names = ("tpfuse, 2 ranks", "torch, 2 ranks over Gloo", "one process, 2 threads")
    return tuple(Bar(name, x, x - 1, x + 2) for name, x in zip(names, (tpfuse, 2 * tpfuse, 3 * tpfuse), strict=True))


def test_the_newest_row_of_the_last_rows_machine_is_shown(tmp_path: Path) -> None:
    _write(tmp_path, "tensor_parallel", TENSOR_PARALLEL)
    picture = plots.tensor_parallel(tmp_path)
    assert picture.heading.splitlines()[1] == "new CPU, 2 cores, 2026-01-01 and 2026-01-02"
    assert [panel.series for panel in picture.panels] == [_three(90.0), _three(100.0), _three(5.0)]


def test_bars_of_zero_begin_with_tpfuse(tmp_path: Path) -> None:
    training = {"subject": "training", "ranks": 2, "n_layer": 6, "n_embd": 768}
    update = {"subject": "update", "ranks": 2, "matrices": 12, "size": 2048}
    rows = [
        NEW | training | {"ms": {"alone": _ms(5.0), "tpfuse stage 1": _ms(4.0), "DDP": _ms(7.0)}},
        NEW | training | {"ranks": 4, "ms": {"alone": _ms(50.0)}},
        NEW | update | {"ms": {"Gloo, whole": _ms(9.0), "tpfuse one sweep": _ms(3.0)}},
    ]
    _write(tmp_path, "zero", rows)
    first, second = plots.zero(tmp_path).panels
    assert first.series == _bars(tpfuse_stage_1=4.0, each_rank_alone=5.0, DDP=7.0)
    assert second.series == (Bar("tpfuse one sweep", 3.0, 2.0, 5.0), Bar("Gloo, whole", 9.0, 8.0, 11.0))
    assert "6 layers x 768" in first.title and "50M parameters" in second.title


def test_ring_attention_shows_what_auto_may_choose(tmp_path: Path) -> None:
    times = {"one_process": _ms(5.0), "tpfuse ring direct": _ms(6.0), "tpfuse ring collective": _ms(7.0)}
    times["torch templates"] = _ms(8.0)
    row = NEW | {"ranks": 4, "tokens": 4096, "heads": 8, "size": 64, "baseline": "one_process", "ms": times}
    ideal = NEW | {"ranks": 4, "baseline": "ideal", "ms": {"tpfuse ring direct": _ms(1.0)}}
    _write(tmp_path, "ring_attention", [row, ideal])
    (panel,) = plots.ring_attention(tmp_path).panels
    assert [(bar.name, bar.median) for bar in panel.series if isinstance(bar, Bar)] == [
        ("tpfuse ring", 6.0), ("one process, two threads", 5.0), ("torch's ring templates", 8.0)
    ]  # fmt: skip


def _collective(head: Row, op: str, nbytes: int, tpfuse: float) -> Row:
    return head | {"op": op, "bytes": nbytes, "ranks": 2, "tpfuse_us": _ms(tpfuse), "gloo_us": _ms(4 * tpfuse)}


def test_bandwidths_are_bus_bandwidths_by_size(tmp_path: Path) -> None:
    ops = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    rows = [_collective(NEW, op, nbytes, nbytes / 1e3) for nbytes in (2**16, 2**12) for op in ops]
    _write(tmp_path, "collectives", [_collective(OLD, "all_gather", 2**12, 1.0), *rows])
    panels = plots.collectives(tmp_path).panels
    assert [panel.title for panel in panels] == ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    for panel in panels:
        rate = 1.0 if panel.title == "all-reduce" else 0.5  # S / time is 1 GB/s
        for line, expected in zip(panel.series, (rate, rate / 4), strict=True):
            assert isinstance(line, Line)
            assert [size for size, _ in line.points] == [2**12, 2**16]
            assert [x for _, x in line.points] == pytest.approx([expected] * 2)


def test_collectives_of_another_number_of_ranks_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path, "collectives", [_collective(NEW, "all_gather", 2**12, 1.0) | {"ranks": 8}])
    with pytest.raises(Missing, match="no row with op all_gather, ranks 2 from new CPU, 2 cores"):
        plots.collectives(tmp_path)


def test_bars_are_drawn_as_long_as_the_rows_say() -> None:
    figure = draw(Picture("title", "CPU", ("2026-01-01",), (Panel("panel", _bars(tpfuse=40.0, peer=120.4)),)))
    (axes,) = figure.axes
    assert [patch.get_width() for patch in axes.patches] == [40.0, 120.4]
    assert axes.patches[0].get_y() > axes.patches[1].get_y(), "the first bar is on top"
    assert [patch.get_facecolor() for patch in axes.patches] == [colors.to_rgba(x) for x in (COLOUR, PEER)]
    assert [text.get_text() for text in axes.texts] == ["40.0 ms", "120 ms"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tpfuse", "peer"]
    plt.close(figure)


def test_lines_are_drawn_through_the_points() -> None:
    points = ((2**12, 0.5), (2**16, 2.0)), ((2**12, 0.1), (2**16, 1.0))
    series = Line("tpfuse", points[0]), Line("Gloo", points[1])
    figure = draw(Picture("title", "CPU", ("2026-01-01",), (Panel("panel", series),)))
    (axes,) = figure.axes
    assert [tuple(map(tuple, line.get_xydata())) for line in axes.lines] == list(points)
    assert [line.get_color() for line in axes.lines] == [COLOUR, PEER]
    assert [text.get_text() for text in axes.texts] == ["tpfuse", "Gloo"]
    plt.close(figure)


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
        assert PICTURES[name](plots.RESULTS).panels
    except Missing as missing:
        pytest.fail(str(missing))
    assert (plots.IMAGES / f"{name}.png").is_file()
    assert f"(images/{name}.png)" in (ROOT / "docs" / "figures.md").read_text()
