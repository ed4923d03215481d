"""The handle of a collective that was begun."""

from typing import Protocol


class Handle(Protocol):
    """The handle of a collective under way."""

    def wait(self) -> object:
        """Block the caller (on CUDA the current stream) until the result may be read."""


class _Done:
    def wait(self) -> None:
        return None


DONE: Handle = _Done()  # the handle of a collective that has ended
