"""Start the ranks of a run on one machine, or join the ranks that a launcher has started.

The ranks of one machine meet through a file in memory, so they need no port and leave no file, and they
communicate over the loopback interface. The parent passes SIGTERM and Ctrl-C on once; a second signal ends the ranks at
once. When a rank fails, the others end too: at first by themselves, because their collectives fail, and after a grace
period by SIGKILL. The parent then prints in one line why the run has ended.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from time import monotonic, sleep
from types import FrameType
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tpfuse.comm.agreement import agreement
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable, named
from tpfuse.comm.handle import CollectiveHandle, is_lost_peer
from tpfuse.errors import PeerLost, RunError, UserError, ending_run, of_disk
from tpfuse.train.child import begin
from tpfuse.train.hardware import is_out_of_memory
from tpfuse.train.launchers import launched

_T = TypeVar("_T")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 10.0  # seconds that the other ranks get to end after one has failed
_POLL = 0.1  # seconds between two checks of the ranks
_MEETING_POLL = 0.02  # seconds between two looks of a rank that waits for the others to start
_USUAL_CAUSES = {
    signal.SIGKILL: ": by a person, or by the system because memory ran out",
    signal.SIGBUS: ": a file that it reads may have become shorter, or /dev/shm may be full",
}


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process among all ranks and among those of its machine.

    store: the path of the file through which the ranks meet; None under a launcher.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    store: str | None


def launched_rank() -> RankInfo | None:
    """Return the rank of this process if a launcher has started it, else None. Raise UserError as `launched` does.

    The ranks meet where MASTER_ADDR and MASTER_PORT say.
    """
    found = launched()
    return None if found is None else RankInfo(*found[1:], None)


def device_of(info: RankInfo) -> torch.device:
    """Select and return the GPU of this rank, or return the CPU if there is no GPU.

    A launcher may show each rank one GPU alone. Where ranks have to share one, `join` refuses that.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", info.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(info: RankInfo, device: torch.device, timeout: float) -> None:
    """Make the default process group (NCCL on GPUs, Gloo on CPU) once all ranks have started.

    timeout: the seconds that this rank waits for the others, here and in each collective of the group. Raise PeerLost,
    which names the ranks that have not started. Raise UserError on every rank if two ranks have one GPU.
    """
    limit = timedelta(seconds=timeout)
    try:
        if info.store is None:
            shared, _, _ = next(rendezvous("env://", info.rank, info.world, timeout=limit))
        else:  # the store is not given the number of ranks: with it, the last rank would remove the file
            shared = dist.FileStore(info.store)  # type: ignore[attr-defined]
        store = _meet(shared, info, limit)
        if device.type == "cuda":
            _check_gpus(store, info, str(torch.cuda.get_device_properties(device).uuid))
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        if info.store is not None and device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store, rank=info.rank, world_size=info.world, timeout=limit, **options,
        )  # fmt: skip
    except PeerLost:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise PeerLost(f"rank {info.rank} could not join the other ranks within {timeout:g} s: {reason}") from error


def by_first(group: dist.ProcessGroup, work: Callable[[], _T], op: str) -> _T:
    """Return the result of `work`, which the first rank alone calls, on all ranks.

    op: the name of the work in errors. Raise RunError on all ranks if `ending_run` does on the first one, RankFailed on
    the others for any other error, and PeerTimeout if a rank is lost.
    """
    found: list[Any] = [None]
    with agreement(op, group, alike=RunError), ending_run():
        if group.rank() == 0:
            found = [work()]
    with CollectiveHandle(op, group, None).name_missing_rank():  # not an exchange: a tokenizer may have megabytes
        dist.broadcast_object_list(found, group=group, group_src=0)
    result: _T = found[0]
    return result


@contextlib.contextmanager
def in_group(info: RankInfo, when: Callable[[], str], cure: str) -> Iterator[None]:
    """Raise what ends a rank's work as RunError, or as PeerLost if other ranks do not answer, and leave the group.

    when: returns where the work is, for the message. cure: what helps if the memory is too small.
    """
    try:
        yield
    except RunError:
        raise
    except PeerTimeout as error:
        missing = () if error.peer in (None, info.rank) else (error.peer,)
        raise PeerLost(str(error) if error.step >= 0 else f"{when()}: {error}", missing) from error
    except (Disagreement, Unavailable) as error:
        raise RunError(f"{when()}: {error}") from error
    except OSError as error:
        raise RunError(f"{when()}: rank {info.rank}: {of_disk(error)}", alone=True) from error
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            reason = " ".join(str(error).split())[:200]
            little = f"{when()}: rank {info.rank} has too little memory ({reason}): {cure}"
            raise RunError(little, alone=True) from error
        if info.world == 1 or not is_lost_peer(error):
            raise
        raise PeerLost(f"rank {info.rank} lost another rank in {when()}: {_message(error)}") from error
    finally:
        if info.world > 1:
            dist.destroy_process_group()


