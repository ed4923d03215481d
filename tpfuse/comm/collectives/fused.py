"""Collectives as Triton kernels on symmetric memory: one launch for each piece that half a slot holds.

On CUDA they run on the current stream, and `wait()` of their handles does nothing; on CPUs they are interpreted.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tpfuse.comm.collectives.collective import DONE, Handle
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.sum_order import rows_of
from tpfuse.comm.symmetric_memory import SymmetricBuffer, SymmetricMemory
from tpfuse.comm.trace import span
from tpfuse.kernels.all_gather import all_gather_forward
from tpfuse.kernels.all_reduce import all_reduce_forward
from tpfuse.kernels.all_to_all import all_to_all_forward
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import multiprocessors
from tpfuse.kernels.reduce_scatter import reduce_scatter_forward

# The bytes of half a slot, by device. On a GPU 128 MiB take four launches, each of which reads 32 MiB: 0.1 ms at the
# rate of NVLink, compared with some 10 µs for a launch and its signals. Not measured yet.
_SLOT_BYTES = {"cuda": 2**25, "cpu": 2**20}
MOST_BYTES = 2**30  # the largest slot: kernels count its elements in 32 bits
ONE_SHOT_BYTES = 2**16  # up to this size an all-reduce takes one shot; not measured yet
_INTERPRETED_PROGRAMS = 2


def most_programs(memory: SymmetricMemory) -> int:
    """Return the most programs of a launch of kernels that only move and sum, if no ranks share a device."""
    return multiprocessors(memory.device) if memory.device.type == "cuda" else _INTERPRETED_PROGRAMS


def check_slot(what: str, nbytes: int) -> None:
    """Raise ValueError if `what` has more bytes than the largest slot."""
    if nbytes > MOST_BYTES:
        raise ValueError(
            f"{what} takes {nbytes} bytes of a slot: fused kernels expect at most {MOST_BYTES}:"
            " tpfuse.use(implementation='collective') has no such limit"
        )


def open_channel(
    memory: SymmetricMemory, name: str, slot_bytes: int, programs: int, parts: int = 2
) -> tuple[SymmetricBuffer, Endpoint]:
    """Open the channel `name`. Return (the slots, uint8 [parts, slot_bytes] on each rank; its endpoint). Collective.

    programs: the most programs of a launch; there are fewer if the memory says that ranks share a device. parts: 2, the
    halves that kernels use in turn, unless no kernel uses the slots. Raise Disagreement if ranks would start different
    numbers of programs: those of one rank would wait in vain for programs of another.
    """
    programs = min(programs, memory.resident_programs or programs)
    count = 2 * programs * memory.world
    slots = memory.buffer(f"{name}: slots", (parts, slot_bytes), torch.uint8)
    try:
        flags = memory.signals(f"{name}: flags", count)
    except Disagreement as error:
        raise Disagreement(
            f"{error}: rank {memory.rank} would start {programs} programs; all ranks of a group need equal GPUs, and on"
            " all of them or on none sums of gradients by NCCL"
        ) from error
    return slots, endpoint_of(memory, slots, flags, memory.signals(f"{name}: state", 2), programs)


def endpoint_of(
    memory: SymmetricMemory, slots: SymmetricBuffer, flags: SymmetricBuffer, state: SymmetricBuffer, programs: int
) -> Endpoint:
    """Return this rank's view of a channel. slots: uint8 [slots, bytes]; flags, state: signals."""
    return Endpoint(
        memory.rank,
        memory.world,
        slots=slots.addresses,
        slot_bytes=slots.shape[1],
        flags=flags.addresses,
        flag_count=len(flags.local),
        state=state.local,
        abort=memory.abort,
        programs=programs,
    )


class FusedCollectives:
    """The collectives of one group, with the methods of `DirectCollectives`.

    Tensors are contiguous, on the memory's device; x has one shape on all ranks. Sums are of a dtype in
    `tpfuse.kernels.endpoint.SUMMED`.
    """

    one_shot_bytes = ONE_SHOT_BYTES

    def __init__(self, memory: SymmetricMemory, slot_bytes: int | None = None) -> None:
        """Open the channel. Collective. slot_bytes: of a piece, a multiple of 16; its default is by device."""
        self.memory, self._slot_bytes = memory, slot_bytes or _SLOT_BYTES[memory.device.type]
        _, self._endpoint = open_channel(memory, "fused collectives", self._slot_bytes, most_programs(memory))

    def all_gather(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle:
        rows = x.view(-1), rows_of(out, self.memory.world)
        return self._run("all_gather", x, rows, self._slot_bytes, all_gather_forward)

    def all_to_all(self, x: Tensor, out: Tensor) -> Handle:
        rows = rows_of(x, self.memory.world), rows_of(out, self.memory.world)
        return self._run("all_to_all", x, rows, self._slot_bytes // self.memory.world, all_to_all_forward)

    def reduce_scatter(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle:
        rows = rows_of(x, self.memory.world), out.view(-1)
        return self._run("reduce_scatter", x, rows, self._slot_bytes // self.memory.world, reduce_scatter_forward)

    def all_reduce(self, x: Tensor, out: Tensor, *, later: bool = False) -> Handle:
        forward = partial(all_reduce_forward, two_shot=x.nbytes > self.one_shot_bytes)
        return self._run("all_reduce", x, (x.view(-1), out.view(-1)), self._slot_bytes, forward)

    def _run(
        self,
        op: str,
        x: Tensor,
        rows: tuple[Tensor, Tensor],
        row_bytes: int,
        forward: Callable[[Tensor, Tensor, Endpoint], None],
    ) -> Handle:
        """Call `forward` for one piece of the rows of x and out after another, or once if they are empty.

        Pieces of several rows are packed for it.
        """
        size, width = row_bytes // x.element_size() // 16 * 16, rows[0].shape[-1]
        described = f"{op} {x.dtype} {list(x.shape)}"
        with self.memory.guard(described, kernel=True), span("communication", described):
            for start in range(0, max(width, 1), size):
                piece, target = (t[..., start : start + size] for t in rows)
                packed = target.contiguous()
                forward(piece.contiguous(), packed, self._endpoint)
                if packed is not target:
                    target.copy_(packed)
        return DONE
