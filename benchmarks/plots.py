"""Draw the newest measurements of benchmarks/results as pictures in docs/images.

    python -m benchmarks.plots                 `make figures` runs this

Each picture comes from one file of rows. It shows the newest row of each subject that was measured on the machine of
the file's last row, and its title names that machine and the dates. A picture whose rows are missing is left out, with
one line that says so. tpfuse has the same colour in all pictures. Bars and points are medians; thin lines reach from
the 20th to the 80th percentile.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.collectives import bus_factor
from benchmarks.harness import OURS, RESULTS, Row

IMAGES = RESULTS.parents[1] / "docs" / "images"
COLOUR, PEER = "#c44e52", "#8c8c8c"  # of tpfuse, and of everything else
RANKS = {"tensor_parallel": 2, "zero": 2, "ring_attention": 4, "collectives": 2}
_INK = "#333333"


class Missing(Exception):
    """The rows of a picture do not exist; the message says which."""


@dataclass(frozen=True)
class Bar:
    """A time in milliseconds: its median, and the 20th and the 80th percentile."""

    name: str
    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Line:
    """Bandwidths over sizes: points of (bytes, GB/s)."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Panel:
    """A part of a picture: bars or lines under a title."""

    title: str
    series: tuple[Bar, ...] | tuple[Line, ...]


@dataclass(frozen=True)
class Picture:
    """The data of a picture. machine, dates: of the rows that it shows."""

    title: str
    machine: str
    dates: tuple[str, ...]
    panels: tuple[Panel, ...]

    @property
    def heading(self) -> str:
        """Return the title with the machine and the dates of the measurement."""
        return f"{self.title}\n{self.machine}, {' and '.join(self.dates)}"


class Results:
    """The rows of one file of a folder that were measured on the machine of its last row."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read the rows. Raise Missing where there is no file, or no row in it."""
        self.path = folder / f"{name}.jsonl"
        if not self.path.is_file():
            raise Missing(f"{self.path.name} does not exist")
        rows = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not rows:
            raise Missing(f"{self.path.name} has no rows")
        self.machine: str = rows[-1]["machine"]
        self._rows: list[Row] = [row for row in rows if row["machine"] == self.machine]
        self._dates: set[str] = set()

    def newest(self, **wanted: Any) -> Row:
        """Return the last row that has these entries. Raise Missing where there is none."""
        for row in reversed(self._rows):
            if all(row.get(key) == value for key, value in wanted.items()):
                self._dates.add(row["date"])
                return row
        entries = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise Missing(f"{self.path.name} has no row with {entries} from {self.machine}")

    def values(self, key: str, **wanted: Any) -> list[int]:
        """Return the sorted numbers that the entry `key` has in the rows that have the wanted entries."""
        return sorted({row[key] for row in self._rows if all(row.get(k) == x for k, x in wanted.items())})

    def picture(self, title: str, *panels: Panel) -> Picture:
        """Return the picture of the rows that `newest` has found."""
        return Picture(title, self.machine, tuple(sorted(self._dates)), panels)


def _bar(name: str, times: Row) -> Bar:
    return Bar(name, times["median"], times["p20"], times["p80"])


def tensor_parallel(folder: Path) -> Picture:
    """Return tpfuse, torch's tensor parallelism and one process, for a training step and two MLPs."""
    results, ranks = Results(folder, "tensor_parallel"), RANKS["tensor_parallel"]
    names = {
        "tpfuse_ms": f"tpfuse, {ranks} ranks",
        "torch_ms": f"torch, {ranks} ranks over Gloo",
        "one_process_ms": f"one process, {ranks} threads",
    }
    subjects = {
        "training step of the small GPT": ("gpt", []),
        "MLP, 1024 tokens x 768": ("mlp", [1024, 768]),
        "MLP, 768 tokens x 128": ("mlp", [768, 128]),
    }
    panels = []
    for title, (subject, sizes) in subjects.items():
        row = results.newest(subject=subject, sizes=sizes, ranks=ranks)
        panels.append(Panel(title, tuple(_bar(name, row[key]) for key, name in names.items())))
    return results.picture(f"Tensor parallelism on {ranks} ranks, float32", *panels)


def zero(folder: Path) -> Picture:
    """Return the candidates of a data-parallel training step, and those of the update alone."""
    results, ranks = Results(folder, "zero"), RANKS["zero"]
    panels = []
    for subject in ("training", "update"):
        row = results.newest(subject=subject, ranks=ranks)
        names = {"alone": "each rank alone"}
        if subject == "training":
            title = f"training step of a GPT of {row['n_layer']} layers x {row['n_embd']}"
        else:
            millions = row["matrices"] * row["size"] ** 2 / 1e6
            title = f"update of {millions:.0f}M parameters: sum, AdamW, gather"
        bars = [_bar(names.get(name, name), times) for name, times in row["ms"].items()]
        ours = [bar for bar in bars if bar.name.startswith(OURS)]
        panels.append(Panel(title, (*ours, *(bar for bar in bars if bar not in ours))))
    return results.picture(f"ZeRO on {ranks} data-parallel ranks, float32", *panels)


def ring_attention(folder: Path) -> Picture:
    """Return the schedules of ring attention beside torch's ring, a plain ring and one process."""
    results, ranks = Results(folder, "ring_attention"), RANKS["ring_attention"]
    row = results.newest(ranks=ranks, baseline="one_process")
    names = {"one_process": "one process, two threads", "torch templates": "torch's ring templates"}
    bars = []
    for name, times in row["ms"].items():
        if name.endswith(" collective"):
            continue  # on CPU ranks `auto` chooses direct
        bars.append(_bar(names.get(name, name.removesuffix(" direct")), times))
    ours = [bar for bar in bars if bar.name.startswith(OURS)]
    panel = Panel(
        f"causal, {row['tokens']} tokens, {row['heads']} heads of {row['size']}, forward and backward",
        (*ours, *(bar for bar in bars if bar not in ours)),
    )
    return results.picture(f"Attention over a sequence that {ranks} ranks share, float32", panel)