def _message(error: BaseException) -> str:
    """Return Gloo's message without its source line and its advice."""
    line = str(error).strip().splitlines()[0]
    return line.partition("] ")[2].partition(". This is")[0] if line.startswith("[/") else line


def _meet(store: Any, info: RankInfo, limit: timedelta) -> Any:
    """Wait until all ranks have started, and return a store that only they use.

    torchrun keeps one store when it starts the ranks again (`_bootstrap_store_info` in torch's dynamic_rendezvous.py),
    so what a rank finds there may come from a rank that has died. Each rank therefore writes a token of its own. Rank 0
    invites the tokens that it finds, and again when one changes; the ranks have met when all of one invitation answer.
    Raise PeerLost, which names the ranks that have not started.
    """
    token, deadline = uuid4().hex, monotonic() + limit.total_seconds()
    tokens = [f"tpfuse/rank {rank} is here" for rank in range(info.world)]
    store.set(tokens[info.rank], token)
    meeting, invited, answers = "", [""], list[str]()
    while monotonic() < deadline:
        if info.rank == 0 and store.check(tokens):
            found = [store.get(name).decode() for name in tokens]
            if found != invited:
                store.set("tpfuse/invitation", " ".join([uuid4().hex, *found]))
        if store.check(["tpfuse/invitation"]):
            latest, *invited = store.get("tpfuse/invitation").decode().split()
            if token in invited and latest != meeting:
                meeting, answers = latest, [f"tpfuse/{latest}/{rank}" for rank in range(info.world)]
                store.set(answers[info.rank], "")
        if answers and store.check(answers):
            return dist.PrefixStore(meeting, store)  # type: ignore[attr-defined]
        sleep(_MEETING_POLL)
    missing = [rank for rank, name in enumerate(answers or tokens) if not store.check([name])] or [0]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    raise PeerLost(
        f"rank {info.rank} waited {limit.total_seconds():g} s for {ranks} to start (--comm.timeout)", tuple(missing)
    )


def _check_gpus(store: Any, info: RankInfo, gpu: str) -> None:
    """Raise UserError on every rank if two ranks have one GPU, over which NCCL does not work."""
    names = [f"tpfuse/gpu of rank {rank}" for rank in range(info.world)]
    store.set(names[info.rank], gpu)
    first: dict[str, int] = {}
    for rank, name in enumerate(names):
        if (other := first.setdefault(store.get(name).decode(), rank)) != rank:
            raise UserError(f"ranks {other} and {rank} have the same GPU: start at most one rank for each GPU")


class StopRequest:
    """Tell whether this process was asked to stop, by Ctrl-C or SIGTERM. The ranks act on it together, between steps.

    The constructor installs the handlers, on the main thread. insistent: whether a second signal ends the process at
    once, for a rank without a parent that would end it.
    """

    def __init__(self, *, insistent: bool) -> None:
        self._wanted, self._insistent = False, insistent
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were blocked while this rank was starting

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._wanted and self._insistent:
            sys.exit(128 + number)
        self._wanted = True
        if not self._insistent:  # the parent repeats the signal, which would interrupt calls inside a collective
            # The signals are blocked and not ignored: for a pending signal, Python would report that it has no handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def __call__(self) -> bool:
        return self._wanted


@dataclass
class _RankProcess:
    """A rank as its parent sees it. error: why it could not continue, once it has reported that."""

    number: int
    process: Any
    reports: Connection
    error: RunError | UserError | None = None

    def listen(self) -> None:
        """Receive the rank's report, if it has sent one."""
        try:
            if self.error is None and self.reports.poll():
                self.error = self.reports.recv()
        except (EOFError, OSError):  # the rank has ended without a report
            return

    def __str__(self) -> str:
        return f"{named(self.number)} (process {self.process.pid})"


