"""engine_scatter: copy engines copy partial sums to their owners; the launches around these copies.

`gemm_reduce_scatter` lets programs store finished tiles in the memory of their owners. Programs of one wave end at the
same time, so their stores compete for the links, and a program that waits for a store does not multiply. Here the
product stores all tiles in its own rank's memory. Copy engines copy them, one owner's rows at a time, while the product
multiplies the next owner's rows. On each rank, P is the stream of the product and C the stream of the copies:

    C: waits for P
    C: open_copies(endpoint, stamp)          all ranks have come here; the stamp, a word, says which epoch this is
    P: gemm_for_copies(…, stored)            the tiles of owner rank + 1 first, this rank's tiles last
    C: for owner = rank + 1, rank + 2, …
           await_part(…, owner)              every program of this rank has stored its tiles of the owner
           owner's received[rank] = part     by a copy engine
           owner's ready[rank] = stamp       by a copy engine too, of four bytes
    P: sum_parts(…, ready)                   waits for all sources, sums in rank order, and advances the epoch
    P: waits for C, after which the parts may be written again

`received` is the first half of a slot, [world, c, N], and the product stores this rank's rows in it; the second half
has the parts that wait for the engines. Every epoch uses both halves, and the same stamp, the words of ready [world]
and those of stored [programs, world], which are zeroed with the signals.

Who may write what when. The parts of the second half are written by the product of epoch e on P, after the end of the
copies of e - 1 on C, for which P has waited. They are read by the copies of e, each after it has awaited the words that
the product's programs have set to e. `received` is written by the owner's product of e (its own part) and by the peers'
copies of e, after their open_copies of e. Each of those has waited for the owner's open_copies, which comes after all
that the owner's P has done before, and so after sum_parts of e - 1, which has read `received`. It is read by sum_parts
of e after the words of all peers. Word s of ready is written by rank s alone, word [p, owner] of stored by this rank's
program p. The stamp is written by open_copies of e and read by await_part and copies before the next open_copies on the
same stream. The state is advanced by sum_parts of e, when all peers have written, and so after all ranks, including
this one, have come to open_copies of e, and after the product of e: open_copies and the product have read the state
before that.

await_part is a launch of one small program instead of cuStreamWaitValue32. It ends with the abort word, which a stream
that waits for a value does not see, and it takes no number from the host, so that a graph may be replayed.

Abort. A product that finds the abort word set stores and signals nothing; await_part and sum_parts end with the abort
word, and sum_parts leaves the epoch as it is. The copies cannot be stopped: they may overwrite what a peer still sums.
As for gathers by copy engines, that peer raises at the end of its guard, and `SymmetricMemory.reset` waits for all
copies.

Local stores, a flag for each owner, and copy engines beside the product are found in kraken's
gemm_reduce_scatter_ce_persistent.py (meta-pytorch/kraken) and Flux, arXiv:2406.06858.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.checks import check_contiguous, check_device, check_floats, check_shape, check_tensor
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.endpoint import Endpoint, check_ready
from tpfuse.kernels.gemm_reduce_scatter import sum_tile
from tpfuse.kernels.launch import Launch, cdiv, planned
from tpfuse.kernels.product_calls import term_strides
from tpfuse.kernels.signals import advance, begin, wait_signal
from tpfuse.kernels.trace import COMPUTING, now, record


@triton.jit(do_not_specialize=["owner"])
def await_part_kernel(
    stored_ptr,  # [programs, WORLD] int32, read
    stamp_ptr,  # [1] int32, read
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    owner,
    programs,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.arange(0, BLOCK)
    words_ptr = stored_ptr + index * WORLD + owner
    wait_signal(words_ptr, tl.load(stamp_ptr), abort_ptr, index < programs, trace_ptr, owner)


@triton.jit(do_not_specialize=["rank"])
def sum_parts_kernel(
    bias_ptr,  # [N] bf16, read; or None
    residual_ptr,  # [rows, N] bf16, read; or None
    out_ptr,  # [rows, N] bf16, written
    ready_ptr,  # [WORLD] int32, read
    slots_ptr,  # [WORLD] int64, addresses of [WORLD, chunk, N] bf16, of which this rank's is read
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    rows,
    N,
    chunk,
    rank,
    stride_bias,
    stride_rm,
    stride_rn,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        sources = tl.arange(0, triton.next_power_of_2(WORLD))
        words_ptr = ready_ptr + sources
        if wait_signal(words_ptr, epoch, abort_ptr, (sources < WORLD) & (sources != rank), trace_ptr, sources):
            since = now(trace_ptr)
            half_ptr = tl.multiple_of(tl.load(slots_ptr + rank).to(tl.pointer_type(dtype)), 16)
            terms = ((bias_ptr, stride_bias), (residual_ptr, stride_rm, stride_rn), None)
            tiles_n = tl.cdiv(N, BLOCK_N)
            for index in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * tiles_n, tl.num_programs(0)):
                first = index // tiles_n * BLOCK_M, index % tiles_n * BLOCK_N
                sum_tile(None, half_ptr, terms, out_ptr, first, (rows, N), chunk, rank, WORLD, BLOCK_M, BLOCK_N)
            record(trace_ptr, COMPUTING, rank, since)
            advance(state_ptr, epoch)


def await_part(endpoint: Endpoint, stored: Tensor, stamp: Tensor, owner: int) -> None:
    """Make the current stream wait until word [p, owner] is the stamp's epoch for every program p, or until an abort.

    stored: int32 [endpoint.programs, world]; stamp: int32 [1]. Raise ValueError for other tensors or an unknown owner.
    """
    _waiting(endpoint, stored, stamp, owner).run(stored_ptr=stored, stamp_ptr=stamp)


@planned
def _waiting(endpoint: Endpoint, stored: Tensor, stamp: Tensor, owner: int) -> Launch:
    for name, x, shape in (("stored", stored, (endpoint.programs, endpoint.world)), ("stamp", stamp, (1,))):
        check_tensor("await_part", name, x, shape, (torch.int32,), ("the channel", endpoint.slots))
    if not 0 <= owner < endpoint.world:
        raise ValueError(f"await_part: owner {owner} of {endpoint.world}: expected 0 <= owner < world")
    block = triton.next_power_of_2(endpoint.programs)
    arguments = {
        "abort_ptr": endpoint.abort,
        "trace_ptr": None,
        "owner": owner,
        "programs": endpoint.programs,
        "WORLD": endpoint.world,
        "BLOCK": block,
    }
    num_warps = min(max(block // 32, 1), 8)  # each thread polls one word: all take no longer than one
    return Launch(await_part_kernel, (1,), arguments, num_warps, num_stages=1)


def sum_parts(
    out: Tensor,
    endpoint: Endpoint,
    ready: Tensor,
    chunk: int,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Set out to Σ over ranks of the parts of this rank's rows, + bias + residual, once all are here; end the epoch.

    out: [rows, N], contiguous, float32, float16 or bfloat16; bias: [N] and residual: [rows, N], any strides, of out's
    dtype. chunk: the rows of a part, at least out's. ready: int32 [world], zeroed with the signals. Parts are added in
    float32, rank 0 first, and rounded once. Raise ValueError for other shapes, dtypes or devices, and where world
    parts are larger than a slot.
    """
    _summing(out, endpoint, ready, chunk, bias, residual).run(
        bias_ptr=bias, residual_ptr=residual, out_ptr=out, ready_ptr=ready
    )


