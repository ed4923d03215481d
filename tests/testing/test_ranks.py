"""Pools of ranks: results, failures, and the settings that ranks take over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpfuse.testing.patience import wait_until
from tpfuse.testing.ranks import RankError, RankPool, on_ranks, pool, run_apart


def _sum(value: int) -> tuple[int, int, int]:
    x = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), int(x)


def _process() -> int:
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == int(os.environ.get("OMP_NUM_THREADS", "1"))
    return os.getpid()


def test_results_are_in_rank_order_and_processes_are_reused() -> None:
    ranks = pool(3)
    assert ranks.run(_sum, 10) == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]
    assert ranks.run(_process) == ranks.run(_process)
    assert pool(3) is ranks


def _stopped(ranks: list[int]) -> bool:
    return all("(stopped)" in Path(f"/proc/{rank}/status").read_text() for rank in ranks)


@pytest.mark.processes
def test_ranks_at_rest_are_stopped_and_end_with_the_process_of_their_pool() -> None:
    program = "import tests.testing.test_ranks as t; print(*t.pool(2).run(t._process), flush=True); input()"
    command = [sys.executable, "-c", "import torch; torch.use_deterministic_algorithms(True); " + program]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ranks = [int(rank) for rank in process.stdout.readline().split()]
        assert len(ranks) == 2
        wait_until(lambda: _stopped(ranks), "ranks at rest are stopped", 10.0)
        process.kill()
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "the ranks have ended", 10.0)


def _raise(guilty: int) -> None:
    if dist.get_rank() == guilty:
        raise KeyError("a message of its own")
    dist.barrier()


def _die(guilty: int) -> None:
    if dist.get_rank() == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang(guilty: int) -> None:
    while dist.get_rank() == guilty:
        time.sleep(0.1)


def _unpicklable() -> object:
    return lambda: None


def test_failures_are_reported_and_the_next_run_works() -> None:
    ranks = RankPool(2, timeout=20.0, grace=0.5)
    try:
        with pytest.raises(RankError, match=r"rank 1: Traceback[^$]*KeyError: 'a message of its own'"):
            ranks.run(_raise, 1)
        assert ranks.run(_sum, 1)[1] == (1, 2, 3)
        with pytest.raises(RankError, match="rank 0: died with exit code -9"):
            ranks.run(_die, 0)
        ranks.run(_sum, 1)
        ranks.timeout = 1.0
        with pytest.raises(RankError, match="rank 1: no answer in time"):
            ranks.run(_hang, 1)
        ranks.timeout = 20.0
        assert ranks.run(_sum, 1)[0] == (0, 2, 3)
        processes, folder = ranks.run(_process), Path(str(ranks._folder))
        assert folder.is_dir()
        with pytest.raises(RankError, match="rank 0: Traceback"):
            ranks.run(_unpicklable)
    finally:
        ranks.close()
    assert not folder.exists()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def _deterministic() -> tuple[bool, bool, str]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_ranks_take_over_the_deterministic_mode() -> None:
    """They also have a cuBLAS workspace of a fixed size, without which cuBLAS raises in that mode."""
    assert pool(1).run(_deterministic) == [(True, False, ":4096:8")]
    ranks = RankPool(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert ranks.run(_deterministic) == [(True, True, ":4096:8")]
    finally:
        torch.use_deterministic_algorithms(True)
        ranks.close()


def _word() -> str | None:
    return os.environ.get("TPFUSE_WORD")


def test_ranks_take_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pool(1).run(_word)  # starts the server from which ranks are forked
    ranks = RankPool(1)
    try:
        monkeypatch.setenv("TPFUSE_WORD", "later")
        assert ranks.run(_word) == ["later"]
    finally:
        ranks.close()


def _apart(what: str) -> tuple[int, int, str | None]:
    if what == "raise":
        raise KeyError("a message of its own")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while what == "hang":
        time.sleep(0.1)
    return os.getpid(), len(list(Path("/proc/self/task").iterdir())), _word()


def test_run_apart_runs_a_function_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPFUSE_WORD", "now")
    process, threads, word = run_apart(_apart, "")
    assert process != os.getpid() and word == "now"
    assert threads == 1 or os.environ["OMP_NUM_THREADS"] != "1", "beside OpenBLAS's, which survive forks"
    for what, message in (("raise", "KeyError: 'a message of its own'"), ("die", "died")):
        with pytest.raises(RankError, match=message):
            run_apart(_apart, what)
    with pytest.raises(RankError, match="no answer in time"):
        run_apart(_apart, "hang", timeout=0.3)


@pytest.mark.parametrize("value", [10])
@pytest.mark.parametrize("half", [1])
@on_ranks(2, "half")
def test_a_test_on_ranks_runs_its_body_on_each_of_them(value: int) -> None:
    rank, world, total = _sum(value)
    assert (rank in range(2), world, total) == (True, 2, 21)


@on_ranks(2)
def _fails_on_rank_1() -> None:
    assert dist.get_rank() == 0, "a message of its own"


def test_a_test_on_ranks_fails_if_its_body_fails_on_one_of_them() -> None:
    with pytest.raises(RankError, match=r"rank 1: Traceback[^$]*a message of its own"):
        _fails_on_rank_1()
