"""A suite of tests that every kind of symmetric memory passes, with one rank or several, on CPUs or GPUs.

`do` in these functions runs an action on the stream on which the memory signals; without streams it calls the action.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tpfuse.comm.symmetric_memory import SymmetricMemory, wrapped

Action = Callable[[], object]


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def check_buffers(memory: SymmetricMemory, dtypes: Sequence[torch.dtype]) -> None:
    """Check that buffers are zero at first, and that every rank reads and writes every rank's part."""

    def byte(rank: int, more: int = 0) -> int:
        return rank % memory.world % 2 if dtype is torch.bool else rank % memory.world + more

    for dtype in dtypes:
        buffer = memory.buffer(f"{dtype}", (3, 7), dtype)
        assert buffer.local.shape == (3, 7) and buffer.local.dtype == dtype == buffer.dtype
        assert buffer.local.is_contiguous() and not _bits(buffer.local).any() and len(buffer.peers) == memory.world
        memory.barrier()
        _bits(buffer.local).fill_(byte(memory.rank))
        memory.barrier()
        for rank, peer in enumerate(buffer.peers):
            assert peer.device == memory.device and peer.dtype == dtype and peer.shape == (3, 7)
            assert bool((_bits(peer) == byte(rank)).all())
        assert buffer.addresses.tolist() == [peer.data_ptr() for peer in buffer.peers]
        assert not any(address % 16 for address in buffer.addresses.tolist())
        memory.barrier()
        _bits(buffer.peers[memory.rank - 1]).fill_(byte(memory.rank, 100))  # Ordinary stores write to it too.
        memory.barrier()
        assert bool((_bits(buffer.local) == byte(memory.rank + 1, 100)).all())
        memory.barrier()
    assert memory.buffer("empty", (0, 5), torch.float32).local.shape == (0, 5)


def check_names(memory: SymmetricMemory) -> None:
    """Check that a name has one shape and dtype until it is freed, and that signals are those that there are."""
    x = memory.buffer("x", (), torch.int64)
    assert memory.buffer("x", (), torch.int64) is x and memory.buffer("x 2", (), torch.int64) is not x
    for shape, dtype in (((1,), torch.int64), ((), torch.int32)):
        with pytest.raises(ValueError, match=r"symmetric buffer 'x' is torch.int64 \(\), not .*: free it first"):
            memory.buffer("x", shape, dtype)
    with pytest.raises(ValueError, match=r"'x' is torch\.int64"):
        memory.signals("x", 2)
    flags = memory.signals("flags", 3)
    assert flags.local.tolist() == [0, 0, 0] and flags.dtype == torch.int32
    for owner, index in ((0, 3), (0, -1), (-1, 0), (memory.world, 0)):
        expected = rf"signal {index} of rank {owner} in 'flags': there are 3 on each of {memory.world} ranks"
        with pytest.raises(ValueError, match=expected):
            memory.signal(flags, owner, index, 1)
        with pytest.raises(ValueError, match=expected):
            memory.wait_signal(flags, owner, index, 1, op="test")
    with pytest.raises(ValueError, match=r"signal in 'x', which is torch.int64 \(\): expected a buffer that `signals`"):
        memory.signal(x, 0, 0, 1)
    x.local.fill_(3)
    memory.free("x")
    memory.free("flags")
    uses: tuple[Action, ...] = (lambda: x.local, lambda: x.peers, lambda: x.addresses)
    for use in uses:
        with pytest.raises(ValueError, match="symmetric buffer 'x' was freed"):
            use()
    with pytest.raises(ValueError, match="there is no symmetric buffer 'x'"):
        memory.free("x")
    assert not memory.buffer("x", (2, 2), torch.int32).local.any()  # Another shape is possible now.
    renewed = memory.signals("flags", 2)
    for use in (lambda: memory.signal(flags, 0, 1, 9), lambda: memory.wait_signal(flags, 0, 1, 1, op="test")):
        with pytest.raises(ValueError, match="symmetric buffer 'flags' was freed"):
            use()
    assert renewed.local.tolist() == [0, 0]


def ring(
    memory: SymmetricMemory,
    rounds: int,
    first: int,
    do: Callable[[Action], object] = lambda action: action(),
    pause: Action = lambda: None,
) -> Tensor:
    """In each round write, signal the right neighbour, read the left one's part, and signal that it is read.

    first: the epoch before the first round. Return what was read, [rounds, 5], for `check_ring` when it is there.
    """
    x, flags = memory.buffer("ring", (5,), torch.int64), memory.signals("ring's flags", 2)
    left, right = (memory.rank - 1) % memory.world, (memory.rank + 1) % memory.world
    out = torch.zeros(rounds, 5, dtype=torch.int64, device=memory.device)
    stamp = torch.zeros(1, dtype=torch.int32, device=memory.device)
    for index in range(2):
        memory.signal(flags, memory.rank, index, first)
    memory.barrier()
    for turn in range(rounds):
        pause()
        epoch = first + 1 + turn
        with memory.guard("turn"):
            memory.wait_signal(flags, memory.rank, 1, epoch - 1, peer=right, op="read")
            do(partial(x.local.fill_, turn * 10 + memory.rank))
            memory.signal(flags, right, 0, epoch)
            memory.wait_signal(flags, memory.rank, 0, epoch, peer=left, op="written")
            do(partial(out[turn].copy_, x.peers[left]))
            do(partial(stamp.fill_, wrapped(epoch)))
            memory.signal(flags, left, 1, stamp)
    return out


def check_ring(memory: SymmetricMemory, out: Tensor) -> None:
    """Check what `ring` has read, after the stream has ended."""
    memory.check()
    assert out.tolist() == [[turn * 10 + (memory.rank - 1) % memory.world] * 5 for turn in range(len(out))]
    memory.barrier()
