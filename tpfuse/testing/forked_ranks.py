"""Ranks that are forked for one test, which may stop, interrupt and kill them: it takes a tenth of a second each.

def on_rank(rank, *args): ...        # tells the test what it likes, and hears of it

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

LIMIT = 60.0  # seconds that a test waits for its ranks on an idle machine, and they for each other


class Rank:
    """What a rank's function is given."""

    def __init__(self, rank: int, world: int, store: Path, connection: Connection) -> None:
        self.rank, self.world, self._store, self._connection = rank, world, store, connection

    def join(self) -> dist.ProcessGroup:
        """The Gloo group of all ranks. Collective."""
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
        """What the test hears next of this rank."""
        self._connection.send(what)

    def hear(self) -> None:
        """Until the test says `go`."""
        self._connection.recv()


def _serve(rank: Rank, function: Callable[..., Any], *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests before have left in this process
    torch.set_num_threads(1)  # the threads of the process that this one was forked from are not here
    try:
        result = function(rank, *args)
    except BaseException as error:
        result = error
    rank.tell(("result", time.monotonic(), result))
    # The test ends this process: one that ends by itself would be missing to ranks that are slower.
    rank._connection.poll(patient(LIMIT))


class Ranks:
    """Processes that run a function."""

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
        """What a rank says next."""
        deadline = Deadline(LIMIT)
        while not self.connections[rank].poll(deadline.next_look()):
            assert deadline.left(), f"rank {rank} says nothing"
        return self.connections[rank].recv()

    def heard_of_all(self) -> None:
        """Until every rank has said that it is here."""
        for rank in range(len(self.processes)):
            assert self.hear(rank) == "here"

    def go(self) -> None:
        """Lets every rank that hears go on."""
        for connection in self.connections:
            connection.send("go")

    def send(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal; returns when."""
        when = time.monotonic()
        os.kill(self.processes[rank].pid or 0, number)
        return when

    def result(self, rank: int) -> tuple[float, Any]:
        """(when it ended, what the function returned or raised)."""
        kind, when, value = self.hear(rank)
        assert kind == "result"
        return when, value


@contextmanager
def ranks(world: int, folder: Path, function: Callable[..., Any], *args: Any) -> Iterator[Ranks]:
    """Ranks that are killed when the block ends."""
    running = Ranks(world, folder / "store", function, *args)
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.join()
