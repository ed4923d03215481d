"""Draw overlap.png, the picture in README.md. Run it by python docs/images/overlap.py."""

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

Bar = tuple[float, float, int, str]  # start, length, rank of the rows, text
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")  # of the rows of ranks 0, 1, 2 and 3
LINKS, CORES = 0.0, 1.0  # the lanes of a panel


def draw(axes: Axes, title: str, links: list[Bar], cores: list[Bar]) -> None:
    """Draw a panel with the work of the links and the tensor cores of rank 0 over time."""
    for lane, bars in ((LINKS, links), (CORES, cores)):
        for start, length, rank, text in bars:
            axes.barh(lane, length, left=start, height=0.72, color=COLOURS[rank], edgecolor="white", linewidth=1.5)
            axes.text(start + length / 2, lane, text, ha="center", va="center", color="white", fontsize=8)
    end = max(start + length for start, length, _, _ in [*links, *cores])
    axes.axvline(end, ymax=0.95, color="#444444", linewidth=1, linestyle=":")
    axes.set_yticks([LINKS, CORES], ["links", "tensor cores"])
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, 8.2)
    axes.set_ylim(-0.5, 1.5)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def main() -> None:
    """Write the picture beside this file. The lengths of the bars are an example and not a measurement."""
    figure, panels = plt.subplots(2, 2, figsize=(10.5, 3.3), layout="constrained")
    chunks = [(1.3 * step, 1.3, step + 1, f"chunk {step + 1}") for step in range(3)]
    draw(
        panels[0, 0],
        "all-gather, then GEMM",
        chunks,
        [(3.9 + step, 1.0, step, f"rows {step}") for step in range(4)],
    )
    draw(
        panels[1, 0],
        "tpfuse: the GEMM waits chunk by chunk",
        chunks,
        [(0, 1.0, 0, "rows 0"), *((1.3 * step, 1.0, step, f"rows {step}") for step in range(1, 4))],
    )
    order = (1, 2, 3, 0)
    draw(
        panels[0, 1],
        "GEMM, then reduce-scatter",
        [(4.0 + 1.3 * step, 1.3, rank, f"to rank {rank}") for step, rank in enumerate(order[:3])],
        [(step, 1.0, step, f"rows {step}") for step in range(4)],
    )
    draw(
        panels[1, 1],
        "tpfuse: finished tiles leave at once",
        [(1.0 + 1.3 * step, 1.3, rank, f"to rank {rank}") for step, rank in enumerate(order[:3])],
        [(step, 1.0, rank, f"rows {rank}") for step, rank in enumerate(order)] + [(4.9, 0.6, 0, "sum")],
    )
    for panel in panels[1]:
        panel.set_xlabel("time →", fontsize=9)
    figure.legend(
        [Patch(color=colour) for colour in COLOURS],
        [f"rows of rank {rank}" for rank in range(4)],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(Path(__file__).with_name("overlap.png"), dpi=110)


if __name__ == "__main__":
    main()
