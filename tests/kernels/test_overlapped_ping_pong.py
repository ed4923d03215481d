"""The gather of Gluon, as it is compiled for an H100: values on several ranks, late chunks, planted faults.

The cases run in a Python that does not interpret kernels (`gather_ping_pong_cases`).
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from tests.support.compilations import TRITONS, answers
from tpfuse.kernels.all_gather_gemm import all_gather_gemm_forward
from tpfuse.kernels.all_gather_gemm_ping_pong import all_gather_gemm_ping_pong
from tpfuse.kernels.configurations import TABLE, override, read_table
from tpfuse.kernels.launch import recording
from tpfuse.tools.operator import on_meta

HERE = triton.__version__
Work = tuple[Any, ...]


def results(*works: Work, version: str = HERE) -> list[str]:
    """Return what `gather_ping_pong_cases` prints for the works."""
    return answers(Path(__file__).with_name("gather_ping_pong_cases.py"), works, version)


# (ranks, rows of a chunk, N of the result, K, activation, dtype, options). A chunk of 256 rows has tiles of 192 and of
# 64 rows. Two programs share the tiles unless there is "one".
SMALL = (2, 64, 72, 72, None, "bfloat16", "one")
KEPT = (2, 256, 72, 72, "gelu_tanh", "bfloat16", "bias", "keep", "one")
GATED = (2, 192, 136, 136, "swiglu", "bfloat16", "bias", "keep", "columns")
FOUR = (4, 64, 328, 72, "gelu_tanh", "bfloat16", "bias", "keep")
VALUES = [KEPT, GATED, FOUR, (4, 320, 8, 200, "silu", "float16"), (3, 128, 136, 328, "relu2", "float16", "keep")]


def _check(*works: Work, version: str = HERE) -> None:
    found = dict(zip(works, results(*works, version=version), strict=True))
    assert {work: wrong for work, wrong in found.items() if wrong} == {}


@pytest.mark.timeout(600)
def test_values_are_those_of_float64_while_chunks_arrive_late() -> None:
    _check(("gather", (2, 64, *KEPT[2:]), 1))


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", TRITONS)
def test_every_variant_is_right_in_each_epoch(version: str) -> None:
    works = VALUES if version == HERE else (KEPT, GATED, FOUR)
    _check(*(("gather", work) for work in works), ("late", SMALL), ("traced", (4, *SMALL[1:])), version=version)


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_chunks_and_warps_may_come_in_any_order() -> None:
    _check(*(("orders", work, 3) for work in (KEPT, GATED, FOUR)))


THREE, ODD = (3, *SMALL[1:]), (2, 64, 328, *SMALL[3:6])  # three tiles of a chunk for two programs
WAIT = "wait_signal(ready_ptr + peer, epoch, abort_ptr, None, trace_ptr, peer)"
LOOP, END = "    for step in range(1, WORLD):\n", "    if here:\n        advance(state_ptr, epoch)\n"
EARLY = "        if step == WORLD - 1:\n            advance(state_ptr, epoch)\n"
LOAD = "        first, stage, parity = load_tiles(gathered"
RACE, OVER, OTHER = "race on engines: ", "the epoch is not over", "rank . raised AssertionError: epoch 1, output 0"
# Each fault has the texts that it replaces, a function and a work that show it, and what the error says.
FAULTS: dict[str, tuple[dict[str, str], str, Work, str]] = {
    "the wait is deleted": ({f"{WAIT} & here": "here"}, "gather", SMALL, RACE),
    "another chunk's word is read": (
        {"ready_ptr + peer": "ready_ptr + (rank + WORLD - step) % WORLD"},
        "gather",
        THREE,
        RACE,
    ),
    "a word's epoch is not compared": ({"peer, epoch,": "peer, epoch - 1,"}, "gather", SMALL, RACE),
    "there is no proxy fence": ({"        _fence_for_tma()\n": ""}, "gather", SMALL, RACE),
    "the fence is for shared memory": ({"async.global;": "async.shared::cta;"}, "gather", SMALL, RACE),
    "the epoch ends before the last chunk": ({LOOP: LOOP + EARLY, END: ""}, "late", SMALL, OVER),
    "the epoch ends after an abort": ({END: "    advance(state_ptr, epoch)\n"}, "late", SMALL, OVER),
    "missing chunks are read": ({"gl.where(here, begin_m + M, 0)": "begin_m + M"}, "late", THREE, RACE),
    "missing chunks are left out": ({LOAD: f"        if here:\n    {LOAD}"}, "late", SMALL, "no thread can continue"),
    "a chunk has squares of the next one": (
        {"row < end_m": "row < end_m + 64"},
        "gather",
        SMALL,
        "GlobalRace: warp . wrote it by TMA, but a TMA store that",
    ),
    "groups begin with another chunk": ({"chunk = (rank + index": "chunk = (index"}, "gather", SMALL, OTHER),
    "a chunk begins with another tile": (
        {"* programs - tiles\n": "* programs - tiles + 1\n"},
        "gather",
        ODD,
        "no thread can continue",
    ),
}


@pytest.mark.compile
@pytest.mark.timeout(1800)
def test_planted_faults_are_named() -> None:
    faults = [("planted", run, changes, work) for changes, run, work, _ in FAULTS.values()]
    for (name, (*_, error)), text in zip(FAULTS.items(), results(*faults), strict=True):
        print(f"{name}: {text.splitlines()[0] if text else 'NOT FOUND'}")
        assert re.search(error, text), name


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _arguments(m: int = 128, n: int = 512, k: int = 256, world: int = 4, **changes: Any) -> dict[str, Any]:
    given = {"x": _meta(m, k), "weight": _meta(n, k), "bias": None, "gathered": _meta(world, m, k)}
    words = {"ready": _meta(world, dtype=torch.int32), "endpoint": on_meta(world, 8 * world, 132)}
    return given | words | changes


def _launched(copied: bool = True, **arguments: Any) -> str:
    rows = [row for row in read_table(TABLE) if row.operator == "all_gather_gemm" and "PING_PONG" in row.blocks]
    assert rows and not any(row.blocks["PING_PONG"] for row in rows), "no row says so before it is measured"
    chosen = [replace(row, blocks=row.blocks | {"PING_PONG": True}) for row in rows]
    with override(*chosen), recording("sm_90") as record:
        all_gather_gemm_forward(**_arguments(**arguments), activation="silu", copied=copied)
    return str(record.launches[0].kernel.__name__)


def test_the_table_chooses_it_where_engines_copy_and_it_can_compute_the_product() -> None:
    ours, triton_kernel = "all_gather_gemm_ping_pong_kernel", "all_gather_gemm_forward_kernel"
    assert _launched() == ours
    assert _launched(copied=False) == triton_kernel
    assert _launched(m=96) == triton_kernel
    assert _launched(bias=_meta(1024)[::2]) == triton_kernel
    with recording("sm_90") as record:
        all_gather_gemm_forward(**_arguments(), copied=True)
    assert record.launches[0].kernel.__name__ == triton_kernel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": 96}, "x has 96 rows: expected a multiple of 64"),
        ({"gathered": _meta(4 * 128 * 256 + 1)[1:].view(4, 128, 256)}, "gathered has rows that do not begin at"),
        ({"bias": _meta(1024)[::2]}, "bias has strides .2,.: expected contiguous"),
        ({"gathered": _meta(4, 128, 128)}, r"gathered has shape \(4, 128, 128\): expected \(4, 128, 256\)"),
        ({"ready": _meta(3, dtype=torch.int32)}, r"ready has shape \(3,\)"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with recording("sm_90") as record, pytest.raises(ValueError, match=f"all_gather_gemm_ping_pong: .*{message}"):
        all_gather_gemm_ping_pong(**_arguments(**changes))
    assert not record.launches
