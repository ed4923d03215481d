"""The collectives under many schedules: no false alarm, no line that is not needed, no wait without an end."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tpfuse.comm.errors import PeerTimeout
from tpfuse.kernels import all_gather, all_reduce, all_to_all, endpoint, reduce_scatter, signals
from tpfuse.testing.explore import PCT, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

Program = Callable[[SimulatedMemory], None]
Connect = Callable[..., Any]
MODULES = {
    "all_gather": all_gather, "all_to_all": all_to_all, "reduce_scatter": reduce_scatter,
    "one_shot": all_reduce, "two_shot": all_reduce,
}  # fmt: skip
SIZES = (40, 7, 50)  # grids of several programs and of one take turns

pytestmark = pytest.mark.usefixtures("small_tiles")


def program_of(collective: Any, connect: Connect, sizes: Sequence[int] = SIZES) -> Program:
    """An epoch for each size."""

    def program(memory: SimulatedMemory) -> None:
        end = connect(memory)
        for epoch, n in enumerate(sizes):
            xs = [integers(10 * epoch + rank, memory.world, n) for rank in range(memory.world)]
            out = collective.run(xs[memory.rank], end)
            assert torch.equal(out, collective.plain(xs, memory.rank)), f"epoch {epoch + 1}"

    program.__name__ = collective.name
    return program


@pytest.mark.parametrize(("world", "resident"), [(2, 1), (3, 2)])
def test_no_alarm(collective: Any, connect: Connect, world: int, resident: int) -> None:
    explore(program_of(collective, connect), world, resident=resident)


def test_no_alarm_in_fifty_seeds(collective: Any, connect: Connect) -> None:
    explore(program_of(collective, connect, (24, 7, 20)), 2, resident=2, schedules=map(PCT, range(50)))


def left_by(program: Program, module: ModuleType, mutants: list[Mutant]) -> list[Mutant]:
    """Those that the program does not fail. What it calls is looked up while it runs, and so mutated."""
    return surviving(lambda *copies: program, [signals, endpoint, module], 2, mutants=mutants, resident=2)


def test_every_line_is_needed(collective: Any, connect: Connect) -> None:
    module = MODULES[collective.name]
    kernel = f"all_reduce_{collective.name}_kernel" if module is all_reduce else f"{collective.name}_forward_kernel"
    found = mutants_of(signals, endpoint, getattr(module, kernel))
    mutants = [mutant for mutant in found if mutant.module == module.__name__]
    assert len(mutants) == (3 if collective.name == "two_shot" else 2)
    left = left_by(program_of(collective, connect), module, mutants)
    assert not left, "\n".join(map(str, left))


def test_every_line_of_the_signals_is_needed(two_shot: Any, connect: Connect) -> None:
    left = [str(mutant) for mutant in left_by(program_of(two_shot, connect), all_reduce, mutants_of(signals))]
    assert [text.partition(".py:")[2].partition(": ")[2] for text in left] == ["tl.debug_barrier(): deleted"], (
        "that of `advance` alone: the barrier before has been one; test_signals needs it"
    )


FAULTS = {
    "one half": (endpoint, "(epoch & 1) * slot_bytes", "0 * slot_bytes"),
    "tiles of another program": (
        endpoint, "range(tl.program_id(0), ", "range(tl.num_programs(0) - 1 - tl.program_id(0), "
    ),
    "a row that is cut short": (endpoint, "(element < total)", "(element < total - 1)"),
    "the first round again": (all_reduce, "ROUND=1", "ROUND=0"),
    "the other one's part": (all_reduce, "part * rank + column", "part * (1 - rank) + column"),
    "an epoch too far": (signals, "epoch = tl.load(state_ptr) + 1", "epoch = tl.load(state_ptr) + 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_are_no_deletion(two_shot: Any, connect: Connect, fault: str) -> None:
    module, before, after = FAULTS[fault]
    source = inspect.getsource(module)
    assert source.count(before) == 1
    mutant = Mutant(module.__name__, str(module.__file__), (1, 1), before, fault, source.replace(before, after))
    assert not left_by(program_of(two_shot, connect), all_reduce, [mutant])


def late(collective: Any, connect: Connect) -> Program:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new."""

    def program(memory: SimulatedMemory) -> None:
        end = connect(memory)
        xs = [integers(rank, memory.world, 50) for rank in range(memory.world)]
        for _ in range(2):
            assert torch.equal(collective.run(xs[memory.rank], end), collective.plain(xs, memory.rank))
            with pytest.raises(PeerTimeout), memory.guard(collective.name):
                if memory.rank == 0:
                    memory.barrier("elsewhere")
                collective.run(xs[memory.rank], end)
                assert end.state[0] == 1, "the epoch is not over"
                collective.run(xs[memory.rank], end)
            memory.reset()
            memory.barrier()
            assert end.state.tolist() == [0, 0]

    return program


def test_waits_end(collective: Any, connect: Connect) -> None:
    explore(late(collective, connect), 2, resident=2, timeouts=True)


def test_every_kernel_that_signals_is_tested_so() -> None:
    """A new one has a file like this one, of its name, whose tests delete its lines."""
    folder = Path(signals.__file__).parent
    found = {path.stem for path in folder.glob("*.py") if "tpfuse.kernels.signals" in path.read_text()}
    others = {"endpoint", "signal_wait"}  # without a kernel; with nothing behind its wait
    others.add("staging")  # in test_all_gather_gemm_protocol.py, beside the product that it stages for
    others |= {"block_exchange", "ring_attention_forward"}  # in test_ring_attention_protocol.py
    others.add("ring_attention_dq")  # in test_ring_attention_backward_protocol.py, with the launch behind it
    own = {path.stem[len("test_") : -len("_protocol")] for path in Path(__file__).parent.glob("test_*_protocol.py")}
    assert found - others - own == {module.__name__.rpartition(".")[2] for module in MODULES.values()}
