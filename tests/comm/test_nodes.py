"""Ranks by node: with pretended nodes, and with two network namespaces if this machine lets a test make them."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.nodes import counted, pretended_nodes, run_on_nodes, why_not_permitted
from tpfuse.comm import collectives, host
from tpfuse.comm.dispatch import choose_implementation, symmetric_memory
from tpfuse.comm.errors import PeerTimeout, Unavailable
from tpfuse.comm.nodes import Nodes, ranks_by_node, split_by_node, why_not_split
from tpfuse.comm.settings import set_settings
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero.reducer.base import BucketSpec
from tpfuse.zero.reducer.dispatch import make_reducer


def on_two_nodes(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that needs two network namespaces."""
    return pytest.mark.nodes(pytest.mark.skipif(bool(why_not_permitted()), reason=why_not_permitted())(test))


CPU = torch.device("cpu")


def _members(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks in the group's order, as the ranks themselves report them."""
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=group)
    return [int(rank) for rank in gathered]


@on_ranks(4)
def test_four_ranks_of_two_nodes() -> None:
    node, place = divmod(dist.get_rank(), 2)
    with pretended_nodes(2, 2) as group:
        found = split_by_node(group)
        assert found is not None and why_not_split(group) == "" and split_by_node(group) is found
        assert (found.count, found.ranks_per_node) == (2, 2)
        assert _members(found.within) == [2 * node, 2 * node + 1] and _members(found.across) == [place, place + 2]


@pytest.mark.parametrize(
    ("world", "sizes", "reason"),
    [
        (4, (4,), "all ranks are on one node"),
        (2, (1, 1), "each of the 2 nodes has one rank"),
        (3, (2, 1), "the 2 nodes have unequal numbers of ranks: 2, 1"),
    ],
)
@on_ranks("world")
def test_every_rank_gets_the_reason_why_a_split_gains_nothing(sizes: tuple[int, ...], reason: str) -> None:
    with pretended_nodes(*sizes) as group:
        assert split_by_node(group) is None and why_not_split(group) == reason


@on_ranks(3)
def test_buckets_give_the_reason_why_nodes_are_not_split() -> None:
    with pretended_nodes(2, 1) as group:
        reducer, reason = make_reducer([BucketSpec(64, torch.float32, torch.float32)], 1, group, CPU)
        reducer.free()
    assert reason.startswith("collective: the ranks share no memory: ")
    assert reason.endswith("; the 2 nodes have unequal numbers of ranks: 2, 1")


def test_ranks_of_a_node_keep_their_order_wherever_they_are() -> None:
    assert ranks_by_node({7: "b", 2: "a", 5: "a", 3: "b", 4: "c"}) == [[2, 5], [3, 7], [4]]


@on_ranks(4)
def test_a_group_that_is_not_the_world_is_split_by_its_members_alone() -> None:
    """Split ranks 1, 2, 3 without rank 0, then with it: the first split has made no group on rank 0."""
    pair, place = divmod(dist.get_rank(), 2)
    with pretended_nodes(1, 1, 1, 1) as whole:
        small = dist.new_group([1, 2, 3])
        host.node_identity = lambda: "ab"[place]
        if dist.get_rank():
            assert why_not_split(small) == "the 2 nodes have unequal numbers of ranks: 2, 1"
        found = split_by_node(whole)
        assert found is not None
        assert _members(found.within) == [place, place + 2] and _members(found.across) == [2 * pair, 2 * pair + 1]


@on_ranks(4)
def test_ranks_in_different_numbers_of_groups_can_split_a_group() -> None:
    """Make the same groups twice; before the second time some ranks have made newer groups."""
    members, names = [], set()
    count = len(dist.distributed_c10d._world.pg_names)
    with pretended_nodes(2, 2) as group:
        own = [dist.new_group([3], use_local_synchronization=True) for _ in range(2) if dist.get_rank() == 3]
        for each in (group, dist.new_group()):
            found = split_by_node(each)
            assert found is not None
            members.append((_members(found.within), _members(found.across)))
            names |= {found.within.group_name, found.across.group_name}
            for made in own:
                dist.destroy_process_group(made)
            own = []
    assert members[0] == members[1] and [len(each) for each in members[0]] == [2, 2] and len(names) == 4
    assert len(dist.distributed_c10d._world.pg_names) == count + 6, "no name stands for a group that is not there"


@on_ranks(4)
def test_new_groups_have_the_deadline_of_the_settings() -> None:
    set_settings(timeout=7.0)
    try:
        with pretended_nodes(2, 2) as group:
            found = split_by_node(group)
            assert found is not None
            for each in (found.within, found.across):
                assert each._get_backend(CPU).options._timeout.total_seconds() == 7.0
    finally:
        set_settings(timeout=60.0)


@on_ranks(4)
def test_a_rank_that_does_not_come_is_named() -> None:
    with pretended_nodes(2, 2) as group:
        dist.barrier()
        if dist.get_rank() != 2:
            set_settings(timeout=patient(0.5))
            try:
                with pytest.raises(PeerTimeout) as caught:
                    split_by_node(group)
                assert (caught.value.op, caught.value.peer) == ("split by node", 2)
            finally:
                set_settings(timeout=60.0)
        dist.barrier()


def _reach() -> tuple[str, str, str]:
    """Return, for the whole group, within and across, the memory's backend, or the reason why there is none."""
    found = split_by_node(dist.group.WORLD)
    assert found is not None

    def memory(group: dist.ProcessGroup) -> str:
        try:
            return symmetric_memory(group, CPU).backend
        except Unavailable as error:
            return str(error)

    choice = choose_implementation(CPU, torch.float32, dist.group.WORLD)
    assert (found.count, found.ranks_per_node) == (2, 2)
    assert choice.implementation == "collective" and choice.state == "fallback"
    return memory(dist.group.WORLD), memory(found.within), memory(found.across)


@on_two_nodes
def test_ranks_share_memory_only_within_a_network_namespace() -> None:
    for whole, within, across in run_on_nodes(_reach):
        assert whole.startswith("the group spans hosts or containers: rank 0 is on ")
        assert "net:[" in whole and "rank 2 on " in whole
        assert within == "shm"
        assert across.startswith("the group spans hosts or containers") and "rank 1 on " in across


def hierarchical_sum(x: torch.Tensor, found: Nodes) -> torch.Tensor:
    part = collectives.reduce_scatter(x, found.within)
    return collectives.all_gather(collectives.all_reduce(part, found.across), found.within)


ELEMENTS = 2**18


def _sums() -> tuple[bool, int, int]:
    """Return whether both sums are right, and the bytes that this node sent for each."""
    found = split_by_node(dist.group.WORLD)
    assert found is not None
    own = torch.arange(ELEMENTS, dtype=torch.float32) % 1000 + dist.get_rank()
    expected = 4 * (torch.arange(ELEMENTS, dtype=torch.float32) % 1000) + 6
    right, sent = True, []
    for total in (lambda x: hierarchical_sum(x, found), lambda x: collectives.all_reduce(x, dist.group.WORLD)):
        total(own)  # The first call connects the ranks.
        with counted() as count:
            right &= torch.equal(total(own), expected)
        sent.append(count[0])
    return right, sent[0], sent[1]


@on_two_nodes
def test_a_sum_by_node_sends_each_element_once() -> None:
    for right, by_nodes, plain in run_on_nodes(_sums):
        assert right
        assert 4 * ELEMENTS < by_nodes < 1.05 * 4 * ELEMENTS
        assert plain > 1.4 * by_nodes  # A ring sends 3/2 of it.
