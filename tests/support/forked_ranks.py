"""Ranks that are forked for one test, which may stop, interrupt and kill them. A fork takes a tenth of a second.

def on_rank(rank, *args): ...        # may send messages to the test, and wait until the test lets it continue

with ranks(3, tmp_path, on_rank, *args) as running:
    running.send(1, signal.SIGKILL)
    when, result = running.result(0)
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.testing.patience import Deadline, patient

LIMIT = 60.0  # seconds that a test waits for its ranks, and that ranks wait for each other, on an idle machine


class Rank:
    """A rank, as its own function sees it: the first argument of that function."""

    def __init__(self, rank: int, world: int, store: Path, connection: Connection) -> None:
        self.rank, self.world, self._store, self._connection = rank, world, store, connection

    def join(self) -> dist.ProcessGroup:
        """Create the Gloo group of all ranks and return it. Every rank must call it."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._store}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=patient(LIMIT)),
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def tell(self, what: object) -> None:
        """Send `what` to the test, which receives it by `Ranks.hear`."""
        self._connection.send(what)

    def hear(self) -> Any:
        """Wait for the next message of the test, and return it: "go" if the test calls `Ranks.go`."""
        return self._connection.recv()

    def pause(self) -> None:
        """Send "here" to the test, and wait until it calls `Ranks.go`."""
        self.tell("here")
        self.hear()


def _serve(rank: Rank, function: Callable[..., Any], *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # earlier tests may have left another handler
    torch.set_num_threads(1)  # a fork does not copy the threads of its parent process
    try:
        result = function(rank, *args)
    except BaseException as error:
        result = error
    rank.tell(("result", time.monotonic(), result))
    # The test ends this process. If it ended by itself, slower ranks would still need it and miss it.
    rank._connection.poll(patient(LIMIT))


class Ranks:
    """The forked processes of a test, each of which runs the same function as one rank."""

    def __init__(self, world: int, store: Path, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(Rank(rank, world, store, theirs), function, *args), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def hear(self, rank: int) -> Any:
        """Return the next message of a rank. Raise AssertionError if there is none within `LIMIT`."""
        deadline = Deadline(LIMIT)
        while not self.connections[rank].poll(deadline.next_look()):
            assert deadline.left(), f"rank {rank} has not sent a message in time"
        return self.connections[rank].recv()

    def wait_for_all(self) -> None:
        """Wait until every rank has sent "here"."""
        for rank in range(len(self.processes)):
            assert self.hear(rank) == "here"

    def go(self) -> None:
        """Let every rank that waits in `Rank.hear` continue."""
        for connection in self.connections:
            connection.send("go")

    def send(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return the time of `time.monotonic()` just before."""
        when = time.monotonic()
        os.kill(self.processes[rank].pid or 0, number)
        return when

    def result(self, rank: int) -> tuple[float, Any]:
        """Return (when the rank's function ended, what it returned or raised); the time is `time.monotonic()`'s."""
        kind, when, value = self.hear(rank)
        assert kind == "result"
        return when, value


@contextmanager
def ranks(world: int, folder: Path, function: Callable[..., Any], *args: Any) -> Iterator[Ranks]:
    """Fork `world` ranks that run `function(rank, *args)`, and kill them when the block ends."""
    running = Ranks(world, folder / "store", function, *args)
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.join()
