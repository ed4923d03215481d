"""Values of gemm_reduce_scatter, on ranks of a simulated symmetric memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.channels import connect, explore_once, unconnected
from tests.support.tiers import exhaustive
from tpfuse.explore import RoundRobin, Schedule, Sequential, SimulatedMemory, explore
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.engine_scatter import await_part, sum_parts
from tpfuse.kernels.gemm_reduce_scatter import gemm_for_copies, gemm_reduce_scatter_forward
from tpfuse.kernels.launch import recording
from tpfuse.testing.inputs import integers, normal

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = ((70, 36, 68), (1, 65, 33), (0, 5, 9), (7, 0, 9), (7, 3, 0), (150, 70, 16))  # M, N, K
X, WEIGHT = torch.zeros(4, 3), torch.zeros(5, 3)
Run = Callable[..., Tensor]


def channel(memory: SimulatedMemory, **options: Any) -> Run:
    """Return run(x, weight, …) on a new channel, whose slots contain NaN before any rank writes there."""
    endpoint = connect(memory, slot_bytes=2**17, **options)
    memory.buffer("slots", (2, 2**17), torch.uint8).local.fill_(255)
    memory.barrier()

    def run(x: Tensor, weight: Tensor, **terms: Any) -> Tensor:
        epoch = int(endpoint.state[0])
        out = gemm_reduce_scatter_forward(x, weight, endpoint, **terms)
        assert endpoint.state.tolist() == [epoch + 1, 0], "each launch is an epoch, for every size"
        return out

    return run


def rows_of(rank: int, m: int, world: int) -> slice:
    chunk = -(-m // world)
    return slice(min(rank * chunk, m), min((rank + 1) * chunk, m))


def summed(partials: list[Tensor], *terms: Tensor | None) -> Tensor:
    """Return the sum in rank order and float32, rounded once."""
    total = partials[0].float()
    for term in (*partials[1:], *terms):
        total = total if term is None else total + term.float()
    return total.to(partials[0].dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ of whole numbers, rounded once."""
    return (x.double() @ weight.double().t()).float().to(x.dtype)


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, BF16), (3, F32), *exhaustive((1, F32), (2, F16), (3, BF16), (4, F16), (4, F32))]
)
def test_every_size_one_after_another(world: int, dtype: torch.dtype) -> None:
    def program(memory: SimulatedMemory) -> None:
        run = channel(memory)
        for seed, (m, n, k) in enumerate(SIZES):
            xs = [integers(10 * seed + rank, m, k, dtype=dtype) for rank in range(world)]
            ws = [integers(10 * seed + rank + 5, n, k, dtype=dtype) for rank in range(world)]
            rows = rows_of(memory.rank, m, world)
            bias = integers(seed, n, dtype=dtype) if seed % 2 else None
            residual = integers(seed, m, n, dtype=dtype)[rows] if seed % 3 else None
            out = run(xs[memory.rank], ws[memory.rank], bias=bias, residual=residual)
            partials = [product(x, w)[rows] for x, w in zip(xs, ws, strict=True)]
            assert torch.equal(out, summed(partials, bias, residual)), (m, n, k)
            assert out.is_contiguous()

    explore_once(program, world)


@pytest.mark.parametrize(("dtype", "schedule"), [(F32, RoundRobin()), *exhaustive((BF16, Sequential()))], ids=str)
def test_partial_sums_of_gemm_in_rank_order_rounded_once(dtype: torch.dtype, schedule: Schedule) -> None:
    """The bits agree, which no other order gives. Products of integers are exact, but not sums of other magnitudes."""
    m, n, k, world = 70, 70, 60, 3
    xs = [integers(rank, m, k, dtype=dtype) for rank in range(world)]
    ws = [integers(10 + rank, n, k, dtype=dtype) * 2.0**power for rank, power in enumerate((0, 24, 24))]
    partials = [product(x, w) for x, w in zip(xs, ws, strict=True)]
    bias, residual = normal(20, n, dtype=dtype), normal(21, m, n, dtype=dtype)

    def program(memory: SimulatedMemory) -> None:
        run, rows = channel(memory), rows_of(memory.rank, m, world)
        expected = summed([partial[rows] for partial in partials], bias, residual[rows])
        out = run(xs[memory.rank], ws[memory.rank], bias=bias, residual=residual[rows])
        assert torch.equal(out, expected)
        if dtype == torch.float32:
            backwards = summed([partial[rows] for partial in partials[::-1]], bias, residual[rows])
            assert not torch.equal(backwards, expected), "another order is seen"

    explore(program, world, schedules=[schedule])


