"""The gather and the scatter of Gluon, as they are compiled for an H100: values on several ranks, planted faults.

The cases run in a Python that does not interpret kernels (`overlapped_ping_pong_cases`).
"""

import re
from collections.abc import Callable
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
from tpfuse.kernels.gemm_reduce_scatter import gemm_for_copies, gemm_reduce_scatter_forward
from tpfuse.kernels.gemm_reduce_scatter_ping_pong import gemm_reduce_scatter_ping_pong
from tpfuse.kernels.launch import recording
from tpfuse.tools.operator import on_meta

HERE = triton.__version__
Work = tuple[Any, ...]


def results(*works: Work, version: str = HERE) -> list[str]:
    """Return what `overlapped_ping_pong_cases` prints for the works."""
    return answers(Path(__file__).with_name("overlapped_ping_pong_cases.py"), works, version)


# ("gather", ranks, rows of a chunk, N of the result, K, activation, dtype, options). A chunk of 256 rows has tiles of
# 192 and of 64 rows. Two programs share the tiles unless there is "one".
SMALL = ("gather", 2, 64, 72, 72, None, "bfloat16", "one")
KEPT = ("gather", 2, 256, 72, 72, "gelu_tanh", "bfloat16", "bias", "keep", "one")
GATED = ("gather", 2, 192, 136, 136, "swiglu", "bfloat16", "bias", "keep", "columns")
FOUR = ("gather", 4, 64, 328, 72, "gelu_tanh", "bfloat16", "bias", "keep")
# ("scatter", ranks, rows of an owner, N, K, dtype, options). An owner of 200 rows has tiles of 192 and of 8 rows.
SUM = ("scatter", 2, 200, 136, 72, "bfloat16", "bias", "residual", "one")
ODD_K = ("scatter", 3, 40, 328, 136, "float16", "odd", "columns")
ORDERED = ("scatter", 3, 8, 264, 64, "bfloat16", "ordered")
VALUES = [
    *(KEPT, GATED, FOUR, ("gather", 4, 320, 8, 200, "silu", "float16")),
    *(("gather", 3, 128, 136, 328, "relu2", "float16", "keep"), SUM, ODD_K, ORDERED),
    *(("scatter", 4, 256, 392, 72, "bfloat16", "residual"), ("scatter", 1, 72, 72, 72, "bfloat16", "bias")),
]


def _check(*works: Work, version: str = HERE) -> None:
    found = dict(zip(works, results(*works, version=version), strict=True))
    assert {work: wrong for work, wrong in found.items() if wrong} == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_values_are_those_of_float64_on_two_ranks() -> None:
    _check(("values", (*KEPT[:2], 64, *KEPT[3:]), 1), ("values", (*SUM[:2], 72, *SUM[3:]), 1))


@pytest.mark.compile
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_every_variant_is_right_in_each_epoch(version: str) -> None:
    works = VALUES if version == HERE else (KEPT, GATED, FOUR, SUM, ODD_K)
    others = [("late", SMALL), ("late", SUM), *(("traced", (kind[0], 4, *kind[2:])) for kind in (SMALL, SUM_SMALL))]
    _check(*(("values", work) for work in works), *others, version=version)


@pytest.mark.compile
@pytest.mark.timeout(3600)
def test_chunks_and_warps_may_come_in_any_order() -> None:
    _check(*(("orders", work, 3) for work in (KEPT, GATED, FOUR, SUM, ODD_K)))


