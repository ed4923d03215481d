"""The fused reducer equals the direct one, in processes and in the explorer."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.cuda_stand_in import StandIn
from tests.support.tiers import exhaustive, pairwise
from tpfuse.choices import Implementation
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.errors import Disagreement
from tpfuse.explore import Sequential, SimulatedMemory, explore
from tpfuse.explore.mutants import surviving
from tpfuse.explore.planting import Fault, replace
from tpfuse.kernels.launch import RESERVED, Reservation
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import shard
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.offload import MemoryStore
from tpfuse.zero.reducer import fused as fused_module
from tpfuse.zero.reducer.base import BucketSpec
from tpfuse.zero.reducer.direct import DirectReducer
from tpfuse.zero.reducer.fused import FusedReducer
from tpfuse.zero.reducer.shard_update import Rates, ShardUpdate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explored reducers are never closed."""
    monkeypatch.setattr(Reservation, "held", [])


def _steps(name: Implementation, stage: int, dtype: torch.dtype, sums: bool) -> list[Tensor]:
    """Return the parameters after three steps with several buckets; the second step has no update."""
    model = nn.Sequential(nn.Linear(9, 33, dtype=dtype), nn.Linear(33, 17, dtype=dtype))
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape))
    with use(implementation=name):
        buckets = shard(model, stage=stage, bucket_bytes=700)
        kind = FusedReducer if name == "fused" else DirectReducer
        assert [type(reducer) for reducer in buckets.reducers] == [kind]
        optimizer = BucketUpdater(buckets, weight_decay=0.1)
        norms = []
        for step in range(3):
            x = normal(10 * step + dist.get_rank(), 5, 9).to(dtype)
            buckets.start(last=True)
            model(x).square().sum().backward()
            buckets.finish(sums=sums)
            if sums:
                norms.append(torch.tensor(buckets.norm()))
            if step != 1:
                optimizer.step(1e-2, 0.5 if step else 1.0)
    found = [p.detach().clone().float() for p in model.parameters()] + norms
    buckets.close()
    return found


@pytest.mark.parametrize(
    *pairwise(world=[2, 3], stage=[2, 0, 1], dtype=[torch.float32, torch.bfloat16], sums=[True, False])
)
def test_equals_direct(world: int, stage: int, dtype: torch.dtype, sums: bool) -> None:
    expected = pool(world).run(_steps, "direct", stage, dtype, sums)
    found = pool(world).run(_steps, "fused", stage, dtype, sums)
    count = 4
    for rank, tensors in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(tensors[:count], found[0][:count], strict=True)), "ranks differ"
        for a, b in zip(tensors, expected[rank], strict=True):
            tolerance = torch.finfo(dtype).eps
            torch.testing.assert_close(a, b, rtol=2 * tolerance, atol=2 * tolerance)


BESIDE = {
    Fault("a buffer is written too early", replace(FusedReducer._sum_part, "self.memory.join(end)", by="None")): 2,
    Fault(
        "an older sum's end", replace(FusedReducer._sum_part, "self._ends.get(turn)", by="self._ends.get(turn - 1)")
    ): 2,
    Fault("the backward pass ends", replace(FusedReducer.end_backward, "self.memory.join(end)", by="None")): 1,
    Fault(
        "sums are summed again",
        replace(FusedReducer._must_sum_first, "self._last_turns[index] in self._ends", by="False"),
    ): 1,
}  # faults, and the stage that shows them


@on_ranks(2)
def test_sums_beside_the_backward_pass_have_multiprocessors_of_their_own() -> None:
    """Check the programs of sums beside the backward pass, and that products leave multiprocessors to them."""
    group, launched = dist.group.WORLD, list[int]()
    assert group is not None
    memory = CudaMemory(group, CPU, 60.0, StandIn(group))
    specs = [BucketSpec(64, torch.float32, torch.float32)]

    def step(reducer: FusedReducer) -> None:
        reducer.start_reduce(0)
        reducer.end_backward()
        reducer.reduced_shard(0)
        reducer.begin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_module, "most_programs", lambda memory: 132)
        patch.setattr(fused_module, "shard_sum", lambda *given: launched.append(given[-1].programs))
        patch.setattr(fused_module, "connected", lambda: [memory])
        first = FusedReducer(specs, 1, memory, "first")
        step(first)
        memory.channel(lambda *_: None, "layers'", 16)  # it leaves multiprocessors to sums
        step(first)
        second = FusedReducer(specs, 1, memory, "second")
        assert launched == [RESERVED, 132] and Reservation.held == ["sums beside the backward pass"] * 2
        second.free()
        first.free()
        third = FusedReducer(specs, 1, memory, "third")
        assert third.reservation is None and not Reservation.held
        third.free()
        patch.setattr(fused_module, "connected", lambda: [memory] * memory.rank)
        with pytest.raises(Disagreement, match="fourth: channel, sums beside the backward pass: slots"):
            FusedReducer(specs, 1, memory, "fourth")
    assert not Reservation.held


