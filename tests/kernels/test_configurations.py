"""The choice of a row of configurations.toml, and the rows of that file."""

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
