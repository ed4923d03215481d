"""Ranks that call an operation with different shapes, dtypes or options: errors show both sides, ranks can go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.meshes import tensor_mesh
from tpfuse.choices import Implementation
from tpfuse.comm import collectives
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.settings import set_settings
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import use
from tpfuse.testing.ranks import pool

Group = dist.ProcessGroup
Product = Callable[[Tensor, Tensor, None, Group], Tensor]
Program = Callable[[bool, Group], object]


def _collective(function: Callable[[Tensor, Group], Tensor], one: Tensor, other: Tensor) -> Program:
    return lambda odd, group: function(other if odd else one, group)


def _product(function: Product, one: tuple[int, int, int], other: tuple[int, int, int], half: bool = False) -> Program:
    """Return a program. one, other: rows, columns and outputs. half: the other in bfloat16, as under autocast."""

    def run(odd: bool, group: Group) -> Tensor:
        (rows, k, n), dtype = (other if odd else one), torch.bfloat16 if odd and half else torch.float32
        return function(torch.ones(rows, k, dtype=dtype), torch.ones(n, k, dtype=dtype), None, group)

    return run


def _embedding(odd: bool, group: Group) -> Tensor:
    layer = VocabParallelEmbedding(8, 4, device_mesh=tensor_mesh())
    return layer(torch.tensor([1, 2, 3] if odd else [1, 2]))


def _attention(
    heads: tuple[int, int] = (2, 2), dtype: torch.dtype = torch.float32, one: dict[str, Any] | None = None, **other: Any
) -> Program:
    """Return a program. heads: those of q and of k on the odd rank; one, other: the options."""

    def run(odd: bool, group: Group) -> object:
        counts = heads if odd else (2, 2)
        q, k = (torch.ones(1, count, 4, 16, dtype=dtype if odd else torch.float32) for count in counts)
        return ring_attention(q, k, k, group=group, **{"schedule": "ring"} | (other if odd else one or {}))

    return run


_DOCUMENTS = [torch.tensor([0, end, 8], dtype=torch.int32) for end in (3, 5)]
_DROPOUT = {"dropout_p": 0.5, "head_rows": torch.arange(2).view(1, 2), "key": torch.tensor(1)}


def _frozen(odd: bool, group: Group) -> None:
    """Run backward where one rank needs no gradient of x: it would send no terms to the others' sums."""
    x = torch.ones(2, 4, requires_grad=not odd)
    all_gather_linear(x, torch.ones(4, 4, requires_grad=True), None, group).sum().backward()


def _elsewhere(odd: bool, group: Group) -> Tensor:
    x = torch.ones(4, 2)
    return collectives.reduce_scatter(x, group) if odd else collectives.all_gather(x, group)


