"""Ranks that stay away from a product or from ring attention, or are killed in it, are named in an error, in time."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.forked_ranks import LIMIT, Rank, ranks
from tpfuse.choices import Implementation
from tpfuse.comm import handle
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.settings import set_settings
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.dispatch import _IMPLEMENTATIONS
from tpfuse.ops.linear.fused import FusedLinear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import use
from tpfuse.testing.patience import patient

TIMEOUT = 0.4  # seconds on an idle machine
# The steps that communicate: products, and ring attention by a schedule.
PRODUCTS = ("all_gather", "all_gather backward", "reduce_scatter", "reduce_scatter backward", "all_reduce")
ATTENTION = ("attention ring", "attention ring backward", "attention all_gather", "attention ulysses backward")


def _later(*rows: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.processes) for row in rows]


def _forward(step: str, group: dist.ProcessGroup) -> Tensor:
    if step in ATTENTION:
        x = torch.ones(1, 3, 8, 16, requires_grad=True)
        return ring_attention(x, x, x, group=group, schedule=step.split()[1])  # type: ignore[arg-type]
    weight = torch.ones(3, 4, requires_grad=True)
    if step.startswith("all_gather"):
        return all_gather_linear(torch.ones(2, 4, requires_grad=True), weight, None, group)
    x = torch.ones(2 * group.size(), 4, requires_grad=True)
    return (linear_all_reduce if step == "all_reduce" else linear_reduce_scatter)(x, weight, None, group)


def _run(step: str, group: dist.ProcessGroup, out: Tensor) -> None:
    """Run the step; out: the result of its forward pass."""
    if step.endswith("backward"):
        out.sum().backward(retain_graph=True)
    elif step in ATTENTION:
        torch.testing.assert_close(_forward(step, group), torch.ones_like(out))
    else:
        expected = 4 if step == "all_gather" else 4 * group.size()
        assert torch.equal(_forward(step, group), torch.full_like(out, expected))


def _by_copy_engines(group: dist.ProcessGroup) -> None:
    """Make copy engines, not the products themselves, gather from now on."""
    memory = symmetric_memory(group, torch.device("cpu"))
    _IMPLEMENTATIONS._objects.setdefault(group, {})["fused", memory] = FusedLinear(memory, engine_bytes=0)


def _set_timeout(seconds: float, group: dist.ProcessGroup, name: Implementation) -> None:
    """Set the timeout of the tested steps; on a busy machine, ranks may meet later than that before the test."""
    set_settings(timeout=seconds)
    if name != "collective":
        memory = symmetric_memory(group, torch.device("cpu"))
        assert isinstance(memory, SharedMemory)
        memory.timeout = memory.control.timeout = seconds


def _one_stays_away(rank: Rank, name: Implementation, engines: bool, steps: tuple[str, ...], timeout: float) -> None:
    """Run each step without rank 1, then with rank 1 coming late, then with all ranks."""
    world = rank.join()
    handle.PATIENCE = timeout
    if engines:
        _by_copy_engines(world)
    for step in steps:
        # Gloo's groups cannot be used after an error.
        group = dist.new_group() if name == "collective" else world
        with use(implementation=name):
            _set_timeout(patient(10.0), group, name)
            out = _forward(step, group)
            _run(step, group, out)
            dist.barrier(world)
            _set_timeout(timeout, group, name)
            if rank.rank == 1:
                rank.hear()
            if rank.rank != 1 or name != "collective":
                with pytest.raises(PeerTimeout) as caught:
                    _run(step, group, out)
                rank.tell(caught.value)
            rank.hear()
            if name != "collective":
                _set_timeout(patient(10.0), group, name)
                symmetric_memory(group, torch.device("cpu")).reset()
                _run(step, group, out)
                symmetric_memory(group, torch.device("cpu")).barrier()


@pytest.mark.parametrize(
    ("name", "engines", "steps"),
    [
        ("direct", False, ("all_gather backward", "attention ulysses backward")),
        ("fused", False, PRODUCTS[:1]),
        *_later(
            ("collective", False, PRODUCTS),
            *((name, False, PRODUCTS[1:]) for name in ("direct", "fused")),
            ("fused", True, PRODUCTS[:2]),
        ),
        *_later(*((name, False, ATTENTION) for name in ("direct", "fused"))),
    ],
)
def test_a_rank_that_never_comes_is_named(
    name: Implementation, engines: bool, steps: tuple[str, ...], tmp_path: Path
) -> None:
    timeout = patient(TIMEOUT)
    with ranks(3, tmp_path, _one_stays_away, name, engines, steps, timeout) as running:
        for step in steps:
            for rank in (0, 2):
                error = running.hear(rank)
                assert isinstance(error, PeerTimeout), error
                assert (error.peer, error.rank) == (1, rank), (step, error)
                assert (0.5 if step in ATTENTION else 0.9) * timeout < error.waited < timeout + patient(2.0)
                if name != "collective" and step not in ATTENTION:
                    operator = f"{'all_gather_linear' if step.startswith('all_gather') else 'linear_' + step}"
                    assert error.op.startswith(operator.removesuffix(" backward")), (step, error)
            running.connections[1].send("go")
            if name != "collective":
                assert isinstance(running.hear(1), PeerTimeout), "it comes late, and does not wait in turn"
            running.go()
        assert [running.result(rank)[1] for rank in range(3)] == [None] * 3


def _until_a_rank_dies(rank: Rank, name: Implementation, step: str) -> None:
    group = rank.join()
    handle.PATIENCE = patient(0.4)
    set_settings(timeout=patient(10.0 if step in ATTENTION and name == "collective" else LIMIT))
    with use(implementation=name):
        out = _forward(step, group)
        _run(step, group, out)
        rank.tell("here")
        while True:
            _run(step, group, out)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("collective", "reduce_scatter"),
        *_later(("direct", "all_gather backward"), ("direct", "attention ring"), ("collective", ATTENTION[1])),
        *_later(("fused", "reduce_scatter"), ("fused", "attention ring backward")),
    ],
)
def test_a_rank_that_is_killed_is_named_at_once(name: Implementation, step: str, tmp_path: Path) -> None:
    with ranks(3, tmp_path, _until_a_rank_dies, name, step) as running:
        running.wait_for_all()
        killed = running.send(1, signal.SIGKILL)
        for survivor in (0, 2):
            when, error = running.result(survivor)
            assert isinstance(error, PeerTimeout), error
            assert error.rank == survivor
            assert when - killed < patient(15.0 if step in ATTENTION and name == "collective" else 5.0)
            if name == "collective":  # Gloo's error may come from another rank that has met it before
                assert error.peer in (1, None)
            else:
                assert error.peer == 1 and f"its process ({running.processes[1].pid}) has ended" in str(error)
