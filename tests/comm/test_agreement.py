"""Ranks exchange values over all that can carry them, and agree on the outcome of local work."""

from typing import Any

import pytest
import torch.distributed as dist

from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable
from tpfuse.comm.mesh import all_groups_of, build_mesh
from tpfuse.testing.ranks import on_ranks, pool


@on_ranks(3)
def test_every_rank_gets_the_values_of_all_in_their_order() -> None:
    group = dist.group.WORLD
    memory = symmetric_memory(group, "cpu")
    rank, every = dist.get_rank(), [[0, "x"], [1, "x"], [2, "x"]]
    assert exchange([rank, "x"], group, op="test") == every
    assert exchange([rank, "x"], group, op="test", within=60.0) == every
    assert exchange([rank, "x"], memory, op="test") == every  # type: ignore[arg-type]
    assert exchange([rank, "x"], None, op="test") == exchange([rank, "x"], op="test") == [[rank, "x"]]


@on_ranks(4)
def test_the_groups_of_a_mesh_carry_the_values_of_all_its_ranks() -> None:
    mesh = build_mesh("cpu", dp=2, tp=2)
    groups = mesh["tp"].get_group(), mesh["dp"].get_group()
    assert exchange(dist.get_rank(), *groups, op="test") == [0, 1, 2, 3]
    assert exchange(dist.get_rank(), *groups, op="test", within=60.0) == [0, 1, 2, 3]
    assert all_groups_of(mesh) == [dist.group.WORLD] and all_groups_of(None) == []
    assert all_groups_of(mesh["tp"]) == [groups[0]]


@on_ranks(2)
def test_ranks_in_different_exchanges_learn_both_names() -> None:
    with pytest.raises(Disagreement, match=r"^rank [01].* runs [ab], rank [01].* runs [ab]$"):
        exchange(0, dist.group.WORLD, op="ab"[dist.get_rank()], within=60.0)


def _outcomes(over: str, errors: dict[int, Exception]) -> tuple[str, bool]:
    """Return the error of this rank of work in which these ranks raise, and whether it is the rank's own object."""
    group = dist.group.WORLD
    ranks: Any = symmetric_memory(group, "cpu") if over == "memory" else group
    by_rank, own = over == "group, by rank", errors.get(dist.get_rank())
    with agreement("work", ranks, alike=Unavailable, by_rank=by_rank):
        pass
    try:
        with agreement("work", ranks, alike=Unavailable, by_rank=by_rank):
            if own is not None:
                raise own
    except Exception as error:
        assert exchange(1, ranks, op="after") == [1, 1, 1]
        return f"{type(error).__name__}: {error}", error is own
    return "no error", False


_ON_1 = "RankFailed: work failed on rank 1: OSError: full"
_FULL = OSError("full")


@pytest.mark.parametrize(
    ("over", "errors", "expected"),
    [
        ("group", {1: _FULL}, [_ON_1, "OSError: full", _ON_1]),
        ("memory", {1: _FULL}, [_ON_1, "OSError: full", _ON_1]),
        ("group", {2: KeyError("k"), 1: _FULL}, [_ON_1, "OSError: full", "KeyError: 'k'"]),
        ("group", {1: Unavailable("a"), 2: Unavailable("b")}, ["Unavailable: a"] * 3),
        ("group, by rank", {1: Unavailable("a"), 2: Unavailable("b")}, ["Unavailable: rank 1: a"] * 3),
        ("memory", {1: Unavailable("a"), 2: Unavailable("b")}, ["Unavailable: a"] * 3),
        ("group", {0: Unavailable("a"), 1: _FULL}, [_ON_1, "OSError: full", _ON_1]),
    ],
    ids=["group", "memory", "each its own", "alike", "alike, by rank", "alike, memory", "another one before alike"],
)
def test_ranks_agree_on_the_outcome_of_work(over: str, errors: dict[int, Exception], expected: list[str]) -> None:
    found = pool(3).run(_outcomes, over, errors)
    assert [text for text, _ in found] == expected
    for text, is_own in found:
        assert is_own or not text.startswith(("OSError", "KeyError"))


@on_ranks(2)
def test_a_rank_that_has_waited_in_vain_says_so_at_once() -> None:
    """It exchanges nothing, since the others do not come."""
    error = PeerTimeout("test", step=-1, rank=0, peer=1, waited=1.0)
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeout) as caught, agreement("work", dist.group.WORLD):
            raise error
        assert caught.value is error
    assert exchange(dist.get_rank(), dist.group.WORLD, op="after") == [0, 1]


def test_one_rank_raises_its_own_error() -> None:
    with pytest.raises(KeyError), agreement("work", None):
        raise KeyError("k")
    with pytest.raises(Unavailable), agreement("work", alike=Unavailable):
        raise Unavailable("full")
