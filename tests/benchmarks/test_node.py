"""The command for a node of GPUs works on CPU ranks, and does not time a wrong candidate of tpfuse."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import node
from benchmarks.harness import may_run
from benchmarks.node import BY_HAND, NodeProduct, NodeRanks, candidates, check, run, truth_of
from tests.support.tiers import exhaustive
from tpfuse.ops.linear.dispatch import FUSED
from tpfuse.testing.ranks import pool

ROOT = Path(__file__).resolve().parents[2]
NAMES = {BY_HAND, "tpfuse collective", "tpfuse fused", *(f"tpfuse {name}" for name in FUSED), "tpfuse direct"}
# The first product has more columns than are checked.
PRODUCTS = [NodeProduct("in", True, 8, 200, 8), NodeProduct("out", False, 8, 8, 16)]


def here() -> NodeRanks:
    group = dist.group.WORLD
    assert group is not None
    return NodeRanks(group, torch.device("cpu"), rounds=2, repeats=1)


@pytest.mark.processes
def test_the_command() -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    before = set((ROOT / "benchmarks" / "results").iterdir())
    done = subprocess.run(
        [*start, "-m", "benchmarks.node", "--scale", "tiny"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    gather, scatter, last = done.stdout.split("\n\n")
    for product, text in (("tiny qkv", gather), ("tiny o", scatter)):
        head, *lines = text.splitlines()
        assert head.startswith(f"{product}, 24 x ") and {re.split("  +", line)[0] for line in lines} == NAMES
        assert all(float(line.split()[-2]) > 0 for line in lines)
    start, beside, verdict = last.splitlines()
    assert start.startswith("start-up, s: memory 0.") and "'beside': " in beside and verdict == "all are right"
    assert [line for line in done.stderr.splitlines() if line.startswith("left out")] == [
        "left out: torch.ops.symm_mem: there is no CUDA GPU"
    ]
    assert set((ROOT / "benchmarks" / "results").iterdir()) == before


def verdicts(product: NodeProduct, broken: str, rank: int) -> dict[str, str]:
    """Return the verdicts where one element of one candidate's result is wrong, on one rank."""
    calls, one = candidates(product, here()), here().group.rank() == rank
    right = calls[broken]

    def wrong() -> torch.Tensor:
        out = right().clone()
        out[-1, 3] += 0.5 if one else 0.0
        return out

    return check(calls | {broken: wrong}, truth_of(product, here()), here())


@pytest.mark.parametrize(
    ("product", "broken"), [(PRODUCTS[1], "tpfuse collective"), *exhaustive((PRODUCTS[0], "tpfuse fused"))]
)
def test_all_ranks_report_what_is_wrong_on_one(product: NodeProduct, broken: str) -> None:
    for verdicts_of_rank in pool(2).run(verdicts, product, broken, 1):
        assert {name for name, verdict in verdicts_of_rank.items() if verdict} == {broken}
        assert verdicts_of_rank[broken].startswith("rank 1: AssertionError: out[")
        assert not may_run(broken, verdicts_of_rank[broken]) and may_run(BY_HAND, verdicts_of_rank[broken])


def status_with_a_wrong_candidate() -> int:
    """Return the exit status of a run in which the fused candidate sets a row of its result to zero."""
    whole = node._ours

    def ours(name: str, *rest: object) -> node.Call:
        call = whole(name, *rest)  # type: ignore[arg-type]
        return (lambda: call().clone().index_fill_(0, torch.tensor([0]), 0.0)) if name == "fused" else call

    node._ours = ours  # type: ignore[assignment]
    try:
        return run("tiny", 1.0, here(), keep=False)
    finally:
        node._ours = whole


@pytest.mark.exhaustive
def test_a_wrong_candidate_of_tpfuse_gives_status_1() -> None:
    assert pool(2).run(status_with_a_wrong_candidate) == [1, 1]
