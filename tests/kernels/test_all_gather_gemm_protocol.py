"""all_gather_gemm with copiers and with copy engines, under many schedules.

There is no alarm, no unneeded line, and no wait without an end.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.channels import connect
from tpfuse.explore import ExploreError, SimulatedMemory, explore
from tpfuse.explore.suite import Fault, ProtocolSuite, StreamMemory, current, replace, without_rank_0, without_wait
from tpfuse.kernels import all_gather_gemm, endpoint, engine_gather, signals
from tpfuse.ops.linear import engine_gather as engines
from tpfuse.testing.inputs import integers

SIZES = ((3, 16, 20), (1, 8, 5), (2, 16, 0), (3, 12, 40))  # m, K, N: a chunk has one tile, several or none
WITHOUT_PRODUCT = (1,)  # indices of SIZES that engines copy without a product: the epoch ends after the copies
SLOT_BYTES = 512
PRODUCT = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 1, "EPILOGUE_PARTS": 1}
TILES = {"all_gather_gemm": PRODUCT | {"COPIERS": 2, "BLOCK_COPY": 16}}  # two programs copy and two multiply

pytestmark = pytest.mark.usefixtures("tiny_tiles")


def multiply(*args: Any, **options: Any) -> torch.Tensor:
    out: torch.Tensor = current(all_gather_gemm).all_gather_gemm_forward(*args, **options)[0]
    return out


def inputs(epoch: int, world: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return every rank's x and the weight."""
    m, k, n = SIZES[epoch]
    return [integers(10 * epoch + rank, m, k) for rank in range(world)], integers(epoch, n, k)


