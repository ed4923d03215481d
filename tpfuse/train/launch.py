"""Ranks: started here on one machine, or joined where torchrun started them.

The ranks of one machine meet through a file, so no port can be taken, and talk over the loopback interface.
The parent passes SIGTERM and Ctrl-C on once; a second one ends the ranks at once. A rank that fails makes
the others end: at first by themselves (their collectives fail), after a grace period by SIGKILL.
"""

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)  # of every collective
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 10.0  # seconds that other ranks get after one has failed


@dataclass(frozen=True)
class Place:
    """Which rank this process is: of all, and of those on this machine. store: the file to meet through; None
    under torchrun."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    store: str | None


def torchrun_place() -> Place | None:
    """This process's place where torchrun (or the like) has started it, else None."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    rank, world, local_rank = (int(os.environ[name]) for name in names[:3])
    return Place(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)), None)


def device_of(place: Place) -> torch.device:
    """The GPU of this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def join(place: Place, device: torch.device) -> None:
    """Makes the default process group (NCCL on GPUs, Gloo on CPU), with a deadline on every collective."""
    options: dict[str, Any] = {"timeout": TIMEOUT, "rank": place.rank, "world_size": place.world}
    if device.type == "cuda":
        options["device_id"] = device
    if place.store is not None:
        if device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        # Without the number of ranks: a store that knows it has its last rank remove the file while another may be
        # opening it, which ends that rank with an uncaught exception. `start_ranks` removes the folder.
        options["store"] = dist.FileStore(place.store)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)


def _die_with_parent(parent: int) -> None:
    """SIGTERM for this process (on Linux) when process `parent` ends, so that no rank is left behind.

    Ends the process at once where its parent has ended before, while this process imported what it needs.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _child(function: Callable[..., int], place: Place, arguments: tuple[Any, ...], parent: int) -> None:
    _die_with_parent(parent)
    status = 1
    try:
        status = function(place, *arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and the group is left: nothing that the C++ libraries do while they unload may change the status.
    os._exit(status)


class _Parent:
    """Passes signals on to the ranks: SIGTERM again and again until they have ended, SIGKILL the second time."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.asked = 0
        self._previous = {number: signal.signal(number, self._count) for number in STOP_SIGNALS}

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1

    def start(self, process: Any) -> None:
        """Starts a rank in which both signals are held back until it is ready for them (`StopRequest`)."""
        resource_tracker.ensure_running()  # otherwise `start` does, and lets the signals through again
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the rank inherits this
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self.processes.append(process)

    def pass_on(self) -> None:
        """Called every now and then: a rank may have started after the signal came."""
        for process in self.processes:
            if self.asked == 1:
                process.terminate()
            elif self.asked > 1:
                process.kill()

    def restore(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def start_ranks(function: Callable[..., int], world: int, *arguments: Any) -> int:
    """Runs `function(place, *arguments)` in `world` new processes; returns the exit status of the run.

    That is 0 where all ranks return 0, else the first status that is not; a rank killed by a signal counts as
    1 and is named on stderr.
    """
    context = multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="tpfuse-"))
    parent = _Parent()
    try:
        for rank in range(world):
            place = Place(rank, world, rank, world, str(folder / "store"))
            parent.start(context.Process(target=_child, args=(function, place, arguments, os.getpid())))
        return _wait(parent)
    finally:
        for process in parent.processes:
            process.kill()
            process.join()
        parent.restore()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(parent: _Parent) -> int:
    status, deadline = 0, float("inf")
    named: set[int] = set()
    while True:
        codes = [process.exitcode for process in parent.processes]
        for rank, code in enumerate(codes):
            if not code:
                continue
            if code < 0 and rank not in named and parent.asked < 2 and monotonic() < deadline:
                named.add(rank)
                name = signal.Signals(-code).name
                print(f"tpfuse train: error: rank {rank} was killed by {name}; ending the others", file=sys.stderr)
            if not status:
                status = code if code > 0 else 1
                deadline = monotonic() + _GRACE
        if all(code is not None for code in codes):
            return status
        parent.pass_on()
        if monotonic() > deadline:
            for process in parent.processes:
                process.kill()
        sleep(0.1)
