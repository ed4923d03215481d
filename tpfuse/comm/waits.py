"""Record whom each process waits for, so that every rank in a chain of waits names the rank that started it.

In a pipeline rank 0 waits for rank 1, which waits for rank 2, which has stopped. A process that waits writes the rank
and the time into its state in each of its control blocks, and again at each look. A stopped process looks no longer.
A rank whose deadline has passed follows these words to a rank that does not wait, even if the waits belong to different
groups. What a process has given up stays there after it has ended, and also in the store of torch.distributed, for
ranks without symmetric memory, such as those of another host.
"""

import contextlib
import time
import weakref
from typing import Any

import torch.distributed as dist

from tpfuse.comm.rank_state import AWAITED, LOOKED

_FOR_GOOD = -1  # the time of a wait that was given up
_RECENT = 1.0  # seconds: a process that waits looks more often, unless it is stopped


_blocks: list["weakref.ref[Any]"] = []  # the control blocks of this process, whose own words are `own_words`
_in_store = False  # whether this process has written into the store
_NO_STORE = (RuntimeError, KeyError, ValueError)  # what torch raises if the store fails, or if there is none


def register(block: Any) -> None:
    """Write the waits of this process into one more control block, as long as it exists."""
    global _blocks
    # A new list, because the thread of a watchdog may be reading the old one.
    _blocks = [*(reference for reference in _blocks if reference() is not None), weakref.ref(block)]


def note_wait(rank: int | None) -> None:
    """Write that this process waits, at this moment, for a rank of the world. None: for no rank in particular."""
    _write(rank, time.time_ns())


def give_up(rank: int | None) -> None:
    """Write that this process has waited in vain for a rank of the world. It holds until `forget`."""
    _write(rank, _FOR_GOOD)
    _write_into_store(rank)


def forget() -> None:
    """Remove what this process has written."""
    _write(None, 0)
    if _in_store:
        _write_into_store(None)


def _write(rank: int | None, when: int) -> None:
    for reference in _blocks:
        block = reference()
        if block is not None:
            words = block.own_words
            words[AWAITED], words[LOOKED] = 0 if rank is None else rank + 1, when


def _write_into_store(rank: int | None) -> None:
    global _in_store
    _in_store = rank is not None
    with contextlib.suppress(*_NO_STORE):
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(dist.get_rank()), "" if rank is None else str(rank))


def _key(rank: int) -> str:
    return f"tpfuse gives up: {rank}"


def last_that_gave_up(rank: int, patience: float) -> int | None:
    """Return the rank for which `rank` has waited in vain, directly or through others, by the entries in the store.

    That is `rank` itself if it does not give up within `patience` seconds, or if the store fails, and None if ranks
    have waited for each other. All ranks are those of the world.
    """
    passed, deadline = set(), time.monotonic() + patience
    with contextlib.suppress(*_NO_STORE):
        store = dist.distributed_c10d._get_default_store()
        passed.add(dist.get_rank())
        while rank not in passed:
            entry = store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
            if entry:
                passed.add(rank)
                rank = int(entry)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.02)
    return None if rank in passed else rank


def awaited(words: memoryview, timeout: float, left: bool) -> int | None:
    """Return the rank of the world for which another process waits or has waited in vain; None: it waits for none.

    words: those of that process. timeout: the seconds after which ranks give up. left: whether the process has ended
    or waits in a reset: then it does not wait for the rank at which it looked last, unless it has given up.
    """
    rank, looked = words[AWAITED] - 1, words[LOOKED]
    if rank < 0:
        return None
    recent = not left and time.time_ns() - looked < min(_RECENT, timeout / 4) * 1e9
    return rank if looked == _FOR_GOOD or recent else None
