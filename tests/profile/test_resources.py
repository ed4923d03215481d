"""What is read from the tools' output. Kernels that are compiled for it: test_gate."""

import pytest

from tpfuse.profile.resources import access_widths, instructions, occupancy, tensor_cores

SASS = """
	.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0020*/               @P1 LDG.E.U16 R4, desc[UR8][R2.64] ;
        /*0030*/                   LDG.E R4, desc[UR8][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R13], desc[UR8][R2.64] ;
        /*0050*/             @!UP0 STG.E.64 desc[UR8][R2.64], R4 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0070*/                   LDGDEPBAR ;
        /*0080*/                   LDG.E.128.CONSTANT R4, desc[UR8][R2.64] ;
"""


def test_instructions_of_a_program() -> None:
    counts = instructions(SASS)
    assert counts["LDGDEPBAR"] == 1
    assert sum(counts.values()) == 9
    assert tensor_cores(counts) == ["wgmma"]
    assert access_widths(counts, "LDG", "LDGSTS") == {2: 1, 4: 1, 16: 3}
    assert access_widths(counts, "STG") == {8: 1}


@pytest.mark.parametrize(
    ("family", "registers", "shared", "warps", "programs"),
    [
        ("sm_90", 32, 0, 4, 16),  # 64 warps
        ("sm_90", 33, 0, 4, 12),  # registers: 40 for each of 32 threads of 51 warps, 12 on each scheduler
        ("sm_90", 255, 0, 8, 1),
        ("sm_90", 168, 0, 8, 1),  # 12 warps
        ("sm_90", 168, 0, 4, 3),
        ("sm_90", 16, 0, 1, 32),  # programs
        ("sm_90", 64, 100 * 1024, 4, 2),  # shared memory
        ("sm_90", 64, 227 * 1024, 4, 1),
        ("sm_90", 64, 227 * 1024 + 1, 4, 0),
        ("sm_80", 64, 163 * 1024, 4, 1),
        ("sm_80", 64, 163 * 1024 + 1, 4, 0),
        ("sm_80", 64, 54 * 1024, 4, 2),  # 1 KiB more each
    ],
)
def test_occupancy(family: str, registers: int, shared: int, warps: int, programs: int) -> None:
    assert occupancy(family, registers, shared, warps) == programs


def test_tensor_memory_limits_too() -> None:
    assert occupancy("sm_100", 64, 0, 4, tensor_memory=256) == 2
