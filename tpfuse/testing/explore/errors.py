"""What an exploration finds."""


class ExploreError(AssertionError):
    """A protocol failed under a schedule; the message names the lines, the ranks and what runs it again.

    replay: an expression that runs the same schedule again.
    """

    def __init__(self, message: str, replay: str = "") -> None:
        self.message, self.replay = message, replay
        super().__init__(message + (f"\n  replay: {replay}" if replay else ""))

    def with_replay(self, replay: str) -> "ExploreError":
        """The same failure with the expression that replays it."""
        error = type(self)(self.message, replay)
        error.__cause__ = self.__cause__
        return error


class RaceError(ExploreError):
    """Two accesses to one element of symmetric memory that nothing orders, at least one of which writes."""


class DeadlockError(ExploreError):
    """Ranks wait for words that nobody is left to change, or run on without an end."""


class ProtocolError(ExploreError):
    """A rank raised, or reached outside a symmetric buffer or into one that was freed."""


class Stopped(BaseException):
    """Unwinds the other ranks after a failure; no Exception, so that nothing on the way takes it for its own."""
