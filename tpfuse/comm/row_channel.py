"""A channel whose ranks must bring equally many rows, and tell each other with every signal how many they have."""

import torch

from tpfuse.comm.channel import Channel
from tpfuse.comm.symmetric_memory import SymmetricMemory


class RowChannel(Channel):
    """A `Channel` that finds out where ranks have unequal numbers of rows, or of whatever `unit` says.

    rows: int64 [2], by the parity of the epoch like the slots, written by its rank alone.
    """

    def __init__(self, memory: SymmetricMemory, name: str, nbytes: int, unit: str = "rows") -> None:
        super().__init__(memory, name, nbytes)
        told = memory.buffer(f"{name}: rows", (2,), torch.int64)
        with torch.inference_mode(False):
            self._told, self._unit = [peer.unbind() for peer in told.peers], unit

    def signal_rows(self, rows: int) -> int:
        """`signal`, with this rank's number of rows."""
        self._told[self.memory.rank][self.next_epoch % 2].fill_(rows)
        return self.signal()

    def wait_for_rows(self, rank: int, epoch: int, rows: int, op: str) -> None:
        """`wait_for`. Raises ValueError, on every rank alike, where `rank` has not got as many rows."""
        self.wait_for(rank, epoch, op)
        theirs = self._told[rank][epoch % 2].item()
        if theirs != rows:
            for other in self.others:  # as in every epoch: what is written in two epochs nobody may still be reading
                self.wait_for(other, epoch, op)
            mine = f"rank {self.memory.rank} has {rows}"
            raise ValueError(f"{op}: rank {rank} has {theirs} {self._unit}, {mine}: all ranks must have equally many")
