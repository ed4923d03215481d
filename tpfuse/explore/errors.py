"""The errors that an exploration raises."""

from collections.abc import Sequence

from tpfuse.explore.sites import Site


class ExploreError(AssertionError):
    """A protocol failed under a schedule. The message names the lines and the ranks, and says how to replay the run.

    replay: an expression that runs the same schedule again. steps: the operations on symmetric memory in the order of
    the run, each with its operation, rank, program and lines; the message has the text of those at fault.
    """

    def __init__(self, message: str, replay: str = "", steps: Sequence[Site] = ()) -> None:
        self.message, self.replay, self.steps = message, replay, steps
        super().__init__(message + (f"\n  replay: {replay}" if replay else ""))

    def of_run(self, replay: str, steps: Sequence[Site]) -> "ExploreError":
        """Return the same error with the expression that replays the run, and the run's steps."""
        error = type(self)(self.message, replay, steps)
        error.__cause__ = self.__cause__
        return error


class RaceError(ExploreError):
    """Two accesses to one element of symmetric memory, at least one of which writes, are not ordered.

    If the later one reads, the message also says what the older value does, in one more run of the program.
    """


class DeadlockError(ExploreError):
    """Ranks wait for words that no rank can change any more, or run without an end."""


class ProtocolError(ExploreError):
    """A rank raised an exception, or accessed memory outside a symmetric buffer or in a buffer that was freed."""


class Stopped(BaseException):
    """Unwinds the other ranks after a failure. It is no `Exception`, so that the program's handlers do not catch it."""
