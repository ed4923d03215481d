"""Errors name ranks by their numbers in the world and their coordinates in the mesh, not by those in a group."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpfuse.comm import collectives
from tpfuse.comm.errors import Disagreement, PeerTimeout, named
from tpfuse.comm.mesh import build_mesh
from tpfuse.comm.settings import set_settings, settings
from tpfuse.testing.ranks import on_ranks


@on_ranks(4)
def _late(folder: Path) -> None:
    """Rank 3 does not come to its tensor-parallel group, in which rank 2 waits for it."""
    before = settings()
    set_settings(timeout=1.0, flight_folder=folder)
    try:
        group = build_mesh("cpu", dp=2, tp=2)["tp"].get_group()
        collectives.all_reduce(torch.ones(2), group)
        if dist.get_rank() == 2:
            message = r"rank 2 \(dp 1, tp 0\) waited .* for rank 3 \(dp 1, tp 1\)"
            with pytest.raises(PeerTimeout, match=message) as caught:
                collectives.all_reduce(torch.ones(2), group)
            assert (caught.value.rank, caught.value.peer) == (2, 3)
        elif dist.get_rank() == 3:
            time.sleep(1.5)
    finally:
        set_settings(timeout=before.timeout, flight_folder=before.flight_folder)


def test_a_rank_of_a_subgroup_is_named_by_its_number_in_the_world(tmp_path: Path) -> None:
    _late(folder=tmp_path)
    record = json.loads((tmp_path / "flight_record_rank2.json").read_text())
    assert (record["rank"], record["missing"]) == (2, 3)
    assert [each["rank"] for each in record["ranks"]] == [2, 3]


@on_ranks(4)
def test_a_disagreement_names_both_ranks_by_their_numbers_in_the_world() -> None:
    group = build_mesh("cpu", dp=2, tp=2)["tp"].get_group()
    with pytest.raises(Disagreement) as caught:
        collectives.all_reduce(torch.ones(2 + dist.get_rank() % 2), group)
        collectives.all_reduce(torch.ones(2), group)
    mine = dist.get_rank()
    for rank in (mine, mine ^ 1):
        assert f"{named(rank)} runs" in str(caught.value) and "dp" in named(rank)
