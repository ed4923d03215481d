"""The control block: shared memory in which the ranks of one host see each other's state.

Each rank writes its own state, and all ranks read all states: the operations that the rank has begun and ended (the
flight record), its text in an exchange, and whether another rank has told it to stop waiting. Everything that must work
if a peer is missing depends on it: host barriers, agreement on sizes, deadlines, the names in PeerTimeout.

`tpfuse.comm.rank_state` has the memory and the layout of a state.
"""

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tpfuse.comm import host, trace, waits
from tpfuse.comm.agreement import exchange
from tpfuse.comm.errors import Disagreement, PeerTimeout, Unavailable, named
from tpfuse.comm.futex import Backoff, compare_and_swap, load_acquire, publish, store_release
from tpfuse.comm.rank_state import (
    BEGUN,
    DIGEST,
    ENDED_NS,
    EPOCH,
    MESSAGES,
    NUMBER,
    RECORDS,
    RESETS,
    STATE_BYTES,
    TEXT,
    Mapping,
    RankState,
    encoded,
    padded,
    word,
)

# An abort word is the missing rank's number in the world + 1, or: no rank is missing; ranks run different operations.
_NO_RANK, _DIFFERENT = -1, -2


class ControlBlock:
    """The control block of one group of ranks, all on this host. Collective.

    step: the caller's step, for messages (-1 if it is not known). Raise Unavailable if the ranks are on several hosts
    or cannot share memory.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.world, self.timeout = group.rank(), group.size(), timeout
        self.step = -1
        self.ranks = dist.get_process_group_ranks(group)  # the ranks' numbers in the world, which messages use
        mapping, reason = self._mapped() if self.rank == 0 else (None, "")
        descriptor = mapping.descriptor if mapping is not None else None
        own, op = (host.node_identity(), os.getpid(), descriptor, reason), "symmetric memory"
        entries = exchange(own, group, op=op, within=timeout)
        reason = _why_not(entries)
        if not reason and mapping is None:
            mapping, reason = self._mapped((entries[0][1], entries[0][2] or 0))
        # Either every rank has mapped the memory, or no rank uses it.
        reasons = [text for text in exchange(reason, group, op=op, within=timeout) if text]
        if mapping is not None:
            mapping.close_descriptor()
        if reasons:
            raise Unavailable(reasons[0])
        assert mapping is not None
        self.memory = mapping.memory
        self.states = [RankState(self.memory, rank) for rank in range(self.world)]
        self.local = self.states[self.rank]
        self.own_words = self.local.words
        waits.register(self)
        self._epoch = self._resets = 0
        self._begun, self._digests = 0, [0] * RECORDS  # copies of what `local` has of this rank's operations
        self._messages = 0  # a copy of the number of messages
        self._begun_address, self._published = self.local.addresses[BEGUN : BEGUN + 1], np.zeros(1, np.int64)
        self._others = [rank for rank in range(self.world) if rank != self.rank]
        self._compared = [0] * self.world
        self.disagreed = False  # whether this rank has found that ranks run different operations
        self._failure: tuple[int, str] | None = None  # how much had begun when an operation first failed, and why
        for state, (_, pid, _, _) in zip(self.states, entries, strict=True):
            with contextlib.suppress(OSError):
                state.pidfd = os.pidfd_open(pid)
        self.pids = [pid for _, pid, _, _ in entries]
        for state in self.states:
            if state.pidfd is not None:
                weakref.finalize(self, os.close, state.pidfd)

    def _mapped(self, location: tuple[int, int] | None = None) -> tuple[Mapping | None, str]:
        """Return the memory, made or mapped from rank 0's location, or the reason why there is none."""
        try:
            return Mapping("control block", self.world * STATE_BYTES, location), ""
        except Unavailable as error:
            return None, str(error)

    @property
    def aborted(self) -> bool:
        """True if this rank was told to stop waiting."""
        return self.local.aborted[0] != 0

    def begin(self, op: str, *, fence: bool = False) -> int:
        """Record that this rank begins an operation, and return its number.

        op: its name, shapes and dtypes, the same on every rank. fence: whether the record is published so that of two
        ranks that then compare at least one sees the other's record.
        """
        number = self._begun + 1
        text, digest = encoded(op)
        digest |= (number & 0x7FFFFFFF) << 32
        self._digests[number % RECORDS] = digest
        self.local.record(number, time.time_ns(), digest, text)
        self._begun = number
        if fence:
            self._published[0] = number
            publish(self._begun_address, self._published)
        else:
            self.local.words[BEGUN] = number
        return number

    def begin_message(self, op: str) -> int:
        """Record that this rank begins to send or to receive a message, and return its number, which is below 0.

        Only two ranks take part, so that ranks have different messages, which are not compared.
        """
        self._messages += 1
        self.local.record(-self._messages, time.time_ns(), 0, padded(op))
        self.local.words[MESSAGES] = self._messages
        return -self._messages

    def end(self, number: int) -> None:
        """Record that an operation or a message has ended."""
        self.local.words[word(number, ENDED_NS)] = time.time_ns()

    def compare(self) -> None:
        """Raise Disagreement if a rank runs another operation than this rank."""
        newest, digests = self._begun, self._digests
        for rank in self._others:
            compared, theirs = self._compared[rank], self.states[rank].words
            while compared < newest and theirs[word(compared + 1, DIGEST)] == digests[(compared + 1) % RECORDS]:
                compared += 1  # This is all that happens if the ranks are in step.
            self._compared[rank] = compared
            if compared != newest and compared != theirs[BEGUN]:
                self.compare_with(rank)

    def compare_with(self, rank: int) -> None:
        """Raise Disagreement if one rank runs another operation than this rank.

        It waits for no rank and tells none: it compares the operations that both ranks have begun, each once. Ranks
        that wait compare with all others meanwhile, and so each of them finds by itself that a rank is in another
        operation.
        """
        compared = self._compared[rank]
        if compared == self._begun:
            return
        newest = min(self._begun, self.states[rank].begun)
        if compared == newest:
            return
        theirs = self.states[rank]
        for number in range(max(compared, self._begun - RECORDS) + 1, newest + 1):
            digest, ours = theirs.digest(number), self._digests[number % RECORDS]
            # In a watchdog the second condition may hold: a later operation has overwritten this rank's digest.
            if digest == ours or ours >> 32 != number & 0x7FFFFFFF:
                continue
            if digest >> 32 == number & 0x7FFFFFFF:
                self.disagreed = True
                texts = theirs.operation(number), self.local.operation(number)
                raise Disagreement(
                    f"operation {number}: {named(self.ranks[rank])} runs {texts[0]},"
                    f" {named(self.ranks[self.rank])} runs {texts[1]}"
                )
            if theirs.record_numbers[number % RECORDS, NUMBER] < number:  # the record is not visible yet
                newest = number - 1
                break
        self._compared[rank] = newest

    def stop_if_others_differ(self) -> None:
        """End the waits of this rank's kernels, which cannot compare, if `compare` would raise. Watchdogs call it.

        A rank that was told to stop already keeps that reason: others that were told too may be in a later operation.
        """
        try:
            self.compare()
        except Disagreement:
            self._tell(self.rank, _DIFFERENT)

    def abort(self, rank: int, missing: int | None) -> None:
        """Tell `rank` to stop waiting. Only the first such call counts.

        missing: the number in the world of the rank that is missing; None: no particular rank.
        """
        self._tell(rank, _NO_RANK if missing is None else missing + 1)

    def _tell(self, rank: int, word: int) -> None:
        """Write a rank's abort word unless it has one."""
        compare_and_swap(self.states[rank].abort_address, np.zeros(1, np.int32), np.array([word], np.int32))

    def has_ended(self, rank: int, within: float = 0.0) -> bool:
        """Return whether the process of `rank` has ended (a zombie has). Wait for that up to `within` seconds."""
        pidfd = self.states[rank].pidfd
        if pidfd is None:
            return not Path(f"/proc/{self.pids[rank]}").exists()
        poll = select.poll()  # select.select refuses descriptors above 1023.
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(1000 * within))

    def has_left(self, rank: int) -> bool:
        """Return whether a rank comes to no more operations of this rank, because it is in `reset` or has ended."""
        return int(self.states[rank].numbers[RESETS]) > self._resets or self.has_ended(rank)

    def first_left(self) -> int | None:
        """Return the first rank that has left before it ended this rank's last operation; None if there is none."""
        number = self.local.begun
        left = (rank for rank in self._others if self.has_left(rank) and not self.states[rank].is_through(number))
        return next(left, None)

    def slowest(self) -> int | None:
        """Return the rank that has begun the fewest operations; None if that is as many as this rank has begun."""
        rank = min(range(self.world), key=lambda r: self.states[r].begun)
        return rank if self.states[rank].begun < self.local.begun else None

    def note_wait(self, peer: int | None) -> None:
        """Say that this rank waits, at this moment, for `peer`; None: for the slowest rank, if there is one."""
        awaited = self.slowest() if peer is None else peer
        waits.note_wait(None if awaited is None else self.ranks[awaited])

    def last_of_chain(self, rank: int) -> int | None:
        """Return the rank for which `rank` waits directly or through others, by its number in the world.

        That is `rank` itself if it waits for none, a rank of another group if a rank of this group waits for it, and
        None if ranks wait for each other.
        """
        passed = {self.rank}
        while rank not in passed:
            passed.add(rank)
            awaited = waits.awaited(self.states[rank].words, self.timeout, self.has_left(rank))
            if awaited is None:
                return self.ranks[rank]
            if awaited not in self.ranks:
                return awaited
            rank = self.ranks.index(awaited)
        return None

    def fail(self, op: str, peer: int | None, waited: float) -> PeerTimeout | Disagreement:
        """End every rank's waits and return the error to raise. peer: the rank that the caller waits for."""
        abort_word = int(self.local.abort[0])
        if abort_word == _DIFFERENT:
            try:
                self.compare()
            except Disagreement as error:
                return error
        missing = abort_word - 1 if abort_word > 0 else None
        if missing is None:
            late = self.first_left()
            if late is None and not abort_word:
                late = self.slowest() if peer is None else peer
            missing = None if late is None else self.last_of_chain(late)
        for rank in range(self.world):
            self.abort(rank, missing)
        begun = self._begun + self._messages
        if self._failure is None:
            self._failure = begun, f"{op}: {self.describe(missing)}"
        earlier, first = self._failure
        if begun > earlier:
            return self._error(op, missing, None, first)
        return self._error(op, missing, waited, self.describe(missing))

    def _error(self, op: str, missing: int | None, waited: float | None, detail: str) -> PeerTimeout:
        waits.give_up(None if missing == self.ranks[self.rank] else missing)
        return PeerTimeout(op, step=self.step, rank=self.ranks[self.rank], peer=missing, waited=waited, detail=detail)

    def describe(self, missing: int | None) -> str:
        """Return what is known of a missing rank, for a message. missing: its number in the world."""
        if missing is None:
            return "no rank is late"
        if missing not in self.ranks:
            return "a rank of this group waits for it in another group"
        rank = self.ranks.index(missing)
        if self.has_ended(rank):
            return f"its process ({self.pids[rank]}) has ended"
        last = self.states[rank].last_operation()
        if self.has_left(rank):
            return f"process {self.pids[rank]} has given up {last or 'its step'}, and waits in reset()"
        return f"process {self.pids[rank]}, " + (f"last seen in {last}" if last else "not seen yet")

    def exchange(self, data: bytes, op: str) -> list[bytes]:
        """Return every rank's data, in rank order. It is a barrier. data: at most 4088 bytes. Raise PeerTimeout.

        Data is overwritten two exchanges later: by then every rank has come to the exchange between, and so has read
        it.
        """
        assert len(data) <= TEXT - 8, "the data is longer than a control block holds"
        self._epoch += 1
        area = self.local.texts[self._epoch % 2]
        area[:8] = np.frombuffer(np.int64(len(data)).tobytes(), np.uint8)
        area[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self._wait_for_all(EPOCH, self._epoch, op, heed_abort=True)
        areas = [state.texts[self._epoch % 2] for state in self.states]
        return [bytes(area[8 : 8 + int(area[:8].view(np.int64)[0])]) for area in areas]

    def _wait_for_all(self, field: int, value: int, op: str, *, heed_abort: bool) -> None:
        """Write one of this rank's numbers and wait until every rank's number is at least as large.

        heed_abort: whether the wait ends if this rank is told to stop waiting.
        """
        store_release(self.local.addresses[field : field + 1], np.array([value], np.int64))
        backoff = Backoff()
        for rank, state in enumerate(self.states):
            with trace.span("wait", op, peer=self.ranks[rank]):
                while True:
                    if heed_abort and self.local.abort[0]:
                        raise self.fail(op, rank, backoff.waited)
                    seen = int(state.numbers[field])
                    if seen >= value:
                        break
                    if backoff.rest(state.addresses[field : field + 1], seen):
                        if heed_abort and not self.aborted:
                            self.compare()
                        waits.note_wait(self.ranks[rank])
                        left = next((r for r in range(self.world) if self._left_early(r, field, value)), None)
                        if backoff.waited > self.timeout or left is not None:
                            missing = rank if left is None else left
                            if heed_abort:
                                raise self.fail(op, missing, backoff.waited)
                            late = self.ranks[missing]
                            raise self._error(op, late, backoff.waited, self.describe(late))
            load_acquire(state.addresses[field : field + 1], np.zeros(1, np.int64))

    def _left_early(self, rank: int, field: int, value: int) -> bool:
        """Return whether a rank has left before it came.

        It may have come and then left, so its number is read after the check that it has left.
        """
        return rank != self.rank and self.has_left(rank) and int(self.states[rank].numbers[field]) < value

    def reset(self, clear: Callable[[], None]) -> None:
        """Reset this rank's state and call `clear`, between two barriers that no abort ends.

        Between the barriers no rank waits for anything. Raise PeerTimeout if a rank does not come; every rank may then
        try again.
        """
        before = self._resets
        try:
            self._reset_barrier()
            self.local.abort[0] = 0
            self.local.numbers[BEGUN] = self._begun = max(state.begun for state in self.states)
            self._compared, self.disagreed, self._failure = [self._begun] * self.world, False, None
            self._epoch = self.local.numbers[EPOCH] = 0
            waits.forget()
            clear()
            self._reset_barrier()
        except PeerTimeout:
            self._resets = self.local.numbers[RESETS] = before  # A rank that comes now waits for this rank.
            raise

    def _reset_barrier(self) -> None:
        self._resets += 1
        self._wait_for_all(RESETS, self._resets, "reset", heed_abort=False)


def _why_not(entries: Sequence[tuple[str, int, int | None, str]]) -> str:
    """Return why these ranks cannot share memory; empty if they can."""
    nodes = [node for node, *_ in entries]
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    if other is not None:
        names = host.different_names(nodes[0], nodes[other])
        return f"the group spans hosts or containers: rank 0 is on {names[0]}, rank {other} on {names[1]}"
    return entries[0][3]
