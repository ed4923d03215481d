"""sharded_adamw under many schedules, with and without shard_sum before it: no false alarm, no line that is not needed,
no wait without an end.

With β₁ = β₂ = 0 and eps = 1 the update is p = p - lr decay p - lr g / (|g| + 1), which torch rounds as the kernel does.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels import shard_sum as shard_sums
from tpfuse.kernels import sharded_adamw, signals
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.explore import PCT, RaceError, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

Program = Callable[[SimulatedMemory], None]
Connect = Callable[..., Endpoint]
LR = 0.5
RATES = {"beta1": 0.0, "beta2": 0.0, "eps": 1.0, "weight_decay": 0.25}

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # 0 log 0


@pytest.fixture(autouse=True)
def tiny_tiles() -> Iterator[None]:
    """Tiles of 16 elements: small shards have several programs."""
    names = ("shard_sum", "sharded_adamw")
    rows = [row for row in read_table(TABLE) if row.operator in names and row.family == "interpreted"]
    with override(*(replace(row, blocks={"BLOCK": 16}) for row in rows)):
        yield


class Bucket:
    """Parameters and gradients of all ranks, shards of m elements; launchers are looked up at each call: mutants are
    elsewhere."""

    def __init__(self, memory: SimulatedMemory, end: Endpoint, m: int, dtype: torch.dtype) -> None:
        self.memory, self.end, self.m, self.border = memory, end, m, m // 2
        shape = (m * memory.world,)
        self.values = memory.buffer(f"values {m}", shape, dtype)
        self.gradients = memory.buffer(f"gradients {m}", shape, torch.float32)
        self.own = slice(memory.rank * m, (memory.rank + 1) * m)
        self.masters = integers(m, *shape)
        self.values.local.copy_(self.masters)
        self.master = None if dtype == torch.float32 else self.masters[self.own].clone()
        self.moments = torch.zeros(m), torch.zeros(m)
        memory.barrier()

    def backward(self, step: int) -> Tensor:
        """The sum over ranks of what is written into their gradients."""
        every = [integers(100 * step + rank, *self.gradients.shape) for rank in range(self.memory.world)]
        self.gradients.local.copy_(every[self.memory.rank])
        return torch.stack(every).sum(0)

    def sum(self) -> None:
        """In place."""
        launcher = importlib.import_module("tpfuse.kernels.shard_sum").shard_sum
        flat = self.gradients
        launcher(flat.local, flat.addresses, flat.local[self.own], torch.empty(3), self.own.start, self.end)

    def update(self, *, summed: bool) -> None:
        launcher = importlib.import_module("tpfuse.kernels.sharded_adamw").sharded_adamw_
        flat, numbers = self.gradients, {"lr": torch.tensor(LR), "step": torch.tensor(3.0), "clip": None}
        taken = (flat.local[self.own], None) if summed else (flat.local, flat.addresses)
        tensors = self.values.local, self.values.addresses, *taken, self.master, *self.moments
        launcher(*tensors, start=self.own.start, border=self.border, **RATES, **numbers, endpoint=self.end)

    def expect(self, total: Tensor) -> None:
        """Masters after one more update."""
        decay = torch.arange(len(total)) % self.m < self.border
        self.masters -= LR * RATES["weight_decay"] * decay * self.masters
        self.masters -= LR * (total / (total.abs() + 1))

    def check(self) -> None:
        """As a forward pass reads them."""
        assert torch.equal(self.values.local, self.masters.to(self.values.dtype))
        assert self.master is None or torch.equal(self.master, self.masters[self.own])


def program_of(connect: Connect, steps: int = 2) -> Program:
    """Two buckets: the gradients of one are summed before, as for a norm, of the other on the way."""

    def zero(memory: SimulatedMemory) -> None:
        end = connect(memory)
        buckets = Bucket(memory, end, 40, torch.float32), Bucket(memory, end, 7, torch.bfloat16)
        for step in range(steps):
            for bucket in buckets:
                bucket.check()
            totals = [bucket.backward(step) for bucket in buckets]
            for bucket, total in zip(buckets, totals, strict=True):
                bucket.expect(total)
            summed, other = buckets[step % 2], buckets[1 - step % 2]
            other.update(summed=False)  # the first launch of a step: nothing before it has met the other ranks
            summed.sum()
            summed.update(summed=True)
        for bucket, total in zip(buckets, totals, strict=True):
            bucket.check()
            assert torch.equal(bucket.moments[0], total[bucket.own]), "as β₁ is 0"

    return zero


@pytest.mark.parametrize(("world", "resident"), [(2, 1), (2, 2), (3, 2)])
def test_no_alarm(connect: Connect, world: int, resident: int) -> None:
    explore(program_of(connect), world, resident=resident)


def test_no_alarm_in_twenty_seeds(connect: Connect) -> None:
    explore(program_of(connect, steps=1), 2, resident=2, schedules=map(PCT, range(20)))


def test_gradients_are_written_behind_the_update_and_not_behind_the_sum(connect: Connect) -> None:
    def program(memory: SimulatedMemory) -> None:
        bucket = Bucket(memory, connect(memory), 20, torch.float32)
        bucket.backward(0)
        bucket.sum()
        bucket.backward(1)  # over what peers may still be reading

    with pytest.raises(RaceError, match="race on gradients 20"):
        explore(program, 2, resident=2)


def left_by(program: Program, mutants: list[Mutant]) -> list[Mutant]:
    """Those that the program does not fail."""
    targets = [signals, shard_sums, sharded_adamw]
    return surviving(lambda *copies: program, targets, 2, mutants=mutants, resident=2)


def test_every_line_is_needed(connect: Connect) -> None:
    found = mutants_of(signals, shard_sums, sharded_adamw)
    mutants = [mutant for mutant in found if mutant.module == sharded_adamw.__name__]
    assert len(mutants) == 3, "\n".join(map(str, mutants))
    left = left_by(program_of(connect), mutants)
    assert not left, "\n".join(map(str, left))


FAULTS = {
    "the first round again": ("ROUND=1", "ROUND=0"),
    "the epoch before will do": ("barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, ROUND=0)",
                                 "barrier(flags_ptr, abort_ptr, epoch - 1, rank, WORLD, ROUND=0)"),
    "another rank's shard of the gradients": ("sum_over_ranks(gradient_addresses_ptr, start,",
                                              "sum_over_ranks(gradient_addresses_ptr, 0,"),
    "another rank's shard of the parameters": ("% WORLD, start, dtype)", "% WORLD, 0, dtype)"),
    "another rank's masters": ("tl.load(values_ptr + start + offs", "tl.load(values_ptr + offs"),
    "parameters for this rank alone": ("(rank + distance) % WORLD", "rank"),
    "a rank gets none": ("tl.static_range(WORLD)", "tl.static_range(WORLD - 1)"),
    "a shard that is cut short": ("mask = offs < m", "mask = offs < m - 1"),
    "decayed beyond the border": ("offs < border", "offs <= border"),
}  # fmt: skip


def planted(fault: str) -> Mutant:
    source = inspect.getsource(sharded_adamw)
    before, after = FAULTS[fault]
    assert source.count(before) == 1, before
    changed = source.replace(before, after)
    return Mutant(sharded_adamw.__name__, str(sharded_adamw.__file__), (1, 1), before, fault, changed)


def test_faults_that_are_no_deletion(connect: Connect) -> None:
    left = left_by(program_of(connect), [planted(fault) for fault in FAULTS])
    assert not left, "\n".join(map(str, left))


def test_waits_end(connect: Connect) -> None:
    """Rank 0 does not come: the others' launches end with nothing changed, and after a reset everything is as new."""

    def late(memory: SimulatedMemory) -> None:
        bucket = Bucket(memory, connect(memory), 40, torch.bfloat16)
        for step in range(2):
            bucket.check()
            bucket.expect(bucket.backward(step))
            bucket.update(summed=False)
            with pytest.raises(PeerTimeout), memory.guard("sharded_adamw"):
                if memory.rank == 0:
                    memory.barrier("elsewhere")
                for _ in range(2):
                    bucket.update(summed=False)
                    assert bucket.end.state[0] == 1, "the epoch is not over"
            memory.reset()
            memory.barrier()
            bucket.check()
            assert bucket.end.state.tolist() == [0, 0]

    explore(late, 2, resident=2, timeouts=True)
