"""Bad arguments are refused in one line, by every rank for itself, before ranks communicate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm.shared_memory import LocalMemory
from tpfuse.ops.linear.direct import DirectLinear
from tpfuse.ops.ring_attention.direct import DirectRing
from tpfuse.ops.ring_attention.fused import FusedRing
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import use
from tpfuse.testing.ranks import pool

DOCUMENTS = torch.tensor([0, 3, 16], dtype=torch.int32)
SHAPE = (1, 4, 4, 16)
DROPOUT = {"dropout_p": 0.1, "key": torch.tensor(1)}
ULYSSES, PAIR = {"schedule": "ulysses"}, {"group": "pair"}
OTHERS = ": schedules ring and all_gather can be used"
PADS = "zigzag (SequenceLayout.shard pads them)"  # it has two chunks on each rank

# (the arguments that differ from good ones, the message) for 4 ranks, or for 2 x 2 ranks if the group is "pair".
# Tuples are the shapes of tensors of ones.
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": (1, 6, 4, 16)} | ULYSSES, f"schedule ulysses: 4 ranks cannot divide 6 heads of q and 6 of k{OTHERS}"),
    (
        {"q": (1, 12, 4, 16), "k": (1, 3, 4, 16)} | ULYSSES,
        f"schedule ulysses: 4 ranks cannot divide 12 heads of q and 3 of k{OTHERS}",
    ),
    (
        {"q": (1, 3, 4, 16), "schedule": "ulysses_ring"} | PAIR,
        f"schedule ulysses_ring: 2 ranks cannot divide 3 heads of q and 3 of k{OTHERS}",
    ),
    ({"schedule": "ulysses_ring"}, "group: schedule ulysses_ring expects a pair of groups (ring, ulysses)"),
    ({"schedule": "ring"} | PAIR, "group: schedule ring expects one group"),
    ({"schedule": "zigzag"}, "schedule 'zigzag': expected one of auto, ring, all_gather, ulysses, ulysses_ring"),
    ({"length": 17}, f"q has 4 tokens: expected 6 on each of 4 ranks for 17 tokens, {PADS}"),
    ({"q": (1, 4, 5, 16)}, f"q has 5 tokens: expected 6 on each of 4 ranks for 20 tokens, {PADS}"),
    ({"k": (1, 4, 6, 16)}, "k has 6 tokens, q has 4: expected the same number"),
    ({"v": (1, 4, 4, 8)}, "v has shape (1, 4, 4, 8): expected (1, 4, 4, 16)"),
    ({"k": (1, 3, 4, 16)}, "k has 3 heads, q 4: expected a divisor of q's"),
    ({"v": torch.ones(SHAPE).double()}, "v is torch.float64, q is torch.float32: expected one dtype"),
    ({"window": 0}, "window 0: expected at least 1, or None"),
    ({"scale": -1.0}, "scale -1.0: expected a positive number, or None for 1 / sqrt(D)"),
    ({"softcap": 0.0}, "softcap 0.0: expected a positive number"),
    ({"sinks": (3,)}, "sinks are torch.float32 (3,): expected floats, one for each of 4 heads"),
    ({"dropout_p": 1.0}, "dropout_p 1.0: expected 0 <= dropout_p < 1"),
    (DROPOUT, "head_rows is None: expected the number of each sequence and head, which dropout needs"),
    (
        DROPOUT | {"head_rows": torch.zeros(1, 4, dtype=torch.int64), "cu_seqlens": DOCUMENTS},
        "head_rows has shape (1, 4): expected (2, 4)",
    ),
    (
        {"q": (2, 4, 4, 16), "cu_seqlens": DOCUMENTS},
        "q has batch size 2: expected 1 with cu_seqlens: concatenate the documents",
    ),
    ({"cu_seqlens": DOCUMENTS.view(1, -1)}, "cu_seqlens has shape (1, 3): expected [S + 1]"),
    ({"cu_seqlens": DOCUMENTS.long()}, "cu_seqlens is torch.int64: expected int32"),
    (
        {"cu_seqlens": DOCUMENTS + (DOCUMENTS > 3).int()},
        "cu_seqlens goes from 0 to 17: expected cumulative lengths from 0 to at most 16, the number of rows",
    ),
)
OF_THE_LAYOUT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"balance": "even"}, "balance 'even': expected one of zigzag, contiguous, striped"),
    ({"length": 3}, "a sequence of 3 tokens cannot be sharded over 4 ranks"),
)
EXPECTED = [f"ring_attention: {message}" for _, message in BAD] + [message for _, message in OF_THE_LAYOUT]


def _refused(name: Implementation) -> list[str]:
    """Return the errors on rank 0, which calls alone in a group that has never communicated; then on all ranks.

    All ranks continue afterwards.
    """
    pair = mesh_of(2, 2)["dp"].get_group(), mesh_of(2, 2)["tp"].get_group()
    world, messages = dist.new_group(), []
    with use(implementation=name):
        for changes, _ in BAD + OF_THE_LAYOUT:
            alone = _complaint(changes, world, pair) if dist.get_rank() == 0 else None
            dist.barrier()
            together = _complaint(changes, world, pair)
            assert alone in (None, together)
            messages.append(together)
        _works(4, world)
    return messages


def _complaint(changes: dict[str, Any], group: Any, pair: Any) -> str:
    given = {"q": SHAPE, "group": group} | changes
    given = {"k": given["q"]} | given
    given = {"v": given["k"]} | given
    given = {name: torch.ones(x) if isinstance(x, tuple) else x for name, x in given.items()}
    with pytest.raises(ValueError) as caught:
        ring_attention(**given | ({"group": pair} if given["group"] == "pair" else {}))
    return str(caught.value)


def test_groups_that_are_no_pair_are_refused() -> None:
    x = torch.ones(SHAPE)
    for groups in ((None,), (None, None), (None, None, None)):
        expected = (
            rf"^ring_attention: group is \({', '.join(['None'] * len(groups))}\): expected a process group, or two"
        )
        with pytest.raises(ValueError, match=expected):
            ring_attention(x, x, x, group=groups)  # type: ignore[arg-type]


def _works(n: int, group: Any, schedule: Any = "auto") -> None:
    """Check a call with equal keys: every query gets the mean of the values that it sees, which are 1."""
    x = torch.ones(1, 1 if schedule == "ring" else 4, n, 16, requires_grad=True)
    out = ring_attention(x, x, x, group=group, schedule=schedule)
    out.sum().backward()
    torch.testing.assert_close(out, torch.ones_like(out))


def test_bad_input_is_refused_before_ranks_communicate() -> None:
    for messages in pool(4).run(_refused, "direct"):
        assert messages == EXPECTED


def _uneven(name: Implementation, schedule: str, odd: int) -> str:
    """Return the error if rank `odd` has two tokens more than the others."""
    pair = mesh_of(2, 2)["dp"].get_group(), mesh_of(2, 2)["tp"].get_group()
    group = pair if schedule == "ulysses_ring" else dist.group.WORLD
    with use(implementation=name):
        _works(4, group, schedule)
        x = torch.ones(1, 1 if schedule == "ring" else 4, 6 if dist.get_rank() == odd else 4, 16)
        with pytest.raises(ValueError) as caught:
            ring_attention(x, x, x, group=group, schedule=schedule)
        _works(4, group, schedule)
        _works(6, group, schedule)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("direct", "ring"),
        ("direct", "ulysses_ring"),
        ("collective", "all_gather"),
        *exhaustive(("direct", "ulysses"), ("collective", "ulysses_ring"), ("fused", "ring")),
    ],
)
def test_unequal_numbers_of_tokens_are_refused(name: Implementation, schedule: str) -> None:
    for messages in pool(4).run(_uneven, name, schedule, 1):
        assert "ring_attention" in messages and "\n" not in messages and "6" in messages and "4" in messages


def test_large_heads_of_similar_sizes_share_a_channel() -> None:
    memory = LocalMemory(torch.device("cpu"))
    ring, linear = DirectRing(memory, 2**16), DirectLinear(memory, 2**16)
    for batch in (9, 10):
        k = torch.empty(batch, 1, 64, 16)
        next(ring._rounds(k, k, 8))
        next(linear._rounds(1, k.nbytes * 2))
    assert len(memory._channels) == 2


def test_a_backward_pass_that_slots_cannot_hold_is_refused_in_forward() -> None:
    ring, call = FusedRing(LocalMemory(torch.device("cpu"))), SimpleNamespace(described=lambda *_: "")
    q = torch.zeros(1, dtype=torch.bfloat16).expand(1, 8, 2**18, 128).requires_grad_()
    with pytest.raises(ValueError, match=r"\[1, 1, 262144, 128\]: the backward pass of one head of k takes \d+ bytes"):
        ring.forward(q, q[:, :1], q[:, :1], call)
