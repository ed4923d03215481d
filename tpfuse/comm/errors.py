"""What goes wrong between ranks, by name."""

_coordinates: dict[int, str] = {}  # of the ranks of the world in the mesh of `tpfuse.comm.mesh.build_mesh`


def set_coordinates(coordinates: dict[int, str]) -> None:
    """What messages say of ranks of the world from now on besides their numbers, as "dp 1, tp 0"."""
    _coordinates.clear()
    _coordinates.update(coordinates)


def named(rank: int) -> str:
    """A rank of the world, for a message: "rank 3 (dp 1, tp 1)"."""
    return f"rank {rank} ({_coordinates[rank]})" if rank in _coordinates else f"rank {rank}"


class PeerTimeout(RuntimeError):
    """A rank waited for another one in vain; raised on every rank that is still there.

    op: the operation; step: the caller's step (-1 where nobody told); rank: who waited; peer: who was missing (None
    where nobody is behind: then the ranks wait for each other), both by their numbers in the world, whatever the group;
    waited: seconds, None where the operation was not begun because of an earlier failure, which `detail` then tells.
    After `SymmetricMemory.reset()` on all ranks the process can go on.
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
                " call tpfuse.comm.connect.connect(group, device).reset() on every rank of the group first"
            )
        elif peer == rank:
            text = f"{named(rank)} came too late: the other ranks have stopped waiting for it"
        else:
            missing = "a rank" if peer is None else named(peer)
            text = f"{named(rank)} waited {waited:.1f} s for {missing}" + (f"; {detail}" if detail else "")
        super().__init__(f"{where}: {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt_timeout, (self.op, self.step, self.rank, self.peer, self.waited, self.detail)


def _rebuilt_timeout(op: str, step: int, rank: int, peer: int | None, waited: float | None, detail: str) -> PeerTimeout:
    return PeerTimeout(op, step=step, rank=rank, peer=peer, waited=waited, detail=detail)


class Disagreement(ValueError):
    """Ranks came to the same place with different things: another operation, shape, dtype or key.

    Raised on every rank, each as it next uses the group's memory. The next operation then works again.
    """


class Unavailable(RuntimeError):
    """Symmetric memory cannot be had for these ranks; the message says why in plain words."""
