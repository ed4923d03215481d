"""all_gather_gemm and the launches around copies under many schedules: no alarm, no line too many, no endless wait."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.symmetric_memory import SymmetricBuffer
from tpfuse.kernels import all_gather_gemm, endpoint, signals, staging
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.explore import PCT, RoundRobin, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

MODULES = [signals, endpoint, staging, all_gather_gemm]
SIZES = ((3, 16, 20), (1, 8, 5), (2, 16, 0), (3, 12, 40))  # m, K, N: one tile of a chunk, several, none
HALVES = (1, 1, 0, 0)  # of the slot, where copies come by themselves: with an empty round before two of them
SLOT_BYTES = 512
BLOCKS = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_K": 16,
    "GROUP_M": 1,
    "EPILOGUE_PARTS": 1,
    "COPIERS": 2,
    "BLOCK_COPY": 16,
}


@pytest.fixture(autouse=True)
def tiny_tiles() -> Iterator[None]:
    """Two copiers and two that multiply, two programs that stage; tensors of a few elements are enough for all."""
    rows = [row for row in read_table(TABLE) if row.family == "interpreted"]
    products = [replace(row, blocks=row.blocks | BLOCKS) for row in rows if row.operator == "all_gather_gemm"]
    stages = [replace(row, blocks={"BLOCK": 8, "PROGRAMS": 2}) for row in rows if row.operator == "stage"]
    with override(*products, *stages):
        yield


def found(module: str, name: str) -> Any:
    """A launcher, looked up at each call: where mutants are tried it is another module's."""
    return getattr(importlib.import_module(f"tpfuse.kernels.{module}"), name)


def multiply(*args: Any, **options: Any) -> torch.Tensor:
    out: torch.Tensor = found("all_gather_gemm", "all_gather_gemm_forward")(*args, **options)[0]
    return out


