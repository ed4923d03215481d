"""A trace of communicating kernels: when their programs wait and for whom, and when they copy and compute.

    with KernelTrace() as trace:
        layer(x)
    for launch in trace.read():
        launch.kernel, launch.rank, launch.events

Every launch within the block that may wait for peers gets a row of int64 words for each of its programs, through its
argument `trace_ptr`. Without a trace that argument is None, and the kernel is compiled without any of this code. A
kernel takes the time with `now`, and adds an event to its program's row with `record`. `signals.wait_signal` records
its own waits. An event is one of these:

    waiting    The program waited for signals that were not all there when the wait began. The peer is the last rank
               whose signal was missing: the owner of a chunk, or in a ring the neighbour that sends the chunk. It is -1
               where the kernel does not know the rank.
    copying    The program copied its share of a chunk. The peer is the rank that owns the chunk.
    computing  The program computed its tiles of a chunk. The peer is the rank whose rows, keys or sums they are.

Times are nanoseconds: on a GPU those of its global timer, which all its kernels share, and in the interpreter those of
the host's clock. PTX promises neither how often a global timer advances, nor that those of two GPUs agree. An event
has the times of its program's first thread: a trace adds no barrier, which could hide that a kernel lacks one. The time
that a trace itself takes is between the events of a program, not in them. The first launch of a kernel in a trace
compiles the kernel again: a trace of one step therefore follows a trace of the step before it, which is not read.

A launch that a CUDA graph captures is not traced: its replays would write into the rows after the trace.
"""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.kernels.launch import start_trace, stop_trace

WAITING: tl.constexpr = tl.constexpr(0)
COPYING: tl.constexpr = tl.constexpr(1)
COMPUTING: tl.constexpr = tl.constexpr(2)
KINDS = ("waiting", "copying", "computing")

EVENTS: tl.constexpr = tl.constexpr(256)  # of a program in one launch; further ones are counted, but not stored
_WORDS: tl.constexpr = tl.constexpr(1 + 4 * 256)  # of a row: the number of events, and (kind, peer, begin, end) of each
_NOBODY: tl.constexpr = tl.constexpr(-2)


if INTERPRETED:

    @triton.jit
    def _clock():
        return tl.cast(time.time_ns(), tl.int64)

else:

    @triton.jit
    def _clock():
        return globaltimer()


@triton.jit
def now(trace_ptr):
    """Return the time in nanoseconds, int64; 0 without a trace."""
    if trace_ptr is not None:
        return _clock()
    else:
        return tl.cast(0, tl.int64)


@triton.jit
def record(trace_ptr, kind, peer, since):
    """Add an event of this program, which began at `since` and ends now.

    trace_ptr: [programs, _WORDS] int64, or None; a row is written by its own program alone, and by one thread of it.
    """
    if trace_ptr is not None:
        end = _clock()
        row_ptr = trace_ptr + tl.program_id(0) * _WORDS
        count = tl.load(row_ptr)
        event_ptr = row_ptr + 1 + 4 * count
        fits = count < EVENTS
        tl.store(event_ptr, kind, mask=fits)
        tl.store(event_ptr + 1, peer, mask=fits)
        tl.store(event_ptr + 2, since, mask=fits)
        tl.store(event_ptr + 3, end, mask=fits)
        tl.store(row_ptr, count + 1)


@triton.jit
def nobody():
    """Return the peer of a wait that has not begun."""
    return tl.cast(_NOBODY, tl.int32)


@triton.jit
def last_late(behind, peer, before):
    """Return a peer whose signal is still missing, the highest one; `before` where all have come.

    behind: whether a signal is missing, or a block of them; peer: the rank that gives it, or a block of ranks.
    """
    late = tl.where(behind, peer, _NOBODY).to(tl.int32)
    if len(late.shape) == 1:
        late = tl.max(late, 0)
    return tl.where(late != _NOBODY, late, before)


@triton.jit
def record_wait(trace_ptr, peer, since):
    """Add the event of a wait; peer: as `last_late` returned it. A wait that found all signals there is no event."""
    if trace_ptr is not None:
        if peer != _NOBODY:
            record(trace_ptr, WAITING, peer, since)


class KernelEvent(NamedTuple):
    """An event says what a program did from begin_ns to end_ns.

    kind: one of KINDS. peer: a rank of the kernel's group, or -1.
    """

    program: int
    kind: str
    peer: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class TracedLaunch:
    """A launch of a kernel. events: program by program, in the order in which each program recorded them.

    rank, world: this rank in the kernel's group and the group's size, None where the kernel does not know them.
    programs: the size of the grid. lost: how many events did not fit the rows of their programs.
    """

    kernel: str
    rank: int | None
    world: int | None
    programs: int
    events: list[KernelEvent]
    lost: int


class KernelTrace:
    """Traces the launches of this process, of all threads, while it is entered; one trace at a time.

    most_bytes: the device memory that rows may take; launches that need more are left out. untraced:
    how many launches were not traced, for that reason or because a CUDA graph captured them.
    """

    def __init__(self, most_bytes: int = 2**29) -> None:
        self._left = most_bytes
        self._launches: list[tuple[str, int | None, int | None, Tensor]] = []
        self.untraced = 0

    @property
    def launched(self) -> int:
        """Return the number of launches that were traced so far."""
        return len(self._launches)

    def __enter__(self) -> "KernelTrace":
        start_trace(self._rows)
        return self

    def __exit__(self, *_: object) -> None:
        stop_trace()

    def _rows(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> Tensor | None:
        """Return the rows of a launch, zeroed in stream order; None where it is not traced."""
        device = arguments["abort_ptr"].device
        nbytes = 8 * grid[0] * _WORDS.value
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured or nbytes > self._left:
            self.untraced += 1
            return None
        self._left -= nbytes
        rows = torch.zeros(grid[0], _WORDS.value, dtype=torch.int64, device=device)
        self._launches.append((kernel.fn.__name__, arguments.get("rank"), arguments.get("WORLD"), rows))
        return rows

    def read(self) -> list[TracedLaunch]:
        """Return the launches that were traced so far, in the order of their launch, after all kernels have ended."""
        for device in {rows.device for *_, rows in self._launches if rows.is_cuda}:
            torch.cuda.synchronize(device)
        return [_read(*launch) for launch in self._launches]


def _read(kernel: str, rank: int | None, world: int | None, rows: Tensor) -> TracedLaunch:
    events, lost = [], 0
    for program, words in enumerate(rows.tolist()):
        count = min(words[0], EVENTS.value)
        lost += words[0] - count
        for first in range(1, 1 + 4 * count, 4):
            kind, peer, begin, end = words[first : first + 4]
            events.append(KernelEvent(program, KINDS[kind], peer, begin, end))
    return TracedLaunch(kernel, rank, world, len(rows), events, lost)
