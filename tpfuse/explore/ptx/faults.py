"""The errors of a kernel that is executed."""


class PtxError(Exception):
    """A kernel cannot be executed, or does what it must not do. The message names the line of PTX and of the source.

    at: the index of the faulty instruction; None for the present one. site: the index of an instruction before it that
    has to do with the fault, if there is one.
    """

    def __init__(self, message: str, *, at: int | None = None, site: int | None = None) -> None:
        super().__init__(message)
        self.at, self.site = at, site


class Unsupported(PtxError):
    """The PTX has an instruction or a directive that this executor does not know."""


class MemoryFault(PtxError):
    """An access outside all memory that the kernel was given, or at an address that is not aligned."""


class SharedRace(PtxError):
    """Two warps access one place of shared memory, one of them writes, and no barrier orders them.

    Also: a place is accessed while an asynchronous copy writes it, or read though nothing was ever written there.
    site: the instruction that wrote the place last.
    """


class GlobalRace(PtxError):
    """Two warps of a program access one place of global memory, one of them writes, and no barrier orders them.

    Also: memory changes while an asynchronous copy may read it. site: the instruction that accessed the place before.
    """


class Divergence(PtxError):
    """An instruction that all lanes of a warp must execute together is executed by some of them."""


class Stuck(PtxError):
    """No thread of a program can continue."""


class WgmmaHazard(PtxError):
    """A register of a wgmma is accessed while it runs, or was changed without a wgmma.fence before it.

    site: the instruction that began it, if it runs.
    """


class MbarrierFault(PtxError):
    """An mbarrier is used where none is, is initialized twice, or gets more arrivals or bytes than it may count."""
