"""The times of collectives follow the formulas of their algorithms and NCCL's measured all-reduces."""

import csv

import numpy as np
import pytest

from benchmarks.plan_accuracy import DATA, fitted_link
from tpfuse.cost import collectives
from tpfuse.cost.hardware import Cluster, Gpu, Link

LINK = Link("toy", 100e9, 5e-6, 20e-6)
SLOW = Link("network", 10e9, 10e-6, 20e-6)
GPU = Gpu("toy", 80e9, 300e12, 150e12, 0.8, 0.5, 2e12, 100, 2e-6, 10e-6)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    both = collectives.reduce_scatter(1e9, 4, LINK) + collectives.all_gather(1e9, 4, LINK)
    assert collectives.all_reduce(1e9, 4, LINK) == pytest.approx(both - LINK.start)
    assert collectives.all_reduce(1e9, 4, LINK) == pytest.approx(20e-6 + 6 * 5e-6 + 2 * 3 / 4 * 1e9 / 100e9)


def test_one_rank_takes_no_time() -> None:
    assert collectives.all_reduce(1e9, 1, LINK) == collectives.all_gather(1e9, 1, LINK) == 0.0


def test_a_tree_is_faster_for_small_tensors_only() -> None:
    for size, faster in ((1e3, True), (1e11, False)):
        tree = collectives.all_reduce(size, 64, LINK, tree=True)
        assert (tree < collectives.all_reduce(size, 64, LINK)) == faster


def test_switches_that_reduce_halve_the_bytes() -> None:
    switch = Link("switch", 100e9, 5e-6, 20e-6, in_network=True)
    assert collectives.all_reduce(1e9, 8, switch) == pytest.approx(20e-6 + 10e-6 + 1e9 / 100e9)


def test_nodes_reduce_inside_first() -> None:
    """8 ranks of each of 4 nodes send an eighth of the tensor over the network."""
    cluster = Cluster(GPU, 32, 8, LINK, SLOW)
    inside = 2 * collectives.all_gather(1e9, 8, LINK)
    apart = collectives.all_reduce(1e9 / 8, 4, SLOW)
    assert collectives.grouped_all_reduce(1e9, 32, 1, cluster) == pytest.approx(inside + apart)
    assert collectives.grouped_all_reduce(1e9, 4, 8, cluster) == collectives.all_reduce(1e9, 4, SLOW)
    assert collectives.grouped_all_reduce(1e9, 8, 1, cluster) == collectives.all_reduce(1e9, 8, LINK)


def test_measured_all_reduces() -> None:
    link = fitted_link(DATA, "a100")
    with (DATA / "nccl_all_reduce_vtrain.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == "a100"]
    errors = [
        collectives.all_reduce(float(row["bytes"]), int(row["ranks"]), link) / (float(row["time_ns"]) * 1e-9) - 1
        for row in rows
    ]
    assert len(errors) == 77
    assert np.mean(np.abs(errors)) < 0.08 and np.max(np.abs(errors)) < 0.25
    assert 200e9 < link.bandwidth < 300e9, "NVLink 3 has 300 GB/s in each direction"
