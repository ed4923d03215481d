"""Counters of the bytes that data parallelism sends and receives."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """The bytes that this rank has sent to others and received from them.

    In shared or peer memory a read from another rank's part of it counts as received, and a write to it as sent.
    """

    sent: int = 0
    received: int = 0

    def add(self, sent: int, received: int) -> None:
        """Count one transfer."""
        self.sent += sent
        self.received += received

    def exchange(self, nbytes: int) -> None:
        """Count one transfer of `nbytes` each way."""
        self.add(nbytes, nbytes)
