"""How many bytes of a rank's memory travel: counters of what data parallelism sends and receives."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes that this rank has sent to others and received from them.

    What lies in shared or peer memory counts where it is read from or written to another rank's part of it.
    """

    sent: int = 0
    received: int = 0

    def add(self, sent: int, received: int) -> None:
        """Counts one transfer."""
        self.sent += sent
        self.received += received

    def exchange(self, nbytes: int) -> None:
        """Counts as much each way."""
        self.add(nbytes, nbytes)
