"""staging: a chunk in this rank's slot for the copy engines of the others, and the signals around their copies.

A copy engine fills a link without a multiprocessor. `all_gather_gemm` with `copied` gets its chunks so; on each rank,
P being the stream of the product and C the one of the copies:

    P: stage(x, endpoint, half)             x is in the own slot, and all ranks are told
    C: waits for P; for source = rank + 1, rank + 2, …
           await_source(gathered[source], endpoint, source)
           gathered[source] = `half` of source's slot, by a copy engine
           deliver(ready, endpoint, source)
    P: all_gather_gemm_forward(…, copied=True)      multiplies what is delivered, and advances the epoch
    P: waits for C

Where no product wants the chunks, `finish(endpoint)`, once P has waited for C, takes its place and advances the epoch.

All these launches find their epoch e in device memory: C's have read it when they deliver, so before the product, which
needs all chunks, advances it; and they begin behind `stage`, behind the product before.

Who may write what when. The own slot's half of e is written by `stage` in e, and read by a peer's copies between its
await_source and its deliver of e. It is written again in e + 2 at the earliest, behind this rank's product of e + 1: so
every peer had staged for e + 1, behind its product of e, all of whose chunks had been delivered. `gathered` is written
by C once P has come to `stage`, so behind the product before, and a chunk of it is read when it is delivered. P waits
for C at the end, so that nobody is given the memory of an operation that was aborted while a copy still writes it.

CUDA graphs. A copy's addresses are those of its capture, whereas the parity of the epoch changes from replay to replay
where a graph advances it an odd number of times. So the host says which half, and `stage` brings the epoch in line:
where it has the other parity, all ranks signal and wait in it, which is an empty round, and the next epoch is taken.
All who read the half before had ended when they signalled. A host that takes 0, 1, 0, 1, … rarely pays for a round; any
order is right, and so are other operators in between, as long as all ranks do the same.

Abort. A launch that finds the abort word set stages nothing and signals nobody. A copy behind it reads what happens to
be in a slot that nobody may free, and writes a chunk that is not delivered and so never read.

PTX's memory model knows no copy engines: a copy is behind what await_source has acquired, and what deliver releases is
behind the copy, by the order of the stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels import endpoint as ends
from tpfuse.kernels.checks import check_device, check_integers
from tpfuse.kernels.configurations import choose
from tpfuse.kernels.endpoint import Endpoint, as_words, slot
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.signals import advance, arrive, barrier, begin, peer_pointer, put, wait


@triton.jit
def _stage_share(x_ptr, slots_ptr, flags_ptr, n, slot_bytes, epoch, rank, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """This program's tiles into the half of `epoch`, and one word of everybody's flags that says so."""
    ends.stage(x_ptr, slot(slots_ptr, rank, epoch, slot_bytes, x_ptr.dtype.element_ty), 1, n, n, BLOCK)
    arrive(flags_ptr, epoch, rank, tl.program_id(0) * WORLD, WORLD)


@triton.jit(do_not_specialize=["half", "rank"])
def stage_kernel(
    x_ptr,  # [n] words, read
    slots_ptr,  # [WORLD] int64, addresses of [2, slot_bytes] bytes: its own is written
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    n,
    slot_bytes,
    half,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        if (epoch & 1) == half:
            _stage_share(x_ptr, slots_ptr, flags_ptr, n, slot_bytes, epoch, rank, WORLD, BLOCK)
        else:
            if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD):
                _stage_share(x_ptr, slots_ptr, flags_ptr, n, slot_bytes, epoch + 1, rank, WORLD, BLOCK)
                advance(state_ptr, epoch)


@triton.jit(do_not_specialize=["programs", "source", "rank"])
def await_source_kernel(
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32, read
    abort_ptr,  # [1] int32, read
    programs,
    source,
    rank,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        program = tl.arange(0, PROGRAMS)
        here = peer_pointer(flags_ptr, rank, tl.int32)
        wait(here + program * WORLD + source, epoch, abort_ptr, program < programs)


@triton.jit(do_not_specialize=["source"])
def deliver_kernel(
    ready_ptr,  # [WORLD] int32, written
    state_ptr,  # [2] int32, read
    abort_ptr,  # [1] int32, read
    source,
):
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        put(ready_ptr + source, epoch)


@triton.jit
def finish_kernel(
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
):
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        advance(state_ptr, epoch)


def stage(x: Tensor, endpoint: Endpoint, half: int) -> None:
    """Puts x at the beginning of `half` of the own slot, and tells every rank; in stream order.

    x: any shape and dtype, the same ones on every rank; half: 0 or 1, the same on every rank. Raises ValueError for
    another half or device, where x is more than a slot holds, and where the channel has too few flags.
    """
    if half not in (0, 1):
        raise ValueError(f"stage: half {half}: expected 0 or 1")
    check_device("stage", "the channel", endpoint.slots, "x", x)
    x = x.contiguous()
    x_words, _, words = as_words(x, x, x.numel())
    row = choose("stage", x.device, torch.int64)
    launch(
        stage_kernel,
        (_programs("stage", x, endpoint),),
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        x_ptr=x_words,
        n=words,
        half=half,
        BLOCK=row.blocks["BLOCK"] * 8 // x_words.element_size(),
        **endpoint.arguments(),
    )


def await_source(chunk: Tensor, endpoint: Endpoint, source: int) -> None:
    """On the current stream: until rank `source` has staged for this epoch, or the abort word is set.

    chunk: of the shape and dtype of what it stages, as what it is copied to has. Raises ValueError for a source that
    is no peer.
    """
    _check_source("await_source", endpoint, source)
    launch(
        await_source_kernel,
        (1,),
        num_warps=1,
        num_stages=1,
        flags_ptr=endpoint.flags,
        state_ptr=endpoint.state,
        abort_ptr=endpoint.abort,
        programs=_programs("await_source", chunk, endpoint),
        source=source,
        rank=endpoint.rank,
        WORLD=endpoint.world,
        PROGRAMS=choose("stage", endpoint.slots.device, torch.int64).blocks["PROGRAMS"],
    )


def deliver(ready: Tensor, endpoint: Endpoint, source: int) -> None:
    """Tells this rank's product that the chunk of `source` is there, behind its copy on the current stream.

    ready: as `all_gather_gemm_forward` is given it. Raises ValueError for other words and for a source that is no peer.
    """
    _check_source("deliver", endpoint, source)
    check_ready("deliver", ready, endpoint)
    launch(
        deliver_kernel,
        (1,),
        num_warps=1,
        num_stages=1,
        ready_ptr=ready,
        state_ptr=endpoint.state,
        abort_ptr=endpoint.abort,
        source=source,
    )


def finish(endpoint: Endpoint) -> None:
    """Ends an epoch whose chunks no product reads; on the current stream, behind the copies of all chunks."""
    launch(finish_kernel, (1,), num_warps=1, num_stages=1, state_ptr=endpoint.state, abort_ptr=endpoint.abort)


def _programs(operator: str, x: Tensor, endpoint: Endpoint) -> int:
    """How many programs stage x, the same on every rank; one where there is nothing to stage, for its signal."""
    blocks = choose("stage", endpoint.slots.device, torch.int64).blocks
    tiles = cdiv(x.nbytes, 8 * blocks["BLOCK"])
    return int(endpoint.grid(operator, x.nbytes, max(1, min(tiles, blocks["PROGRAMS"])))[0])


def _check_source(operator: str, endpoint: Endpoint, source: int) -> None:
    if not 0 <= source < endpoint.world or source == endpoint.rank:
        raise ValueError(f"{operator}: source {source}: expected another rank than {endpoint.rank} of {endpoint.world}")


def check_ready(operator: str, ready: Tensor, endpoint: Endpoint) -> None:
    """Raises ValueError unless these are int32 words, one for each rank at least, on the channel's device."""
    check_device(operator, "the channel", endpoint.slots, "ready", ready)
    check_integers(operator, "ready", ready, (torch.int32,))
    if ready.ndim != 1 or len(ready) < endpoint.world or not ready.is_contiguous():
        given = f"{tuple(ready.shape)} and strides {ready.stride()}"
        raise ValueError(f"{operator}: ready has shape {given}: expected contiguous, at least ({endpoint.world},)")
