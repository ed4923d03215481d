"""all_gather_gemm and the launches around copies under many schedules: no alarm, no line too many, no endless wait."""

from typing import Any

import pytest
import torch

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.symmetric_memory import SymmetricBuffer
from tpfuse.kernels import all_gather_gemm, endpoint, signals, staging
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.testing.explore import SimulatedMemory
from tpfuse.testing.inputs import integers
from tpfuse.testing.protocol import Fault, ProtocolSuite, current, replace

SIZES = ((3, 16, 20), (1, 8, 5), (2, 16, 0), (3, 12, 40))  # m, K, N: one tile of a chunk, several, none
HALVES = (1, 1, 0, 0)  # of the slot, where copies come by themselves: with an empty round before two of them
WITHOUT_PRODUCT = (0,)  # of these: the epoch ends behind the copies
SLOT_BYTES = 512
PRODUCT = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_K": 16,
    "GROUP_M": 1,
    "EPILOGUE_PARTS": 1,
    "COPIERS": 2,
    "BLOCK_COPY": 16,
}
TILES = {"all_gather_gemm": PRODUCT, "stage": {"BLOCK": 8, "PROGRAMS": 2}}  # two copiers, two that multiply or stage

pytestmark = pytest.mark.usefixtures("tiny_tiles")


def multiply(*args: Any, **options: Any) -> torch.Tensor:
    out: torch.Tensor = current(all_gather_gemm).all_gather_gemm_forward(*args, **options)[0]
    return out


