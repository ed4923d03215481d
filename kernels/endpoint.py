"""The view of a channel that one rank's kernels have, and how they move tiles through its slots.

Every collective is "stage, signal, wait, combine": a rank writes what others need into its own slot, program p signals
program p of every rank and waits for its signal, and then reads their slots (pull). Each slot has two halves; epoch e
uses half e % 2. So no second barrier is needed before a half is written again: that happens in epoch e + 2, whose
launch follows one that waited for every rank's signal of e + 1, and a rank gives that signal only after its launch of e
has ended, with all its reads.

Program p of each rank works on the same tiles of every row, p, p + programs, …: a tile has the same bytes on all ranks,
however their tensors are aligned. The launches of a channel must be the same, in one order, on every rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_device, check_dtype, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.signals import peer_pointer
from tpfuse.kernels.tiles import rounded

SUMMED = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64)
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True, eq=False)
class Endpoint:
    """The arguments that launchers of collectives take from a channel. All tensors are on one device.

    slots: [world] int64, the address of each rank's slot, a multiple of 16; slot_bytes: the size of each of its two
    halves, also a multiple of 16 and at most 2^30, so that kernels count the contents in 32 bits. flags: [world] int64,
    the address of each rank's signals; flag_count: the number of their int32 words. state: [2] int32 and abort: [1]
    int32, used by this rank alone; the state is zeroed with the signals, and only kernels of this channel write to it.
    programs: the most that a launch may start, the same on every rank and at most the number of multiprocessors of the
    group's smallest GPU: all programs of a launch must run at once.
    """

    rank: int
    world: int
    slots: Tensor
    slot_bytes: int
    flags: Tensor
    flag_count: int
    state: Tensor
    abort: Tensor
    programs: int

    def __post_init__(self) -> None:
        """Raise ValueError for a rank, shape, dtype or device that is not valid."""
        if not 0 <= self.rank < self.world:
            raise ValueError(f"endpoint: rank {self.rank} of {self.world}: expected 0 <= rank < world")
        if self.slot_bytes % 16 or not 0 < self.slot_bytes <= 2**30:
            raise ValueError(f"endpoint: slot_bytes {self.slot_bytes}: expected a multiple of 16 up to 2^30")
        if self.programs < 1:
            raise ValueError(f"endpoint: programs {self.programs}: expected at least 1")
        for name, x, shape, dtype in (
            ("slots", self.slots, (self.world,), torch.int64),
            ("flags", self.flags, (self.world,), torch.int64),
            ("state", self.state, (2,), torch.int32),
            ("abort", self.abort, (1,), torch.int32),
        ):
            check_tensor("endpoint", name, x, shape, (dtype,), ("slots", self.slots))

    def check(
        self, operator: str, x: Tensor, x_shape: tuple[int, ...], out: Tensor, out_shape: tuple[int, ...]
    ) -> None:
        """Raise ValueError unless both are contiguous, of one dtype, of these shapes, on the channel's device."""
        for name, tensor, shape in (("x", x, x_shape), ("out", out, out_shape)):
            check_tensor(operator, name, tensor, shape, (x.dtype,), ("the channel", self.slots), contiguous=True)

    def grid(self, operator: str, nbytes: int, tiles: int, rounds: int = 1) -> tuple[int]:
        """Return how many programs share `tiles` tiles of each row: where there is none, one that only waits.

        nbytes: what each rank stages; rounds: barriers in a launch. Raise ValueError where slots or flags are too few.
        """
        if nbytes > self.slot_bytes:
            raise ValueError(f"{operator}: {nbytes} bytes to stage, a slot holds {self.slot_bytes}: pass it in pieces")
        programs = self.flag_count // (rounds * self.world)
        if programs == 0:
            needed = f"one program needs {rounds * self.world}, the channel has {self.flag_count}"
            raise ValueError(f"{operator}: too few flags: {needed}")
        return (min(self.programs, max(tiles, 1), programs),)

    def signals(self) -> dict[str, Any]:
        """Return the arguments that every kernel takes. A launch gets a trace_ptr while a trace is being taken."""
        return {
            "flags_ptr": self.flags,
            "state_ptr": self.state,
            "abort_ptr": self.abort,
            "trace_ptr": None,
            "rank": self.rank,
            "WORLD": self.world,
        }

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that a kernel takes that moves data through slots."""
        return {"slots_ptr": self.slots, "slot_bytes": self.slot_bytes, **self.signals()}


def as_words(x: Tensor, out: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """Return x, out and the row's length n in the widest integers that fit all three, for kernels that move bytes."""
    offsets = [n * x.element_size()]
    for tensor in (x, out):
        offsets += [tensor.data_ptr(), int(tensor.storage_offset()) * tensor.element_size()]
    word = next(dtype for dtype in _WORDS if not any(offset % dtype.itemsize for offset in offsets))
    return x.reshape(-1).view(word), out.reshape(-1).view(word), offsets[0] // word.itemsize


