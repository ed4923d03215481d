"""The figures that are read from the tools' output. test_gate.py reads them for compiled kernels."""

import pytest

from tpfuse.tools.resources import access_widths, occupancy, tensor_cores

PTX = """
	ld.param.b64 	%rd1, [kernel_param_0];
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p1 ld.global.L1::evict_last.v8.b32 { %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8 }, [ %rd1 + 0 ];
	ld.global.b16 	%rs1, [%rd1];
	ld.acquire.gpu.global.b32 	%r1, [%rd1];
	ld.shared.v4.b32 	{%r1, %r2, %r3, %r4}, [%r9];
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 4, 4;
	@%p2 st.global.v2.f32 [ %rd1 + 0 ], { %r1, %r2 };
	st.shared.b16 	[%r1], %rs1;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;
	wgmma.wait_group.sync.aligned 0;
"""


def test_instructions_of_a_program() -> None:
    assert tensor_cores(PTX) == ["wgmma"]
    assert tensor_cores("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {};") == ["mma.sync"]
    assert tensor_cores("tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ];") == ["tcgen05"]
    assert tensor_cores("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;") == []
    assert access_widths(PTX, "ld") == {2: 1, 4: 2, 16: 2, 32: 1}
    assert access_widths(PTX, "st") == {8: 1}


@pytest.mark.parametrize(
    ("family", "registers", "shared", "warps", "programs"),
    [
        ("sm_90", 32, 0, 4, 16),  # the limit of 64 warps
        ("sm_90", 33, 0, 4, 12),  # 40 registers for each of 32 threads: 51 warps, 12 on each scheduler
        ("sm_90", 88, 0, 1, 20),  # 23 warps, but five on each scheduler
        ("sm_90", 168, 0, 8, 1),  # 12 warps
        ("sm_90", 168, 0, 4, 3),
        ("sm_90", 16, 0, 1, 32),  # the limit of 32 programs
        ("sm_90", 64, 100 * 1024, 4, 2),  # the limit of shared memory
        ("sm_90", 64, 227 * 1024, 4, 1),
        ("sm_80", 64, 163 * 1024 + 1, 4, 0),
        ("sm_80", 64, 54 * 1024, 4, 2),  # each program takes 1 KiB more
    ],
)
def test_occupancy(family: str, registers: int, shared: int, warps: int, programs: int) -> None:
    assert occupancy(family, registers, shared, warps) == programs


def test_tensor_memory_limits_too() -> None:
    assert occupancy("sm_100", 64, 0, 4, tensor_memory=256) == 2
