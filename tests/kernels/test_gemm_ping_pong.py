"""The product of Gluon, as it is compiled for an H100: values beside float64, planted faults, orders of warps.

Gluon has no interpreter. The cases run in a Python that does not interpret kernels (`ping_pong_cases`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.support.compilations import TRITONS, answers
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.kernels.gemm_ping_pong import gemm_ping_pong, gemm_ping_pong_gradient
from tpfuse.kernels.launch import recording

HERE = triton.__version__
Work = tuple[Any, ...]


def results(*works: Work, version: str = HERE) -> list[str]:
    """Return what `ping_pong_cases` prints for the works."""
    return answers(Path(__file__).with_name("ping_pong_cases.py"), works, version)


# (M, N of the result, K, activation, dtype, options); one program has four tiles, which have tails in each direction.
KEPT = (200, 136, 72, "gelu_tanh", "bfloat16", "bias", "keep", "one")
RESIDUAL = (200, 136, 72, None, "bfloat16", "bias", "residual", "one")
GRADIENT = (200, 136, 72, "gelu_tanh", "bfloat16", "gradient", "columns", "one")
GATED = (200, 72, 72, "swiglu", "bfloat16", "keep", "one")
LONG = (200, 136, 328, None, "bfloat16", "one")  # six steps: stages are used again within a tile
VALUES = [
    (1, 8, 8, "gelu", "bfloat16", "bias", "keep"),
    (192, 128, 64, "silu", "float16", "bias", "keep"),
    (193, 264, 200, "relu2", "bfloat16", "keep"),
    (577, 392, 328, "gelu_tanh", "float16", "bias"),
    (200, 136, 72, "relu", "float16", "bias", "residual", "keep"),
    (400, 264, 72, "gelu_tanh", "bfloat16", "bias", "residual", "keep", "one"),
    (400, 264, 136, "silu", "float16", "residual", "columns", "one"),
    (400, 136, 72, "geglu", "float16", "bias", "keep", "columns", "one"),
    (400, 136, 136, "swiglu", "bfloat16", "bias"),
    (400, 264, 72, "gelu", "float16", "gradient", "columns", "one"),
    (200, 136, 72, "relu2", "bfloat16", "gradient"),
    (200, 136, 72, "silu", "bfloat16", "gradient", "columns"),
    GRADIENT,
    RESIDUAL,
    GATED,
    LONG,
]


def _check(*works: Work, version: str = HERE) -> None:
    found = dict(zip(works, results(*(("values", *work) for work in works), version=version), strict=True))
    assert {work: wrong for work, wrong in found.items() if wrong} == {}


@pytest.mark.timeout(600)
def test_values_are_those_of_float64() -> None:
    _check(KEPT)


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", TRITONS)
def test_every_variant_is_right(version: str) -> None:
    _check(*(VALUES if version == HERE else (KEPT, GRADIENT, RESIDUAL, GATED, LONG)), version=version)


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_warps_may_run_in_any_order() -> None:
    works = [("orders", 4, [*work]) for work in (KEPT, RESIDUAL, LONG)]
    assert results(*works) == [""] * len(works)


# Each fault has the source that it replaces, the replacement, which occurrence, and a case that shows it.
WAIT, RELEASE = "tma.store_wait(SLOTS - 1)", "mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1)"
FAULTS: dict[str, tuple[str, str, int, Work]] = {
    "copies do not wait for an empty stage": ("mbarrier.wait(empty.index(stage), parity)", "pass", 0, LONG),
    "fewer bytes are expected": ("(PARTS + 2) * SQUARE", "(PARTS + 1) * SQUARE", 0, LONG),
    "products do not wait for a full stage": ("mbarrier.wait(full.index(stage), parity)", "pass", 0, LONG),
    "a group does not wait for its turn": ("mbarrier.wait(turn", "(turn", 0, LONG),
    "a turn is not given": ("mbarrier.arrive(turn.index(1 - me), pred=k == steps - 1)", "pass", 0, LONG),
    "a turn is given to oneself": ("turn.index(1 - me)", "turn.index(me)", 0, LONG),
    "a stage is released a step too early": ("wait(PARTS, deps", "wait(2 * PARTS, deps", 0, LONG),
    "a stage is not released": (RELEASE + ", pred=k > 0)", "pass", 0, LONG),
    "a tile's last stage is not released": (RELEASE + ")", "pass", 0, LONG),
    "sums are not waited for": ("wait(0, deps", "wait(PARTS, deps", 0, LONG),
    "the kept square's slot is not waited for": (WAIT, "pass", 0, KEPT),
    "the square of up has a slot that is not waited for": (WAIT, "pass", 1, GATED),
    "the result's slot is not waited for": (WAIT, "pass", 2, LONG),
    "the slots of the tile before are not waited for": ("tma.store_wait(0)", "pass", 0, LONG),
    "the program does not wait for its last stores": ("tma.store_wait(0)", "pass", 1, KEPT),
    "the residual is not waited for": ("mbarrier.wait(arrived", "(arrived", 0, RESIDUAL),
    "the residual is fetched into a slot that is read": ("tma.store_wait(SENT)", "pass", 0, RESIDUAL),
    "no bytes of the residual are expected": ("mbarrier.expect(there, SQUARE_BYTES)", "pass", 0, RESIDUAL),
    "bytes of another square are expected": (
        "mbarrier.expect(there, SQ",
        "mbarrier.expect(there, 2 * SQ",
        0,
        RESIDUAL,
    ),
}


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_proxy_fences_are_needed() -> None:
    """They are deleted in the PTX: where the source has no fence, the compiler adds one before a store.

    The first fence follows the descriptors and mbarriers, the others precede stores of the groups.
    """
    work = (200, 72, 64, "relu", "bfloat16", "keep", "one")
    found = results(*(("without", r"fence\.proxy\.async\.shared::cta;", number, work) for number in (0, 12, -1)))
    assert all("no fence.proxy.async comes between" in text for text in found), found


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_planted_faults_are_found() -> None:
    """Each wait, arrival and expectation is needed: without it a check fails, or a result is wrong."""
    found = dict(zip(FAULTS, results(*(("planted", *fault) for fault in FAULTS.values())), strict=True))
    for name, text in found.items():
        print(f"{name}: {text.splitlines()[0] if text else 'NOT FOUND'}")
    assert [name for name, text in found.items() if not text or "is not in one source" in text] == []


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launched(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor, **options: Any) -> str:
    rows = [row for row in read_table(TABLE) if "PING_PONG" in row.blocks]
    assert rows and not any(row.blocks["PING_PONG"] for row in rows), "no row says so before it is measured"
    chosen = [replace(row, blocks=row.blocks | {"PING_PONG": True}) for row in rows]
    with override(*chosen), recording("sm_90") as record:
        gemm_forward(x, weight, *rest, **options)
    return record.launches[0].kernel.__name__


def test_the_table_chooses_it_where_it_can_compute_the_product() -> None:
    m, n, k = 4096, 4096, 1024
    x, weight = _meta(m, k), _meta(n, k)
    ours, triton_kernel = "gemm_ping_pong_kernel", "gemm_forward_kernel"
    assert _launched(x, weight, activation="gelu_tanh", keep_preactivation=True) == ours
    assert _launched(x, weight, _meta(n), _meta(m, n)) == ours
    assert _launched(x, weight, activation="swiglu") == ours
    assert _launched(x, weight, None, _meta(m, n // 2), activation="swiglu") == triton_kernel
    assert _launched(x, weight[:-1]) == triton_kernel
    assert _launched(x, weight, _meta(2 * n)[::2]) == triton_kernel
    assert _launched(x[:100], weight) == triton_kernel  # few tiles: K is split
    with recording("sm_90") as record:
        gemm_forward(x, weight, activation="gelu_tanh")
    assert record.launches[0].kernel.__name__ == triton_kernel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": _meta(4, 9), "weight": _meta(8, 9)}, "do not begin at multiples of 16 bytes"),
        ({"x": _meta(0, 8)}, "a tensor is empty"),
        ({"weight": _meta(12, 8)}, "do not begin at multiples of 16 bytes"),
        ({"bias": _meta(16)[::2]}, "bias has strides .2,.: expected contiguous"),
        ({"residual": _meta(4, 7)}, r"residual has shape \(4, 7\): expected \(4, 8\)"),
        ({"activation": "tanh"}, "activation 'tanh' is not known"),
        ({"activation": "swiglu", "weight": _meta(16, 8), "residual": _meta(4, 8)}, "swiglu is gated: expected no res"),
        ({"x": _meta(4, 8, dtype=torch.float32), "weight": _meta(8, 8, dtype=torch.float32)}, "x is torch.float32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {"x": _meta(4, 8), "weight": _meta(8, 8)}
    with recording("sm_90") as record, pytest.raises(ValueError, match=f"gemm_ping_pong: .*{message}"):
        gemm_ping_pong(**good | changes)
    assert not record.launches
    with recording("sm_80"), pytest.raises(ValueError, match="expected a GPU of compute capability 9"):
        gemm_ping_pong(**good)


def test_a_gradient_of_a_gated_activation_is_refused() -> None:
    with recording("sm_90"), pytest.raises(ValueError, match="swiglu is gated: expected no residual or pre-activation"):
        gemm_ping_pong_gradient(_meta(4, 8), _meta(8, 16), _meta(4, 8), "swiglu")
