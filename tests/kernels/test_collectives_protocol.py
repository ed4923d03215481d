"""The collectives under many schedules: no false alarm, no unneeded line, no wait without an end."""

import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tpfuse.kernels
from tests.support.channels import connect
from tpfuse.explore import SimulatedMemory, explore_all
from tpfuse.explore.mutants import Mutant, mutants_of
from tpfuse.explore.suite import Fault, ProtocolSuite, replace, without_rank_0
from tpfuse.kernels import (
    all_gather,
    all_gather_gemm_ping_pong,
    all_reduce,
    all_to_all,
    attention_merge,
    cross_entropy,
    endpoint,
    gemm_reduce_scatter_ping_pong,
    ping_pong,
    ping_pong_epilogue,
    reduce_scatter,
    signal_wait,
    signals,
)
from tpfuse.ops.linear import engine_gather, engine_scatter
from tpfuse.testing.inputs import integers

SIZES = (40, 7, 50)  # grids of several programs and of one alternate

TILES = {name: {"BLOCK": 16} for name in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")}

pytestmark = pytest.mark.usefixtures("tiny_tiles")


class CollectiveSuite(ProtocolSuite):
    """The suite of one collective, by its name."""

    name: ClassVar[str]
    collectives: Mapping[str, Any]
    fixtures = ("collectives",)
    worlds = ((2, 2), (2, 1), (3, 2))

    def epochs(self, memory: SimulatedMemory, sizes: Sequence[int], first: int = 0) -> Iterator[tuple[int, int]]:
        """Run an epoch for each size, after `first` epochs. Those of one parity have the same inputs."""
        collective, end = self.collectives[self.name], connect(memory)
        end.state[0] = first
        for epoch, n in enumerate(sizes, 1):
            xs = [integers(10 * (epoch % 2) + rank, memory.world, n) for rank in range(memory.world)]
            out = collective.run(xs[memory.rank], end)
            assert torch.equal(out, collective.plain(xs, memory.rank)), f"epoch {epoch}"
            yield int(end.state[0]), epoch % 2

    def program(self, memory: SimulatedMemory) -> None:
        list(self.epochs(memory, SIZES))

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return self.epochs(memory, (24, 7) * 2)

    def late_program(self, memory: SimulatedMemory) -> None:
        collective, end = self.collectives[self.name], connect(memory)
        xs = [integers(rank, memory.world, 50) for rank in range(memory.world)]
        for _ in range(2):
            assert torch.equal(collective.run(xs[memory.rank], end), collective.plain(xs, memory.rank))
            run = partial(collective.run, xs[memory.rank], end)
            without_rank_0(memory, collective.name, end.state, run)


class TestAllGather(CollectiveSuite):
    name = "all_gather"
    modules = (signals, endpoint, all_gather)
    needed = (all_gather,)


class TestAllToAll(CollectiveSuite):
    name = "all_to_all"
    modules = (signals, endpoint, all_to_all)
    needed = (all_to_all,)


class TestReduceScatter(CollectiveSuite):
    name = "reduce_scatter"
    modules = (signals, endpoint, reduce_scatter)
    needed = (reduce_scatter,)


class TestOneShot(CollectiveSuite):
    name = "one_shot"
    modules = (signals, endpoint, all_reduce)
    needed = (all_reduce.all_reduce_one_shot_kernel,)


class TestTwoShot(CollectiveSuite):
    """The suite of the collective that uses most of the protocol, so that it needs every line of the signals too."""

    name = "two_shot"
    modules = (signals, endpoint, all_reduce)
    needed = (all_reduce.all_reduce_two_shot_kernel, signals)
    unneeded: ClassVar = {
        (signals.advance, "tl.debug_barrier()"): "the barrier before it has been one; test_signals.py needs it"
    }
    faults = (
        Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes")),
        Fault(
            "tiles of another program",
            replace(endpoint.stage, "tl.program_id(0)", by="tl.num_programs(0) - 1 - tl.program_id(0)", call="range"),
        ),
        Fault("a row that is cut short", replace(endpoint.stage, "element < total", by="element < total - 1")),
        Fault("the first round again", replace(all_reduce.all_reduce_two_shot_kernel, "1", by="0", call="barrier")),
        Fault(
            "the other one's part",
            replace(all_reduce._sum_part, "part * rank + column", by="part * (1 - rank) + column"),
        ),
        Fault("an epoch too far", replace(signals.begin, "tl.load(state_ptr) + 1", by="tl.load(state_ptr) + 2")),
    )

    @pytest.mark.exhaustive
    def test_no_alarm_where_epochs_wrap_around(self) -> None:
        """The rounds after 2^31 - 1 have the states of those before."""
        report = explore_all(lambda memory: self.epochs(memory, (24, 7) * 2, first=2**31 - 4), 2)
        assert report.exhausted and report.grows == ""


def _suites() -> Iterator[type[ProtocolSuite]]:
    """Yield the suites of all kernels: those of the modules test_*_protocol.py in this folder."""
    for path in sorted(Path(__file__).parent.glob("test_*_protocol.py")):
        spec = importlib.util.spec_from_file_location(f"tpfuse_suites_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for suite in vars(module).values():
            if inspect.isclass(suite) and issubclass(suite, ProtocolSuite) and suite.__name__.startswith("Test"):
                yield suite


def _lines(mutants: list[Mutant]) -> set[tuple[str, int]]:
    return {(mutant.module, mutant.lines[0]) for mutant in mutants}


def test_every_synchronisation_line_of_a_kernel_belongs_to_a_suite() -> None:
    """A kernel that signals has a suite in a file like this one, which deletes its lines."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(signals.__file__).parent)])]
    kernels = [importlib.import_module(f"{tpfuse.kernels.__name__}.{name}") for name in names]
    lines = _lines(mutants_of(*kernels, engine_gather, engine_scatter))  # in these the host signals between copies
    tested = {line for suite in _suites() for line in _lines(mutants_of(*suite.needed, among=suite.modules))}
    assert {module for module, _ in tested} <= {module for module, _ in lines}
    left = {module for module, _ in lines - tested}
    # Their barriers order warps: the emulator's business. It also explores kernels in Gluon, which are not interpreted.
    within = {module.__name__ for module in (attention_merge, cross_entropy, ping_pong, ping_pong_epilogue)}
    within |= {module.__name__ for module in (all_gather_gemm_ping_pong, gemm_reduce_scatter_ping_pong)}
    assert left <= {signal_wait.__name__} | within, "test_signal_wait.py: nothing comes after its wait that could race"
