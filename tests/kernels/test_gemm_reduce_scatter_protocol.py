"""gemm_reduce_scatter under many schedules: no false alarm, no unneeded line, no wait without an end."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.support.channels import connect
from tpfuse.explore import SimulatedMemory, explore
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace, without_rank_0
from tpfuse.kernels import endpoint, gemm_reduce_scatter, signals
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.reduce_scatter import reduce_scatter_forward
from tpfuse.testing.inputs import integers

SIZES = ((40, 20), (3, 5), (0, 7), (50, 18))  # M and N: grids of several programs and of one alternate
K = 4


TILES = {  # tiles of 16 by 16: small tensors have several programs
    "gemm_reduce_scatter": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "EPILOGUE_PARTS": 1},
    "reduce_scatter": {"BLOCK": 16},
}

pytestmark = pytest.mark.usefixtures("tiny_tiles")


def summed(xs: Sequence[Tensor], weight: Tensor, rank: int) -> Tensor:
    """Return the rows of `rank`."""
    chunk = -(-len(xs[0]) // len(xs))
    return (torch.stack(list(xs)).sum(0) @ weight.t())[rank * chunk : (rank + 1) * chunk]


def multiply(x: Tensor, weight: Tensor, end: Endpoint) -> Tensor:
    out: Tensor = current(gemm_reduce_scatter).gemm_reduce_scatter_forward(x, weight, end)
    return out


def products(memory: SimulatedMemory, sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Run an epoch for each size; those of one parity have the same inputs."""
    end = connect(memory, slot_bytes=4096)
    for epoch, (m, n) in enumerate(sizes):
        xs = [integers(10 * (epoch % 2) + rank, m, K) for rank in range(memory.world)]
        weight = integers(epoch % 2, n, K)
        out = multiply(xs[memory.rank], weight, end)
        assert torch.equal(out, summed(xs, weight, memory.rank)), f"epoch {epoch + 1}"
        yield epoch + 1, epoch % 2


SIGNAL = "_signal(flags_ptr, (rank + step - 1) % WORLD, epoch, rank, WORLD)"
LAST_SIGNAL = "_signal(flags_ptr, (rank + WORLD - 1) % WORLD, epoch, rank, WORLD)"
KERNEL = gemm_reduce_scatter.gemm_reduce_scatter_forward_kernel
DESTINATION = gemm_reduce_scatter._destination
TELL = gemm_reduce_scatter._tell
SIGNAL_OWNER = gemm_reduce_scatter._signal
EXCHANGE = gemm_reduce_scatter._exchange
WORDS = "peer_pointer(flags_ptr, owner, tl.int32) + tl.program_id(0) * WORLD"
PART = "part_ptr = _destination(stored_ptr, slots_ptr, owner, epoch, rank, chunk, N, slot_bytes, dtype)"
TOLD = "_tell(stored_ptr, flags_ptr, step, epoch, rank, WORLD)"
HALF = "half_ptr = slot(slots_ptr, rank, {}, slot_bytes, dtype)"
FIRST = "first_tile({}, most)"

COPIES = "it signals copies: test_engine_scatter_protocol.py has them"


class TestGemmReduceScatter(ProtocolSuite):
    modules = (signals, endpoint, gemm_reduce_scatter)
    needed = (gemm_reduce_scatter,)
    unneeded: ClassVar = {
        (gemm_reduce_scatter._signal_copies, "signal"): COPIES,
        (TELL, "_signal_copies"): COPIES,
    }
    worlds = ((3, 2), (2, 2), (2, 1), (3, 1))  # two ranks have one other owner alone
    faults = (
        Fault("one half", replace(endpoint.slot, "(epoch & 1) * slot_bytes", by="0 * slot_bytes")),
        Fault("an epoch too far", replace(signals.begin, "tl.load(state_ptr) + 1", by="tl.load(state_ptr) + 2")),
        Fault("the epoch before will do", replace(EXCHANGE, "epoch", by="epoch - 1", call="wait_signal")),
        Fault("the owner's word", replace(SIGNAL_OWNER, f"{WORDS} + rank", by=f"{WORDS} + owner")),
        Fault("this rank's words alone", replace(SIGNAL_OWNER, "owner", by="rank", call="peer_pointer")),
        Fault("one program signals for all", replace(SIGNAL_OWNER, "tl.program_id(0) * WORLD", by="0 * WORLD")),
        Fault(
            "another program is waited for",
            replace(EXCHANGE, "tl.program_id(0) * WORLD", by="(tl.num_programs(0) - 1 - tl.program_id(0)) * WORLD"),
        ),
        Fault(
            "signalled before it is stored",
            replace(TELL, SIGNAL, by="pass"),
            replace(EXCHANGE, LAST_SIGNAL, by="pass"),
            replace(KERNEL, PART, by=f"{PART}\n_signal(flags_ptr, owner, epoch, rank, WORLD)"),
        ),
        Fault("signalled one owner too early", replace(TELL, "(rank + step - 1) % WORLD", by="(rank + step) % WORLD")),
        Fault("the first owner is not signalled", replace(TELL, "step > 1", by="step > 2")),
        Fault("another rank's part", replace(DESTINATION, "rank * chunk * N", by="owner * chunk * N")),
        Fault("an owner is left out", replace(KERNEL, "OTHERS", by="OTHERS - 1", call="range")),
        Fault("the last owner is not signalled", replace(EXCHANGE, LAST_SIGNAL, by="pass")),
        Fault("this rank's part from memory", replace(gemm_reduce_scatter._partial_sums, "own is None", by="True")),
        Fault("no signal without rows", replace(KERNEL, TOLD, by=f"if rows > 0:\n    {TOLD}")),
        Fault("one source too few", replace(EXCHANGE, "sources < WORLD", by="sources < WORLD - 1")),
        Fault("the half of the next epoch", replace(KERNEL, HALF.format("epoch"), by=HALF.format("epoch + 1"))),
        Fault(
            "tiles are dealt out in each rank's own order",
            replace(KERNEL, FIRST.format("owner"), by=FIRST.format("(owner + WORLD - rank) % WORLD"), call="range"),
        ),
    )

    def program(self, memory: SimulatedMemory) -> None:
        list(products(memory, SIZES))

    def short_program(self, memory: SimulatedMemory) -> Iterator[tuple[int, int]]:
        return products(memory, ((20, 5), (3, 20)) * 2)

    def late_program(self, memory: SimulatedMemory) -> None:
        xs, weight = [integers(rank, 40, K) for rank in range(memory.world)], integers(9, 20, K)
        end = connect(memory, slot_bytes=4096)
        run = partial(multiply, xs[memory.rank], weight, end)
        for _ in range(2):
            assert torch.equal(run(), summed(xs, weight, memory.rank))
            without_rank_0(memory, "gemm_reduce_scatter", end.state, run)


@pytest.mark.exhaustive
def test_a_channel_shared_with_collectives() -> None:
    """Epochs alternate: both kernels write halves and words of the same slots and flags."""

    def program(memory: SimulatedMemory) -> None:
        end, world = connect(memory, slot_bytes=4096), memory.world
        for epoch in range(3):
            xs = [integers(10 * epoch + rank, 40, K) for rank in range(world)]
            weight, out = integers(epoch, 20, K), torch.empty(20 * K)
            assert torch.equal(multiply(xs[memory.rank], weight, end), summed(xs, weight, memory.rank))
            reduce_scatter_forward(xs[memory.rank].view(world, -1), out, end)
            assert torch.equal(out, (xs[0] + xs[1]).view(world, -1)[memory.rank])

    explore(program, 2, resident=2)
