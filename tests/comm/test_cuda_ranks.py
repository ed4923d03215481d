"""Symmetric memory of CUDA ranks in a Gloo group. Each rank has a GPU of its own, or all ranks share one.

Their kernels are compiled: the ranks are started without TRITON_INTERPRET. The tests in test_cuda_memory.py need no
GPU.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.comm.symmetric_memories import check_buffers, check_names, check_ring, ring
from tpfuse.comm.collectives.fused import FusedCollectives
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout, Unavailable
from tpfuse.comm.settings import set_settings
from tpfuse.testing.ranks import GpuRankPool, RankError, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    running = GpuRankPool(request.param, timeout=120.0)
    yield running
    running.close()


def _memory(timeout: float = 30.0) -> CudaMemory:
    group = dist.group.WORLD
    assert group is not None
    return CudaMemory(group, torch.device("cuda", torch.cuda.current_device()), timeout)


def _buffers() -> None:
    memory = _memory()
    check_buffers(memory, (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool))
    check_names(memory)
    free, _ = torch.cuda.mem_get_info()
    for _ in range(5):
        memory.buffer("large", (2**26,), torch.uint8)
        memory.free("large")
    memory.barrier()
    assert torch.cuda.mem_get_info()[0] > free - 2**25 * memory.world


def test_every_rank_reads_and_writes_every_ranks_part(ranks: RankPool) -> None:
    ranks.run(_buffers)


def _ring(first: int) -> None:
    """The stream does all copies and signals; the host reads nothing before the end."""
    memory = _memory()
    out = ring(memory, 500, first)
    torch.cuda.synchronize()
    check_ring(memory, out)


def test_signals_order_copies_on_streams(ranks: RankPool) -> None:
    ranks.run(_ring, 0)
    ranks.run(_ring, 2**31 - 200)


def _neighbours() -> None:
    """Words in the memory of both neighbours are set from the host's ints, which wrap around."""
    memory = _memory()
    flags = memory.signals("neighbours", 2)
    left, right = (memory.rank - 1) % memory.world, (memory.rank + 1) % memory.world
    for epoch in (1, 2**31 - 1, 2**31, 2**31 + 1):
        with memory.guard("neighbours"):
            memory.signal(flags, right, 0, epoch)
            memory.signal(flags, left, 1, epoch)
            memory.wait_signal(flags, memory.rank, 0, epoch, peer=left, op="from the left")
            memory.wait_signal(flags, memory.rank, 1, epoch, peer=right, op="from the right")
    torch.cuda.synchronize()
    memory.check()
    assert flags.local.tolist() == [-(2**31) + 1] * 2
    memory.barrier()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: words of one GPU are no peer's")
def test_ints_are_signalled_to_both_neighbours() -> None:
    running = GpuRankPool(torch.cuda.device_count(), timeout=120.0)
    try:
        running.run(_neighbours)
    finally:
        running.close()


def _never() -> None:
    """The last rank does not come. Kernels that spin are told to stop, and all ranks can go on."""
    memory = _memory(timeout=1.0)
    flags = memory.signals("flags", memory.world)
    last = memory.world - 1
    with memory.guard("operation"):  # The first one may wait longer, and compiles the kernel.
        memory.signal(flags, memory.rank, memory.rank, 1)
        memory.wait_signal(flags, memory.rank, memory.rank, 1, peer=memory.rank, op="operation")
    torch.cuda.synchronize()
    started = time.monotonic()
    if memory.rank != last:
        with memory.guard("operation"):
            memory.wait_signal(flags, memory.rank, last, 1, peer=last, op="operation")
        assert time.monotonic() - started < 0.8  # The host goes on.
        torch.cuda.synchronize()
        assert time.monotonic() - started < 4.0
        with pytest.raises(PeerTimeout) as caught:
            memory.check()
        assert caught.value.op == "operation" and caught.value.peer == last
    else:
        while not memory.control.aborted:
            time.sleep(0.01)
    with pytest.raises(PeerTimeout), memory.guard("the next one"):
        pass
    memory.control.timeout = 30.0  # Ranks that share a GPU leave their kernels one after another.
    memory.reset()
    assert int(memory.abort) == 0 and not flags.local.any()
    memory.barrier()
    for epoch in (1, 2, 3):
        with memory.guard("after"):
            for rank in range(memory.world):
                memory.signal(flags, rank, memory.rank, epoch)
            for rank in range(memory.world):
                memory.wait_signal(flags, memory.rank, rank, epoch, peer=rank, op="after")
    torch.cuda.synchronize()
    memory.check()
    memory.barrier()