class _Parent:
    """Start ranks and pass signals on to them: SIGTERM for the first signal, SIGKILL for the second."""

    def __init__(self) -> None:
        self.ranks: list[_RankProcess] = []
        self.signals = 0
        self._context = multiprocessing.get_context("spawn")
        self._previous = {number: signal.signal(number, self._count) for number in STOP_SIGNALS}

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1

    def start(self, function: Callable[..., int], info: RankInfo, arguments: tuple[Any, ...]) -> None:
        """Start a rank in which both signals are blocked until the rank is ready for them (`StopRequest`)."""
        reports, sending = self._context.Pipe(duplex=False)
        work = pickle.dumps((function, (info, *arguments)))
        process = self._context.Process(target=begin, args=(os.getpid(), sending, work))
        resource_tracker.ensure_running()  # otherwise `start` starts it, which unblocks the signals again
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the rank inherits this
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        sending.close()
        self.ranks.append(_RankProcess(info.rank, process, reports))

    def pass_on(self) -> None:
        """Send the signals received so far to all ranks. It is called again and again, since ranks may start late."""
        for rank in self.ranks:
            if self.signals == 1:
                rank.process.terminate()
            elif self.signals > 1:
                rank.process.kill()

    def wait(self, timeout: float) -> int:
        """Wait until all ranks have ended, kill those that end too late, and return the run's exit status.

        timeout: the seconds that ranks get to end after the first one has ended with status 0. Raise RunError or
        UserError if a rank or the system has reported why the run failed, and KeyboardInterrupt if a signal has ended
        the ranks.
        """
        killed: _RankProcess | None = None
        left: float | None = None  # seconds until the others are killed; they pass only while this process runs
        silent: list[_RankProcess] = []
        while True:
            codes = [rank.process.exitcode for rank in self.ranks]
            for rank in self.ranks:
                rank.listen()
            if self.signals < 2 and not silent and killed is None:
                killed = next((rank for rank, code in zip(self.ranks, codes, strict=True) if code and code < 0), None)
            if all(code is not None for code in codes):
                break
            if any(codes):
                left = _GRACE if left is None else min(left, _GRACE)
            elif left is None and 0 in codes:
                left = timeout
            self.pass_on()
            if left is not None and left <= 0:
                silent = silent or [rank for rank in self.ranks if rank.process.exitcode is None]
                for rank in self.ranks:
                    rank.process.kill()
            sleep(_POLL)
            left = None if left is None else left - _POLL
        ended = killed is not None and killed.process.exitcode == -signal.SIGTERM  # a rank that has nothing to save
        if self.signals > 1 or (self.signals and ended):
            raise KeyboardInterrupt
        if (error := _reason(self.ranks, killed, silent, timeout)) is not None:
            # A run that was asked to stop is not started again.
            raise RunError(str(error)) if self.signals and isinstance(error, PeerLost) else error
        return next((code for code in codes if code and code > 0), 0)  # a rank with such a status has printed its error

    def end(self) -> None:
        """Kill the ranks that still run, and restore the previous signal handlers."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.reports.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _reason(
    ranks: Sequence[_RankProcess], killed: _RankProcess | None, silent: Sequence[_RankProcess], timeout: float
) -> RunError | UserError | None:
    """Return the most informative reason why the run has failed; None if there is none.

    killed: the first rank that a signal has ended. silent: the ranks that were killed because they did not end.
    """
    if killed is not None:
        number = signal.Signals(-killed.process.exitcode)
        return PeerLost(f"{killed} was killed by {number.name}{_USUAL_CAUSES.get(number, '')}", (killed.number,))
    errors = [rank.error for rank in ranks if rank.error is not None]
    for error in errors:
        if not isinstance(error, PeerLost):
            return error
    reporting = {rank.number for rank in ranks if rank.error is not None}
    lost = [error for error in errors if isinstance(error, PeerLost)]
    for error in lost:  # a missing rank that has reported why it waits is not the cause
        if error.missing and not reporting & set(error.missing):
            return error
    unheard = ", ".join(str(rank) for rank in silent if rank.number not in reporting)
    if lost:
        return PeerLost(f"{lost[0]}; {unheard} did not answer" if unheard else str(lost[0]))
    if unheard and not any(rank.process.exitcode > 0 for rank in ranks):
        return PeerLost(f"{unheard} did not end within {timeout:g} s after the others (--comm.timeout)")
    return None


def start_ranks(function: Callable[..., int], world: int, *arguments: Any, timeout: float) -> int:
    """Run `function(info, *arguments)` in `world` new processes and return the exit status of the run.

    The status is 0 if all ranks return 0, else that of the first rank, in rank order, with another one. timeout: the
    seconds that ranks get to end after the first one has ended. Raise the error that gives the reason: a RunError or
    UserError of a rank, PeerLost if a rank was killed or does not answer, and KeyboardInterrupt if a second signal, or
    the first one to ranks that let it, has ended all ranks.
    """
    store = os.memfd_create("tpfuse-store")
    parent = _Parent()
    try:
        for rank in range(world):
            info = RankInfo(rank, world, rank, world, f"/proc/{os.getpid()}/fd/{store}")
            parent.start(function, info, arguments)
        return parent.wait(timeout)
    finally:
        parent.end()
        os.close(store)