@planned
def _summing(
    out: Tensor, endpoint: Endpoint, ready: Tensor, chunk: int, bias: Tensor | None, residual: Tensor | None
) -> Launch:
    operator = "sum_parts"
    check_floats(operator, out=out, bias=bias, residual=residual)
    check_contiguous(operator, "out", out)
    if out.ndim != 2 or len(out) > chunk:
        raise ValueError(f"{operator}: out has shape {tuple(out.shape)}: expected [rows, N], at most {chunk} rows")
    rows, n = out.shape
    check_shape(operator, "bias", bias, (n,))
    check_shape(operator, "residual", residual, (rows, n))
    check_device(operator, "the channel", endpoint.slots, "out", out)
    check_ready(operator, ready, endpoint)
    row = choose_configuration(
        "gemm_reduce_scatter", out.device, out.dtype,
        M=chunk, N=n, chunks=endpoint.world, programs=endpoint.programs, unaligned=0,
    )  # fmt: skip
    block_m, block_n = row.blocks["BLOCK_M"], min(row.blocks["SUM_WIDTH"], row.blocks["BLOCK_N"])
    nbytes = endpoint.world * chunk * n * out.element_size()
    grid = endpoint.grid(operator, nbytes, cdiv(rows, block_m) * cdiv(n, block_n))
    arguments = {
        "rows": rows,
        "N": n,
        "chunk": chunk,
        **term_strides(bias, residual),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        **{name: x for name, x in endpoint.arguments().items() if name not in ("flags_ptr", "slot_bytes")},
    }
    return Launch(sum_parts_kernel, grid, arguments, row.num_warps, num_stages=1)