class Group:
    """What the launches of one rank of a group are given; `rank` of `world`, which may be fewer than the memory's."""

    def __init__(self, memory: SimulatedMemory, rank: int, world: int) -> None:
        def words(key: str, count: int) -> SymmetricBuffer:
            return memory.signals(key, count)

        self.rank, self.world = rank, world
        self.slots = memory.buffer("slots", (2, SLOT_BYTES), torch.uint8)
        flags, state, ready = words("flags", 4 * world), words("state", 2), words("ready", 2 * world)
        self.ready = ready.peers[rank]
        self.gathered = memory.buffer("gathered", (world * SLOT_BYTES // 4,), torch.float32).peers[rank]
        self.end = Endpoint(
            rank,
            world,
            slots=self.slots.addresses[:world],
            slot_bytes=SLOT_BYTES,
            flags=flags.addresses[:world],
            flag_count=4 * world,
            state=state.peers[rank],
            abort=memory.abort,
            programs=4,
        )

    def inputs(self, epoch: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Every rank's x, the weight, and where chunks are gathered."""
        m, k, n = SIZES[epoch]
        xs = [integers(10 * epoch + rank, m, k) for rank in range(self.world)]
        return xs, integers(epoch, n, k), self.gathered[: self.world * m * k].view(self.world, m, k)

    def gather(self, epoch: int) -> None:
        """One product, with copiers."""
        xs, weight, chunks = self.inputs(epoch)
        out = multiply(xs[self.rank], weight, None, chunks, self.ready, self.end, keep_own=True)
        assert torch.equal(out, torch.cat(xs) @ weight.t()), f"epoch {epoch + 1}"
        assert torch.equal(chunks, torch.stack(xs)), f"epoch {epoch + 1}"

    def stage(self, epoch: int) -> None:
        """In front of one that has none."""
        current(staging).stage(self.inputs(epoch)[0][self.rank], self.end, HALVES[epoch])

    def copy(self, epoch: int) -> None:
        """What a copy engine does, and the launches around it."""
        chunks = self.inputs(epoch)[2]
        for step in range(1, self.world):
            source = (self.rank + step) % self.world
            chunk = chunks[source]
            current(staging).await_source(chunk, self.end, source)
            staged = self.slots.peers[source][HALVES[epoch], : chunk.nbytes]
            chunk.copy_(staged.view(torch.float32).view(chunk.shape))
            current(staging).deliver(self.ready, self.end, source)

    def product(self, epoch: int) -> None:
        """Of chunks that are delivered."""
        xs, weight, chunks = self.inputs(epoch)
        out = multiply(xs[self.rank], weight, None, chunks, self.ready, self.end, copied=True)
        assert torch.equal(out, torch.cat(xs) @ weight.t()), f"epoch {epoch + 1}"

    def finish(self, epoch: int) -> None:
        """Ends an epoch whose chunks no product reads."""
        xs, _, chunks = self.inputs(epoch)
        current(staging).finish(self.end)
        for source in range(1, self.world):
            other = (self.rank + source) % self.world
            assert torch.equal(chunks[other], xs[other]), f"epoch {epoch + 1}"


def gathering(memory: SimulatedMemory, epochs: int = len(SIZES)) -> None:
    """Every size, with copiers."""
    group = Group(memory, memory.rank, memory.world)
    for epoch in range(epochs):
        group.gather(epoch)


def two_streams(memory: SimulatedMemory, epochs: int = len(SIZES)) -> None:
    """Every size, with copies on a stream of their own: half of the ranks are the other ones' second streams."""
    world = memory.world // 2
    rank, copies = memory.rank % world, memory.rank >= world
    group, events = Group(memory, rank, world), memory.signals("events", 1)
    for epoch in range(epochs):
        if copies:
            memory.wait(events, memory.rank, 0, epoch + 1, peer=rank, op="P has staged")
            group.copy(epoch)
            memory.put(events, rank, 0, epoch + 1)
        else:
            group.stage(epoch)
            memory.put(events, rank + world, 0, epoch + 1)
            if epoch not in WITHOUT_PRODUCT:
                group.product(epoch)
            memory.wait(events, rank, 0, epoch + 1, peer=rank + world, op="C has copied")
            if epoch in WITHOUT_PRODUCT:
                group.finish(epoch)


def late(memory: SimulatedMemory) -> None:
    """Rank 0 does not come: the others' launches end, and after a reset everything is as new. Both ways in turn."""
    group = Group(memory, memory.rank, memory.world)
    for copied in (False, True, False):
        if copied:
            group.stage(0)
            group.copy(0)
            group.product(0)
        else:
            group.gather(0)
        before = group.end.state[0].item()
        with pytest.raises(PeerTimeout), memory.guard("all_gather_gemm"):
            if memory.rank == 0:
                memory.barrier("elsewhere")
            for _ in range(2):
                xs, weight, chunks = group.inputs(3)
                if copied:
                    group.stage(3)
                    group.copy(3)
                multiply(xs[memory.rank], weight, None, chunks, group.ready, group.end, copied=copied)
                assert group.end.state[0] == before, "the epoch is not over"
                assert not (group.ready > before).any(), "nothing of it is delivered"
        memory.reset()
        memory.barrier()
        assert group.end.state.tolist() == [0, 0]


class GatherSuite(ProtocolSuite):
    """What the suites of both ways have in common."""

    modules = (signals, endpoint, staging, all_gather_gemm)
    seeds = 20

    def late_program(self, memory: SimulatedMemory) -> None:
        """Both ways in turn, on every rank."""
        late(memory)


class TestGathering(GatherSuite):
    """Copiers of the product's own grid."""

    needed = (all_gather_gemm,)
    worlds = ((2, 2), (2, 1), (3, 2))
    faults = (
        Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes")),
        Fault("an epoch too far", replace(signals.begin, "tl.load(state_ptr) + 1", by="tl.load(state_ptr) + 2")),
        Fault(
            "one word of ready for all copiers",
            replace(
                all_gather_gemm._gather_chunks,
                "ready_ptr + source * COPIERS + copier",
                by="ready_ptr + source * COPIERS",
            ),
        ),
        Fault(
            "ready for the next launch",
            replace(all_gather_gemm._gather_chunks, "epoch", by="epoch + 1", call="put"),
        ),
        Fault("ready for another chunk", replace(all_gather_gemm._gather_chunks, "source", by="rank", call="put")),
        Fault(
            "one share is a chunk",
            replace(all_gather_gemm.all_gather_gemm_forward_kernel, "shares < SHARES", by="shares < 1"),
        ),
        Fault(
            "the first chunk is there",
            replace(all_gather_gemm.all_gather_gemm_forward_kernel, "step > 0", by="step > 1"),
        ),
        Fault(
            "another copier's signal",
            replace(
                all_gather_gemm._gather_chunks,
                "peer_pointer(flags_ptr, rank, tl.int32) + copier * WORLD",
                by="peer_pointer(flags_ptr, rank, tl.int32) + (COPIERS - 1 - copier) * WORLD",
            ),
        ),
        Fault(
            "another place",
            replace(
                all_gather_gemm._gather_chunks,
                "tl.cast(source, tl.int64)",
                by="tl.cast(WORLD - 1 - source, tl.int64)",
            ),
        ),
        Fault(
            "a tile left out",
            replace(
                all_gather_gemm.all_gather_gemm_forward_kernel,
                "tl.cdiv(max(tiles - first, 0), workers) * workers - tiles",
                by="tl.cdiv(max(tiles - first, 0), workers) * workers - tiles + 1",
            ),
        ),
    )
    late_faults = (
        Fault(
            "an epoch of parts",
            replace(all_gather_gemm.all_gather_gemm_forward_kernel, "chunks == WORLD", by="chunks > 0"),
        ),
        Fault(
            "delivered after an abort",
            replace(
                staging.deliver_kernel,
                "if running:\n    put(ready_ptr + source, epoch)",
                by="if epoch != 0:\n    put(ready_ptr + source, epoch)",
            ),
        ),
    )

    def program(self, memory: SimulatedMemory) -> None:
        gathering(memory)

    def short_program(self, memory: SimulatedMemory) -> None:
        gathering(memory, 3)


class TestTwoStreams(GatherSuite):
    """Copies by a stream of their own, between launches that stage, wait and deliver."""

    needed = (staging,)
    test_waits_end = None  # type: ignore[assignment]  # that of TestGathering goes both ways
    worlds = ((4, 2), (4, 1), (6, 2))
    faults = (
        Fault("the other half", replace(staging.stage_kernel, "(epoch & 1) == half", by="(epoch & 1) != half")),
        Fault("no round for either half", replace(staging.stage_kernel, "(epoch & 1) == half", by="(epoch & 1) < 2")),
        Fault(
            "staged where the readers are",
            replace(staging.stage_kernel, "epoch + 1", by="epoch", call="_stage_share"),
        ),
        Fault(
            "one program stages all",
            replace(staging.await_source_kernel, "program < programs", by="program < 1", call="wait"),
        ),
        Fault("delivered for the next launch", replace(staging.deliver_kernel, "epoch", by="epoch + 1", call="put")),
        Fault(
            "another one is delivered",
            replace(staging.deliver_kernel, "ready_ptr + source", by="ready_ptr", call="put"),
        ),
    )

    def program(self, memory: SimulatedMemory) -> None:
        two_streams(memory)

    def short_program(self, memory: SimulatedMemory) -> None:
        two_streams(memory, 3)
