"""The arithmetic of the waves of tiles is right, and the rows of configurations.toml fill the waves."""

from collections import defaultdict
from pathlib import Path

from benchmarks.waves import shares, table
from tpfuse.kernels.configurations import Configuration

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "waves.md"


def test_idle_multiprocessors() -> None:
    row = Configuration("toy", "sm_90", 16, {"idle": 20}, {"BLOCK_M": 128, "BLOCK_N": 256}, 4, 3, "")
    sizes = {"M": 1280, "N": 256, "programs": 10}
    assert row.idle(sizes) == 0 and row.fits(16, sizes)
    assert round(row.idle(sizes | {"M": 1281})) == 50, "another wave"
    assert round(row.idle(sizes | {"N": 192})) == 25, "a tile over the edge"
    assert round(row.idle(sizes | {"M": 128, "chunks": 9})) == 10
    assert row.idle(sizes | {"programs": 13}) > 20 and not row.fits(16, sizes | {"programs": 13})


def test_the_waves_of_known_models_are_full() -> None:
    """The mean is weighted by time, over the numbers of tokens."""
    shares_of: dict[tuple[str, int], list[float]] = defaultdict(list)
    for model, ranks, tokens, _, weighted in shares():
        shares_of[model.name, ranks] += [weighted] * (tokens // 2048)
    means = {key: len(values) / sum(1 / value for value in values) for key, values in shares_of.items()}
    assert len(means) == 19
    assert min(means.values()) >= 0.85, sorted(means.items(), key=lambda item: item[1])[:3]


def test_the_committed_table_is_current() -> None:
    assert table() == COMMITTED.read_text(), "make compiled"
