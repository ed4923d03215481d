"""Programs of ranks in one process pass in the explorer and detect a missing wait, and one rank runs alone."""

import sys
from collections.abc import Callable

import pytest
import torch

from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import Sequential, SimulatedMemory, explore
from tpfuse.explore.mutants import mutants_of, surviving
from tpfuse.explore.suite import current
from tpfuse.kernels import all_gather_gemm, signals
from tpfuse.ops.linear import fused as fused_linear
from tpfuse.testing.one_process import OneProcess
from tpfuse.tools import one_rank, rank_programs
from tpfuse.tools.rank_programs import TINY, iterate

CPU = torch.device("cpu")


def of(name: str, rounds: int = 4) -> Callable[[SimulatedMemory], None]:
    def program(memory: SimulatedMemory) -> None:
        programs = current(rank_programs)
        assert programs.iterate(memory, programs.PROGRAMS[name](memory, TINY), rounds) == []

    return program


@pytest.mark.parametrize("name", ["all_gather_gemm", "all_gather_gemm, copy engines"])
def test_results_are_right_past_the_largest_epoch(name: str) -> None:
    explore(of(name), 2, schedules=[Sequential()], resident=3)


def test_a_missing_wait_is_detected() -> None:
    """The mutants delete or weaken the product's waits for copiers and for peers."""
    mutants = [
        x
        for x in mutants_of(all_gather_gemm, among=[signals])
        if x.text.startswith(("wait_signal(", "if wait_signal("))
    ]
    assert len(mutants) >= 2
    modules = [all_gather_gemm, fused_linear, rank_programs]
    assert not surviving(
        lambda *copies: of("all_gather_gemm"), modules, 2, mutants=mutants, schedules=[Sequential()], resident=3
    )


def test_results_are_compared_to_the_bit() -> None:
    expected = rank_programs._exactly({"out": torch.tensor([1.0, 2.0])})
    program = rank_programs.RankProgram([(dict, expected)])
    program.check(0, {"out": torch.tensor([1.0, 2.0])})
    with pytest.raises(AssertionError, match=r"out\[1\] is 2.0000002.*, expected 2.0"):
        program.check(0, {"out": torch.tensor([1.0, 2.0000002])})


class Later:
    """A program whose results change in its fifth round on rank 1."""

    def __init__(self, memory: SimulatedMemory) -> None:
        self.memory, self.rounds = memory, 0

    def run(self, variant: int) -> dict[str, torch.Tensor]:
        self.rounds += 1
        return {"out": torch.tensor([variant, int(self.rounds == 5 and self.memory.rank == 1)])}

    def check(self, variant: int, results: dict[str, torch.Tensor]) -> None:
        assert results["out"].tolist() == [variant, 0]


def test_rounds_with_other_bits_are_returned() -> None:
    results = OneProcess(2, CPU).at_once(lambda memory: iterate(memory, Later(memory), 6))  # type: ignore[arg-type]
    assert results == [[], [5 - 1 - rank_programs.VARIANTS]]


@pytest.mark.parametrize("name", ["all_gather_gemm, copy engines", "gemm_reduce_scatter, copy engines"])
def test_one_rank_alone_runs_without_waiting(name: str) -> None:
    one_rank.profile(name, 3, 1, TINY, CPU, timeout=60.0)


def test_one_rank_without_signals_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneProcess, "signal_ahead", lambda self, rank: setattr(self, "timeout", 0.5))
    with pytest.raises(PeerTimeout, match=r"rank 1 waited 0\.5 s"):
        one_rank.profile("all_gather_gemm", 3, 1, TINY, CPU, timeout=60.0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["one_rank", *arguments])
        return one_rank.main()

    assert run("gemm_reduce_scatter", "--world", "2", "--rows", "5") == 0
    assert capsys.readouterr().out == "gemm_reduce_scatter: rank 0 of 2, once, on cpu: nothing has waited\n"
    with pytest.raises(SystemExit, match="2"):
        run("collectives", "--rank", "8")
    assert "rank 8 of 8: expected 0 <= rank < world" in capsys.readouterr().err
    monkeypatch.setattr(one_rank, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("collectives") == 2
    assert "there is no CUDA GPU" in capsys.readouterr().err
