"""ZeRO trains like AdamW and Muon on one rank at every stage and with every reducer, and sends as little as it may."""

from math import inf
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.nodes import pretended_nodes
from tests.support.tiers import exhaustive, pairwise
from tests.zero.zero_training import CLIP, Layout, Result, check_same, engine_of, gpt, plain, run
from tpfuse.choices import Implementation
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import MuonOptions, shard
from tpfuse.zero.bucket_layout import plan_buckets

BUCKET = {"toy": 300, "gpt": 6000}  # bytes of gradients of a bucket, so that there are several


def trained(
    name: str,
    layout: Layout,
    accumulation: int,
    clip: float,
    reducer: Implementation,
    muon: MuonOptions | None,
    nodes: bool,
) -> tuple[Result, int]:
    """Train on this rank. nodes: whether the four ranks are on two pretended nodes."""
    options: dict[str, Any] = {} if layout.stage == 3 else {"bucket_bytes": BUCKET[name]}
    options["muon"] = muon
    with use(implementation=reducer):
        if not nodes:
            return run(name, layout, accumulation, clip, **options)
        with pretended_nodes(2, 2) as group:
            _, engine = engine_of(name, layout, group=group, **options)
            assert all("2 nodes of 2 ranks, within one direct" in reason for reason in engine.reasons)
            return run(name, layout, accumulation, clip, group=group, **options)


def check(
    name: str,
    layout: Layout,
    accumulation: int = 1,
    clip: float = CLIP,
    reducer: Implementation = "auto",
    muon: MuonOptions | None = None,
    nodes: bool = False,
) -> list[int]:
    """Compare weights and norms with those of one rank, and return the bytes that each rank received in a step."""
    expected, norms = plain(name, clip, muon=muon)
    results = pool(layout.world).run(trained, name, layout, accumulation, clip, reducer, muon, nodes)
    for (weights, found), _ in results:
        check_same(weights, expected)
        assert clip == inf or found == pytest.approx(norms, rel=1e-12)
        assert all(torch.equal(weight, results[0][0][0][key]) for key, weight in weights.items()), "ranks differ"
    return [received for _, received in results]


def sizes(world: int) -> list[int]:
    """Return the number of elements of each bucket for this many ranks."""
    named = reversed(list(gpt().model.to("meta").named_parameters()))
    worlds = dict.fromkeys(("sharded", "replicated", "partial"), world)
    return [layout.size for layout in plan_buckets(named, (), worlds, BUCKET["gpt"])]


@pytest.mark.parametrize(("stage", "accumulation", "clip"), [(2, 3, CLIP), *exhaustive((0, 3, CLIP), (1, 1, inf))])
def test_training_on_two_nodes_equals_that_of_one_rank(stage: int, accumulation: int, clip: float) -> None:
    """A rank of 4 on 2 nodes receives half of the gradients within its node, and half of those between nodes."""
    whole = sum(sizes(4)) * 8
    # Gradients: half of the bucket from the node's other rank, at stage 2 for each micro-batch, and a quarter from the
    # other node, once in a step; parameters likewise, once.
    received = (1 + (accumulation if stage == 2 else 1)) * (whole // 2) + 2 * (whole // 4)
    assert check("gpt", Layout(dp=4, stage=stage), accumulation, clip, nodes=True) == [received] * 4


LAYOUTS = [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)]  # dp, tp, cp
FIRST = [
    ((2, 1, 1), 0, 1, "collective"),
    ((2, 1, 1), 2, 3, "collective"),
    ((2, 1, 1), 1, 3, "auto"),
    ((3, 1, 1), 2, 3, "auto"),
    ((1, 2, 1), 1, 3, "auto"),
    ((1, 1, 2), 2, 1, "auto"),
]
NAMES, ROWS = pairwise(first=0, layout=LAYOUTS, stage=[0, 1, 2], accumulation=[1, 3], name=["auto", "collective"])


