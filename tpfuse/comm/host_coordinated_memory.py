"""The common part of the backends of several ranks: control block, deadlines, flight record and reset."""

import pickle
import threading
import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tpfuse.comm import trace
from tpfuse.comm.control_block import ControlBlock
from tpfuse.comm.errors import Disagreement, PeerTimeout
from tpfuse.comm.settings import settings
from tpfuse.comm.symmetric_memory import SymmetricMemory
from tpfuse.comm.watchdog import Watchdog, write_flight_record


class _Guard:
    """The context that `guard` returns. A generator of contextlib would cost as much as a small collective's copies."""

    def __init__(self, memory: "HostCoordinatedMemory", op: str, kernel: bool, peer: int | None) -> None:
        self._memory, self._op, self._kernel, self._peer = memory, op, kernel, peer

    def __enter__(self) -> None:
        self._memory.begin(self._op, self._kernel, self._peer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.end(self._op, error, self._peer)


class HostCoordinatedMemory(SymmetricMemory):
    """The symmetric memory of ranks that share a control block. Raise Unavailable if they do not share a host."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.control = ControlBlock(group, timeout)
        super().__init__(group.rank(), group.size(), device, timeout)
        self.global_rank = self.control.ranks[self.rank]
        self._watchdog: Watchdog | None = None
        self._busy = threading.Lock()
        self._started, self._number = 0.0, 0
        self._span: trace.Span | None = None

    @property
    def step(self) -> int:
        return self.control.step

    @step.setter
    def step(self, step: int) -> None:
        self.control.step = step

    def barrier(self, op: str = "barrier") -> None:
        self._meet(op, op)

    def guard(self, op: str, *, kernel: bool = False, peer: int | None = None) -> _Guard:
        return _Guard(self, op, kernel, peer)

    def begin(self, op: str, kernel: bool, peer: int | None) -> None:
        """Do the part of `guard` before an operation."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{op}: another operation of this group is under way in another thread")
        self._started = time.monotonic()
        kind: trace.Kind = "operator" if peer is None else "communication"
        self._span = trace.begin(kind, op, "fused" if kernel else "direct", ranks=self.control.ranks)
        try:
            self._recover()
            self._number = self.control.begin(op, fence=kernel) if peer is None else self.control.begin_message(op)
            if self.control.aborted:
                raise self._failure(op, 0.0)
            if peer is None:
                self._compare(op, kernel)
            self._watch(op, kernel, peer)
        except BaseException as error:
            self.end(op, error, peer)
            raise

    def _compare(self, op: str, kernel: bool) -> None:
        """Raise Disagreement if another rank runs another operation, as far as that must be known before it begins."""
        fingerprint = settings().fingerprint
        if fingerprint:
            self.control.exchange(b"", op)  # No rank goes on before all have come to the comparison.
        if kernel or fingerprint:
            self.control.compare()  # A kernel cannot compare while it waits.

    def end(self, op: str, error: BaseException | None, peer: int | None) -> None:
        """Do the part of `guard` after an operation, or after its failure."""
        self._unwatch(op, peer)
        trace.end(self._span)
        self._busy.release()
        if error is None and self.control.aborted:
            error = self._failure(op, time.monotonic() - self._started)
            write_flight_record(self.control, error)
            raise error
        if error is None:
            self.control.end(self._number)
        else:
            write_flight_record(self.control, error)

    def _watch(self, op: str, kernel: bool, peer: int | None) -> None:
        """Set a deadline, until `_unwatch`, for a kernel, which cannot read a clock."""
        if kernel:
            self._watchdog = self._watchdog or Watchdog(self.control)
            self._watchdog.watch(op, peer)

    def _unwatch(self, op: str, peer: int | None) -> None:
        if self._watchdog is not None:
            self._watchdog.unwatch()

    def _meet(self, what: str, op: str) -> None:
        """Wait for all ranks and compare what they do: raise Disagreement on every rank if one does something else.

        what: the text that the ranks compare, which is recorded as an operation; op: its name in PeerTimeout. After an
        earlier Disagreement this resets the memory first, but not within a guard: that operation must raise the
        Disagreement, which the watchdog may have found.
        """
        if not self._busy.locked():
            self._recover()
        try:
            number = self.control.begin(what)
            self.control.exchange(b"", op)
            self.control.compare()
            self.control.end(number)
        except PeerTimeout as error:
            write_flight_record(self.control, error)
            raise

    def _recover(self) -> None:
        """Reset the memory if this rank has raised a Disagreement. Every other rank that goes on resets it too."""
        if self.control.disagreed:
            self.reset()

    def _failure(self, op: str, waited: float) -> PeerTimeout | Disagreement:
        """Return the error to raise after this rank was told to stop waiting."""
        return self.control.fail(op, None, waited)

    def check(self) -> None:
        """Raise Disagreement if one of the last operations was another one on another rank."""
        self.control.compare()

    def exchanged(self, value: object, op: str) -> list[Any]:
        """Return every rank's value by the control block (`tpfuse.comm.agreement.exchange`)."""
        try:
            return [pickle.loads(data) for data in self.control.exchange(pickle.dumps(value), op)]
        except PeerTimeout as error:
            write_flight_record(self.control, error)
            raise

    def reset(self) -> None:
        self.control.reset(self.clear_signals)
        self.generation += 1