def launch_words(kernel: Any, operator: str, x: Tensor, out: Tensor, n: int, endpoint: Endpoint) -> None:
    """Launch a kernel that moves x to out, in rows of n elements. A tile has the same number of bytes on all ranks."""
    x_words, out_words, words = as_words(x, out, n)
    row = choose_configuration(operator, x.device, torch.int64)
    block = row.blocks["BLOCK"] * 8 // x_words.element_size()
    launch(
        kernel,
        endpoint.grid(operator, x.nbytes, cdiv(words, block)),
        x_ptr=x_words,
        out_ptr=out_words,
        n=words,
        **row.options | {"BLOCK": block},
        **endpoint.arguments(),
    )


def check_ready(operator: str, ready: Tensor, endpoint: Endpoint) -> None:
    """Raise ValueError unless `ready` is int32 words, at least one for each rank, on the channel's device."""
    check_device(operator, "the channel", endpoint.slots, "ready", ready)
    check_dtype(operator, "ready", ready, (torch.int32,))
    if ready.ndim != 1 or len(ready) < endpoint.world or not ready.is_contiguous():
        given = f"{tuple(ready.shape)} and strides {ready.stride()}"
        raise ValueError(f"{operator}: ready has shape {given}: expected contiguous, at least ({endpoint.world},)")


def configured(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose rows of configurations.toml serve for sums of `dtype`: 64-bit types have no rows."""
    return torch.float32 if dtype.itemsize == 8 else dtype


@triton.jit
def slot(slots_ptr, peer, epoch, slot_bytes, dtype: tl.constexpr):
    """Return a pointer to the half of `peer`'s slot that belongs to `epoch`."""
    base = peer_pointer(slots_ptr, peer, tl.int8) + (epoch & 1) * slot_bytes
    return tl.multiple_of(base, 16).to(tl.pointer_type(dtype))


@triton.jit
def stage(x_ptr, own_ptr, rows, stride, total, BLOCK: tl.constexpr):
    """Copy this program's tiles of each row of x to the same offsets in the slot; rows end at `total` elements."""
    for row in range(rows):
        for tile in range(tl.program_id(0), tl.cdiv(stride, BLOCK), tl.num_programs(0)):
            column = tile * BLOCK + tl.arange(0, BLOCK)
            element = row * stride + column
            mask = (column < stride) & (element < total)
            tl.store(own_ptr + element, tl.load(x_ptr + element, mask=mask), mask=mask)


@triton.jit
def _widened(x):
    """Convert half types to float32, in which they are summed."""
    if x.dtype == tl.float16 or x.dtype == tl.bfloat16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def sum_of_slots(slots_ptr, epoch, slot_bytes, offs, mask, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Return the sum over all ranks of what they have staged at `offs`, rank 0 first, rounded once to `dtype`."""
    total = _widened(tl.load(slot(slots_ptr, 0, epoch, slot_bytes, dtype) + offs, mask=mask))
    for source in tl.static_range(1, WORLD):
        total += _widened(tl.load(slot(slots_ptr, source, epoch, slot_bytes, dtype) + offs, mask=mask))
    return rounded(total, dtype)
