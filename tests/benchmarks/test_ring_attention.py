"""The candidates of ring attention compute the same result; a candidate that does not is not timed."""

import math

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_ring_attention as bench
from benchmarks.bench_ring_attention import PLAIN, TEMPLATES, CpSubject, PlainRing, measure, report
from benchmarks.cpu_ranks import ALONE
from tests.support.tiers import exhaustive
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool

SCHEDULES = ("ring", "all_gather", "ulysses", "ulysses_ring")


def _settings() -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.exhaustive
def test_candidates_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate is compared with the whole sequence on one rank; `measure` raises where one differs."""
    times, others = measure(CpSubject(64, 4, 16), pool(4), pool(1), rounds=2, seconds=0.01)
    expected = {f"tpfuse {schedule} {name}" for schedule in SCHEDULES for name in ("direct", "collective")}
    assert times.keys() == expected | {ALONE, TEMPLATES, PLAIN}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert math.isnan(others) or -0.5 < others < 1.5  # the kernel counts in hundredths of a second
    row = report(CpSubject(64, 4, 16), 4, times, others)
    assert row["baseline"] == ALONE and row["asked"] == 1.03 and row["ratios"][ALONE] == 1.0
    assert f"x {ALONE}" in capsys.readouterr().out
    pool(4).run(_settings)
    pool(1).run(_settings)


def _wrong_ring() -> str:
    before = PlainRing.forward
    PlainRing.forward = staticmethod(lambda *args: before(*args) * 1.001)
    try:
        with pytest.raises(AssertionError) as caught:
            bench.prepare(CpSubject(64, 4, 16), False, False)
    finally:
        PlainRing.forward = staticmethod(before)
        _settings()
    return str(caught.value)


def test_a_candidate_that_is_wrong_by_a_thousandth_is_not_timed() -> None:
    for error in pool(2).run(_wrong_ring):
        assert error.startswith(f"{PLAIN}: Tensor-likes are not close")


def _plain(world: int) -> None:
    """Compare the plain ring with the definition of attention, in float64."""
    layout, rank = SequenceLayout(8 * world, world), dist.get_rank()
    q, k, v, grad = (normal(i, 1, 2, 8 * world, 16) for i in range(4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT / 4 + torch.full((8 * world, 8 * world), -torch.inf).triu(1)
    out = scores.softmax(-1) @ leaves[2]
    out.backward(grad.double())
    shards = [layout.shard(x, rank, 2).requires_grad_() for x in (q, k, v)]
    result = PlainRing.apply(*shards, dist.group.WORLD)
    result.backward(layout.shard(grad, rank, 2))
    for actual, truth in zip([result, *(x.grad for x in shards)], [out, *(x.grad for x in leaves)], strict=True):
        torch.testing.assert_close(actual.double(), layout.shard(truth, rank, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
def test_the_plain_ring_computes_attention(world: int) -> None:
    pool(world).run(_plain, world)