PROGRAMS: dict[str, Program] = {
    "all_reduce dtype": _collective(collectives.all_reduce, torch.ones(4), torch.ones(4, dtype=torch.float64)),
    "all_reduce elements": _collective(collectives.all_reduce, torch.ones(4), torch.ones(6)),
    "all_reduce in another channel": _collective(collectives.all_reduce, torch.ones(4), torch.ones(2**19)),
    "all_reduce_max elements": _collective(collectives.all_reduce_max, torch.ones(4), torch.ones(6)),
    "all_gather rows": _collective(collectives.all_gather, torch.ones(2, 4), torch.ones(4, 4)),
    "all_gather shape": _collective(collectives.all_gather, torch.ones(4, 2), torch.ones(2, 4)),
    "reduce_scatter rows": _collective(collectives.reduce_scatter, torch.ones(4, 2), torch.ones(8, 2)),
    "all_to_all columns": _collective(collectives.all_to_all, torch.ones(2, 2), torch.ones(2, 3)),
    "all_to_all rows": _collective(collectives.all_to_all, torch.ones(2, 2), torch.ones(3, 2)),
    "all_reduce of nothing": _collective(collectives.all_reduce, torch.ones(0, 2), torch.ones(3, 2)),
    "all_reduce_max of nothing": _collective(collectives.all_reduce_max, torch.ones(3, 2), torch.ones(0, 2)),
    "all_gather of nothing": _collective(collectives.all_gather, torch.ones(3, 2), torch.ones(0, 2)),
    "reduce_scatter rows that do not divide": _collective(
        collectives.reduce_scatter, torch.ones(4, 2), torch.ones(3, 2)
    ),
    "reduce_scatter of nothing": _collective(collectives.reduce_scatter, torch.ones(4, 2), torch.ones(0, 2)),
    "all_to_all of nothing": _collective(collectives.all_to_all, torch.ones(2, 0), torch.ones(2, 3)),
    "embedding ids": _embedding,
    "all_gather_linear rows": _product(all_gather_linear, (2, 4, 4), (4, 4, 4)),
    "all_gather_linear columns": _product(all_gather_linear, (2, 4, 4), (2, 8, 4)),
    "all_gather_linear dtype": _product(all_gather_linear, (2, 4, 4), (2, 4, 4), half=True),
    "linear_reduce_scatter rows that do not divide": _product(linear_reduce_scatter, (2, 4, 4), (3, 4, 4)),
    "linear_reduce_scatter dtype": _product(linear_reduce_scatter, (2, 4, 4), (2, 4, 4), half=True),
    "linear_reduce_scatter outputs": _product(linear_reduce_scatter, (2, 4, 2), (2, 4, 4)),
    "linear_all_reduce dtype": _product(linear_all_reduce, (2, 4, 4), (2, 4, 4), half=True),
    "linear_all_reduce outputs": _product(linear_all_reduce, (2, 4, 2), (2, 4, 4)),
    "linear_all_reduce rows": _product(linear_all_reduce, (2, 4, 4), (4, 4, 4)),
    "linear_all_reduce of nothing": _product(linear_all_reduce, (2, 4, 4), (0, 4, 4)),
    "ring_attention dtype": _attention(dtype=torch.float64),
    "ring_attention heads of q": _attention((4, 2)),
    "ring_attention heads of k": _attention((2, 1)),
    "ring_attention window": _attention(window=1),
    "ring_attention scale": _attention(scale=1.0),
    "ring_attention balance": _attention(balance="striped"),
    "ring_attention schedule": _attention(schedule="all_gather"),
    "ring_attention exchange": _attention(schedule="ulysses"),
    "ring_attention documents": _attention(cu_seqlens=_DOCUMENTS[0]),
    "ring_attention ends of documents": _attention(one={"cu_seqlens": _DOCUMENTS[0]}, cu_seqlens=_DOCUMENTS[1]),
    "ring_attention key": _attention(one=_DROPOUT, **_DROPOUT | {"key": torch.tensor(2)}),
    "no gradient": _frozen,
    "another operation": _elsewhere,
}

# The beginnings of the programs that `collective` compares; it compares neither collectives alone nor backward passes.
AGREED = "all_gather_linear", "linear_", "ring_attention"


def _disagree(name: Implementation, fingerprint: bool) -> list[tuple[str, str]]:
    """Let rank 1 call each program differently and return the errors. All ranks continue after each program."""
    group, messages = dist.group.WORLD, []
    assert group is not None
    set_settings(fingerprint=fingerprint)
    try:
        with use(implementation=name):
            for title, run in PROGRAMS.items():
                if name == "fused" and "dtype" in title and "attention" in title:
                    continue  # `fused` computes no float64
                if name == "collective" and not title.startswith(AGREED):
                    continue
                try:
                    run(dist.get_rank() == 1, group)
                    messages.append((title, "nothing"))
                except Disagreement as error:
                    messages.append((title, str(error)))
                total = collectives.all_reduce(torch.tensor([float(dist.get_rank())]), group)
                assert total.item() == sum(range(group.size())), title
    finally:
        set_settings(fingerprint=False)
    return messages


@pytest.mark.parametrize(
    ("name", "fingerprint"), [("direct", False), ("direct", True), ("fused", False), ("collective", False)]
)
def test_errors_on_all_ranks_show_both_sides_and_ranks_continue(name: Implementation, fingerprint: bool) -> None:
    for messages in pool(2).run(_disagree, name, fingerprint):
        for title, text in messages:
            sides = [part[2:].rstrip(", ") for part in text.split("rank ")[1:]]
            assert len(sides) == len(set(sides)) == 2, (title, text)
