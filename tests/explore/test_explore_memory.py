"""The explorer's symmetric memory: torch operations, signals of the host, and accesses to freed memory or outside."""

import pytest
import torch
import triton
import triton.language as tl

from tpfuse.comm.errors import Disagreement
from tpfuse.explore import DeadlockError, ProtocolError, RaceError, explore


@triton.jit
def fill_kernel(ptr, value, N: tl.constexpr):
    tl.store(ptr + tl.arange(0, N), tl.full((N,), value, tl.float32))


# Torch operations


@torch.library.custom_op("tpfuse_test::double_into", mutates_args=("out",))
def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2, out=out)


@pytest.mark.parametrize(
    ("access", "operation"),
    [
        ("write", lambda box: box.fill_(1.0)),
        ("write", lambda box: torch.add(torch.ones(4), 1.0, out=box)),
        ("write", lambda box: torch.cat([torch.ones(2), torch.ones(2)], out=box)),
        ("write", lambda box: torch._foreach_add_([torch.ones(1), box], 1.0)),
        ("write", lambda box: box[1:].view(3, 1).transpose(0, 1).copy_(torch.ones(1, 3))),
        ("write", lambda box: box.view(torch.int32).zero_()),
        ("read", lambda box: torch.ones(4).add(other=box)),
        ("read", lambda box: torch.cat([torch.ones(1), box])),
        ("read", lambda box: box[2].item()),
        ("read", lambda box: box.tolist()),
        ("read", lambda box: repr(box)),
        ("read", lambda box: box.double()),
        ("read", lambda box: box.view(2, 2).t().contiguous()),
        ("read", lambda box: box.view(2, 2).t().flatten()),
        ("read", lambda box: box.expand(2, 4).sum()),
        ("write", lambda box: double_into(torch.ones(4), box)),
        ("read", lambda box: double_into(box, torch.empty(4))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_torch_operations_on_a_peers_memory_race(mode, access, operation) -> None:
    def program(memory):
        box = memory.buffer("box", (4,), torch.float32)
        if memory.rank == 0:
            with mode():
                operation(box.peers[1])
        else:
            box.local.add_(1.0)

    with pytest.raises(RaceError, match=rf"(?s)race on box\[\d\] of rank 1.*\n  {access} by rank 0 at "):
        explore(program, 2)


def test_operations_that_read_no_elements_are_no_accesses() -> None:
    def program(memory):
        box = memory.buffer("box", (4,), torch.float32)
        if memory.rank == 0:
            box.peers[1][1:3].view(2, 1).detach().new_empty(3).add_(1.0)
            torch.zeros_like(box.peers[1]).add_(1.0)
            box.peers[1].split(2)[0].expand(3, 2).unbind()
            with torch.inference_mode():
                box.peers[1].contiguous().float().reshape(2, 2).flatten()
        box.local.add_(1.0)

    explore(program, 2)


# Signals of the host


def test_host_signals_order_kernels_and_torch_without_a_debug_barrier() -> None:
    def program(memory):
        box, flags = memory.buffer("box", (2, 4), torch.float32), memory.signals("flags", memory.world)
        for epoch in range(1, 4):
            fill_kernel[(1,)](box.local[0], float(epoch), 4)
            box.local[1].fill_(memory.rank)
            for peer in range(memory.world):
                memory.signal(flags, peer, memory.rank, epoch)
            for peer in range(memory.world):
                memory.wait_signal(flags, memory.rank, peer, epoch, op="test", peer=peer)
                assert box.peers[peer].tolist() == [[epoch] * 4, [peer] * 4]
            memory.barrier()

    explore(program, 3)


def test_signals_wrap_around() -> None:
    def program(memory):
        flags = memory.signals("flags", 1)
        if memory.rank == 0:
            for epoch in (2**31 - 1, 2**31, 2**31 + 1):
                memory.signal(flags, 1, 0, epoch)
        else:
            flags.local.fill_(0)
            memory.wait_signal(flags, 1, 0, 2**31 - 1, op="test")

    with pytest.raises(RaceError):  # the fill
        explore(program, 2)


def test_wait_compares_by_difference() -> None:
    def program(memory):
        flags = memory.signals("flags", 2)
        memory.signal(flags, 0, 0, -(2**31) + 1)  # two epochs after 2**31 - 1
        memory.wait_signal(flags, 0, 0, 2**31 - 1, op="test")
        memory.signal(flags, 0, 1, 2**31 - 1)
        memory.wait_signal(flags, 0, 1, -(2**31) + 1, op="test")

    with pytest.raises(DeadlockError, match=r"flags\[1\] of rank 0 is 2147483647"):
        explore(program, 1)


# Buffers


def test_using_a_freed_buffer_raises() -> None:
    def program(memory):
        box = memory.buffer("box", (4,), torch.float32)
        memory.free("box")
        with pytest.raises(ValueError, match="symmetric buffer 'box' was freed"):
            box.local  # noqa: B018
        again = memory.buffer("box", (2,), torch.int32)
        assert again.shape == (2,) and again.local.tolist() == [0, 0]
        with pytest.raises(ValueError, match="free it first"):
            memory.buffer("box", (3,), torch.int32)
        with pytest.raises(ValueError, match="there is no symmetric buffer 'flags'"):
            memory.free("flags")

    explore(program, 2)


def test_an_access_to_a_freed_buffer_by_its_old_address_is_reported() -> None:
    def program(memory):
        local = memory.buffer("box", (4,), torch.float32).local
        memory.free("box")
        fill_kernel[(1,)](local, 1.0, 4)

    with pytest.raises(
        ProtocolError, match=r"'box' of rank \d was accessed after it was freed:\n +store by rank \d, program 0 at .*tl"
    ):
        explore(program, 2)


def test_a_store_past_the_end_is_reported() -> None:
    def program(memory):
        fill_kernel[(1,)](memory.buffer("box", (3,), torch.float32).local, 1.0, 4)

    with pytest.raises(
        ProtocolError,
        match=r"element 3 of .* 'box' of rank \d was accessed, but the buffer has 3 elements:\n +store by",
    ):
        explore(program, 2)


def test_different_shapes_of_one_buffer_raise_disagreement() -> None:
    def program(memory):
        with pytest.raises(Disagreement, match=r"rank 1 asks for torch.float32 \(2,\), another rank for .* \(1,\)"):
            memory.buffer("box", (1 + memory.rank,), torch.float32)
        raise AssertionError("unreachable on rank 0, which waits for the others")

    with pytest.raises(ProtocolError, match="rank 1 raised AssertionError: unreachable"):
        explore(program, 2)


def test_a_buffer_that_one_rank_does_not_make_is_a_deadlock() -> None:
    def program(memory):
        if memory.rank:
            memory.buffer("box", (1,), torch.float32)

    with pytest.raises(DeadlockError, match="buffer 'box'"):
        explore(program, 2)
