"""The two ways in which ranks agree: they exchange values, or run local work and agree on its outcome.

An exchange goes one of three ways, since none can do what the other two can:

| over                   | by                | a value         | waits for a rank                                    |
|------------------------|-------------------|-----------------|-----------------------------------------------------|
| a group, with `within` | the group's store | small, for JSON | that long, and names it even if it has never come   |
| a group                | NCCL or Gloo      | any, pickled    | as long as torch's group, unless the rank has ended |
| a symmetric memory     | its control block | 4 KB, pickled   | as long as the memory, unless the rank has ended    |

Two comparisons are too frequent for an exchange, and take a collective of a few bytes: `collectives.compare` in each
call of an operator, and `collectives.on_any_rank`, for each gradient in `parallelize(check=True)`.
"""

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tpfuse.comm.errors import Disagreement, PeerTimeout, RankFailed, named
from tpfuse.comm.handle import CollectiveHandle, announce, write_group_record

_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # of exchanges in the store


class _SharingMemory(Protocol):
    def exchanged(self, value: Any, op: str) -> list[Any]: ...


Ranks = dist.ProcessGroup | _SharingMemory | None  # None for a single rank


def exchange(value: Any, *ranks: Ranks, op: str, within: float | None = None) -> list[Any]:
    """Return every rank's value, in rank order. Collective.

    ranks: a group, or several along the axes of a mesh: then the values of all ranks of the mesh. op: the name of the
    operation in errors. within: the seconds in which all ranks must come, by the store; None: the deadline of torch's
    group. Raise PeerTimeout, which names the missing rank; with `within` also Disagreement, on every rank, if a rank
    comes with another `op`.
    """
    values = [value]
    for each in ranks:
        if each is None:
            continue
        if not isinstance(each, dist.ProcessGroup):
            found = each.exchanged(values, op)
        elif within is not None:
            found = _stored(values, each, op, within)
        else:
            found = [None] * each.size()
            with CollectiveHandle(op, each, None).name_missing_rank():
                dist.all_gather_object(found, values, group=each)
        values = [value for of_rank in found for value in of_rank]
    return values


@contextlib.contextmanager
def agreement(op: str, *ranks: Ranks, alike: type[Exception] | tuple[()] = (), by_rank: bool = False) -> Iterator[None]:
    """Run the block on every rank. If it fails on one, raise on all. The end of the block is an `exchange`.

    The rank itself raises its own error, and the others RankFailed, which names the rank and the error. alike: a class
    of errors that all ranks raise as the first rank that has one; by_rank: whether its number precedes their text.
    Raise PeerTimeout if a rank is lost.
    """
    rank = named(dist.get_rank() if dist.is_initialized() else 0)
    error: Exception | None = None
    outcome: Exception | str | None = None
    try:
        yield
    except PeerTimeout:  # the others learn of it by a time-out of theirs
        raise
    except alike as own:
        outcome = type(own)(f"{rank}: {own}") if by_rank else own
    except Exception as own:
        error, outcome = own, f"{rank}: {type(own).__name__}: {own}"
    outcomes = [each for each in exchange(outcome, *ranks, op=op) if each is not None]
    if error is not None:
        raise error
    for failed in outcomes:
        if isinstance(failed, str):
            raise RankFailed(f"{op} failed on {failed}")
    for failed in outcomes:
        raise failed


def _stored(value: Any, group: dist.ProcessGroup, op: str, timeout: float) -> list[Any]:
    """Return every rank's value by the group's store."""
    announce(group)
    _counts[group] = count = _counts.get(group, 0) + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(f"tpfuse exchange {count}: {group.rank()}", json.dumps([op, value]))
    values, ranks = [], dist.get_process_group_ranks(group)
    for rank in range(group.size()):
        key = f"tpfuse exchange {count}: {rank}"
        try:
            store.wait([key], timedelta(seconds=timeout))
            entry = store.get(key)
        except RuntimeError as error:
            detail = "it has not come to this exchange of the ranks"
            missing = PeerTimeout(
                op, step=-1, rank=ranks[group.rank()], peer=ranks[rank], waited=timeout, detail=detail
            )
            write_group_record(group, missing)
            raise missing from error
        other, found = json.loads(entry)
        if other != op:
            own = named(ranks[group.rank()])
            raise Disagreement(f"{named(ranks[rank])} runs {other}, {own} runs {op}")
        values.append(found)
    return values