def test_strides(layout: Callable[[int, int, int], Tensor]) -> None:
    """Every tensor has the layout: each alone among contiguous ones would be as many launches, and no other code."""
    m, n, k = 70, 36, 68

    def program(memory: SimulatedMemory) -> None:
        run, rows = channel(memory), rows_of(memory.rank, m, 2)
        shapes = {"x": (m, k), "weight": (n, k), "bias": (n, 3), "residual": (m // 2, n)}
        inputs = {key: layout(seed, *shape) for seed, (key, shape) in enumerate(shapes.items())}
        inputs["bias"] = inputs["bias"][:, 1]
        expected = 2 * product(inputs["x"], inputs["weight"])[rows] + inputs["bias"] + inputs["residual"]
        assert torch.equal(run(**inputs), expected)

    explore_once(program, 2)


@pytest.mark.parametrize("dtype", [BF16, *exhaustive(F32)])
def test_tma_reads_weights_of_either_layout(dtype: torch.dtype, launches: list[dict[str, Any]]) -> None:
    def program(memory: SimulatedMemory) -> None:
        run = channel(memory)
        for n, k, by_rows, by_columns in ((40, 64, True, True), (63, 64, True, False), (40, 63, False, False)):
            x, weight = integers(1, 70, k, dtype=dtype), integers(2, n, k, dtype=dtype)
            assert torch.equal(run(x, weight), product(x, weight))
            assert (launches[-1]["TMA"], launches[-1]["K_ADJACENT"]) == (by_rows, True)
            assert torch.equal(run(x, weight.t().contiguous().t()), product(x, weight))
            assert (launches[-1]["TMA"], launches[-1]["K_ADJACENT"]) == (by_columns, False)

    explore_once(program, 1)


def test_grids(launches: list[dict[str, Any]]) -> None:
    """Every program has a tile; where there is none one program signals and waits; flags limit the programs."""

    def program(memory: SimulatedMemory) -> None:
        run = channel(memory, flag_count=4, programs=5)
        for m, n in ((257, 100), (16, 80), (0, 16), (16, 0)):
            run(torch.zeros(m, 16), torch.zeros(n, 16))
        assert [seen["grid"] for seen in launches] == [(4,), (2,), (1,), (1,)]

    explore_once(program, 1)


@pytest.mark.parametrize("bits", [16, 32])
def test_ranks_have_the_same_tiles_however_their_tensors_are_aligned(bits: int) -> None:
    """It holds also for a table whose row for unaligned tensors has another tile; K may differ too."""
    rows = [row for row in read_table(TABLE) if (row.operator, row.family) == ("gemm_reduce_scatter", "sm_90")]
    odd = next(row for row in rows if row.bits == bits and not row.at_most)
    dtype = BF16 if bits == 16 else F32
    with recording("sm_90") as recorded, override(replace(odd, blocks=odd.blocks | {"BLOCK_M": 32, "GROUP_M": 3})):
        table, words = (torch.empty(2, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32))
        end = Endpoint(0, 2, table, 2**30, table, 1024, words, words[:1], programs=132)
        for m in (64, 2048, 8192):
            for k in (512, 511):
                x, weight = (torch.empty(rows, k, dtype=dtype, device="meta") for rows in (m, 1280))
                gemm_reduce_scatter_forward(x, weight, end)
    names = ("BLOCK_M", "BLOCK_N", "GROUP_M")
    plans = [(seen.grid, *(seen.arguments[name] for name in names)) for seen in recorded.launches]
    assert plans[::2] == plans[1::2] and [seen.arguments["TMA"] for seen in recorded.launches] == [True, False] * 3


def test_ranks_of_different_k() -> None:
    """The tensors of one rank are aligned."""
    xs, ws = (
        [integers(rank, 70, 63 + rank) for rank in range(2)],
        [integers(5 + rank, 36, 63 + rank) for rank in range(2)],
    )
    expected = product(xs[0], ws[0]) + product(xs[1], ws[1])

    def program(memory: SimulatedMemory) -> None:
        out = channel(memory)(xs[memory.rank], ws[memory.rank])
        assert torch.equal(out, expected[rows_of(memory.rank, 70, 2)])

    explore_once(program, 2)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # NaN is expected
def test_nan_and_infinity_stay_in_their_row() -> None:
    m, n, k = 70, 40, 30

    def program(memory: SimulatedMemory) -> None:
        run = channel(memory)
        xs = [normal(rank, m, k) for rank in range(2)]
        weight = normal(5, n, k)
        clean = run(xs[memory.rank], weight)
        xs[0][3, 29], xs[1][60, 0] = torch.nan, torch.inf
        out = run(xs[memory.rank], weight)
        expected = ((xs[0].double() + xs[1].double()) @ weight.double().t())[rows_of(memory.rank, m, 2)]
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())
        finite = expected.isfinite().all(1)
        assert finite.sum() == 34
        assert torch.equal(out[finite], clean[finite])

    explore_once(program, 2)


ALONE = unconnected(flag_count=3)


def test_nothing_is_done_after_an_abort() -> None:
    gemm_reduce_scatter_forward(X, WEIGHT, ALONE)
    assert ALONE.state.tolist() == [1, 1], "as it was"


test_bad_input_is_named = refusals(
    gemm_reduce_scatter_forward,
    {"x": X, "weight": WEIGHT, "endpoint": ALONE},
    "gemm_reduce_scatter: ",
    ({"x": torch.zeros(4)}, r"x has shape \(4,\): expected \[M, K\]"),
    ({"weight": torch.zeros(5, 4)}, r"weight has shape \(5, 4\): expected \(5, 3\)"),
    ({"weight": torch.zeros(3)}, r"weight has shape \(3,\): expected \(3, 3\)"),
    ({"bias": torch.zeros(4)}, r"bias has shape \(4,\): expected \(5,\)"),
    ({"residual": torch.zeros(4, 5)}, r"residual has shape \(4, 5\): expected \(2, 5\)"),
    ({"bias": torch.zeros(5).half()}, r"bias is torch.float16, x is torch.float32: expected one dtype"),
    ({"x": torch.zeros(4, 3).double()}, r"x is torch.float64: expected float32, float16 or bfloat16"),
    ({"x": torch.zeros(4, 3, device="meta")}, r"weight is on cpu, x on meta: expected one device"),
    ({"x": torch.zeros(13, 3)}, "300 bytes to stage, a slot holds 256: pass it in pieces"),
    ({"endpoint": replace(ALONE, flag_count=2)}, "too few flags: one program needs 3, the channel has 2"),
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda end, words: await_part(end, words[:1], words[0, :1], 0), r"await_part: stored has shape \(1, 3\)"),
        (lambda end, words: await_part(end, words, words[0], 0), r"await_part: stamp has shape \(3,\)"),
        (lambda end, words: await_part(end, words, words[0, :1], 3), "await_part: owner 3 of 3"),
        (lambda end, words: gemm_for_copies(X, WEIGHT, end, words[:1]), r"gemm_for_copies: stored has shape \(1, 3\)"),
        (lambda end, words: sum_parts(X, end, words[0], 3), r"sum_parts: out has shape \(4, 3\): expected .* 3 rows"),
        (lambda end, words: sum_parts(X, end, words[0], 2**28), "sum_parts: .* bytes to stage"),
        (lambda end, words: sum_parts(X, end, words[0], 4, bias=X[0, :2]), r"sum_parts: bias has shape \(2,\)"),
        (lambda end, words: sum_parts(X.half(), end, words[0, :2], 4), r"sum_parts: ready has shape \(2,\)"),
        (lambda end, words: sum_parts(X.t(), end, words[0], 4), "sum_parts: out has strides"),
    ],
)
def test_bad_input_beside_copy_engines_is_named(call: Callable[[Endpoint, Tensor], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ALONE, torch.zeros(ALONE.programs, 3, dtype=torch.int32))