class Copiers:
    """A rank whose products copy."""

    def __init__(self, memory: SimulatedMemory) -> None:
        self.rank, self.world = memory.rank, memory.world
        self.end = connect(memory, SLOT_BYTES, 4 * memory.world, 4)
        self.ready = memory.signals("ready", 2 * self.world).local
        self.gathered = memory.buffer("gathered", (self.world * SLOT_BYTES // 4,), torch.float32).local

    def product(self, epoch: int) -> None:
        xs, weight = inputs(epoch, self.world)
        chunks = self.gathered[: self.world * xs[0].numel()].view(self.world, *xs[0].shape)
        out = multiply(xs[self.rank], weight, None, chunks, self.ready, self.end, keep_own=True)
        assert torch.equal(out, torch.cat(xs) @ weight.t()), f"epoch {epoch + 1}"
        assert torch.equal(chunks, torch.stack(xs)), f"epoch {epoch + 1}"


class Engines:
    """A stream of a rank for which engines copy. x is in memory that is written again in each epoch."""

    def __init__(self, memory: SimulatedMemory, world: int) -> None:
        self.rank, self.world = memory.rank % world, world
        streams: Any = StreamMemory(memory, world)
        self.engines = current(engines).EngineGather(streams, "engines", SLOT_BYTES)
        self._x = streams.buffer("x", (SLOT_BYTES // 4,), torch.float32).local

    def x(self, epoch: int) -> torch.Tensor:
        m, k, _ = SIZES[epoch]
        return self._x[: m * k].view(m, k)

    def begin(self, epoch: int) -> None:
        """Do the work that precedes the copies on the product's stream: it writes x into memory that was freed."""
        self.x(epoch).copy_(inputs(epoch, self.world)[0][self.rank])

    def send(self, epoch: int) -> None:
        """Copy, on the stream of copies."""
        self.engines.send(self.x(epoch), multiplied=epoch not in WITHOUT_PRODUCT, keep=True)

    def product(self, epoch: int) -> None:
        """Multiply chunks that are signalled, beside the copies."""
        if epoch not in WITHOUT_PRODUCT:
            xs, weight = inputs(epoch, self.world)
            x, chunks, end = self.x(epoch), self.engines.chunks(xs[0]), self.engines.endpoint
            out = multiply(x, weight, None, chunks, self.engines.ready, end, copied=True)
            assert torch.equal(out, torch.cat(xs) @ weight.t()), f"epoch {epoch + 1}"

    def end(self, epoch: int) -> None:
        """Do the work that follows the copies."""
        xs = inputs(epoch, self.world)[0]
        assert torch.equal(self.engines.chunks(xs[0]), torch.stack(xs)), f"epoch {epoch + 1}"


def two_streams(memory: SimulatedMemory) -> None:
    """Run every size with copies on a second stream."""
    list(stream_rounds(memory, range(len(SIZES))))


def stream_rounds(memory: SimulatedMemory, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Run an epoch for each size: half of the ranks are the second streams of the others."""
    world = memory.world // 2
    rank, copies = memory.rank % world, memory.rank >= world
    stream, events = Engines(memory, world), memory.signals("events", 1)
    for epoch, size in enumerate(sizes, 1):
        if copies:
            memory.wait_signal(events, memory.rank, 0, epoch, peer=rank, op="P has come here")
            stream.send(size)
            memory.signal(events, rank, 0, epoch)
        else:
            stream.begin(size)
            memory.signal(events, rank + world, 0, epoch)
            stream.product(size)
            memory.wait_signal(events, rank, 0, epoch, peer=rank + world, op="C has copied")
            stream.end(size)
        yield epoch, epoch % 2


class GatherSuite(ProtocolSuite):
    """The program for late ranks and the suites' common settings."""

    modules = (signals, endpoint, engine_gather, all_gather_gemm, engines)

    def late_program(self, memory: SimulatedMemory) -> None:
        """Run both ways in turn, each without rank 0 in its second call.

        The barriers before these calls are needed because copies after an abort may overwrite what a peer still reads.
        """
        copiers, copied = Copiers(memory), Engines(memory, memory.world)
        engine, (xs, weight) = copied.engines, inputs(3, memory.world)
        for way in (copiers, copied, copiers):
            if way is copied:
                copied.begin(0)
                copied.send(0)
            way.product(0)
            memory.barrier()
            end, ready = (engine.endpoint, engine.ready) if way is copied else (copiers.end, copiers.ready)
            before = end.state[0].item()

            def run(way: Any = way, end: Any = end, ready: Any = ready, before: Any = before) -> None:
                if way is copied:
                    engine.send(xs[memory.rank], multiplied=True, keep=True)
                multiply(xs[memory.rank], weight, None, engine.chunks(xs[0]), ready, end, copied=way is copied)
                assert not (ready > before).any(), "nothing of it is ready"
                received = [words[memory.rank].item() for words in engine._words.peers]
                assert not any(word > before for word in received), "no rank is signalled"

            without_rank_0(memory, "all_gather_gemm", end.state, run)

    def copier_rounds(self, memory: SimulatedMemory, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        rank = Copiers(memory)
        for epoch, size in enumerate(sizes, 1):
            rank.product(size)
            yield epoch, epoch % 2


GATHER, KERNEL = all_gather_gemm._gather_chunks, all_gather_gemm.all_gather_gemm_forward_kernel
FLAGS = "peer_pointer(flags_ptr, rank, tl.int32) + {} * WORLD"
IDLE = "tl.cdiv(max(tiles - first, 0), workers) * workers - tiles"
OPEN = engine_gather.open_copies_kernel
BARRIER = "barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, trace_ptr=trace_ptr)"
STAMP = "tl.store(stamp_ptr, epoch)"
STAMP_AFTER_BARRIER = f"if {BARRIER}:\n    {STAMP}"


class TestGathering(GatherSuite):
    """The suite of gathers by copiers of the product's own grid."""

    needed = (all_gather_gemm,)
    worlds = ((2, 2), (2, 1), (3, 2))
    faults = (
        Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes")),
        Fault("an epoch too far", replace(signals.begin, "tl.load(state_ptr) + 1", by="tl.load(state_ptr) + 2")),
        Fault(
            "one word of ready for all copiers",
            replace(GATHER, "ready_ptr + source * COPIERS + copier", by="ready_ptr + source * COPIERS"),
        ),
        Fault("ready for the next launch", replace(GATHER, "epoch", by="epoch + 1", call="signal")),
        Fault("ready for another chunk", replace(GATHER, "source", by="rank", call="signal")),
        Fault("one share is a chunk", replace(KERNEL, "shares < SHARES", by="shares < 1")),
        Fault("the first chunk is there", replace(KERNEL, "step > 0", by="step > 1")),
        Fault(
            "another copier's signal",
            replace(GATHER, FLAGS.format("copier"), by=FLAGS.format("(COPIERS - 1 - copier)")),
        ),
        Fault(
            "copied to another chunk's rows",
            replace(GATHER, "tl.cast(source, tl.int64)", by="tl.cast(WORLD - 1 - source, tl.int64)"),
        ),
        Fault("a tile left out", replace(KERNEL, IDLE, by=f"{IDLE} + 1")),
    )
    late_faults = (
        Fault("an epoch of parts", replace(KERNEL, "chunks == WORLD", by="chunks > 0")),
        Fault("the new epoch after an abort", replace(OPEN, STAMP_AFTER_BARRIER, by=f"{BARRIER}\n{STAMP}")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        list(self.copier_rounds(memory, range(len(SIZES))))

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return self.copier_rounds(memory, (0, 1) * 2)


SEND = engines.EngineGather.send
COPY = "destinations[peer].copy_(x)"
CLOSE = "if not multiplied:\n    close_copies(self.endpoint)"
SIGNAL = "if multiplied:\n    memory.signal(self._words, peer, rank, self._stamp)"


class TestTwoStreams(GatherSuite):
    """The suite of copies on a second stream, between launches that wait for the same stream of all ranks."""

    needed = (engine_gather, engines)
    test_waits_end = None  # type: ignore[assignment]  # that of TestGathering goes both ways
    worlds = ((4, 2), (4, 1), (6, 2))
    all_worlds = ((4, 1),)
    faults = (
        Fault("signalled before it is copied", replace(SEND, f"{COPY}\n{SIGNAL}", by=f"{SIGNAL}\n{COPY}")),
        Fault("no rank is signalled", replace(SEND, SIGNAL, by="pass")),
        Fault("signalled for another rank", replace(SEND, "rank", by="peer", call="signal")),
        Fault("another rank is signalled", replace(SEND, "peer", by="(peer + 1) % world", call="signal")),
        Fault("the previous epoch is signalled", replace(SEND, "self._stamp", by="self._stamp - 1", call="signal")),
        Fault("the next epoch is signalled", replace(SEND, "self._stamp", by="self._stamp + 1", call="signal")),
        Fault("copied to another chunk", replace(SEND, COPY, by="self.chunks(x)[peer].copy_(x)")),
        Fault("one peer is left out", replace(SEND, "range(1, world)", by="range(1, world - 1)")),
        Fault("this rank's chunk is left out", replace(SEND, "if keep:\n    destinations[rank].copy_(x)", by="pass")),
        Fault("copied before all have come", replace(SEND, "open_copies(self.endpoint, self._stamp)", by="pass")),
        Fault("closed before all have copied", replace(SEND, CLOSE, by="pass")),
        Fault("one barrier for both ends", replace(engine_gather.close_copies_kernel, "1", by="0", call="barrier")),
        Fault("closed twice", replace(SEND, CLOSE, by="close_copies(self.endpoint)")),
        Fault(
            "one source is not waited for",
            replace(signals.barrier, "ranks < WORLD", by="ranks < WORLD - 1", call="wait_signal"),
        ),
        Fault("stamped before the wait", replace(OPEN, STAMP_AFTER_BARRIER, by=STAMP)),
        Fault("the product takes any epoch", replace(KERNEL, "epoch", by="epoch - 1", call="wait_signal")),
    )

    def program(self, memory: SimulatedMemory) -> None:
        two_streams(memory)

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return stream_rounds(memory, (0, 1) * 2)


@pytest.mark.parametrize("what", ["P has come here", "C has copied"])
def test_both_streams_wait_for_each_other(what: str) -> None:
    """Copy that begin before the rows are written, or end after the operation, are found."""
    with pytest.raises(ExploreError):
        explore(without_wait(two_streams, what), 4, resident=2)
