"""Draw the newest measurements of benchmarks/results as pictures in docs/images.

    python -m benchmarks.plots                 `make figures` runs this

Each picture comes from one file of rows. It shows the newest row of each subject that was measured on the machine of
the file's last row, and its title names that machine and the dates. A picture whose rows are missing is left out, with
one line that says so. tpfuse has the same colour in all pictures. Bars and points are medians; thin lines reach from
the 20th to the 80th percentile.
"""

import itertools
import json
from collections.abc import Callable, Mapping
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

# Panels map the title of each part of a picture to bars (percentiles of milliseconds by name), or to lines (points of
# (bytes, GB/s)).
Bars = dict[str, Mapping[str, float]]
Lines = dict[str, list[tuple[int, float]]]
Panels = dict[str, Bars] | dict[str, Lines]


class Missing(Exception):
    """The rows of a picture do not exist; the message says which."""


class Results:
    """The rows of one file of a folder that were measured on the machine of its last row."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read the rows. Raise Missing where there is no file, or no row in it."""
        self.path, self.ranks = folder / f"{name}.jsonl", RANKS[name]
        if not self.path.is_file():
            raise Missing(f"{self.path.name} does not exist")
        rows = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not rows:
            raise Missing(f"{self.path.name} has no rows")
        self.machine: str = rows[-1]["machine"]
        self.rows: list[Row] = [row for row in rows if row["machine"] == self.machine]
        self.dates: set[str] = set()

    def newest(self, **wanted: Any) -> Row:
        """Return the last row of these ranks that has these entries. Raise Missing where there is none."""
        wanted |= {"ranks": self.ranks}
        for row in reversed(self.rows):
            if all(row.get(key) == value for key, value in wanted.items()):
                self.dates.add(row["date"])
                return row
        entries = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise Missing(f"{self.path.name} has no row with {entries} from {self.machine}")


def _ours_first(bars: Bars) -> Bars:
    return dict(sorted(bars.items(), key=lambda bar: not bar[0].startswith(OURS)))


def tensor_parallel(results: Results) -> tuple[str, Panels]:
    """Return tpfuse, torch's tensor parallelism and one process, for a training step and two MLPs."""
    ranks = results.ranks
    names = {
        "tpfuse_ms": f"tpfuse, {ranks} ranks",
        "torch_ms": f"torch, {ranks} ranks over Gloo",
        "one_process_ms": f"one process, {ranks} threads",
    }
    panels = {}
    for title, subject, sizes in (
        ("training step of the small GPT", "gpt", []),
        ("MLP, 1024 tokens x 768", "mlp", [1024, 768]),
        ("MLP, 768 tokens x 128", "mlp", [768, 128]),
    ):
        row = results.newest(subject=subject, sizes=sizes)
        panels[title] = {name: row[key] for key, name in names.items()}
    return f"Tensor parallelism on {ranks} ranks, float32", panels


def zero(results: Results) -> tuple[str, Panels]:
    """Return the candidates of a data-parallel training step, and those of the update alone."""
    step, update = (results.newest(subject=subject) for subject in ("training", "update"))
    millions = update["matrices"] * update["size"] ** 2 / 1e6
    titles = {
        f"training step of a GPT of {step['n_layer']} layers x {step['n_embd']}": step,
        f"update of {millions:.0f}M parameters: sum, AdamW, gather": update,
    }
    names = {"alone": "each rank alone"}
    panels = {
        title: _ours_first({names.get(name, name): times for name, times in row["ms"].items()})
        for title, row in titles.items()
    }
    return f"ZeRO on {results.ranks} data-parallel ranks, float32", panels


def ring_attention(results: Results) -> tuple[str, Panels]:
    """Return the schedules of ring attention beside torch's ring, a plain ring and one process."""
    row = results.newest(baseline="one_process")
    names = {"one_process": "one process, two threads", "torch templates": "torch's ring templates"}
    bars = {
        names.get(name, name.removesuffix(" direct")): times
        for name, times in row["ms"].items()
        if not name.endswith(" collective")  # on CPU ranks `auto` chooses direct
    }
    title = f"causal, {row['tokens']} tokens, {row['heads']} heads of {row['size']}, forward and backward"
    return f"Attention over a sequence that {results.ranks} ranks share, float32", {title: _ours_first(bars)}


