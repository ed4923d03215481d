"""Values of all_gather_gemm, with copiers and after copies of the host, on ranks of a simulated symmetric memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import refusals
from tests.support.channels import connect, explore_once, unconnected
from tests.support.tiers import exhaustive
from tpfuse.explore import SimulatedMemory
from tpfuse.kernels import reference
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.engine_gather import open_copies
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.ops.linear.engine_gather import EngineGather
from tpfuse.testing.inputs import integers, normal

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(33, 40, 70), (1, 1, 1), (70, 64, 36), (0, 8, 5), (5, 8, 0), (3, 0, 4), (64, 33, 7), (2, 36, 130)]
Product = Callable[..., tuple[Tensor, Tensor | None]]


class Channel:
    """A rank's endpoint and words, and the product with chunks that arrive in either way."""

    def __init__(self, memory: SimulatedMemory, words: int | None = None, **options: int) -> None:
        self.memory, self.end = memory, connect(memory, **options)
        self.ready = memory.signals("ready", 8 * memory.world if words is None else words).local
        self.engines = EngineGather(memory, "engines", 32768)
        self.gathered = torch.empty(0)

    def gather(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Multiply with copiers."""
        self.gathered = torch.empty(self.memory.world, *x.shape, dtype=x.dtype)
        weight, bias = (*args, None)[:2]
        return all_gather_gemm_forward(x, weight, bias, self.gathered, self.ready, self.end, **options)

    def copy(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Multiply after the host has copied the chunks instead of copy engines."""
        self.engines.send(x.contiguous(), multiplied=True, keep=False)
        self.gathered, ready = self.engines.chunks(x), self.engines.ready
        end = replace(self.engines.endpoint, programs=self.end.programs)
        weight, bias = (*args, None)[:2]
        return all_gather_gemm_forward(x, weight, bias, self.gathered, ready, end, copied=True, **options)


def exact(xs: list[Tensor], weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of whole numbers, rounded once."""
    out = torch.cat(xs).double() @ weight.double().t()
    return (out if bias is None else out + bias.double()).float().to(weight.dtype)


@pytest.mark.parametrize(
    ("way", "world"), [("gather", 3), ("copy", 2), *exhaustive(("gather", 1), ("gather", 4), ("copy", 3))]
)
def test_sizes_one_after_another(way: str, world: int) -> None:
    def program(memory: SimulatedMemory) -> None:
        channel = Channel(memory)
        for epoch, (m, k, n) in enumerate(SHAPES):
            dtype = (F32, BF16, F16)[epoch % 3]
            xs = [integers(10 * epoch + rank, m, k, dtype=dtype) for rank in range(world)]
            weight, bias = integers(5, n, k, dtype=dtype), integers(6, n, dtype=dtype) if epoch % 2 else None
            options = {"keep_own": epoch % 3 > 0} if way == "gather" else {}
            out, preactivation = getattr(channel, way)(
                xs[memory.rank], weight, bias, keep_preactivation=epoch == 0, **options
            )
            assert torch.equal(out, exact(xs, weight, bias)), (m, k, n)
            assert preactivation is None if epoch else torch.equal(preactivation, out)
            whole = any(options.values())
            for rank in range(world):
                if whole or rank != memory.rank:
                    assert torch.equal(channel.gathered[rank], xs[rank])
                elif way == "gather":
                    assert channel.gathered[rank].isnan().all(), "no call asked for it"
        if way == "gather":
            assert channel.end.state.tolist() == [len(SHAPES), 0], "every launch is an epoch, also for no elements"

    explore_once(program, world)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("swiglu", BF16), ("gelu", F32), *exhaustive((None, F16), ("geglu", F32))],  # test_activations.py has all
)
def test_bitwise_equal_to_gemm_with_the_same_tiles(activation: str | None, dtype: torch.dtype) -> None:
    xs = [normal(rank, 65, 60, dtype=dtype) for rank in range(2)]
    weight, some_bias = normal(3, 72, 60, dtype=dtype) / 4, normal(4, 72, dtype=dtype)
    options = {"activation": activation, "keep_preactivation": True}

    def program(memory: SimulatedMemory) -> None:
        channel = Channel(memory)
        for bias in (None, some_bias):
            products = [gemm_forward(x, weight, bias, **options) for x in xs]
            expected = [torch.cat(parts) for parts in zip(*products, strict=True)]
            for way in (channel.gather, channel.copy):
                assert all(map(torch.equal, way(xs[memory.rank], weight, bias, **options), expected))
            out, nothing = channel.copy(xs[memory.rank], weight, bias, activation=activation)
            assert nothing is None and torch.equal(out, expected[0])

    explore_once(program, 2)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # in silu, which is then 0
def test_strides(layout: Callable[[int, int, int], Tensor]) -> None:
    m, n, k = 20, 72, 68
    xs, weight, bias = [layout(rank, m, k) for rank in range(2)], layout(5, n, k), layout(6, n, 3)[:, 1]

    def program(memory: SimulatedMemory) -> None:
        channel = Channel(memory)
        for way in (channel.gather, channel.copy):
            assert torch.equal(way(xs[memory.rank], weight, bias)[0], exact(xs, weight, bias))
        gate, up = exact(xs, weight, bias).split(n // 2, dim=1)
        out, preactivation = channel.gather(xs[memory.rank], weight, bias, activation="swiglu", keep_preactivation=True)
        assert torch.equal(preactivation, torch.cat([gate, up], dim=1))
        torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)

    explore_once(program, 2)


def test_tma_reads_aligned_weights_of_either_layout(launches: list[dict[str, Any]]) -> None:
    def program(memory: SimulatedMemory) -> None:
        channel, x = Channel(memory), integers(1, 3, 40)
        plain, odd = integers(2, 36, 40), integers(2, 35, 40)
        for weight, k_adjacent, tma in (
            (plain, True, True), (plain.t().contiguous().t(), False, True),
            (odd, True, True), (odd.t().contiguous().t(), False, False),
            (plain.t().contiguous().t()[1:], False, False), (integers(2, 36, 80)[:, ::2], True, False),
        ):  # fmt: skip
            out, _ = channel.gather(x, weight)
            assert torch.equal(out, exact([x], weight))
            assert (launches[-1]["K_ADJACENT"], launches[-1]["TMA"]) == (k_adjacent, tma), weight.stride()

    explore_once(program, 1)


@pytest.mark.parametrize(
    ("way", "m", "options", "copiers", "programs"),
    [
        ("gather", 100, {}, 4, 6),
        ("gather", 1, {}, 1, 2),
        ("gather", 0, {}, 1, 1),
        ("gather", 100, {"programs": 5}, 4, 5),
        ("gather", 100, {"programs": 2}, 1, 2),
        ("gather", 100, {"flag_count": 2}, 2, 4),
        ("gather", 100, {"words": 3}, 3, 5),
        ("copy", 100, {}, 0, 2),
        ("copy", 300, {"programs": 3}, 0, 2),
        ("copy", 100, {"programs": 1}, 0, 1),
        ("copy", 0, {}, 0, 1),
    ],
)
def test_how_many_copy_and_how_many_multiply(
    launches: list[dict[str, Any]], way: str, m: int, options: Any, copiers: int, programs: int
) -> None:
    """Share, flags, words and tiles limit the programs that copy and that multiply; beside copies one is spared."""
    rows = [row for row in read_table(TABLE) if (row.operator, row.family) == ("all_gather_gemm", "interpreted")]
    many = [replace(row, blocks=row.blocks | {"COPIERS": 4, "BLOCK_COPY": 64}) for row in rows]

    def program(memory: SimulatedMemory) -> None:
        x, weight = integers(1, m, 20), integers(2, 10, 20)
        channel = Channel(memory, **{"programs": 9} | options)
        assert torch.equal(getattr(channel, way)(x, weight)[0], exact([x], weight))
        assert (launches[-1]["COPIERS"], launches[-1]["grid"]) == (copiers, (programs,))

    with override(*many):
        explore_once(program, 1)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_and_inf_stay_in_their_row() -> None:
    x, weight = normal(1, 40, 70), normal(2, 20, 70)
    x[3, 69], x[25, 0] = torch.nan, torch.inf
    expected = reference.linear(x.double(), weight.double(), activation_name="gelu")

    def program(memory: SimulatedMemory) -> None:
        out, _ = Channel(memory).gather(x.chunk(2)[memory.rank], weight, activation="gelu")
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())

    explore_once(program, 2)


ALONE: dict[str, Any] = {
    "x": torch.zeros(4, 3), "weight": torch.zeros(6, 3), "bias": None, "gathered": torch.zeros(3, 4, 3),
    "ready": torch.zeros(3, dtype=torch.int32), "endpoint": unconnected(),
}  # fmt: skip
test_bad_input_is_named = refusals(
    all_gather_gemm_forward,
    ALONE,
    "all_gather_gemm: .*",
    ({"x": torch.zeros(4)}, r"x has shape \(4,\): expected \[M, K\]"),
    ({"weight": torch.zeros(6, 4)}, r"weight has shape \(6, 4\): expected \(6, 3\)"),
    ({"weight": torch.zeros(6)}, r"weight has shape \(6,\): expected \(6, 3\)"),
    ({"bias": torch.zeros(5)}, r"bias has shape \(5,\): expected \(6,\)"),
    ({"weight": torch.zeros(5, 3), "activation": "swiglu"}, r"weight has 5 rows: swiglu expects an even number"),
    ({"activation": "tanh"}, r"activation 'tanh' is not known"),
    ({"bias": torch.zeros(6).half()}, r"bias is torch.float16, x is torch.float32: expected one dtype"),
    ({"x": torch.zeros(4, 3).long()}, r"x is torch.int64: expected float32, float16 or bfloat16"),
    ({"weight": torch.zeros(6, 3, device="meta")}, r"weight is on meta, x on cpu: expected one device"),
    ({"gathered": torch.zeros(2, 4, 3)}, r"gathered has shape \(2, 4, 3\): expected \(3, 4, 3\)"),
    ({"gathered": torch.zeros(3, 3, 4).mT}, r"gathered has strides \(12, 1, 4\): expected contiguous"),
    ({"gathered": torch.zeros(3, 4, 3).half()}, r"gathered is torch.float16"),
    ({"ready": torch.zeros(3)}, r"ready is torch.float32: expected int32"),
    ({"ready": torch.zeros(2, dtype=torch.int32)}, r"ready has shape \(2,\) .*at least \(3,\)"),
    ({"ready": torch.zeros(3, dtype=torch.int32, device="meta")}, "ready is on meta, the channel on cpu"),
    ({"keep_own": True, "copied": True}, "keep_own is True: expected False with copied"),
    ({"x": torch.zeros(40, 3), "gathered": torch.zeros(3, 40, 3)}, "480 bytes to stage, a slot holds 256"),
    ({"endpoint": unconnected(programs=1)}, "a channel of 1 program: expected at least 2"),
    ({"endpoint": unconnected(flag_count=2)}, "too few flags: one program needs 3, the channel has 2"),
)  # fmt: skip


test_bad_input_of_open_copies = refusals(
    open_copies,
    {"endpoint": unconnected(flag_count=6), "stamp": torch.zeros(1, dtype=torch.int32)},
    "open_copies: .*",
    ({"stamp": torch.zeros(2, dtype=torch.int32)}, r"stamp has shape \(2,\): expected \(1,\)"),
    ({"stamp": torch.zeros(1)}, "stamp is torch.float32: expected int32"),
    ({"stamp": torch.zeros(1, dtype=torch.int32, device="meta")}, "stamp is on meta, the channel on cpu"),
    ({"endpoint": unconnected(flag_count=5)}, "too few flags: one program needs 6"),
)
