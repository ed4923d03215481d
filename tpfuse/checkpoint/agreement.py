"""Ranks agree on the outcome of local work before any of them continues.

Work that can fail on one rank alone (its disk, its memory) must not be followed by a collective as if nothing had
happened, because the failed rank would not take part. So local work ends in one exchange of outcomes, and either all
ranks raise an error or none does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tpfuse.comm.collectives.collective import gather_objects
from tpfuse.errors import CheckpointError, RunError, UserError, of_disk

_T = TypeVar("_T")


class DiskFailed(Exception):
    """The disk of one rank failed. The message names the rank and the error."""


def agree(group: dist.ProcessGroup | None, work: Callable[[], _T]) -> list[_T]:
    """Run `work` on every rank and return the results of all ranks, in rank order.

    If `work` raises on any rank, every rank raises: DiskFailed for an OSError; for any other error, that error on the
    rank where it happened and RuntimeError on the others. If a rank is lost, the exchange raises PeerTimeout.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as caught:  # the other ranks wait for the outcome, so every kind of error is reported to them
        error = caught
    disk = isinstance(error, OSError)
    outcomes: list[Any] = [(value, disk, None if error is None else f"{type(error).__name__}: {error}")]
    if group is not None:
        outcomes = gather_objects(outcomes[0], group, op="agreement on files")
    if error is not None and not disk:
        raise error
    failures = [(disk, f"rank {rank}: {text}") for rank, (_, disk, text) in enumerate(outcomes) if text is not None]
    for disk, text in sorted(failures):  # errors that are not of the disk come first
        raise DiskFailed(text) if disk else RuntimeError(f"stopped by an error on {text}")
    return [value for value, _, _ in outcomes]


def _outcome(work: Callable[[], _T]) -> tuple[_T | None, tuple[str, int] | None]:
    """Return what `work` returns, or the arguments of a RunError if it finds bad input or a damaged checkpoint."""
    try:
        return work(), None
    except (UserError, CheckpointError) as error:
        return None, (str(error), error.status)


def from_first(group: dist.ProcessGroup, work: Callable[[], _T]) -> _T:
    """Return the result of `work`, which the first rank of the world alone calls.

    Raise RunError on all ranks for bad input, a damaged checkpoint and a disk that fails, and RuntimeError on the
    others if the first rank is lost.
    """
    found: list[Any] = [None]
    if group.rank() == 0:
        try:
            found = [_outcome(work)]
        except OSError as error:
            found = [(None, (of_disk(error), 1))]
    dist.broadcast_object_list(found, src=0)
    value, failure = found[0]
    if failure is not None:
        raise RunError(*failure)
    result: _T = value
    return result


def agree_to_load(group: dist.ProcessGroup | None, load: Callable[[], object]) -> None:
    """Call `load` on every rank. Raise RunError on all ranks if one finds bad input or a damaged checkpoint."""
    for failure in agree(group, lambda: _outcome(load)[1]):
        if failure is not None:
            raise RunError(*failure)
