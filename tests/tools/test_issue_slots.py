"""The figures that are counted in SASS. test_gate.py counts them in compiled kernels."""

from tpfuse.tools.issue_slots import ProductLoop, main_loop, product_loops

# A loop over tiles contains a loop over steps, whose wait for a tile comes after all other code; one loop is separate.
SASS = """
.L_x_0:
        /*0010*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
.L_x_5:
        /*0038*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0060*/              @!P2 BRA `(.L_x_1) ;
        /*0070*/                   STG.E.128 desc[UR6][R2.64], R4 ;
        /*0078*/                   BRA.DIV UR5, `(.L_x_6) ;
        /*007c*/                   FADD R1, R1, R1 ;
.L_x_7:
        /*0080*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0090*/                   HGMMA.64x64x8.F32.TF32 R24, gdesc[UR12], R24, gsb0 ;
{        /*00a0*/                   FADD R1, R1, R1 ;
        /*00b0*/               @P1 BRA `(.L_x_2) ;
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00e0*/              @!P0 BRA `(.L_x_4) ;
        /*00f0*/                   BRA `(.L_x_5) ;
.L_x_6:
        /*0100*/                   WARPSYNC.ALL ;
        /*0110*/                   BRA `(.L_x_7) ;
"""


def test_innermost_loops_with_products() -> None:
    tiled, alone = sorted(product_loops(SASS), key=lambda loop: loop.issue_share)
    assert tiled == ProductLoop(instructions=9, tensor_cycles=192.0, barriers=1, tile_instructions=7)
    assert alone == ProductLoop(instructions=3, tensor_cycles=32.0, barriers=0, tile_instructions=0)
    assert main_loop(SASS) == tiled
    assert main_loop(SASS.replace("HGMMA", "HMMA")) is None