def collectives(results: Results) -> tuple[str, Panels]:
    """Return the bus bandwidths of tpfuse and of Gloo, or NCCL, over the size of the tensor, for each operation."""
    panels = {}
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        peer = "Gloo" if "gloo_us" in results.newest(op=op) else "NCCL"
        sizes = sorted({row["bytes"] for row in results.rows if (row["op"], row["ranks"]) == (op, results.ranks)})
        rows = [results.newest(op=op, bytes=size) for size in sizes]
        factor = bus_factor(op, results.ranks)
        panels[op.replace("_", "-")] = {
            name: [(row["bytes"], row["bytes"] / row[key]["median"] / 1e3 * factor) for row in rows]
            for key, name in (("tpfuse_us", OURS), (f"{peer.lower()}_us", peer))
        }
    return f"Collectives between {results.ranks} ranks, bus bandwidth", panels


PICTURES: dict[str, Callable[[Results], tuple[str, Panels]]] = {
    "tensor_parallel": tensor_parallel,
    "zero": zero,
    "collectives": collectives,
    "ring_attention": ring_attention,
}


def draw_bars(axes: Axes, bars: Bars) -> None:
    """Draw horizontal bars, the first one on top, each with its median at its end."""
    places = range(len(bars), 0, -1)
    colours = [COLOUR if name.startswith(OURS) else PEER for name in bars]
    medians = [bar["median"] for bar in bars.values()]
    spread = [[x["median"] - x["p20"] for x in bars.values()], [x["p80"] - x["median"] for x in bars.values()]]
    axes.barh(places, medians, height=0.68, color=colours, xerr=spread, error_kw={"linewidth": 1, "ecolor": _INK})
    for place, (name, bar) in zip(places, bars.items(), strict=True):
        text = f"{bar['median']:.1f} ms" if bar["median"] < 100 else f"{bar['median']:.0f} ms"
        font = {"va": "center", "fontsize": 9, "weight": "bold" if name.startswith(OURS) else "normal"}
        axes.annotate(text, (bar["p80"], place), (4, 0), textcoords="offset points", **font)
    axes.set_yticks(places, list(bars))
    axes.set_xlim(0, 1.22 * max(bar["p80"] for bar in bars.values()))
    axes.set_xlabel("milliseconds", fontsize=9, color=_INK)
    axes.spines["left"].set_visible(False)


def draw_lines(axes: Axes, lines: Lines) -> None:
    """Draw bandwidths over sizes, both logarithmic, each line with its name beside its last point."""
    sizes: list[int] = []
    for (name, points), up in zip(lines.items(), (5, -5), strict=True):
        colour = COLOUR if name == OURS else PEER
        sizes, rates = (list(each) for each in zip(*points, strict=True))
        axes.plot(sizes, rates, color=colour, marker="o", markersize=4, linewidth=2)
        place = (sizes[-1], rates[-1])
        axes.annotate(name, place, (7, up), textcoords="offset points", va="center", fontsize=9, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    near = {size for last, size in itertools.pairwise(sizes) if size < 8 * last}  # their labels would overlap
    axes.set_xticks(sizes, ["" if size in near else _bytes(size) for size in sizes])
    axes.set_xlim(sizes[0] / 2, sizes[-1] * 32)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_xlabel("size of the tensor", fontsize=9, color=_INK)


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def draw(heading: str, panels: Panels) -> Figure:
    """Return the figure of a picture: its parts side by side, or four lines in two rows."""
    lines = isinstance(next(iter(next(iter(panels.values())).values())), list)
    rows = 2 if lines else 1
    same = len({tuple(panel) for panel in panels.values()}) == 1  # then one axis has the labels
    height = 5.6 if lines else 0.3 * max(map(len, panels.values())) + 1.5
    shape = rows, len(panels) // rows
    figure, grid = plt.subplots(*shape, figsize=(10, height), layout="constrained", squeeze=False, sharey=same)
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, labelsize=9, labelcolor=_INK)
        axes.set_title(title, loc="left", fontsize=10)
        (draw_lines if lines else draw_bars)(axes, panel)
    if lines:
        for axes in grid[:, 0]:
            axes.set_ylabel("bus bandwidth, GB/s", fontsize=9, color=_INK)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    return figure


def picture(name: str, folder: Path) -> tuple[str, Panels]:
    """Return the heading of a picture, with the machine and the dates of the measurements, and its parts."""
    results = Results(folder, name)
    title, panels = PICTURES[name](results)
    return f"{title}\n{results.machine}, {' and '.join(sorted(results.dates))}", panels


def main() -> None:
    """Draw all pictures whose rows exist, with a line for each picture."""
    plt.switch_backend("agg")
    for name in PICTURES:
        path = IMAGES / f"{name}.png"
        try:
            figure = draw(*picture(name, RESULTS))
        except Missing as missing:
            print(f"{path.name} is left out: {missing}")
            continue
        figure.savefig(path, dpi=110, metadata={"Software": None})  # the same rows give the same file
        plt.close(figure)
        print(f"{path.name} is drawn from {name}.jsonl")


if __name__ == "__main__":
    main()
