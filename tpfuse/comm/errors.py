"""The errors of communication, and the names of ranks in their messages."""

from functools import partial

_coordinates: dict[int, str] = {}  # for each rank of the world its position in the mesh of `build_mesh`


def set_coordinates(coordinates: dict[int, str]) -> None:
    """Set the coordinates of the world's ranks, such as "dp 1, tp 0", which messages add to the ranks' numbers."""
    _coordinates.clear()
    _coordinates.update(coordinates)


def named(rank: int) -> str:
    """Return the name of a rank of the world for a message: "rank 3 (dp 1, tp 1)"."""
    return f"rank {rank} ({_coordinates[rank]})" if rank in _coordinates else f"rank {rank}"


class PeerTimeout(RuntimeError):
    """A rank waited for another one in vain. It is raised on every rank that still runs.

    op: the operation; step: the caller's step (-1 if it is not known); rank: the rank that waited; peer: the rank that
    was missing (None if no rank is late: then the ranks wait for each other), both by their numbers in the world, not
    in the group; waited: seconds, or None if the operation was not begun because of an earlier failure, which `detail`
    then describes. After `SymmetricMemory.reset()` on all ranks the process can go on.
    """

    def __init__(
        self, op: str, *, step: int, rank: int, peer: int | None, waited: float | None, detail: str = ""
    ) -> None:
        self.op, self.step, self.rank, self.peer, self.waited = op, step, rank, peer, waited
        self.detail = detail
        where = f"{op}, step {step}" if step >= 0 else op
        if waited is None:
            text = (
                f"{named(rank)} cannot begin it after an earlier failure ({detail}):"
                " call tpfuse.symmetric_memory(group, device).reset() on every rank of the group first"
            )
        elif peer == rank:
            text = f"{named(rank)} came too late: the other ranks have stopped waiting for it"
        else:
            missing = "a rank" if peer is None else named(peer)
            text = f"{named(rank)} waited {waited:.1f} s for {missing}" + (f"; {detail}" if detail else "")
        super().__init__(f"{where}: {text}")

    def __reduce__(self) -> tuple[object, ...]:
        given = {name: getattr(self, name) for name in ("step", "rank", "peer", "waited", "detail")}
        return partial(PeerTimeout, self.op, **given), ()


class Disagreement(ValueError):
    """Ranks came to the same operation of a group with a different name, shape, dtype or key, or with other inputs.

    It is raised on every rank, the next time that the rank uses the group's memory. The operation after that works.
    """


class RankFailed(RuntimeError, ValueError):
    """Work that each rank does by itself has failed on another rank. The message names the rank and its error.

    Most often a rank was given what it cannot use, so that it is a ValueError too.
    """


class Unavailable(RuntimeError):
    """These ranks cannot have symmetric memory. The message gives the reason."""
