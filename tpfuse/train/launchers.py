"""The launcher that has started this process as one of several, and its place among them, by environment variables.

The variables are those of torch's `distributed/run.py`, of Slurm's `env_array_for_step` (a batch script has none of a
step), of `mpirun` of Open MPI 5 and `mpiexec` of MPICH 5 as they run, of HPE's PALS, and of Kubeflow's PyTorchJob.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tpfuse.errors import UserError


class Launcher(NamedTuple):
    """The variables of a launcher. way: the command that starts its processes as ranks."""

    name: str
    rank: str
    world: str
    # Empty if the launcher does not tell the processes of a node apart.
    local_rank: str
    local_world: str
    way: str
    # Returns the number of processes of this node from the value of `local_world`.
    count: Callable[[str], int] = int
    # Set in a terminal that the launcher opens, whose shell is one process of a step that may have more.
    terminal: str = ""


TORCHRUN = Launcher(
    "a launcher such as torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "set it too, or start the ranks of each node by torchrun; where RANK numbers the nodes: torchrun --nnodes"
    " $WORLD_SIZE --node-rank $RANK --nproc-per-node N --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
    " -m tpfuse ...",
)  # fmt: skip
LAUNCHERS = (
    TORCHRUN,
    Launcher(
        "a PyTorchJob of Kubernetes", "PET_NNODES", "PET_NNODES", "", "",
        "let each pod start torchrun, which reads its PET_ variables: torchrun --nproc-per-node N -m tpfuse ...",
    ),
    Launcher(
        "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "name the node of rank 0: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 tpfuse ...",
    ),
    Launcher(
        "mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        "name the node of rank 0: mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 tpfuse ...",
    ),
    Launcher(
        "mpiexec of PALS", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE",
        "name the node of rank 0: mpiexec --env MASTER_ADDR=HOST --env MASTER_PORT=29500 tpfuse ...",
    ),
    Launcher(
        "srun of Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS",
        "before srun, export MASTER_PORT=29500 MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" |"
        " head -n 1); or start one task, which starts the ranks of its node itself: srun -n 1 tpfuse ...",
        count=lambda tasks: tasks.count(",") + 1, terminal="SLURM_PTY_PORT",
    ),
)  # fmt: skip
"""A launcher stands before those that may run it, whose variables its processes have too."""


class Launched(NamedTuple):
    """The place of this process among those that a launcher has started, in all and on this node."""

    launcher: Launcher
    rank: int
    world: int
    local_rank: int
    local_world: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the place of this process among those of a launcher; None if it is the only one.

    One process of torchrun is its only rank, and one process of another launcher is none: it starts ranks itself. Raise
    UserError if a launcher has started several and does not say all that ranks must know.
    """
    started = _started(environment)
    for launcher in dict.fromkeys((TORCHRUN, *started)):
        if launcher.local_rank in environment and not _missing(launcher, environment):
            return _place(launcher, environment)
    if not started:
        return None
    refused = min(started, key=lambda launcher: (launcher.local_rank != "", len(_missing(launcher, environment))))
    lacks = " and ".join(_missing(refused, environment)) if refused.local_rank else "LOCAL_RANK"
    raise UserError(f"{_said(refused, environment)}, without {lacks}: {refused.way}; {_alone(started)}")


def several(environment: Mapping[str, str] = os.environ) -> str:
    """Return which launcher has started several processes, and what lets each of them be the only one; "" for none."""
    started = _started(environment)
    return f"{_said(started[0], environment)}: start one; {_alone(started)}" if started else ""


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, number of ranks), which are (0, 1) where `launched` finds none."""
    try:
        found = launched(environment)
    except UserError:
        found = None
    return (0, 1) if found is None else (found.rank, found.world)


def _started(environment: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers that have started several processes, of which this is one.

    Some of their variables alone are not enough: the containers of a cluster may have a rank of their own.
    """
    found = []
    for launcher in LAUNCHERS:
        in_terminal = launcher.terminal in environment and sys.stdin is not None and sys.stdin.isatty()
        if launcher.rank in environment and launcher.world in environment and not in_terminal:
            most = environment[launcher.world].rpartition(":")[2]  # 1:4 are the pods of an elastic job
            found += [launcher] if _number(launcher.world, most) > 1 else []
    return found


def _said(launcher: Launcher, environment: Mapping[str, str]) -> str:
    return f"{launcher.world}={environment[launcher.world]} says that {launcher.name} has started several processes"


def _alone(started: Sequence[Launcher]) -> str:
    names = dict.fromkeys(launcher.world for launcher in started)
    return f"for a run of its own in each process, unset {' '.join(names)}"


def _missing(launcher: Launcher, environment: Mapping[str, str]) -> list[str]:
    """Return the variables that ranks need and do not have."""
    needed = [launcher.rank, launcher.world, launcher.local_rank, launcher.local_world, "MASTER_ADDR", "MASTER_PORT"]
    if launcher is TORCHRUN:
        needed.remove(launcher.local_world)  # programs that set the same may leave it out, for ranks of one node
    return [name for name in needed if name not in environment]


def _place(launcher: Launcher, environment: Mapping[str, str]) -> Launched:
    """Return the place that the variables say. Raise UserError if they contradict each other."""
    names = [launcher.rank, launcher.world, launcher.local_rank]
    rank, world, local_rank = (_number(name, environment[name]) for name in names)
    local_world = environment.get(launcher.local_world)
    size = world if local_world is None else launcher.count(local_world)
    if not (rank < world and local_rank < size <= world):
        names += [launcher.local_world] if local_world is not None else []
        found = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError(f"{found} contradict each other: expected a rank below the number of ranks, also on the node")
    return Launched(launcher, rank, world, local_rank, size)


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UserError(f"{name}={value}: expected a number, as launchers of ranks set it")
    return int(value)
