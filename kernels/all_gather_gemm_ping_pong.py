"""all_gather_gemm on Hopper in Gluon: the product of `ping_pong`, whose loading warp waits for chunks of rows.

Copy engines write the chunks (`engine_gather`). The program's tiles go on from chunk to chunk, this rank's first, then
those of rank + 1, …, and the loading warp and the groups go through them in the same order. The loading warp alone
knows of peers. It reads this rank's chunk from x, and waits for another chunk's word of `ready` before it loads from
that chunk. It begins the epoch, and ends it once all chunks were there. It records its waits in a trace, and as
computing the time in which it loads a chunk's tiles.

**What a signal orders for TMA.** One thread acquires the word, and a barrier of the warp passes that on to the others.
That orders ordinary loads. TMA belongs to the asynchronous proxy: a fence between the proxies, for global memory, comes
before the loads, in all threads of the warp, one of which issues them (PTX ISA 8.7, "Proxy-preserved base causality
order"). What the groups store is read by no peer.

**Edges.** To TMA the chunks are one matrix, whose rows it would load and store beyond the end of a chunk. Therefore a
chunk has a multiple of 64 rows, and squares beyond its end get a row that is outside the matrix: TMA loads 0 there,
counts the bytes, and stores nothing.

**Abort.** A wait that was cut short must not leave the groups waiting at `full`. The loading warp then fills the ring
from outside the matrix, and so reads nothing that a peer may still write. The results are not valid, the epoch is not
ended, and the guard raises.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpfuse.kernels.activations import GATED
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.gemm_ping_pong import ping_pong_problem
from tpfuse.kernels.gemm_tiles import allows_tma
from tpfuse.kernels.launch import Launch, planned
from tpfuse.kernels.ping_pong import SIDE, load_tiles, matrix, product_arguments, product_tiles
from tpfuse.kernels.ping_pong_epilogue import run_warps
from tpfuse.kernels.product_calls import GatherPlan, check_gather, programs_beside_copies, run_gather
from tpfuse.kernels.signals import advance, begin, wait_signal
from tpfuse.kernels.trace import COMPUTING, now, record


@gluon.jit
def _fence_for_tma():
    """Let copies by TMA, which this thread issues next, see what the thread sees in global memory."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_chunks(
    x,
    gathered,
    ready_ptr,
    state_ptr,
    abort_ptr,
    trace_ptr,
    rank,
    M,
    WORLD: gl.constexpr,
    rest,
):
    """Run the loading warp: fill the ring for the program's tiles of all chunks, as the chunks arrive."""
    epoch, here = begin(state_ptr, abort_ptr)
    stage = 0
    parity = 1  # of the phase before the first one, as for the plain product
    since = now(trace_ptr)
    first, stage, parity = load_tiles(x, 0, M, gl.program_id(0), stage, parity, *rest)
    record(trace_ptr, COMPUTING, rank, since)
    for step in range(1, WORLD):
        peer = (rank + step) % WORLD
        here = wait_signal(ready_ptr + peer, epoch, abort_ptr, None, trace_ptr, peer) & here
        _fence_for_tma()
        arrived = now(trace_ptr)
        begin_m = peer * M
        end_m = gl.where(here, begin_m + M, 0)
        first, stage, parity = load_tiles(gathered, begin_m, end_m, first, stage, parity, *rest)
        record(trace_ptr, COMPUTING, peer, arrived)
    if here:
        advance(state_ptr, epoch)


@gluon.jit(do_not_specialize=["rank"])
def all_gather_gemm_ping_pong_kernel(
    x_ptr,  # [M, K] bf16, read
    weight_ptr,  # [N, K] bf16, read
    weight_up_ptr,  # [N, K] bf16, read: the second half of a gated pair, or None
    bias_ptr,  # [N] bf16, [2 N] gated, read; or None
    preactivation_ptr,  # [WORLD M, N] bf16, [WORLD M, 2 N] gated, written; or None
    out_ptr,  # [WORLD M, N] bf16, written
    gathered_ptr,  # [WORLD, M, K] bf16, written by copy engines, read
    ready_ptr,  # [WORLD] int32, written by copy engines, read
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    M,
    N,
    K,
    stride_xm,
    stride_weight,
    rank,
    WORLD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    K_ADJACENT: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    x, gathered = matrix(x_ptr, M, K, stride_xm), matrix(gathered_ptr, WORLD * M, K, K)
    run_warps(
        _load_chunks, (x, gathered, ready_ptr, state_ptr, abort_ptr, trace_ptr, rank, M, WORLD), weight_ptr,
        weight_up_ptr, bias_ptr, None, preactivation_ptr, out_ptr, rank, M, N, K, stride_weight, 0,
        ACTIVATION, False, K_ADJACENT, GROUP_M, STAGES, WORLD,
    )  # fmt: skip


def all_gather_gemm_ping_pong(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gathered: Tensor,
    ready: Tensor,
    endpoint: Endpoint,
    *,
    activation: str | None = None,
    keep_preactivation: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return act(X Wᵀ + bias) of all ranks' rows X and, on request, X Wᵀ + bias, as `all_gather_gemm_forward` does.

    The tensors are those of `all_gather_gemm_forward` with `copied`, of bfloat16 or float16, on an H100 or H200. x has
    a multiple of 64 rows. Rows or columns of the weight, and rows of x and gathered, have adjacent elements and begin
    at multiples of 16 bytes; so a result has a multiple of 8 columns. Raise ValueError for all else.
    """
    plan = _plan(x, weight, bias, gathered, ready, endpoint, activation)
    return run_gather(plan, x, weight, bias, gathered, ready, activation, keep_preactivation)


@planned
def _plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gathered: Tensor,
    ready: Tensor,
    endpoint: Endpoint,
    activation: str | None,
) -> GatherPlan:
    operator = "all_gather_gemm_ping_pong"
    check_gather(operator, x, weight, bias, gathered, ready, endpoint, activation)
    problem = gather_ping_pong_problem(x, weight, bias, gathered, activation)
    if problem:
        raise ValueError(f"{operator}: {problem}")
    return ping_pong_plan(x, weight, endpoint, activation)


def ping_pong_plan(x: Tensor, weight: Tensor, endpoint: Endpoint, activation: str | None) -> GatherPlan:
    """Plan the launch for arguments that have passed `check_gather` and have no `gather_ping_pong_problem`."""
    m, n = len(x), len(weight)
    width = n // 2 if activation in GATED else n
    signals = endpoint.signals()
    del signals["flags_ptr"]  # copy engines signal in `ready`
    tiles = endpoint.world * product_tiles(m, width, activation)
    product = Launch(
        all_gather_gemm_ping_pong_kernel,
        programs_beside_copies(tiles, endpoint),
        product_arguments(x, weight, width, activation) | signals,
        num_warps=4,
        num_stages=1,
    )
    return GatherPlan(endpoint.world * m, width, n, product)


def gather_ping_pong_problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, gathered: Tensor, activation: str | None
) -> str:
    """Return why the kernel cannot compute a product of `check_gather`, or "" if it can."""
    problem = ping_pong_problem(x, weight, bias, None, activation)
    if problem:
        return problem
    if len(x) % SIDE.value:
        return f"x has {len(x)} rows: expected a multiple of {SIDE.value}"
    if not allows_tma(gathered.flatten(0, 1)):
        return "gathered has rows that do not begin at multiples of 16 bytes"
    return ""
