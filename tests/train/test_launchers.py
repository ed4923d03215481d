"""Processes that a launcher has started are ranks of one run, or every one of them is refused in a line."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.command import Command, losses
from tpfuse.cli import COMMANDS, run
from tpfuse.errors import UserError
from tpfuse.tools import doctor
from tpfuse.tools.machine import Machine
from tpfuse.train.launchers import LAUNCHERS, launched, several

MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_GTIDS=2,3"
OPEN_MPI = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
MPICH = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
PALS = "PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2"
TORCHRUN = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
PODS = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500"


def _variables(words: str) -> dict[str, str]:
    return dict(word.split("=") for word in words.split())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (MPICH, "MPICH"),
        (PALS, "PALS"),
        (SRUN, "srun"),
        # torchrun as the only task of each node, torchrun in pods, mpirun whose daemons srun has started, srun with PMI
        (f"{TORCHRUN} SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_GTIDS=1", "torchrun"),
        (f"{TORCHRUN} PET_NNODES=2 PET_NODE_RANK=1", "torchrun"),
        (f"{OPEN_MPI} SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_GTIDS=1", "Open MPI"),
        (f"{SRUN} PMI_RANK=3 PMI_SIZE=4", "srun"),
    ],
)
def test_the_processes_of_a_launcher_are_ranks(words: str, name: str) -> None:
    """Without an address where they can meet, they are refused with the command of this launcher."""
    found = launched(_variables(words) | MEETING)
    assert found is not None and found[1:] == (3, 4, 1, 2)
    assert name in found.launcher.name
    if "PET_NNODES" in words:
        return
    with pytest.raises(UserError, match="without MASTER_ADDR and MASTER_PORT: ") as refused:
        launched(_variables(words))
    assert found.launcher.way in str(refused.value)
    assert found.launcher.world in str(refused.value).rpartition("unset ")[2]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "RANK=0",  # of a container
        "WORLD_SIZE=4",
        "RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=23456 PET_NNODES=1 PET_NODE_RANK=0",  # one pod
        "SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GTIDS=0",  # a batch script, and one with 8 tasks
        "SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GTIDS=0 SLURM_TASKS_PER_NODE=8",
        "SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=4294967290 SLURM_PTY_PORT=1",  # salloc
        "SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=0",  # srun -n 1
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
    ],
)
def test_one_process_starts_its_ranks(words: str) -> None:
    variables = _variables(words)
    assert launched(variables) is None and several(variables) == ""


def test_the_shell_of_a_terminal_is_one_process_of_its_step() -> None:
    """Tasks that are started from that shell have its variables, but no terminal."""
    shell = _variables(f"{SRUN.replace('=3 ', '=0 ', 1)} SLURM_PTY_PORT=34889")
    for terminal in (True, False):
        with mock.patch("sys.stdin", mock.Mock(isatty=lambda found=terminal: found)):
            assert bool(several(shell)) is not terminal


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            PODS,
            "WORLD_SIZE=2 .* without LOCAL_RANK: .*torchrun --nnodes .WORLD_SIZE --node-rank .RANK .* unset WORLD_SIZE",
        ),
        (
            f"{PODS} PET_NNODES=2 PET_NODE_RANK=1",
            "PET_NNODES=2 .* without LOCAL_RANK: let each pod start .* PET_NNODES$",
        ),
        ("PET_NNODES=1:4", "PET_NNODES=1:4 .* let each pod start torchrun"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "without MASTER_ADDR and MASTER_PORT"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1", "RANK=2, WORLD_SIZE=2, .* contradict each"),
        (f"{PODS} LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1 contradict each other"),
        ("RANK=first WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1", "RANK=first: expected a number"),
        (SRUN.replace("SLURM_GTIDS=2,3", ""), "without SLURM_GTIDS and MASTER_ADDR"),
    ],
)
def test_what_does_not_say_all_that_ranks_need_is_refused(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        launched(_variables(words))


def test_a_process_of_torchrun_may_be_alone() -> None:
    """It is its only rank, so that it does not start others. LOCAL_WORLD_SIZE may be missing."""
    found = launched(dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "1"} | MEETING)
    assert found is not None and found[1:] == (0, 1, 0, 1)
    found = launched(_variables(TORCHRUN.replace("LOCAL_WORLD_SIZE=2", "")) | MEETING)
    assert found is not None and found[1:] == (3, 4, 1, 4)


def _in(variables: Mapping[str, str]) -> Any:
    """Return a patch of the environment to that of a process of a launcher."""
    own = {name for launcher in LAUNCHERS for name in launcher[1:5]} | set(MEETING)
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return mock.patch.dict(os.environ, {**kept, **variables}, clear=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_several_processes_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that would start ranks, measure, or write beside each other are refused, and their help is not."""
    words = [name] if name == "doctor" else [name, str(tmp_path / "none"), str(tmp_path / "other")]
    with _in(_variables(PODS)), mock.patch("tpfuse.cli.import_module") as imported:
        imported.return_value = mock.Mock(**{f"{COMMANDS[name].function.partition(':')[2]}.return_value": 0})
        with mock.patch("tpfuse.cli._doctor", return_value=0):
            status = run(words)
        said = capsys.readouterr().err
        with pytest.raises(SystemExit, match="0"):
            run([name, "--help"])
    if name in ("doctor", "hang", "memory", "watch"):
        assert "LOCAL_RANK" not in said and "one process" not in said
        return
    assert status == 2 and said.count("\n") == 1
    assert ("without LOCAL_RANK" if name in ("train", "evaluate", "sample") else "one process is enough") in said


def test_the_doctor_says_what_it_sees() -> None:
    def said(words: str) -> list[tuple[str, str]]:
        machine = Machine(environment=_variables(words))
        return [(status, text) for status, text, *_ in doctor._environment(machine, False)]

    assert said("") == []
    assert said(f"{SRUN} MASTER_ADDR=a MASTER_PORT=1") == [("ok", "This is rank 3 of 4 that srun of Slurm has started")]
    (found,) = said(PODS)
    assert found[0] == "fails" and "torchrun --nnodes" in found[1]


@pytest.mark.processes
@pytest.mark.parametrize("meets", [True, False])
def test_two_tasks_of_srun_train_one_run_or_none(meets: bool, flags: list[str], tmp_path: Path) -> None:
    double = ["--train.dtype", "float64", "--train.log-every", "1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tasks = []
    for rank in range(2):
        words = f"SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID={rank} SLURM_GTIDS=0,1"
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if meets else {}
        with _in(_variables(words) | meeting):
            tasks.append(Command(["-m", "tpfuse", "train", *flags, *double, "--out", str(tmp_path / "run")]))
    for task in tasks:
        _, error = task.end(0 if meets else 2)
        assert meets or error.startswith("tpfuse train: error: SLURM_STEP_NUM_TASKS=2 says that srun")
    assert (tmp_path / "run").exists() is meets
    if meets:
        assert run(["train", *flags, *double, "--out", str(tmp_path / "one")]) == 0
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