@pytest.mark.parametrize(NAMES, [*FIRST, *(row for row in ROWS if row.values not in FIRST)])
def test_weights_equal_those_of_one_rank_and_bytes_those_of_theory(
    layout: tuple[int, int, int], stage: int, accumulation: int, name: Implementation
) -> None:
    """A rank receives 2 (world - 1) / world of the model in each step, at every stage (arXiv:1910.02054, section 7).

    These are the other data-parallel ranks' gradients of its shard, at stage 2 those of each micro-batch, and the
    parameters of their shards.
    """
    dp, tp, cp = layout
    received = check("gpt", Layout(tp, dp, cp, stage=stage), accumulation, reducer=name)
    if tp == cp == 1:
        times = 1 + (accumulation if stage == 2 else 1)
        assert received == [times * (dp - 1) * sum(size // dp * 8 for size in sizes(dp))] * dp


@pytest.mark.parametrize(
    *pairwise(first=2, world=[2, 3, 1], stage=[2, 1, 0], accumulation=[3, 1], name=["auto", "collective"])
)
def test_tied_and_frozen_weights_odd_sizes_and_missing_gradients(
    world: int, stage: int, accumulation: int, name: Implementation
) -> None:
    check("toy", Layout(dp=world, stage=stage), accumulation, reducer=name)


AT_STAGE_3 = [
    ("toy", Layout(dp=2), 3),
    ("gpt", Layout(tp=2, dp=2), 1),
    ("gpt", Layout(cp=2, dp=2, replicas=2), 1),
    *exhaustive(
        ("toy", Layout(dp=4, replicas=2), 3),
        ("toy", Layout(dp=2, replicas=2), 1),
        ("gpt", Layout(dp=3), 3),
        ("gpt", Layout(tp=2, dp=2, replicas=2), 1),
    ),
]


@pytest.mark.parametrize(("name", "layout", "accumulation"), AT_STAGE_3)
def test_training_at_stage_3_equals_that_of_one_rank(name: str, layout: Layout, accumulation: int) -> None:
    check(name, layout, accumulation)


BY_MUON: list[tuple[str, Layout, int, float, Implementation]] = [
    ("gpt", Layout(tp=2, dp=2, stage=3), 3, CLIP, "auto"),
    ("toy", Layout(dp=2, stage=2), 3, CLIP, "collective"),
    ("toy", Layout(dp=2, stage=0), 1, inf, "auto"),
    *exhaustive(
        ("gpt", Layout(stage=2), 3, CLIP, "auto"),
        ("gpt", Layout(tp=2, cp=2, stage=2), 3, inf, "auto"),
        ("gpt", Layout(dp=3, stage=1), 1, CLIP, "collective"),
        ("toy", Layout(dp=4, stage=3), 3, CLIP, "auto"),
    ),
]


@pytest.mark.parametrize(("name", "layout", "accumulation", "clip", "reducer"), BY_MUON)
def test_training_by_muon_equals_that_of_torch_on_one_rank(
    name: str, layout: Layout, accumulation: int, clip: float, reducer: Implementation
) -> None:
    """Buckets are so small that ranks cut matrices at stages 1 and 2."""
    check(name, layout, accumulation, clip, reducer, MuonOptions(momentum=0.9))


@pytest.mark.parametrize("name", ["auto", "collective"])
@on_ranks(2)
def test_padding_between_parameters_is_not_in_the_norm(name: Implementation) -> None:
    """All gradients are 1; a small bucket follows larger ones in the same buffer."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (1, 64, 64, 64)])
    with use(implementation=name):
        buckets = shard(model, stage=2, bucket_bytes=1)
        buckets.start(last=True)
        sum(parameter.sum() for parameter in model).backward()  # type: ignore[union-attr]
        buckets.finish()
        norm = buckets.norm()
    buckets.close()
    assert norm**2 == pytest.approx(2**2 * (1 + 3 * 64), rel=1e-15)


@pytest.mark.parametrize(("world", "name"), [(2, "auto"), (3, "collective"), *exhaustive((3, "auto"))])
def test_the_update_computes_sums_that_were_not_requested(world: int, name: Implementation) -> None:
    """The update of stage 1 sums the gradients itself if no caller has requested their norm."""
    check("gpt", Layout(dp=world, stage=1), clip=inf, reducer=name)
    check("toy", Layout(dp=world, stage=1), 3, clip=inf, reducer=name)
