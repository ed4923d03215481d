"""Accesses to registers of a running wgmma are found in SASS. test_gate.py plants one in a compiled kernel."""

import pytest

from tpfuse.tools.wgmma_hazards import hazards

# A loop leaves one group running, whose inputs a branch back to the head of the loop must not overwrite.
SASS = """
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR16], RZ, !UPT ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR20], R88, gsb0 ;
.L_x_1:
        /*0030*/                   LDS.128 R16, [R8+UR4] ;
        /*0040*/                   ISETP.GE.AND P1, PT, R15, R10, PT ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   F2FP.BF16.F32.PACK_AB R24, R89, R88 ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R152, R24, gdesc[UR16].tnspB, R152, gsb0 ;
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR20], R88, gsb0 ;
        /*00a0*/               @P1 BRA `(.L_x_1) ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00c0*/                   MOV R24, R3 ;
        /*00d0*/                   FADD R152, R152, R3 ;
        /*00e0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_2:
        /*00f0*/                   STG.E.128 desc[UR6][R2.64], R88 ;
        /*0100*/                   EXIT ;
"""
NEXT = "/*0090*/                   HGMMA.64x64x16.F32.BF16"
FIRST = "*/                   LDS.128 R16, [R8"
LOAD, LAST = "LDS.128 R16, [R8", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n.L_x_2"
TABLE = "EXIT ;\n"
BEHIND_TABLE = """@P4 EXIT ;
        /*0108*/                   BRX R2 -0x190                               (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_3:
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R40, gdesc[UR20], R40, gsb0 ;
        /*0120*/                   FADD R40, R40, R3 ;
"""
FAULTS = {
    "a wait is missing": (LAST, "NOP ;\n.L_x_2", "STG.E.128 at 00f0 accesses the accumulators of the wgmma at 0090"),
    "a wait is too weak": (LAST, LAST.replace("0x0", "0x1"), "STG.E.128 at 00f0 accesses the accumulators"),
    "a wait is conditional": (f"     {LAST}", f" @P3 {LAST}", "STG.E.128 at 00f0 accesses the accumulators"),
    "a group is waited for too late": ("gsb0, 0x1", "gsb0, 0x2", "MOV at 00c0 writes the inputs of the wgmma at 0080"),
    "inputs are loaded": (LOAD, "LDS.128 R24, [R8", "LDS.128 at 0030 writes the inputs of the wgmma at 0080"),
    "one of four inputs is written": (LOAD, "SHFL.BFLY PT, R27, R8, [R8", "SHFL.BFLY at 0030 writes the inputs"),
    "an accumulator is read": ("R15, R10", "R15, R90", "ISETP.GE.AND at 0040 accesses the accumulators"),
    "an accumulator is an address": (LOAD, "LDS.128 R16, [R88", "LDS.128 at 0030 accesses the accumulators"),
    "an accumulator is written": (LOAD, "LDS.128 R212, [R8", "LDS.128 at 0030 accesses the accumulators"),
    "accumulators overlap": ("R152, R24,", "R104, R24,", "HGMMA.64x64x16.F32.BF16 at 0090 accesses the accumulators"),
    "inputs are accumulators": (f"{NEXT} R88, gdesc[UR20]", f"{NEXT} R88, R152", "at 0090 reads the accumulators"),
    "accumulators are inputs": (f"{NEXT} R88,", f"{NEXT} R8,", "at 0090 writes the inputs of the wgmma at 0080"),
    "addresses occur twice": (f"0030{FIRST}", "0080*/ LDS.128 R24, [R8", "LDS.128 at 0080 writes the inputs"),
    "a function is called": (LOAD, "CALL.REL.NOINC `($div) [R8", "CALL.REL.NOINC at 0030 leads to code that is not"),
    "a table decides": ("ISETP.GE.AND P1, PT, R15, R10, PT", "@P3 BRX R2 -0x190", "BRX at 0040 leads to code"),
    "only a table leads there": (TABLE, BEHIND_TABLE, "FADD at 0120 accesses the accumulators of the wgmma at 0110"),
}  # fmt: skip
SOUND = {
    "as it is": (LOAD, LOAD),
    "inputs are read": (LOAD, "STS.128 [R24], R24 ; // [R8"),
    "a barrier has inputs as operands": (LOAD, "BAR.SYNC R24, R25 ; // [R8"),
    "registers after the accumulators are written": (LOAD, "LDS.128 R216, [R8"),
    "registers are written after the wait": ("@P0 BRA `(.L_x_2) ;", "MOV R88, R152 ;"),
    "accumulators of half precision take half as many": ("x128x16.F32.BF16 R152", "x128x16.F16 R56"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(name: str) -> None:
    old, new, message = FAULTS[name]
    assert SASS.count(old) == 1
    found = hazards(SASS.replace(old, new))
    assert any(message in line for line in found), found


@pytest.mark.parametrize("name", SOUND)
def test_sound_code_has_no_hazard(name: str) -> None:
    old, new = SOUND[name]
    assert SASS.count(old) == 1
    assert hazards(SASS.replace(old, new)) == []


def test_code_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match="no wgmma"):
        hazards(SASS.replace("HGMMA", "HMMA"))
