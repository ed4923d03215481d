"""The two ways in which ranks agree: they exchange values, or run local work and agree on its outcome.

An exchange goes one of three ways, since each can do what the others cannot:

| way                     | what it needs                | waits                     | a value           |
|-------------------------|------------------------------|---------------------------|-------------------|
| the group's store       | a group                      | `within` seconds          | small, for JSON   |
| a collective of a group | that it has not failed       | as long as torch's group  | any, pickled      |
| a control block         | ranks that share a host      | as long as the memory     | 4 KB, pickled     |

The store alone names a rank that has never come, but does not tell that a rank has ended, and each rank reads as many
entries as there are ranks. A collective ends at once if a rank has ended, and may wait for one that reads files for
long. A control block does both, on one host. Two kinds of comparison are no exchange, since they are made in each call
of an operator and cost a collective of a few bytes: `collectives.compare` and `collectives.on_any_rank`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch.distributed as dist

from tpfuse.comm.errors import PeerTimeout, RankFailed, named
from tpfuse.comm.handle import gathered
from tpfuse.comm.rendezvous import stored


class Exchanging(Protocol):
    """Ranks that exchange by their shared memory."""

    def exchanged(self, value: Any, op: str) -> list[Any]:
        """Return every rank's value, in rank order. Raise PeerTimeout."""


Ranks = dist.ProcessGroup | Exchanging | None  # None for a single rank


def exchange(value: Any, *ranks: Ranks, op: str, within: float | None = None) -> list[Any]:
    """Return every rank's value, in rank order. Collective.

    ranks: a group, or several along the axes of a mesh: then the values of all ranks of the mesh. op: the name of the
    operation in errors. within: the seconds in which all ranks must come, by the store; None: the deadline of torch's
    group. Raise PeerTimeout, which names the missing rank; with `within` also Disagreement, on every rank, if a rank
    comes with another `op`.
    """
    values = [value]
    for each in ranks:
        if isinstance(each, dist.ProcessGroup):
            found = gathered(values, each, op) if within is None else stored(values, each, op, within)
        else:
            found = [values] if each is None else each.exchanged(values, op)
        values = [value for of_rank in found for value in of_rank]
    return values


@contextlib.contextmanager
def agreement(op: str, *ranks: Ranks, alike: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Run the block on every rank. If it fails on one, raise on all. The end of the block is an `exchange`.

    The rank itself raises its own error, and the others RankFailed, which names the rank and the error. If the error is
    one of `alike`, all ranks raise it, as the first rank that has one. Raise PeerTimeout if a rank is lost.
    """
    error: Exception | None = None
    try:
        yield
    except PeerTimeout:  # the others learn of it by a time-out of theirs
        raise
    except Exception as own:
        error = own
    shared = error if isinstance(error, alike) else None
    own_text = ""
    if error is not None and shared is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        own_text = f"{named(rank)}: {type(error).__name__}: {error}"
    outcomes = exchange((shared, own_text), *ranks, op=op)
    if error is not None and shared is None:
        raise error
    for _, text in outcomes:
        if text:
            raise RankFailed(f"{op} failed on {text}")
    for shared, _ in outcomes:
        if shared is not None:
            raise shared
