"""What a collective that was begun is waited for by."""

from typing import Protocol


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Blocks (on CUDA: the current stream) until the result may be read."""


class _Done:
    def wait(self) -> None:
        return None


DONE: Handle = _Done()  # nothing is left to wait for
