"""The choice of a row of configurations.toml, and the rows of that file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpfuse.kernels import configurations
from tpfuse.kernels.configurations import choose_configuration, read_table
from tpfuse.kernels.launch import recording

TEXT = """
toy = [
    {families = ["sm_90"], bits = [16], at_most = {M = 64}, blocks = {BLOCK_M = 16}, num_warps = 4, num_stages = 3, measured = "never"},
    {families = ["sm_90", "sm_80"], bits = [16], blocks = {BLOCK_M = 128}, num_warps = 8, num_stages = 4, measured = "never"},
]
"""  # noqa: E501


def test_the_first_row_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TEXT)
    monkeypatch.setattr(configurations, "TABLE", path)
    with recording("sm_90"):
        meta = torch.device("meta")
        assert choose_configuration("toy", meta, torch.bfloat16, M=64).blocks == {"BLOCK_M": 16}
        assert choose_configuration("toy", meta, torch.bfloat16, M=65).num_warps == 8
        with pytest.raises(AssertionError, match="no row of toy for sm_90, 32 bits"):
            choose_configuration("toy", meta, torch.float32, M=1)


@pytest.mark.parametrize(
    ("operator", "n", "width", "other"),
    [("all_gather_gemm", 4096, 256, 128), ("all_gather_gemm", 1280, 128, 256), ("gemm_reduce_scatter", 8192, 256, 128)],
)
def test_the_second_best_has_tiles_of_another_shape(operator: str, n: int, width: int, other: int) -> None:
    """The sizes are 8192 tokens on 8 ranks of 132 multiprocessors, one of which is left to copies."""
    sizes = {"M": 1024, "N": n, "K": 8192, "chunks": 8, "programs": 131, "gated": 0, "unaligned": 0}
    with recording("sm_90"):
        rows = [
            choose_configuration(operator, torch.device("meta"), torch.bfloat16, other_tiles=flag, **sizes)
            for flag in (False, True)
        ]
        assert [row.blocks["BLOCK_N"] for row in rows] == [width, other]
        sizes["unaligned"] = 1  # one row of the table has this limit
        assert (
            choose_configuration(operator, torch.device("meta"), torch.bfloat16, other_tiles=True, **sizes).blocks[
                "TMA"
            ]
            is False
        )


GEMM = {"M": 4096, "N": 4096, "K": 4096, "programs": 132, "gated": 0, "unaligned": 0}


def test_a_variable_turns_the_roles_of_warps_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for value in ("1", "0"):
        monkeypatch.setenv("TPFUSE_WARP_SPECIALIZE", value)
        with recording("sm_90"):
            meta = torch.device("meta")
            rows.append(choose_configuration("gemm", meta, torch.bfloat16, **GEMM))
            rows.append(choose_configuration("attention_forward", meta, torch.bfloat16, D=128, DROPOUT=0))
    assert [(row.blocks["WARP_SPECIALIZE"], row.num_warps) for row in rows] == [(True, 4)] * 2 + [(False, 8)] * 2
    assert [row.tile for row in rows[:2]] == [row.tile for row in rows[2:]]
    monkeypatch.setenv("TPFUSE_WARP_SPECIALIZE", "off")
    with recording("sm_90"), pytest.raises(ValueError, match=r"^TPFUSE_WARP_SPECIALIZE=off: expected 0, 1 or no such"):
        choose_configuration("gemm", torch.device("meta"), torch.bfloat16, **GEMM)


PTX = """
import torch
from tpfuse.kernels.launch import recording
from tpfuse.tools import operators
from tpfuse.tools.compilation import compiled
from tpfuse.tools.recorded import Job, source_of
with recording("sm_90") as recorded:
    operators.load("gemm").launches(torch.bfloat16)
x = next(x for x in recorded.launches if x.arguments.get("BLOCK_N") == 256)
print(compiled(Job("gemm", "sm_90", "", source_of(x, "sm_90"), x.num_warps, x.num_stages)).asm["ptx"])
"""


@pytest.mark.compile
@pytest.mark.timeout(300)
def test_without_roles_no_warp_gives_registers_to_another() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for value, moved in (("1", True), ("0", False)):
        variables = environment | {"TPFUSE_WARP_SPECIALIZE": value}
        done = subprocess.run([sys.executable, "-c", PTX], env=variables, capture_output=True, text=True, check=True)
        assert "wgmma.mma_async" in done.stdout and ("setmaxnreg" in done.stdout) == moved


def test_a_row_with_a_key_too_many_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TEXT.replace("num_warps = 8", "num_warps = 8, colour = 3"))
    with pytest.raises(ValueError, match=r"table.toml: line 2 of toy: .*colour"):
        read_table(path)
    path.write_text(TEXT.replace('families = ["sm_90"], ', ""))
    with pytest.raises(ValueError, match=r"table.toml: line 1 of toy: 'families'"):
        read_table(path)


def test_every_row_of_the_table_can_be_chosen() -> None:
    rows = read_table(configurations.TABLE)
    last = {(row.operator, row.family, row.bits): row for row in rows}
    for row in rows:
        assert row.measured, row
        unlimited = not row.at_most
        assert unlimited == (last[row.operator, row.family, row.bits] is row), (
            f"{row}: the last row alone has no limits"
        )


def test_ranks_agree_on_who_copies_what() -> None:
    """Rows for the same rows of x agree on who copies what.

    A rank's row also depends on the height and alignment of its weight, which other ranks need not share.
    """
    shared = ("COPIERS", "BLOCK_COPY")
    copies_by_family: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for row in read_table(configurations.TABLE):
        if row.operator == "all_gather_gemm" and "M" not in row.at_most:
            family = row.family, row.bits
            copies_by_family.setdefault(family, set()).add(tuple(row.blocks.get(name) for name in shared))
    assert len(copies_by_family) >= 4 and all(len(copies) == 1 for copies in copies_by_family.values())
