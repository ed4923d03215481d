"""Memory that the processes of a host share, and the state of one rank in it, with its flight record.

The memory is anonymous (memfd_create(2)): a peer opens it as /proc/PID/fd/N of the rank that made it. So nothing ever
remains in /dev/shm, whenever a process is killed, and the size of /dev/shm (64 MB in a container by default) does not
matter.
"""

import functools
import os
import zlib

import numpy as np
import torch
from numpy.typing import NDArray

from tpfuse.comm.errors import Unavailable

# Indices of a rank's int64 numbers, and their count. AWAITED: the number in the world of the rank for which this one
# waits, + 1; LOOKED: when it looked last (ns), see `tpfuse.comm.waits`.
BEGUN, EPOCH, RESETS, MESSAGES, AWAITED, LOOKED, _NUMBERS = 0, 1, 2, 3, 4, 5, 16
TEXT = 4096  # bytes of one exchange
# The operations of all ranks in the flight record, as many messages, and the bytes of each: four numbers (`RankState`),
# then text.
RECORDS, _RECORD = 64, 192
NUMBER, BEGUN_NS, ENDED_NS, DIGEST, _WORDS = 0, 1, 2, 3, 4  # indices of those numbers, and their count
_ABORT_BYTES = 128
_FIRST_WORD = (_NUMBERS * 8 + _ABORT_BYTES + 2 * TEXT) // 8  # index of the first record's word in a rank's state
STATE_BYTES = 8 * _FIRST_WORD + 2 * RECORDS * _RECORD


def _row(number: int) -> int:
    """Return the row of an operation in the flight record. The messages, with numbers below 0, have the later rows."""
    return number % RECORDS if number >= 0 else RECORDS + -number % RECORDS


def word(number: int, field: int) -> int:
    """Return the index of one of an operation's four numbers among the int64 words of a rank's state."""
    return _FIRST_WORD + _row(number) * (_RECORD // 8) + field


class Mapping:
    """Anonymous shared memory, which one process makes and others map."""

    def __init__(self, name: str, size: int, location: tuple[int, int] | None = None) -> None:
        """Make `size` bytes, which are zero, or map those at `location`, (process, file descriptor) of their maker.

        Raise Unavailable with the reason.
        """
        self.descriptor: int | None = None
        try:
            if location is None:
                self.descriptor = os.memfd_create(f"tpfuse {name}"[:200], os.MFD_CLOEXEC)
                os.posix_fallocate(self.descriptor, 0, size)
                location = os.getpid(), self.descriptor
            # mmap.mmap would keep a descriptor for each mapping.
            self.memory: NDArray[np.uint8] = _map(f"/proc/{location[0]}/fd/{location[1]}", size)
        except (OSError, ValueError, AttributeError, RuntimeError) as error:
            what = (
                "made" if location is None or self.descriptor is not None else f"opened (made by process {location[0]})"
            )
            self.close_descriptor()
            reason = str(error).splitlines()[0]
            raise Unavailable(f"{size} bytes of shared memory for {name} cannot be {what}: {reason}") from None

    def close_descriptor(self) -> None:
        """Close the descriptor after every peer has mapped the memory, which exists as long as a process maps it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _map(path: str, size: int) -> NDArray[np.uint8]:
    mapped: NDArray[np.uint8] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
    return mapped


class RankState:
    """The state of one rank in the control block.

    A row of the flight record has the operation's number, when it began and ended (ns, 0: not yet), its number and the
    digest of its text in one word, which is written at once, and as much of the text as fits. The operations of all
    ranks have the numbers 1, 2, 3, …, by which they are compared. A message, in which two ranks take part, is no such
    operation: the messages of a rank have the numbers -1, -2, -3, … and no digest.
    """

    def __init__(self, memory: NDArray[np.uint8], rank: int) -> None:
        start = rank * STATE_BYTES
        self.numbers = np.frombuffer(memory, np.int64, _NUMBERS, start)
        start += _NUMBERS * 8
        self.abort = np.frombuffer(memory, np.int32, 1, start)
        start += _ABORT_BYTES
        self.texts = [np.frombuffer(memory, np.uint8, TEXT, start + half * TEXT) for half in range(2)]
        self.records = np.frombuffer(memory, np.uint8, 2 * RECORDS * _RECORD, start + 2 * TEXT).reshape(-1, _RECORD)
        self.record_numbers = self.records.view(np.int64)
        # These are views of the same memory: an element of a numpy array takes twice as long to read and to write.
        self.bytes = memoryview(memory)[rank * STATE_BYTES : (rank + 1) * STATE_BYTES]  # type: ignore[arg-type]
        self.words = self.bytes.cast("q")
        self.aborted = self.bytes[_NUMBERS * 8 : _NUMBERS * 8 + 4].cast("i")
        self.addresses = np.array([self.numbers.ctypes.data], np.uint64) + np.arange(_NUMBERS, dtype=np.uint64) * 8
        self.abort_address = np.array([self.abort.ctypes.data], np.uint64)
        self.pidfd: int | None = None

    @property
    def begun(self) -> int:
        """Return the number of operations of all ranks that this rank has begun."""
        return self.words[BEGUN]

    @property
    def messages(self) -> int:
        """Return the number of messages that this rank has begun to send or to receive."""
        return self.words[MESSAGES]

    def digest(self, number: int) -> int:
        """Return the word that has an operation's number and the digest of its text.

        If it has not been written yet, or has been overwritten, the word is another operation's, or 0.
        """
        return self.words[word(number, DIGEST)]

    def record(self, number: int, begun_ns: int, digest: int, text: bytes) -> None:
        """Write that an operation begins. text: exactly as many bytes as a record holds."""
        words, first = self.words, word(number, 0)
        words[first], words[first + 1], words[first + ENDED_NS], words[first + DIGEST] = number, begun_ns, 0, digest
        self.bytes[8 * (first + _WORDS) : 8 * first + _RECORD] = text

    def operations(self) -> list[dict[str, object]]:
        """Return the last operations and messages, in the order in which they began.

        Each has its number, its text, and when it began and ended (ns, 0: not yet).
        """
        rows = [(*(int(x) for x in numbers[:DIGEST]), index) for index, numbers in enumerate(self.record_numbers)]
        return [
            {"number": number, "operation": self._text(index), "begun_ns": begun, "ended_ns": ended}
            for number, begun, ended, index in sorted(rows, key=lambda row: (row[1], row[0]))
            if number
        ]

    def is_through(self, number: int) -> bool:
        """Return whether this rank has ended operation `number`."""
        begun = self.begun
        return begun > number or (begun == number and bool(self.record_numbers[begun % RECORDS, ENDED_NS]))

    def last_operation(self) -> str:
        """Return the text of the operation or message that the rank has begun last; empty if it has begun none."""
        numbers = [number for number in (self.begun, -self.messages) if number]
        return self.operation(max(numbers, key=lambda n: self.words[word(n, BEGUN_NS)])) if numbers else ""

    def operation(self, number: int) -> str:
        """Return the text of one of the last operations."""
        return self._text(_row(number))

    def _text(self, index: int) -> str:
        return bytes(self.records[index, 8 * _WORDS :]).rstrip(b"\0").decode(errors="replace")


@functools.lru_cache(maxsize=256)
def encoded(op: str) -> tuple[bytes, int]:
    """Return (as much of the text as a record holds, the digest of all of it). Training steps repeat their texts."""
    return padded(op), zlib.crc32(op.encode())


def padded(op: str) -> bytes:
    size = _RECORD - 8 * _WORDS
    return op.encode()[:size].ljust(size, b"\0")