THREE, ODD = ("gather", 3, *SMALL[2:]), ("gather", 2, 64, 328, *SMALL[4:7])  # three tiles of a chunk for two programs
SUM_SMALL, SUM_THREE = ("scatter", 2, 64, 72, 72, "bfloat16", "one"), ("scatter", 3, 64, 328, 72, "bfloat16")
WAIT = "wait_signal(ready_ptr + peer, epoch, abort_ptr, None, trace_ptr, peer)"
LOOP = "    for step in range(1, WORLD):\n        peer = (rank + step) % WORLD\n"
END = "    if here:\n        advance(state_ptr, epoch)\n"
EARLY = "        if step == WORLD - 1:\n            advance(state_ptr, epoch)\n"
LOAD = "        first, stage, parity = load_tiles(gathered"
SIGNAL = "signal(peer_pointer(flags_ptr, owner, gl.int32) + word + rank, epoch)"
SCATTER_WAIT = "wait_signal(word_ptr, epoch, abort_ptr, None, trace_ptr, source)"
SCATTER_END = (
    "        if here:\n            record(trace_ptr, COMPUTING, rank, since)\n            advance(state_ptr, epoch)\n"
)
FIRST_PART = "_partial_sums(own, half_ptr + offsets, 0, rank, mask)"
NEXT_PART = "_partial_sums(own, half_ptr + source * chunk * N + offsets, source, rank, mask)"
DEADLOCK, STOP = "deadlock: ", "no thread can continue"
RACE, OVER, OTHER = "race on engines: ", "the epoch is not over", "rank . raised AssertionError: epoch 1, output 0"
# Each fault has the texts that it replaces, a function and a work that show it, and what the error says.
FAULTS: dict[str, tuple[dict[str, str], str, Work, str]] = {
    "the wait is deleted": ({f"{WAIT} & here": "here"}, "values", SMALL, RACE),
    "another chunk's word is read": (
        {"ready_ptr + peer": "ready_ptr + (rank + WORLD - step) % WORLD"},
        "values",
        THREE,
        RACE,
    ),
    "a word's epoch is not compared": (
        {"ready_ptr + peer, epoch,": "ready_ptr + peer, epoch - 1,"},
        "values",
        SMALL,
        RACE,
    ),
    "there is no proxy fence": ({"        _fence_for_tma()\n": ""}, "values", SMALL, RACE),
    "the fence is for shared memory": ({"async.global;": "async.shared::cta;"}, "values", SMALL, RACE),
    "the epoch ends before the last chunk": ({LOOP: LOOP + EARLY, END: ""}, "late", SMALL, OVER),
    "the epoch ends after an abort": ({END: "    advance(state_ptr, epoch)\n"}, "late", SMALL, OVER),
    "missing chunks are read": ({"gl.where(here, begin_m + M, 0)": "begin_m + M"}, "late", THREE, RACE),
    "missing chunks are left out": ({LOAD: f"        if here:\n    {LOAD}"}, "late", SMALL, "no thread can continue"),
    "a chunk has squares of the next one": (
        {"row < end_m": "row < end_m + 64"},
        "values",
        SMALL,
        "GlobalRace: warp . wrote it by TMA, but a TMA store that",
    ),
    "groups begin with another chunk": ({"chunk = (rank + index": "chunk = (index"}, "values", SMALL, OTHER),
    "a chunk begins with another tile": (
        {"* programs - tiles\n": "* programs - tiles + 1\n"},
        "values",
        ODD,
        STOP,
    ),
    "an owner is not signalled": ({SIGNAL: "pass"}, "values", SUM_SMALL, DEADLOCK),
    "the owner's word is signalled": (
        {"+ word + rank, epoch)": "+ word + owner, epoch)"},
        "values",
        SUM_SMALL,
        DEADLOCK,
    ),
    "every program signals as the first one": ({"gl.program_id(0) * WORLD": "0"}, "values", SUM_THREE, OTHER),
    "signals do not wait for stores": (
        {"mbarrier.wait(stored.index(step - 1), 0)": "pass"},
        "values",
        SUM_SMALL,
        OTHER,
    ),
    "one group's stores will do": ({"mbarriers(WORLD, 2)": "mbarriers(WORLD, 1)"}, "values", SUM, OTHER),
    "groups do not say that they have stored": (
        {"mbarrier.arrive(stored.index(step - 1))": "pass"},
        "values",
        SUM_SMALL,
        STOP,
    ),
    "no signal is waited for": ({f"{SCATTER_WAIT} & here": "here"}, "values", SUM_SMALL, OTHER),
    "the epoch before will do": (
        {"wait_signal(word_ptr, epoch,": "wait_signal(word_ptr, epoch - 1,"},
        "values",
        SUM_SMALL,
        OTHER,
    ),
    "one signal is waited for twice": (
        {"(rank + WORLD - step) % WORLD  # in": "(rank + WORLD - 1) % WORLD  # in"},
        "values",
        SUM_THREE,
        OTHER,
    ),
    "groups do not wait for the messenger": (
        {"mbarrier.wait(parts.index(0), 0)": "pass"},
        "values",
        SUM_SMALL,
        "SharedRace: .* but nothing has been written there",
    ),
    "the messenger does not let the groups go on": (
        {"mbarrier.arrive(parts.index(0))": "pass"},
        "values",
        SUM_SMALL,
        STOP,
    ),
    "missing parts are added": (
        {"gl.max(complete.load(word_layout), 0) != 0": "True"},
        "late",
        SUM_SMALL,
        "parts are missing",
    ),
    "an aborted scatter ends the epoch": (
        {SCATTER_END: SCATTER_END.replace("if here", "if running")},
        "late",
        SUM_SMALL,
        OVER,
    ),
    "an aborted launch has tiles": ({"gl.where(running, chunk, 0)": "chunk"}, "late", SUM_SMALL, STOP),
    "groups count from each owner's first tile": (
        {"tile = before + (before + me) % 2": "tile = me + 0 * before"},
        "values",
        SUM_THREE,
        "SharedRace: .* that nobody has waited for",
    ),
    "this rank's part comes first": (
        {
            f"total = {FIRST_PART}": f"total = own + gl.where(rank == 0, 0.0, {FIRST_PART})",
            f"total += {NEXT_PART}": f"total += gl.where(source == rank, 0.0, {NEXT_PART})",
        },
        "values",
        ORDERED,
        OTHER,
    ),
    "one half serves all epochs": ({"(epoch & 1) * slot_bytes": "0 * slot_bytes"}, "values", SUM_SMALL, OTHER),
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


CHANNEL = on_meta(4, 4 * 132, 132)


def _arguments(m: int = 128, n: int = 512, k: int = 256, world: int = 4, **changes: Any) -> dict[str, Any]:
    given = {"x": _meta(m, k), "weight": _meta(n, k), "bias": None, "gathered": _meta(world, m, k)}
    words = {"ready": _meta(world, dtype=torch.int32), "endpoint": on_meta(world, 8 * world, 132)}
    return given | words | changes


def _launched(run: Callable[[], object], chosen: bool = True) -> str:
    """Return the kernel that a call launches, where rows say PING_PONG or as the table is."""
    rows = [row for row in read_table(TABLE) if "PING_PONG" in row.blocks]
    assert not any(row.blocks["PING_PONG"] for row in rows), "no row says so before it is measured"
    chosen_rows = [replace(row, blocks=row.blocks | {"PING_PONG": chosen}) for row in rows]
    with override(*chosen_rows), recording("sm_90") as record:
        run()
    return str(record.launches[-1].kernel.__name__)


def test_the_table_chooses_the_gather_where_engines_copy_and_it_can_compute_the_product() -> None:
    def launched(copied: bool = True, chosen: bool = True, **arguments: Any) -> str:
        given = _arguments(**arguments)
        return _launched(lambda: all_gather_gemm_forward(**given, activation="silu", copied=copied), chosen)

    ours, triton_kernel = "all_gather_gemm_ping_pong_kernel", "all_gather_gemm_forward_kernel"
    assert launched() == ours
    assert launched(copied=False) == triton_kernel
    assert launched(m=96) == triton_kernel
    assert launched(bias=_meta(1024)[::2]) == triton_kernel
    assert launched(chosen=False) == triton_kernel


def test_the_table_chooses_the_same_scatter_on_every_rank() -> None:
    """A rank's own K and strides do not matter: tiles of the two kernels differ, and each rank waits for the others."""

    def launched(m: int = 512, n: int = 512, k: int = 256, chosen: bool = True, **more: Tensor) -> str:
        return _launched(lambda: gemm_reduce_scatter_forward(_meta(m, k), _meta(n, k), CHANNEL, **more), chosen)

    ours, triton_kernel = "gemm_reduce_scatter_ping_pong_kernel", "gemm_reduce_scatter_forward_kernel"
    assert launched() == launched(k=257) == launched(k=0) == ours
    assert launched(bias=_meta(1024)[::2], residual=_meta(512, 128).t()) == ours
    assert launched(m=511) == launched(n=516) == launched(m=0) == launched(chosen=False) == triton_kernel
    stored = _meta(CHANNEL.programs, CHANNEL.world, dtype=torch.int32)
    assert _launched(lambda: gemm_for_copies(_meta(512, 256), _meta(512, 256), CHANNEL, stored)) == triton_kernel


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


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (
            _meta(510, 64),
            _meta(64, 64),
            "x has 510 rows: expected a multiple of the 4 ranks",
        ),
        (_meta(512, 64), _meta(60, 64), "weight has 60 rows: expected a multiple of 8"),
        (_meta(512, 64).float(), _meta(64, 64).float(), "x is torch.float32: expected bfloat16 or float16"),
    ],
)
def test_what_the_scatter_cannot_do_is_refused(x: Tensor, weight: Tensor, message: str) -> None:
    with recording("sm_90") as record, pytest.raises(ValueError, match=f"gemm_reduce_scatter_ping_pong: {message}"):
        gemm_reduce_scatter_ping_pong(x, weight, CHANNEL)
    assert not record.launches