class Group:
    """What the launches of one rank of a group are given; `rank` of `world`, which may be fewer than the memory's."""

    def __init__(self, memory: SimulatedMemory, rank: int, world: int) -> None:
        def words(key: str, count: int) -> SymmetricBuffer:
            return memory.signals(key, count)

        self.rank, self.world = rank, world
        self.slots = memory.buffer("slots", (2, SLOT_BYTES), torch.uint8)
        flags, state, ready = words("flags", 4 * world), words("state", 2), words("ready", 2 * world)
        self.ready = ready.peers[rank]
        self.gathered = memory.buffer("gathered", (world * SLOT_BYTES // 4,), torch.float32).peers[rank]
        self.end = Endpoint(
            rank,
            world,
            slots=self.slots.addresses[:world],
            slot_bytes=SLOT_BYTES,
            flags=flags.addresses[:world],
            flag_count=4 * world,
            state=state.peers[rank],
            abort=memory.abort,
            programs=4,
        )

    def inputs(self, epoch: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Every rank's x, the weight, and where chunks are gathered."""
        m, k, n = SIZES[epoch]
        xs = [integers(10 * epoch + rank, m, k) for rank in range(self.world)]
        return xs, integers(epoch, n, k), self.gathered[: self.world * m * k].view(self.world, m, k)

    def gather(self, epoch: int) -> None:
        """One product, with copiers."""
        xs, weight, chunks = self.inputs(epoch)
        out = multiply(xs[self.rank], weight, None, chunks, self.ready, self.end, keep_own=True)
        assert torch.equal(out, torch.cat(xs) @ weight.t()), f"epoch {epoch + 1}"
        assert torch.equal(chunks, torch.stack(xs)), f"epoch {epoch + 1}"

    def stage(self, epoch: int) -> None:
        """In front of one that has none."""
        found("staging", "stage")(self.inputs(epoch)[0][self.rank], self.end, HALVES[epoch])

    def copy(self, epoch: int) -> None:
        """What a copy engine does, and the launches around it."""
        chunks = self.inputs(epoch)[2]
        for step in range(1, self.world):
            source = (self.rank + step) % self.world
            chunk = chunks[source]
            found("staging", "await_source")(chunk, self.end, source)
            staged = self.slots.peers[source][HALVES[epoch], : chunk.nbytes]
            chunk.copy_(staged.view(torch.float32).view(chunk.shape))
            found("staging", "deliver")(self.ready, self.end, source)

    def product(self, epoch: int) -> None:
        """Of chunks that are delivered."""
        xs, weight, chunks = self.inputs(epoch)
        out = multiply(xs[self.rank], weight, None, chunks, self.ready, self.end, copied=True)
        assert torch.equal(out, torch.cat(xs) @ weight.t()), f"epoch {epoch + 1}"


def gathering(memory: SimulatedMemory, epochs: int = len(SIZES)) -> None:
    """Every size, with copiers."""
    group = Group(memory, memory.rank, memory.world)
    for epoch in range(epochs):
        group.gather(epoch)


def two_streams(memory: SimulatedMemory, epochs: int = len(SIZES)) -> None:
    """Every size, with copies on a stream of their own: half of the ranks are the other ones' second streams."""
    world = memory.world // 2
    rank, copies = memory.rank % world, memory.rank >= world
    group, events = Group(memory, rank, world), memory.signals("events", 1)
    for epoch in range(epochs):
        if copies:
            memory.wait(events, memory.rank, 0, epoch + 1, peer=rank, op="P has staged")
            group.copy(epoch)
            memory.put(events, rank, 0, epoch + 1)
        else:
            group.stage(epoch)
            memory.put(events, rank + world, 0, epoch + 1)
            group.product(epoch)
            memory.wait(events, rank, 0, epoch + 1, peer=rank + world, op="C has copied")


PROGRAMS: dict[str, tuple[Callable[..., None], int]] = {"gathering": (gathering, 2), "two_streams": (two_streams, 4)}


@pytest.mark.parametrize(("world", "resident"), [(2, 1), (3, 2)])
def test_no_alarm_with_copiers(world: int, resident: int) -> None:
    explore(gathering, world, resident=resident, seeds=range(2))


@pytest.mark.parametrize(("world", "resident"), [(4, 1), (6, 2)])
def test_no_alarm_with_two_streams(world: int, resident: int) -> None:
    explore(two_streams, world, resident=resident, seeds=range(2))


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_alarm_in_twenty_seeds(name: str) -> None:
    program, world = PROGRAMS[name]
    explore(lambda memory: program(memory, 3), world, resident=2, schedules=map(PCT, range(20)))


def left_by(name: str, mutants: list[Mutant]) -> list[Mutant]:
    """Those that a program does not fail. What it calls is looked up while it runs, and so mutated."""
    program, world = PROGRAMS[name]
    return surviving(lambda *copies: program, MODULES, world, mutants=mutants, resident=2)


@pytest.mark.parametrize(("name", "module", "lines"), [("gathering", all_gather_gemm, 5), ("two_streams", staging, 7)])
def test_every_line_is_needed(name: str, module: ModuleType, lines: int) -> None:
    mutants = [mutant for mutant in mutants_of(*MODULES) if mutant.module == module.__name__]
    assert len(mutants) == lines
    left = left_by(name, mutants)
    assert not left, "\n".join(map(str, left))


FAULTS = {
    "gathering": (
        ("one half", endpoint, "(epoch & 1) * slot_bytes", "0 * slot_bytes"),
        ("an epoch too far", signals, "epoch = tl.load(state_ptr) + 1", "epoch = tl.load(state_ptr) + 2"),
        ("one word of ready for all copiers", all_gather_gemm, "COPIERS + copier, epoch", "COPIERS, epoch"),
        ("ready for the next launch", all_gather_gemm, "+ copier, epoch)", "+ copier, epoch + 1)"),
        ("ready for another chunk", all_gather_gemm, "put(ready_ptr + source *", "put(ready_ptr + rank *"),
        ("one share is a chunk", all_gather_gemm, "(shares < SHARES) & (step", "(shares < 1) & (step"),
        ("the first chunk is there", all_gather_gemm, "& (step > 0)", "& (step > 1)"),
        (
            "another copier's signal",
            all_gather_gemm,
            "int32) + copier * WORLD",
            "int32) + (COPIERS - 1 - copier) * WORLD",
        ),
        (
            "another place",
            all_gather_gemm,
            "gathered_ptr + tl.cast(source",
            "gathered_ptr + tl.cast(WORLD - 1 - source",
        ),
        ("a tile left out", all_gather_gemm, "workers - tiles\n", "workers - tiles + 1\n"),
    ),
    "two_streams": (
        ("the other half", staging, "(epoch & 1) == half", "(epoch & 1) != half"),
        ("no round for either half", staging, "(epoch & 1) == half", "(epoch & 1) < 2"),
        ("staged where the readers are", staging, "slot_bytes, epoch + 1, rank", "slot_bytes, epoch, rank"),
        ("one program stages all", staging, "program < programs", "program < 1"),
        (
            "delivered for the next launch",
            staging,
            "put(ready_ptr + source, epoch",
            "put(ready_ptr + source, epoch + 1",
        ),
        ("another one is delivered", staging, "put(ready_ptr + source, epoch)", "put(ready_ptr, epoch)"),
    ),
}


def mutant_of(fault: str, module: ModuleType, before: str, after: str) -> Mutant:
    source = inspect.getsource(module)
    assert source.count(before) == 1, before
    return Mutant(module.__name__, str(module.__file__), (1, 1), before, fault, source.replace(before, after))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_are_no_deletion(name: str) -> None:
    left = left_by(name, [mutant_of(*fault) for fault in FAULTS[name]])
    assert not left, [mutant.change for mutant in left]


def late(memory: SimulatedMemory) -> None:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new. Both ways in turn."""
    group = Group(memory, memory.rank, memory.world)
    for copied in (False, True, False):
        if copied:
            group.stage(0)
            group.copy(0)
            group.product(0)
        else:
            group.gather(0)
        before = group.end.state[0].item()
        with pytest.raises(PeerTimeout), memory.guard("all_gather_gemm"):
            if memory.rank == 0:
                memory.barrier("elsewhere")
            for _ in range(2):
                xs, weight, chunks = group.inputs(3)
                if copied:
                    group.stage(3)
                    group.copy(3)
                multiply(xs[memory.rank], weight, None, chunks, group.ready, group.end, copied=copied)
                assert group.end.state[0] == before, "the epoch is not over"
                assert not (group.ready > before).any(), "nothing of it is delivered"
        memory.reset()
        memory.barrier()
        assert group.end.state.tolist() == [0, 0]


def test_waits_end() -> None:
    explore(late, 2, resident=2, timeouts=True)


def test_what_is_done_after_an_abort_is_seen() -> None:
    mutants = [
        mutant_of("an epoch of parts", all_gather_gemm, "if chunks == WORLD:", "if chunks > 0:"),
        mutant_of("delivered", staging, "if running:\n        put(ready_ptr", "if epoch != 0:\n        put(ready_ptr"),
    ]
    options: dict[str, Any] = {"resident": 4, "timeouts": True, "schedules": [RoundRobin()]}
    assert not surviving(lambda *copies: late, MODULES, 2, mutants=mutants, **options)