def test_each_event_of_the_second_stream_is_needed() -> None:
    for stage in (1, 2):
        mutants = [fault.mutant() for fault, shown in BESIDE.items() if shown == stage]
        program = program_of(stage, False, True)
        assert not surviving(program, [fused_module], 2, mutants=mutants, schedules=[Sequential()], resident=2)


def program_of(
    stage: int, sums: bool, beside: bool = False, rounds: int = 1, sizes: tuple[int, ...] = (1, 3, 1, 1)
) -> Callable[[ModuleType], Callable[[SimulatedMemory], None]]:
    """Return a program of three steps. rounds: how often each bucket is reduced in one. sizes: of the buckets."""

    def of(module: ModuleType) -> Callable[[SimulatedMemory], None]:
        def program(memory: SimulatedMemory) -> None:
            """Check values before each step. AdamW without moments changes them by lr against the gradient's sign."""
            world, memory.has_second_stream = memory.world, beside
            specs, buckets = [BucketSpec(16 * world * n, torch.float32, torch.float32) for n in sizes], len(sizes)
            reducer = module.FusedReducer(specs, stage, memory, "reducer")
            moments = [[torch.zeros(len(reducer.shard(i))) for _ in range(2)] for i in range(buckets)]
            ramps, value = [torch.arange(1.0, spec.size + 1) for spec in specs], 0.0
            for step in range(1, 4):
                for index in range(buckets):
                    assert torch.allclose(reducer.values(index), torch.tensor(value), atol=1e-5)
                reducer.begin()
                for round_, index in itertools.product(range(rounds), range(buckets)):
                    reducer.gradient_buffer(index).copy_(ramps[index] * (memory.rank + 1) * (round_ + 1))
                    reducer.start_reduce(index, more=round_ < rounds - 1)
                reducer.end_backward()
                shards = [reducer.shard(index) for index in range(buckets)]
                times = (world * (world + 1) // 2) * (rounds * (rounds + 1) // 2)
                whole = [ramp * times for ramp in ramps]
                expected = [x[shard.start : shard.stop] for x, shard in zip(whole, shards, strict=True)]
                if sums or (step == 2 and not beside):
                    for index in range(buckets):
                        assert torch.equal(reducer.reduced_shard(index), expected[index])
                if step == 2:
                    continue  # no update; the gradients are written again nevertheless
                # With a factor, torch's AdamW gets a copy of the gradients, because it is declared to write them.
                rates = Rates(0.1, 0.0, 0.0, 1e-8, 0.0, torch.tensor(1.0), 0.5)
                store = MemoryStore(CPU)
                reducer.update([ShardUpdate(*moments[index], None, 0, rates, store) for index in range(buckets)])
                for index in range(buckets):
                    assert torch.equal(moments[index][0], expected[index] * 0.5)
                value -= 0.1

        return program

    return of


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, (1, False)),
        (2, (2, False, True, 2)),
        (2, (2, True, False, 3, (1,))),
        *exhaustive((2, (0, True)), (2, (1, True)), (3, (2, True)), (3, (2, True, True, 2, (1, 3)))),
        *exhaustive((2, (0, True, True)), (2, (1, False, True))),
    ],
)
def test_no_alarm(case: tuple[Any, ...], world: int) -> None:
    explore(program_of(*case)(fused_module), world, resident=2)


FAULTS = {
    "the start of the whole bucket": (
        replace(FusedReducer._sum_shard, "node_shard.start", by="0", call="shard_sum"),
        (2, True),
    ),
    "another shard is written": (
        replace(FusedReducer._update_shard, "shard.start", by="0", call="sharded_adamw_"),
        (1, True),
    ),
    "a later sum replaces the earlier one": (
        replace(FusedReducer._sum_shard, "self._later_sums(index) if again else sums", by="sums"),
        (2, True, False, 2),
    ),
    "a buffer alone is written before its readers are done": (
        replace(FusedReducer._wait_until_read, "len(self._gradient_buffers) == 1", by="False"),
        (2, True, False, 3, (1,)),
    ),
    "old sums": (
        replace(
            FusedReducer._update_shard,
            "gradients[self.memory.rank] if sums is None else sums",
            by="gradients[self.memory.rank]",
            call="sharded_adamw_",
        ),
        (2, True),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    edit, case = FAULTS[fault]
    mutant = Fault(fault, edit).mutant()
    assert not surviving(program_of(*case), [fused_module], 2, mutants=[mutant], schedules=[Sequential()], resident=2)
