"""gemm_reduce_scatter under many schedules: no false alarm, no line that is not needed, no wait without an end."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels import endpoint, gemm_reduce_scatter, signals
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.reduce_scatter import reduce_scatter_forward
from tpfuse.testing.explore import PCT, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

Program = Callable[[SimulatedMemory], None]
Connect = Callable[..., Endpoint]
SIZES = ((40, 20), (3, 5), (0, 7), (20, 18))  # M and N: grids of several programs and of one take turns
K = 4


@pytest.fixture(autouse=True)
def tiny_tiles() -> Iterator[None]:
    """Tiles of 16 by 16: small tensors have several programs."""
    blocks = {
        "gemm_reduce_scatter": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "EPILOGUE_PARTS": 1},
        "gemm_reduce_scatter_sum": {"BLOCK_M": 8, "BLOCK_N": 16},
        "reduce_scatter": {"BLOCK": 16},
    }
    rows = [row for row in read_table(TABLE) if row.operator in blocks and row.family == "interpreted"]
    with override(*(replace(row, blocks=dict(row.blocks) | blocks[row.operator]) for row in rows)):
        yield


def summed(xs: Sequence[Tensor], weight: Tensor, rank: int) -> Tensor:
    """The rows of `rank`."""
    chunk = -(-len(xs[0]) // len(xs))
    return (torch.stack(list(xs)).sum(0) @ weight.t())[rank * chunk : (rank + 1) * chunk]


class Launcher:
    """The launcher, with a channel of its own; looked up at each call: mutants are in other modules."""

    def __init__(self, memory: SimulatedMemory, connect: Connect) -> None:
        self.endpoint = connect(memory, slot_bytes=4096)
        self.counts = memory.signals("counts", memory.world).local

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        module = importlib.import_module("tpfuse.kernels.gemm_reduce_scatter")
        out: Tensor = module.gemm_reduce_scatter_forward(x, weight, self.endpoint, self.counts)
        return out


def program_of(connect: Connect, sizes: Sequence[tuple[int, int]] = SIZES) -> Program:
    """An epoch for each size."""

    def gemm_reduce_scatter(memory: SimulatedMemory) -> None:
        run = Launcher(memory, connect)
        for epoch, (m, n) in enumerate(sizes):
            xs = [integers(10 * epoch + rank, m, K) for rank in range(memory.world)]
            weight = integers(epoch, n, K)
            out = run(xs[memory.rank], weight)
            assert torch.equal(out, summed(xs, weight, memory.rank)), f"epoch {epoch + 1}"

    return gemm_reduce_scatter


@pytest.mark.parametrize(("world", "resident"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_no_alarm(connect: Connect, world: int, resident: int) -> None:
    explore(program_of(connect), world, resident=resident)


def test_no_alarm_in_twenty_seeds(connect: Connect) -> None:
    explore(program_of(connect, ((20, 5), (3, 5), (2, 20))), 2, resident=2, schedules=map(PCT, range(20)))


def test_a_channel_shared_with_collectives(connect: Connect) -> None:
    """Epoch by epoch in turn: both write halves and words of the same slots and flags."""

    def program(memory: SimulatedMemory) -> None:
        run, world = Launcher(memory, connect), memory.world
        for epoch in range(3):
            xs = [integers(10 * epoch + rank, 40, K) for rank in range(world)]
            weight, out = integers(epoch, 20, K), torch.empty(20 * K)
            assert torch.equal(run(xs[memory.rank], weight), summed(xs, weight, memory.rank))
            reduce_scatter_forward(xs[memory.rank].view(world, -1), out, run.endpoint)
            assert torch.equal(out, (xs[0] + xs[1]).view(world, -1)[memory.rank])

    explore(program, 2, resident=2)


def left_by(program: Program, mutants: list[Mutant], world: int = 2) -> list[Mutant]:
    """Those that the program does not fail."""
    targets = [signals, endpoint, gemm_reduce_scatter]
    return surviving(lambda *copies: program, targets, world, mutants=mutants, resident=2)


def test_every_line_is_needed(connect: Connect) -> None:
    mutants = [m for m in mutants_of(signals, gemm_reduce_scatter) if m.module == gemm_reduce_scatter.__name__]
    assert len(mutants) == 11, "\n".join(map(str, mutants))
    left = left_by(program_of(connect), mutants)
    assert not left, "\n".join(map(str, left))


SIGNAL = "            _signal_when_stored(counts_ptr, flags_ptr, owner, epoch, rank)\n"
LOOP = "            for index in range(first, tiles, programs):\n"
FAULTS: dict[str, tuple[Any, dict[str, str]]] = {
    "one half": (endpoint, {"(epoch & 1) * slot_bytes": "0 * slot_bytes"}),
    "an epoch too far": (signals, {"epoch = tl.load(state_ptr) + 1": "epoch = tl.load(state_ptr) + 2"}),
    "the epoch before will do": (gemm_reduce_scatter, {"sources, epoch, abort_ptr": "sources, epoch - 1, abort_ptr"}),
    "any word": (gemm_reduce_scatter, {"owner, tl.int32) + rank, epoch": "owner, tl.int32) + owner, epoch"}),
    "the own words alone": (gemm_reduce_scatter, {"peer_pointer(flags_ptr, owner,": "peer_pointer(flags_ptr, rank,"}),
    "the first program signals": (gemm_reduce_scatter, {"stored == tl.num_programs(0)": "stored == 1"}),
    "one count for all owners": (gemm_reduce_scatter, {"tl.atomic_add(counts_ptr + owner": "tl.atomic_add(counts_ptr"}),
    "signalled before it is stored": (gemm_reduce_scatter, {SIGNAL: "", LOOP: SIGNAL + LOOP}),
    "another rank's part": (gemm_reduce_scatter, {"+ rank * chunk * N": "+ owner * chunk * N"}),
    "an owner is left out": (gemm_reduce_scatter, {"range(1, WORLD + 1)": "range(1, WORLD)"}),
    "no signal without rows": (gemm_reduce_scatter, {SIGNAL: f"            if rows > 0:\n    {SIGNAL}"}),
    "one source too few": (gemm_reduce_scatter, {"abort_ptr, sources < WORLD": "abort_ptr, sources < WORLD - 1"}),
    "the half of the next epoch": (
        gemm_reduce_scatter, {"slot(slots_ptr, rank, epoch,": "slot(slots_ptr, rank, epoch + 1,"}
    ),
}  # fmt: skip


def planted(fault: str) -> Mutant:
    module, changes = FAULTS[fault]
    source = inspect.getsource(module)
    for before, after in changes.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return Mutant(module.__name__, str(module.__file__), (1, 1), fault, "planted", source)


def test_faults_that_are_no_deletion(connect: Connect) -> None:
    left = left_by(program_of(connect), [planted(fault) for fault in FAULTS])
    assert not left, "\n".join(map(str, left))


def test_waits_end(connect: Connect) -> None:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new."""

    def late(memory: SimulatedMemory) -> None:
        run = Launcher(memory, connect)
        xs, weight = [integers(rank, 40, K) for rank in range(memory.world)], integers(9, 20, K)
        for _ in range(2):
            assert torch.equal(run(xs[memory.rank], weight), summed(xs, weight, memory.rank))
            with pytest.raises(PeerTimeout), memory.guard("gemm_reduce_scatter"):
                if memory.rank == 0:
                    memory.barrier("elsewhere")
                run(xs[memory.rank], weight)
                assert run.endpoint.state[0] == 1, "the epoch is not over"
                run(xs[memory.rank], weight)
            memory.reset()
            memory.barrier()
            assert run.endpoint.state.tolist() == [0, 0]
            assert not run.counts.any()

    explore(late, 2, resident=2, timeouts=True)
