"""The benchmark of the overlapped GEMMs detects a kernel that is wrong anywhere."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks import bench_overlapped_gemm
from benchmarks.bench_overlapped_gemm import cases
from benchmarks.harness import OURS, Row, measure, new_bench
from benchmarks.timing import Ceilings
from tests.support.tiers import exhaustive

TINY = {case.name.split()[0]: case for case in reversed(cases(tiny=True))}


def rows(kind: str) -> dict[str, Row]:
    bench = new_bench(0, interpreted=True, ceilings=Ceilings(1e12, 1e12))
    return {row["candidate"]: row for row in measure(TINY[kind], bench)}


def other(x: Tensor, *place: int) -> Tensor:
    """Return a copy with one number changed."""
    x = x.clone()
    x[place] += 2.0
    return x


@pytest.mark.parametrize(
    ("kind", "operator", "change"),
    [
        ("gather", "all_gather_gemm_forward", lambda x, w, b, gathered: (x, w, b, other(gathered, 3, -1, 5))),
        # The changed row is pushed to another rank.
        ("scatter", "gemm_reduce_scatter_forward", lambda x, w: (other(x, -1, 3), w)),
        *exhaustive(
            ("gather", "all_gather_gemm_forward", lambda x, w, b, gathered: (x, w, other(b, 7), gathered)),
            ("link", "all_gather_gemm_forward", lambda x, w, b, gathered: (x, w, b, other(gathered, 0, 0, 31))),
            # The changed row is this rank's own.
            ("scatter", "gemm_reduce_scatter_forward", lambda x, w: (other(x, 16, 3), w)),
        ),
    ],
)
def test_a_wrong_kernel_is_not_timed(
    kind: str, operator: str, change: Callable[..., tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(bench_overlapped_gemm, operator)
    count = change.__code__.co_argcount

    def wrong(*arguments: Any, **options: Any) -> Any:
        return right(*change(*arguments[:count]), *arguments[count:], **options)

    monkeypatch.setattr(bench_overlapped_gemm, operator, wrong)
    by_candidate = rows(kind)
    assert "median_us" not in by_candidate[OURS] and by_candidate[OURS]["error"].startswith("AssertionError: out[")
    assert all("median_us" in row for name, row in by_candidate.items() if name != OURS)
