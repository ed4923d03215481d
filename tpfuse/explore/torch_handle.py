"""A stand-in of torch's handle of symmetric memory, for explored programs of other projects."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from tpfuse.comm.symmetric_memory import SymmetricBuffer
from tpfuse.explore.simulated_memory import SimulatedMemory


class TorchHandle:
    """The handle that torch's `symm_mem.rendezvous` returns, of a symmetric buffer of a simulated memory.

        handle = TorchHandle(memory, "inbox", (1024,), torch.bfloat16)      # on each rank of an explored program
        inbox = handle.get_buffer(handle.rank, (1024,), torch.bfloat16)     # what `symm_mem.empty` returns in torch
        kernel[(8,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, handle.rank, handle.world_size)

    It has the attributes and methods of `torch._C._distributed_c10d._SymmetricMemory` (torch 2.11 to 2.13) that kernels
    and their launchers use; another one is an AttributeError. A signal pad is as large as torch's, and zero at first.
    There is no multicast memory. The waits end as those of `SimulatedMemory` do; `timeout_ms` is not used.

    key: a name, which is the same on all ranks. shape, dtype: of the buffer on each rank.
    """

    multicast_ptr = 0

    def __init__(self, memory: SimulatedMemory, key: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._memory = memory
        self.rank, self.world_size = memory.rank, memory.world
        self.signal_pad_size = _symmetric_memory.get_signal_pad_size()
        self._buffer = memory.buffer(key, shape, dtype)
        self._pads = memory.signals(f"{key}'s signal pad", self.signal_pad_size // 4)
        self.buffer_size = self._buffer.local.numel() * dtype.itemsize

    @property
    def buffer_ptrs(self) -> list[int]:
        """Return the address of each rank's buffer."""
        return self._buffer.addresses.tolist()

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """Return the address of each rank's signal pad."""
        return self._pads.addresses.tolist()

    @property
    def buffer_ptrs_dev(self) -> int:
        """Return the address of an array of `buffer_ptrs`."""
        return self._buffer.addresses.data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Return the address of an array of `signal_pad_ptrs`."""
        return self._pads.addresses.data_ptr()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """Return a part of a rank's buffer. storage_offset: in elements of `dtype`."""
        return _part(self._buffer, rank, sizes, dtype, storage_offset)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> Tensor:
        """Return a part of a rank's signal pad, by default all of it, as uint32."""
        dtype = dtype or torch.uint32
        return _part(self._pads, rank, sizes or (self.signal_pad_size // dtype.itemsize,), dtype, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for all ranks, which orders what they did before it before what follows it."""
        self._memory.stream_barrier(f"barrier of channel {channel}")

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Change a word of the destination from 0 to 1, with release semantics."""
        index = channel * self.world_size + self.rank
        self._memory.exchange(self._pads, dst_rank, index, 0, 1, releases=True, peer=dst_rank, op="put_signal")

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Change the word of the source back from 1 to 0, with acquire semantics."""
        index = channel * self.world_size + src_rank
        self._memory.exchange(self._pads, self.rank, index, 1, 0, releases=False, peer=src_rank, op="wait_signal")

    def stream_write_value32(self, input: Tensor, offset: int, val: int) -> None:
        """Write a word of a tensor in symmetric memory on the current stream, after all that the stream has done."""
        self._memory.write_word(input, offset, val)


def _part(buffer: SymmetricBuffer, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> Tensor:
    whole = buffer.peers[rank].view(-1).view(torch.uint8)
    count, begin = math.prod(sizes) * dtype.itemsize, storage_offset * dtype.itemsize
    if begin < 0 or begin + count > whole.numel():
        raise ValueError(
            f"bytes {begin} to {begin + count} of symmetric buffer {buffer.key!r}: expected a part of its "
            f"{whole.numel()} bytes"
        )
    return whole[begin : begin + count].view(dtype).view(tuple(sizes))