def test_kernels_stop_waiting_and_all_ranks_can_go_on(ranks: RankPool) -> None:
    ranks.run(_never)


def _two_streams() -> None:
    memory = _memory()
    x = torch.zeros(2**24, device=memory.device)
    seen = torch.zeros(20, device=memory.device)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]), memory.guard("operation"):
            for _ in range(5):
                x += 1  # This would be a race if the operations were not ordered.
            seen[turn] = x[-1]
    torch.cuda.synchronize()
    assert seen.tolist() == [5.0 * (turn + 1) for turn in range(20)]
    memory.barrier()


def test_the_second_of_two_streams_waits_for_the_first(ranks: RankPool) -> None:
    ranks.run(_two_streams)


def _beside() -> None:
    memory = _memory()
    memory.has_second_stream = True  # also if the ranks share a GPU
    x, y = torch.zeros(2, 2**24, device=memory.device)
    seen = torch.zeros(20, device=memory.device)

    def work() -> None:
        with memory.guard("beside"):
            y.copy_(x)

    for turn in range(20):
        x += 1  # before the work begins
        end = memory.beside(work)
        memory.join(end)
        seen[turn] = y[-1]  # after its end
    torch.cuda.synchronize()
    memory.check()
    assert seen.tolist() == [float(turn + 1) for turn in range(20)]
    memory.barrier()


def test_work_beside_a_stream_waits_for_it_and_is_joined(ranks: RankPool) -> None:
    ranks.run(_beside)


def _collectives() -> None:
    memory = _memory()
    collectives = FusedCollectives(memory)
    expected = torch.arange(1000, device=memory.device) * memory.world + sum(range(memory.world))
    x = torch.arange(1000, device=memory.device) + memory.rank
    out = torch.empty_like(x)
    for _ in range(50):
        out.zero_()
        collectives.all_reduce(x, out)
        assert torch.equal(out, expected)
    memory.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        collectives.all_reduce(x, out)
    for turn in range(20):
        x.add_(1)
        with memory.guard("replay"):
            graph.replay()
        assert torch.equal(out, expected + memory.world * (turn + 1))
    memory.check()
    memory.barrier()


def test_fused_collectives_and_their_graphs(ranks: RankPool) -> None:
    ranks.run(_collectives)


def _connected() -> str:
    set_settings(timeout=20.0)
    group = dist.group.WORLD
    assert group is not None
    memory = symmetric_memory(group, torch.device("cuda"))
    assert memory.device == torch.device("cuda", torch.cuda.current_device()) and memory.timeout == 20.0
    assert symmetric_memory(group, memory.device) is memory
    return memory.backend


def test_connect_gives_the_memory_of_the_current_gpu(ranks: RankPool) -> None:
    assert ranks.run(_connected) == ["cuda"] * ranks.world


def _killed() -> None:
    memory = _memory(timeout=60.0)
    flags = memory.signals("flags", 1)
    memory.signal(flags, memory.rank, 0, 1)
    memory.wait_signal(flags, memory.rank, 0, 1, op="once, to compile it")
    memory.barrier()
    if memory.rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    with memory.guard("operation"):
        memory.wait_signal(flags, memory.rank, 0, 2, peer=1, op="operation")
    torch.cuda.synchronize()
    memory.check()


def test_a_rank_that_is_killed_is_named() -> None:
    running = GpuRankPool(2, timeout=120.0)
    try:
        with pytest.raises(RankError, match=r"PeerTimeout: operation: rank 0 waited .* for rank 1; .* has ended"):
            running.run(_killed)
    finally:
        running.close()


def _overlapping() -> str:
    torch.cuda.set_device(0)
    try:
        _memory()
    except Unavailable as error:
        return str(error)
    return "made"


def test_ranks_of_one_gpu_need_the_environment_variable() -> None:
    running = GpuRankPool(2, timeout=120.0, overlapping=False)
    try:
        (message, other) = running.run(_overlapping)
    finally:
        running.close()
    assert message == other and message.startswith("rank 0 (cuda:0) and rank 1 (cuda:0) are on one GPU: torch refuses")