def collectives(folder: Path) -> Picture:
    """Return the bus bandwidths of tpfuse and of Gloo, or NCCL, over the size of the tensor, for each operation."""
    results, ranks = Results(folder, "collectives"), RANKS["collectives"]
    panels = []
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        lines: list[Line] = []
        peer = "Gloo" if "gloo_us" in results.newest(op=op, ranks=ranks) else "NCCL"
        rows = [results.newest(op=op, ranks=ranks, bytes=size) for size in results.values("bytes", op=op, ranks=ranks)]
        for key, name in (("tpfuse_us", OURS), (f"{peer.lower()}_us", peer)):
            points = [(row["bytes"], row["bytes"] / row[key]["median"] / 1e3 * bus_factor(op, ranks)) for row in rows]
            lines.append(Line(name, tuple(points)))
        panels.append(Panel(op.replace("_", "-"), tuple(lines)))
    return results.picture(f"Collectives between {ranks} ranks, bus bandwidth", *panels)


PICTURES: dict[str, Callable[[Path], Picture]] = {
    "tensor_parallel": tensor_parallel,
    "zero": zero,
    "collectives": collectives,
    "ring_attention": ring_attention,
}


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=_INK)


def draw_bars(axes: Axes, panel: Panel, bars: Sequence[Bar]) -> None:
    """Draw horizontal bars, the first one on top, each with its median at its end."""
    places = range(len(bars), 0, -1)
    colours = [COLOUR if bar.name.startswith(OURS) else PEER for bar in bars]
    spread = [[bar.median - bar.p20 for bar in bars], [bar.p80 - bar.median for bar in bars]]
    medians = [bar.median for bar in bars]
    axes.barh(places, medians, height=0.68, color=colours, xerr=spread, error_kw={"linewidth": 1, "ecolor": _INK})
    for place, bar in zip(places, bars, strict=True):
        text = f"{bar.median:.1f} ms" if bar.median < 100 else f"{bar.median:.0f} ms"
        weight = "bold" if bar.name.startswith(OURS) else "normal"
        axes.annotate(
            text, (bar.p80, place), (4, 0), textcoords="offset points", va="center", fontsize=9, weight=weight
        )
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.set_xlim(0, 1.22 * max(bar.p80 for bar in bars))
    axes.set_xlabel("milliseconds", fontsize=9, color=_INK)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.spines["left"].set_visible(False)


def draw_lines(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    """Draw bandwidths over sizes, both logarithmic, each line with its name beside its last point."""
    for line, up in zip(lines, (5, -5), strict=True):
        colour = COLOUR if line.name == OURS else PEER
        sizes, rates = zip(*line.points, strict=True)
        axes.plot(sizes, rates, color=colour, marker="o", markersize=4, linewidth=2)
        place = (sizes[-1], rates[-1])
        axes.annotate(line.name, place, (7, up), textcoords="offset points", va="center", fontsize=9, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [size for size, _ in lines[0].points]
    near = {size for last, size in itertools.pairwise(sizes) if size < 8 * last}  # their labels would overlap
    axes.set_xticks(sizes, ["" if size in near else _bytes(size) for size in sizes])
    axes.set_xlim(sizes[0] / 2, sizes[-1] * 32)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_xlabel("size of the tensor", fontsize=9, color=_INK)
    axes.set_title(panel.title, loc="left", fontsize=10)


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def draw(picture: Picture) -> Figure:
    """Return the figure of a picture: its panels side by side, or in two rows where there are four."""
    rows = 2 if len(picture.panels) > 3 else 1
    columns = len(picture.panels) // rows
    most = max(len(panel.series) for panel in picture.panels)
    same = len({tuple(x.name for x in panel.series) for panel in picture.panels}) == 1  # then one axis has the labels
    height = 2.4 * rows + 0.8 if isinstance(picture.panels[0].series[0], Line) else 0.3 * most + 1.5
    figure, grid = plt.subplots(rows, columns, figsize=(10, height), layout="constrained", squeeze=False, sharey=same)
    for axes, panel in zip(grid.flat, picture.panels, strict=True):
        _style(axes)
        bars = [x for x in panel.series if isinstance(x, Bar)]
        lines = [x for x in panel.series if isinstance(x, Line)]
        if bars:
            draw_bars(axes, panel, bars)
        else:
            draw_lines(axes, panel, lines)
    if lines:
        for axes in grid[:, 0]:
            axes.set_ylabel("bus bandwidth, GB/s", fontsize=9, color=_INK)
    figure.suptitle(picture.heading, x=0.01, ha="left", fontsize=11)
    return figure


def main() -> None:
    """Draw all pictures whose rows exist, with a line for each picture."""
    plt.switch_backend("agg")
    for name, picture_of in PICTURES.items():
        path = IMAGES / f"{name}.png"
        try:
            picture = picture_of(RESULTS)
        except Missing as missing:
            print(f"{path.name} is left out: {missing}")
            continue
        figure = draw(picture)
        figure.savefig(path, dpi=110, metadata={"Software": None})  # the same rows give the same file
        plt.close(figure)
        print(f"{path.name} is drawn from {name}.jsonl")


if __name__ == "__main__":
    main()
