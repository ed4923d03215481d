"""Reduce-scatters by copy engines under many schedules: no alarm, no unneeded line, and no wait without an end."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tpfuse.explore import ExploreError, SimulatedMemory, explore
from tpfuse.explore.suite import Fault, ProtocolSuite, StreamMemory, current, replace, without_rank_0, without_wait
from tpfuse.kernels import endpoint, engine_gather, engine_scatter, gemm_reduce_scatter, signals
from tpfuse.ops.linear import engine_scatter as engines
from tpfuse.testing.inputs import integers

SIZES = ((40, 20), (3, 5), (0, 7), (50, 18))  # M and N: several tiles per owner, owners without rows, no rows
K = 4
SLOT_BYTES = 4096
TILES = {  # tiles of 16 by 16: small tensors have several programs
    "gemm_reduce_scatter": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "EPILOGUE_PARTS": 1, "SUM_WIDTH": 16}
}

pytestmark = pytest.mark.usefixtures("tiny_tiles")


class Scatter:
    """A stream of a rank."""

    def __init__(self, memory: SimulatedMemory, world: int) -> None:
        streams: Any = StreamMemory(memory, world)
        self.rank, self.world = streams.rank, world
        self.engines = current(engines).EngineScatter(streams, "engines", SLOT_BYTES)

    def inputs(self, epoch: int) -> tuple[list[Tensor], Tensor]:
        """Return every rank's x and the weight."""
        m, n = SIZES[epoch]
        return [integers(10 * epoch + rank, m, K) for rank in range(self.world)], integers(epoch, n, K)

    def open(self) -> None:
        self.engines.open()

    def multiply(self, epoch: int) -> None:
        xs, weight = self.inputs(epoch)
        self.engines.multiply(xs[self.rank], weight, other_tiles=False)

    def send(self, epoch: int) -> None:
        self.engines.send(*SIZES[epoch], torch.float32)

    def sum(self, epoch: int) -> Tensor:
        out: Tensor = self.engines.sum(*SIZES[epoch], torch.float32, None, None)
        return out

    def check(self, epoch: int, out: Tensor) -> None:
        xs, weight = self.inputs(epoch)
        chunk = -(-SIZES[epoch][0] // self.world)
        expected = (torch.stack(xs).sum(0) @ weight.t())[self.rank * chunk : (self.rank + 1) * chunk]
        assert torch.equal(out, expected), f"epoch {epoch + 1}"


def two_streams(memory: SimulatedMemory) -> None:
    """Run every size with copies on a second stream."""
    list(stream_rounds(memory, range(len(SIZES))))


def stream_rounds(memory: SimulatedMemory, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Run an epoch for each size: half of the ranks are the second streams of the others."""
    world = memory.world // 2
    rank, copies = memory.rank % world, memory.rank >= world
    stream, events = Scatter(memory, world), memory.signals("events", 1)
    for epoch, size in enumerate(sizes, 1):
        if copies:
            memory.wait_signal(events, memory.rank, 0, epoch, peer=rank, op="P has come here")
            stream.open()
            stream.send(size)
            memory.signal(events, rank, 0, epoch)
        else:
            memory.signal(events, rank + world, 0, epoch)
            stream.multiply(size)
            stream.check(size, stream.sum(size))
            memory.wait_signal(events, rank, 0, epoch, peer=rank + world, op="C has copied")
        yield epoch, epoch % 2


SEND = engines.EngineScatter.send
OPEN = "open_copies(self._endpoint, self._stamp)"
AWAIT = "await_part(self._endpoint, self._stored, self._stamp, owner)"
COPY = "destination.copy_(part)"
SIGNAL = "memory.signal(self._words, owner, rank, self._stamp)"
KERNEL = gemm_reduce_scatter.gemm_reduce_scatter_forward_kernel
SIGNAL_COPIES = gemm_reduce_scatter._signal_copies
AWAIT_PART, SUM = engine_scatter.await_part_kernel, engine_scatter.sum_parts_kernel
WORDS = "stored_ptr + tl.program_id(0) * WORLD"
TOLD = "_tell(stored_ptr, flags_ptr, step, epoch, rank, WORLD)"
PART = "part_ptr = _destination(stored_ptr, slots_ptr, owner, epoch, rank, chunk, N, slot_bytes, dtype)"


class TestEngineScatter(ProtocolSuite):
    """The suite of copies on a second stream, between the launches of the first one."""

    modules = (signals, endpoint, engine_gather, gemm_reduce_scatter, engine_scatter, engines)
    needed = (engine_scatter, engines, SIGNAL_COPIES)
    worlds = ((4, 2), (4, 1), (6, 2))
    all_worlds = ((4, 1),)
    faults = (
        Fault("copied before it is stored", replace(SEND, AWAIT, by="pass")),
        Fault("signalled before it is copied", replace(SEND, f"{COPY}\n{SIGNAL}", by=f"{SIGNAL}\n{COPY}")),
        Fault("no rank is signalled", replace(SEND, SIGNAL, by="pass")),
        Fault("signalled for another rank", replace(SEND, "rank", by="owner", call="signal")),
        Fault("another rank is signalled", replace(SEND, "owner", by="(owner + 1) % world", call="signal")),
        Fault("the previous epoch is signalled", replace(SEND, "self._stamp", by="self._stamp - 1", call="signal")),
        Fault("the next epoch is signalled", replace(SEND, "self._stamp", by="self._stamp + 1", call="signal")),
        Fault("one owner is left out", replace(SEND, "range(1, world)", by="range(1, world - 1)")),
        Fault("another owner's part", replace(SEND, "parts[owner]", by="parts[rank]")),
        Fault(
            "one program is not awaited",
            replace(AWAIT_PART, "index < programs", by="index < programs - 1", call="wait_signal"),
        ),
        Fault("any epoch is awaited", replace(AWAIT_PART, "tl.load(stamp_ptr)", by="tl.load(stamp_ptr) - 1")),
        Fault("copied before all have come", replace(engines.EngineScatter.open, OPEN, by="pass")),
        Fault(
            "signalled before it is stored",
            replace(KERNEL, TOLD, by="pass"),
            replace(KERNEL, PART, by=f"{PART}\n{TOLD}"),
        ),
        Fault("one word for all owners", replace(SIGNAL_COPIES, f"{WORDS} + owner", by=WORDS)),
        Fault("the sum takes any epoch", replace(SUM, "epoch", by="epoch - 1", call="wait_signal")),
        Fault(
            "one source is not waited for",
            replace(SUM, "sources < WORLD", by="sources < WORLD - 1", call="wait_signal"),
        ),
        Fault("another rank's parts are summed", replace(SUM, "slots_ptr + rank", by="slots_ptr + (rank + 1) % WORLD")),
        Fault("all parts in one half", replace(gemm_reduce_scatter._destination, "owner != rank", by="owner < 0")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        two_streams(memory)

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return stream_rounds(memory, (0, 1) * 2)

    def late_program(self, memory: SimulatedMemory) -> None:
        """Rank 0 does not come. The barriers are needed: copies after an abort may overwrite what a peer still sums."""
        scatter = Scatter(memory, memory.world)

        def run(epoch: int) -> Tensor:
            scatter.open()
            scatter.multiply(epoch)
            scatter.send(epoch)
            return scatter.sum(epoch)

        def run_alone() -> None:
            run(1)
            received = [words[memory.rank].item() for words in scatter.engines._words.peers]
            assert not any(word > 1 for word in received), "no rank is signalled"

        for _ in range(2):
            scatter.check(0, run(0))
            memory.barrier()
            without_rank_0(memory, "gemm_reduce_scatter", scatter.engines._endpoint.state, run_alone)


@pytest.mark.parametrize("what", ["P has come here", "C has copied"])
def test_both_streams_wait_for_each_other(what: str) -> None:
    """Copy that begin before the last sum, or whose parts are overwritten, are found."""
    with pytest.raises(ExploreError):
        explore(without_wait(two_streams, what), 4, resident=2)
