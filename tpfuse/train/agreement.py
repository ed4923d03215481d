"""Ranks agree on how a piece of local work went before any of them goes on.

Work that can fail on one rank alone (its disk, its memory) must not be followed by a collective as if nothing had
happened: the failed rank would not be there. So every piece ends in one exchange of outcomes, and all ranks raise
or none does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tpfuse.comm.collectives.collective import gather_objects

_T = TypeVar("_T")


class DiskFailed(Exception):
    """The disk failed one rank; the message says which and how."""


def agree(group: dist.ProcessGroup | None, work: Callable[[], _T]) -> list[_T]:
    """What `work` returned on every rank, in rank order.

    Raises on every rank where it raised on any: DiskFailed for an OSError; for anything else that error itself
    where it happened and RuntimeError elsewhere. A rank that is lost makes the exchange raise PeerTimeout.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as caught:  # whatever it is, the other ranks are waiting to hear of it
        error = caught
    disk = isinstance(error, OSError)
    outcomes: list[Any] = [(value, disk, None if error is None else f"{type(error).__name__}: {error}")]
    if group is not None:
        outcomes = gather_objects(outcomes[0], group, op="agreement on files")
    if error is not None and not disk:
        raise error
    failures = [(disk, f"rank {rank}: {text}") for rank, (_, disk, text) in enumerate(outcomes) if text is not None]
    for disk, text in sorted(failures):  # errors that are not the disk's come first
        raise DiskFailed(text) if disk else RuntimeError(f"stopped by an error on {text}")
    return [value for value, _, _ in outcomes]
