"""Bad arguments are refused in one line, by every rank for itself; ranks that are killed in a ring are named."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.backend import Implementation, implementation
from tpfuse.comm.collectives import collective
from tpfuse.comm.connect import connect
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.measurement import measuring
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.testing.forked_ranks import LIMIT, Rank, ranks
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive

TIMEOUT = 0.4
KEY, ROWS = torch.tensor(1), torch.zeros(1, 4, dtype=torch.int64)
DOCUMENTS = torch.tensor([0, 3, 16], dtype=torch.int32)
Shape = tuple[int, int, int, int]


def _draw(q: Shape = (1, 4, 4, 16), k: Shape | None = None, v: Shape | None = None) -> dict[str, Tensor]:
    k = k or q
    return {"q": torch.ones(q), "k": torch.ones(k), "v": torch.ones(v or k)}


# (inputs, options, message) for 4 ranks, or for 2 x 2 ranks if the group is "pair".
BAD: tuple[tuple[dict[str, Tensor], dict[str, Any], str], ...] = (
    (
        _draw((1, 6, 4, 16)),
        {"schedule": "ulysses"},
        "ring_attention: schedule ulysses: 4 ranks cannot divide 6 heads of q and 6 of k:"
        " schedules ring and all_gather can be used",
    ),
    (
        _draw((1, 12, 4, 16), (1, 3, 4, 16)),
        {"schedule": "ulysses"},
        "ring_attention: schedule ulysses: 4 ranks cannot divide 12 heads of q and 3 of k:"
        " schedules ring and all_gather can be used",
    ),
    (
        _draw((1, 3, 4, 16)),
        {"schedule": "ulysses_ring", "group": "pair"},
        "ring_attention: schedule ulysses_ring: 2 ranks cannot divide 3 heads of q and 3 of k:"
        " schedules ring and all_gather can be used",
    ),
    (
        _draw(),
        {"schedule": "ulysses_ring"},
        "ring_attention: group: schedule ulysses_ring expects a pair of groups (ring, ulysses)",
    ),
    (_draw(), {"schedule": "ring", "group": "pair"}, "ring_attention: group: schedule ring expects one group"),
    (
        _draw(),
        {"schedule": "zigzag"},
        "ring_attention: schedule 'zigzag': expected one of auto, ring, all_gather, ulysses, ulysses_ring",
    ),
    (_draw(), {"balance": "even"}, "balance 'even': expected one of zigzag, contiguous, striped"),
    (_draw(), {"length": 3}, "a sequence of 3 tokens cannot be sharded over 4 ranks"),
    (
        _draw(),
        {"length": 17},
        "ring_attention: q has 4 tokens: expected 6 on each of 4 ranks for 17 tokens, zigzag"
        " (SequenceLayout.shard pads them)",
    ),
    (
        _draw((1, 4, 5, 16)),
        {},  # zigzag has two chunks on each rank
        "ring_attention: q has 5 tokens: expected 6 on each of 4 ranks for 20 tokens, zigzag"
        " (SequenceLayout.shard pads them)",
    ),
    (_draw(k=(1, 4, 6, 16)), {}, "ring_attention: k has 6 tokens, q has 4: expected the same number"),
    (_draw(v=(1, 4, 4, 8)), {}, "ring_attention: v has shape (1, 4, 4, 8): expected (1, 4, 4, 16)"),
    (_draw(k=(1, 3, 4, 16)), {}, "ring_attention: k has 3 heads, q 4: expected a divisor of q's"),
    (
        _draw() | {"v": torch.ones(1, 4, 4, 16, dtype=torch.float64)},
        {},
        "ring_attention: v is torch.float64, q is torch.float32: expected one dtype",
    ),
    (_draw(), {"window": 0}, "ring_attention: window 0: expected at least 1, or None"),
    (_draw(), {"scale": -1.0}, "ring_attention: scale -1.0: expected a positive number, or None for 1 / sqrt(D)"),
    (_draw(), {"dropout_p": 1.0}, "ring_attention: dropout_p 1.0: expected 0 <= dropout_p < 1"),
    (
        _draw(),
        {"dropout_p": 0.1, "key": KEY},
        "ring_attention: head_rows is None: expected the number of each sequence and head, which dropout needs",
    ),
    (
        _draw(),
        {"dropout_p": 0.1, "key": KEY, "head_rows": ROWS, "cu_seqlens": DOCUMENTS},
        "ring_attention: head_rows has shape (1, 4): expected (2, 4)",
    ),
    (
        _draw((2, 4, 4, 16)),
        {"cu_seqlens": DOCUMENTS},
        "ring_attention: q has batch size 2: expected 1 with cu_seqlens: concatenate the documents",
    ),
    (
        _draw(),
        {"cu_seqlens": DOCUMENTS.view(1, -1)},
        "ring_attention: cu_seqlens has shape (1, 3): expected [S + 1]",
    ),
    (_draw(), {"cu_seqlens": DOCUMENTS.long()}, "ring_attention: cu_seqlens is torch.int64: expected int32"),
    (
        _draw(),
        {"cu_seqlens": torch.tensor([0, 17], dtype=torch.int32)},
        "ring_attention: cu_seqlens goes from 0 to 17: expected cumulative lengths from 0 to at most 16, the number of"
        " rows",
    ),
)


def _refused(name: Implementation) -> list[str]:
    """Return the errors on rank 0, which calls alone in a group that has never communicated; then on all ranks.

    All ranks continue afterwards. name "auto": while cases are measured.
    """
    pair = mesh_of(2, 2)["dp"].get_group(), mesh_of(2, 2)["tp"].get_group()
    world, messages = dist.new_group(), []
    measured = measuring(20, file=Path("/proc/none")) if name == "auto" else contextlib.nullcontext()
    with implementation(name), measured:
        for inputs, options, _ in BAD:
            alone = _complaint(inputs, options, world, pair) if dist.get_rank() == 0 else None
            dist.barrier()
            together = _complaint(inputs, options, world, pair)
            assert alone in (None, together)
            messages.append(together)
        _works(4, world)
    return messages


def _complaint(inputs: dict[str, Tensor], options: dict[str, Any], group: Any, pair: Any) -> str:
    asked = options | {"group": pair if "group" in options else group}
    with pytest.raises(ValueError) as caught:
        ring_attention(**inputs, **asked)
    return str(caught.value)


def _works(n: int, group: Any, schedule: Any = "auto") -> None:
    """Check a call with equal keys: every query gets the mean of the values that it sees, which are 1."""
    x = torch.ones(1, 1 if schedule == "ring" else 4, n, 16, requires_grad=True)
    out = ring_attention(x, x, x, group=group, schedule=schedule)
    out.sum().backward()
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("name", ["direct", *exhaustive("collective", "fused", "auto")])
def test_bad_input_is_refused_before_ranks_communicate(name: Implementation) -> None:
    for messages in pool(4).run(_refused, name):
        assert messages == [expected for _, _, expected in BAD]


def _uneven(name: Implementation, schedule: str, odd: int) -> str:
    """Return the error if rank `odd` has two tokens more than the others."""
    pair = mesh_of(2, 2)["dp"].get_group(), mesh_of(2, 2)["tp"].get_group()
    group = pair if schedule == "ulysses_ring" else dist.group.WORLD
    with implementation(name):
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
        *exhaustive(("direct", "all_gather"), ("direct", "ulysses"), ("collective", "ring")),
        *exhaustive(("collective", "ulysses_ring"), ("fused", "ring"), ("fused", "ulysses")),
    ],
)
def test_unequal_numbers_of_tokens_are_refused(name: Implementation, schedule: str) -> None:
    for messages in pool(4).run(_uneven, name, schedule, 1):
        assert "ring_attention" in messages and "\n" not in messages and "6" in messages and "4" in messages


STEPS = ("ring", "ring backward", "all_gather", "ulysses backward")


def _forward(step: str, group: dist.ProcessGroup) -> Tensor:
    x = torch.ones(1, 3, 8, 16, requires_grad=True)
    return ring_attention(x, x, x, group=group, schedule=step.split()[0])  # type: ignore[arg-type]


def _run(step: str, group: dist.ProcessGroup, out: Tensor) -> None:
    """Run the step; out: the result of its forward pass."""
    if step.endswith("backward"):
        out.sum().backward(retain_graph=True)
    else:
        torch.testing.assert_close(_forward(step, group), torch.ones_like(out))


def _set_timeout(seconds: float, group: dist.ProcessGroup) -> None:
    set_settings(timeout=seconds)
    memory = connect(group, torch.device("cpu"))
    assert isinstance(memory, SharedMemory)
    memory.timeout = memory.control.timeout = seconds


def _one_stays_away(rank: Rank, name: Implementation, timeout: float) -> None:
    """Run each step without rank 1, then with rank 1 coming late, then with all ranks."""
    group = rank.join()
    for step in STEPS:
        with implementation(name):
            _set_timeout(patient(10.0), group)
            out = _forward(step, group)
            _run(step, group, out)
            dist.barrier(group)
            _set_timeout(timeout, group)
            if rank.rank == 1:
                rank.hear()
            with pytest.raises(PeerTimeout) as caught:
                _run(step, group, out)
            rank.tell(caught.value)
            rank.hear()
            _set_timeout(patient(10.0), group)
            connect(group, torch.device("cpu")).reset()
            _run(step, group, out)
            connect(group, torch.device("cpu")).barrier()


@pytest.mark.parametrize("name", ["direct", pytest.param("fused", marks=pytest.mark.processes)])
def test_a_rank_that_never_comes_is_named(name: Implementation, tmp_path: Path) -> None:
    timeout = patient(TIMEOUT)
    with ranks(3, tmp_path, _one_stays_away, name, timeout) as running:
        for step in STEPS:
            for rank in (0, 2):
                error = running.hear(rank)
                assert isinstance(error, PeerTimeout), error
                assert (error.peer, error.rank) == (1, rank), (step, error)
                assert 0.5 * timeout < error.waited < timeout + patient(2.0)
            running.connections[1].send("go")
            assert isinstance(running.hear(1), PeerTimeout), "it comes late, and does not wait in turn"
            running.go()
        assert [running.result(rank)[1] for rank in range(3)] == [None] * 3


def _until_a_rank_dies(rank: Rank, name: Implementation, step: str) -> None:
    group = rank.join()
    collective._PATIENCE = patient(0.4)
    set_settings(timeout=patient(10.0 if name == "collective" else LIMIT))
    with implementation(name):
        out = _forward(step, group)
        _run(step, group, out)
        rank.tell("here")
        while True:
            _run(step, group, out)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("direct", "ring"),
        *(
            pytest.param(name, step, marks=pytest.mark.processes)
            for name, steps in (
                ("direct", ("ring backward", "ulysses backward")),
                ("collective", ("ring backward", "all_gather")),
                ("fused", ("ring", "ring backward", "all_gather")),
            )
            for step in steps
        ),
    ],
)
def test_a_rank_that_is_killed_in_the_ring_is_named_at_once(name: Implementation, step: str, tmp_path: Path) -> None:
    with ranks(3, tmp_path, _until_a_rank_dies, name, step) as running:
        running.wait_for_all()
        killed = running.send(1, signal.SIGKILL)
        for survivor in (0, 2):
            when, error = running.result(survivor)
            assert isinstance(error, PeerTimeout), error
            assert error.rank == survivor
            assert when - killed < patient(15.0 if name == "collective" else 5.0)
            if name == "collective":  # a rank may wait for another one that has stopped before it
                assert error.peer in (1, None)
            else:
                assert error.peer == 1 and f"its process ({running.processes[1].pid}) has ended" in str(error)
