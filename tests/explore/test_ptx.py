"""Each instruction of PTX does what its definition says, and every wrong access or missing barrier is a named fault.

The definitions are those of NVIDIA's PTX ISA 8.7, chapter "Instruction Set".
"""

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tpfuse.explore import ProtocolError, RaceError, Report, Sequential, explore, explore_all
from tpfuse.explore.ptx import (
    Divergence,
    GlobalRace,
    Kernel,
    MemoryFault,
    PtxError,
    SharedRace,
    Stuck,
    Unsupported,
    global_memory,
    ranks,
)
from tpfuse.explore.ptx.control_flow import weak_topological_order

HEAD = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
  .reg .pred %p<16>;
  .reg .b16 %h<32>;
  .reg .b32 %r<64>;
  .reg .b64 %d<32>;
{body}
}}
  .file 1 "kernel.py"
"""


def kernel(body: str, *, inputs: int = 1, threads: int = 32, shared: int = 0) -> Kernel:
    """Return a kernel with the addresses of `inputs` arrays in %d0, %d1, … and a thread's number in %r0."""
    parameters = ", ".join(f".param .u64 array{number}" for number in range(inputs))
    loads = "\n".join(f"  ld.param.b64 %d{number}, [array{number}];" for number in range(inputs))
    return Kernel(
        HEAD.format(parameters=parameters, threads=threads, body=f"{loads}\n  mov.u32 %r0, %tid.x;\n{body}\n  ret;"),
        shared,
    )


def f32(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def f16(x: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", x))[0])


def f64(x: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", x))[0])


def bf16(x: float) -> int:
    """Return the bits of a number that bfloat16 has."""
    assert f32(x) % 2**16 == 0
    return f32(x) >> 16


def pair(low: int, high: int) -> int:
    return low | high << 16


NAN, INF = math.nan, math.inf
TINY = 2.0**-140  # subnormal in float32
# Modifiers of min and max, widths and pairs of zeros, of which the negative one is the lower
ZEROS = [
    (f"{modifier}.{kind}", width * 3, zeros)
    for modifier, kind, width, lowest in [
        ("", "f32", "r", 2**31),
        (".NaN", "f32", "r", 2**31),
        ("", "f16", "h", 2**15),
        ("", "bf16", "h", 2**15),
        ("", "f16x2", "r", pair(2**15, 2**15)),
    ]
    for zeros in [(0, lowest), (lowest, 0), (lowest, lowest)]
]
# opcode, widths (h 16 bits, r 32, d 64, p a predicate) of the target and of the sources, sources, target
CASES: list[tuple[str, str, tuple[int, ...], int]] = [
    ("add.s32", "rrr", (2**31 - 1, 1), -(2**31)),
    ("sub.s64", "ddd", (0, 1), -1),
    ("mul.lo.s32", "rrr", (-3, 5), -15),
    ("min.relu.s32", "rrr", (-3, 5), 0),
    ("min.relu.s32", "rrr", (3, 5), 3),
    ("cvta.global.u64", "dd", (2**40,), 2**40),
    ("mul.lo.s64", "ddd", (2**40, 2**30 + 1), 2**40),
    ("mul.hi.s32", "rrr", (-5, 2**30), -5 * 2**30 >> 32),
    ("mul.hi.u32", "rrr", (2**32 - 1, 2**32 - 1), 2**32 - 2),
    ("mul.wide.s32", "drr", (-5, 7), -35),
    ("mul.wide.u32", "drr", (2**32 - 1, 2), 2**33 - 2),
    ("mad.lo.s32", "rrrr", (-3, 5, 16), 1),
    ("mad.lo.s64", "dddd", (-3, 5, 16), 1),
    ("mad.wide.s32", "drrd", (-1, 8, 2**40), 2**40 - 8),
    ("mad.wide.u32", "drrd", (2**32 - 1, 8, 1), 8 * (2**32 - 1) + 1),
    ("div.s32", "rrr", (-7, 2), -3),
    ("div.s64", "ddd", (7, -2), -3),
    ("div.u32", "rrr", (2**32 - 1, 2), 2**31 - 1),
    ("rem.s32", "rrr", (-7, 2), -1),
    ("min.s32", "rrr", (-1, 1), -1),
    ("min.u32", "rrr", (-1, 1), 1),
    ("max.s64", "ddd", (-1, 1), 1),
    ("neg.s32", "rr", (5,), -5),
    ("abs.s32", "rr", (-5,), 5),
    ("and.b32", "rrr", (12, 10), 8),
    ("or.b16", "hhh", (12, 10), 14),
    ("xor.b64", "ddd", (12, 10), 6),
    ("not.b32", "rr", (0,), -1),
    ("not.pred", "pp", (1,), 0),
    ("and.pred", "ppp", (1, 0), 0),
    ("or.pred", "ppp", (1, 0), 1),
    ("shl.b32", "rrr", (3, 31), 2**31),
    ("shl.b32", "rrr", (3, 32), 0),
    ("shl.b16", "hhr", (3, 15), 2**15),
    ("shl.b64", "ddr", (1, 40), 2**40),
    ("shr.s32", "rrr", (-8, 1), -4),
    ("shr.s32", "rrr", (-8, 99), -1),
    ("shr.u32", "rrr", (-1, 31), 1),
    ("shr.u64", "ddr", (-1, 63), 1),
    ("bfe.u32", "rrrr", (0b1101_0000, 4, 4), 0b1101),
    ("bfe.s32", "rrrr", (0b1101_0000, 4, 4), -3),
    ("bfe.s32", "rrrr", (4, 2, 1), -1),
    ("bfe.s32", "rrrr", (-16, 2, 99), -4),
    ("bfe.u32", "rrrr", (-1, 3, 0), 0),
    ("bfe.u64", "ddrr", (0xABCD << 40, 44, 8), 0xBC),
    ("bfe.s64", "ddrr", (0xABCD << 40, 48, 99), 0xAB),
    ("prmt.b32", "rrrr", (0x33221100, 0x77665544, 0x5410), 0x55441100),
    ("prmt.b32", "rrrr", (0x33228100, 0x77665544, 0x98C7), 0xFF000077),
    ("selp.b32", "rrrp", (5, 6, 1), 5),
    ("selp.f32", "rrrp", (5, 6, 0), 6),
    ("mov.b64", "dd", (-5,), -5),
    ("setp.lt.s32", "prr", (-1, 1), 1),
    ("setp.lt.u32", "prr", (-1, 1), 0),
    ("setp.ge.s64", "pdd", (-1, -1), 1),
    ("setp.ne.b32", "prr", (5, 5), 0),
    ("setp.eq.f32", "prr", (f32(NAN), f32(NAN)), 0),
    ("setp.ne.f32", "prr", (f32(NAN), f32(0)), 0),
    ("setp.ne.f32", "prr", (f32(1), f32(1)), 0),
    ("setp.neu.f32", "prr", (f32(NAN), f32(0)), 1),
    ("setp.ltu.f32", "prr", (f32(NAN), f32(0)), 1),
    ("setp.ltu.f32", "prr", (f32(1), f32(0)), 0),
    ("setp.num.f32", "prr", (f32(1), f32(NAN)), 0),
    ("setp.nan.f32", "prr", (f32(1), f32(NAN)), 1),
    ("setp.gt.ftz.f32", "prr", (f32(TINY), f32(0)), 0),
    ("add.f32", "rrr", (f32(1), f32(2**-24)), f32(1)),
    ("add.f32", "rrr", (f32(TINY), f32(TINY)), f32(2 * TINY)),
    ("add.ftz.f32", "rrr", (f32(TINY), f32(TINY)), f32(0)),
    ("sub.f32", "rrr", (f32(1), f32(3)), f32(-2)),
    ("mul.f32", "rrr", (f32(3), f32(-0.5)), f32(-1.5)),
    ("fma.rn.f32", "rrrr", (f32(1 + 2**-20), f32(1 - 2**-20), f32(-1)), f32(-(2**-40))),
    ("fma.rn.ftz.f32", "rrrr", (f32(TINY), f32(1), f32(0)), f32(0)),
    ("fma.rn.f64", "dddd", (f64(1 + 2**-40), f64(1 - 2**-40), f64(-1)), f64(-(2**-80))),
    ("fma.rn.f64", "dddd", (f64(-0.0), f64(1), f64(-0.0)), f64(-0.0)),
    ("fma.rn.f64", "dddd", (f64(NAN), f64(1), f64(0)), f64(NAN)),
    ("fma.rn.bf16x2", "rrrr", (*[pair(bf16(2), bf16(3))] * 2, pair(bf16(1), bf16(-1))), pair(bf16(5), bf16(8))),
    ("mul.f16x2", "rrr", (pair(f16(2), f16(3)), pair(f16(0.5), f16(-1))), pair(f16(1), f16(-3))),
    ("div.rn.f32", "rrr", (f32(1), f32(3)), f32(1 / 3)),
    ("div.full.f32", "rrr", (f32(1), f32(0)), f32(INF)),
    ("max.f32", "rrr", (f32(NAN), f32(1)), f32(1)),
    ("max.NaN.f32", "rrr", (f32(NAN), f32(1)), f32(NAN)),
    ("min.f32", "rrr", (f32(-2), f32(1)), f32(-2)),
    *((f"min{x}", y, z, z[0] | z[1]) for x, y, z in ZEROS),
    *((f"max{x}", y, z, z[0] & z[1]) for x, y, z in ZEROS),
    ("abs.f32", "rr", (f32(-2),), f32(2)),
    ("neg.f32", "rr", (f32(0),), f32(-0.0)),
    ("sqrt.rn.f32", "rr", (f32(2),), f32(2**0.5)),
    ("sqrt.approx.ftz.f32", "rr", (f32(9),), f32(3)),
    ("rsqrt.approx.f32", "rr", (f32(4),), f32(0.5)),
    ("rcp.approx.ftz.f32", "rr", (f32(8),), f32(0.125)),
    ("rcp.approx.ftz.f32", "rr", (f32(TINY),), f32(INF)),
    ("tanh.approx.f32", "rr", (f32(-INF),), f32(-1)),
    ("ex2.approx.f32", "rr", (f32(-1.5),), f32(2**-1.5)),
    ("ex2.approx.ftz.f32", "rr", (f32(-INF),), f32(0)),
    ("lg2.approx.f32", "rr", (f32(8),), f32(3)),
    ("cvt.s64.s32", "dr", (-5,), -5),
    ("cvt.u64.u32", "dr", (-5,), 2**32 - 5),
    ("cvt.u32.u64", "rd", (2**32 + 7,), 7),
    ("cvt.s64.s32", "dd", (2**32 + 7,), 7),
    ("cvt.u16.u32", "hr", (2**16 + 7,), 7),
    ("cvt.u32.u16", "rh", (-1,), 2**16 - 1),
    ("cvt.rn.f32.s32", "rr", (-(2**24) - 1,), f32(-(2**24))),
    ("cvt.rn.f32.u32", "rr", (2**32 - 1,), f32(2.0**32)),
    ("cvt.rzi.s32.f32", "rr", (f32(-2.7),), -2),
    ("cvt.rni.s32.f32", "rr", (f32(2.5),), 2),
    ("cvt.rmi.s32.f32", "rr", (f32(-2.1),), -3),
    ("cvt.rzi.s32.f32", "rr", (f32(1e20),), 2**31 - 1),
    ("cvt.rzi.s32.f32", "rr", (f32(NAN),), 0),
    ("cvt.rzi.s64.f32", "dr", (f32(NAN),), -(2**63)),
    ("cvt.rzi.u64.f32", "dr", (f32(NAN),), 2**63),
    ("cvt.rzi.s32.f64", "rd", (0x7FF8 << 48,), -(2**31)),
    ("cvt.rzi.u32.f64", "rd", (0x7FF8 << 48,), 2**31),
    ("cvt.f32.bf16", "rh", (bf16(1.5),), f32(1.5)),
    ("cvt.f32.f16", "rh", (f16(1.5),), f32(1.5)),
    ("cvt.rn.f16.f32", "hr", (f32(65536),), f16(INF)),
    ("cvt.rn.bf16.f32", "hr", (0x3F808000,), 0x3F80),  # a tie: to the even one below
    ("cvt.rn.bf16.f32", "hr", (0x3F818000,), 0x3F82),  # a tie: to the even one above
    ("cvt.rn.bf16.f32", "hr", (f32(3.4e38),), bf16(INF)),
    ("cvt.rn.bf16x2.f32", "rrr", (f32(2), f32(3)), pair(bf16(3), bf16(2))),
    ("cvt.rn.f16x2.f32", "rrr", (f32(2), f32(3)), pair(f16(3), f16(2))),
    ("cvt.rna.tf32.f32", "rr", (0x3F801000,), 0x3F802000),  # a tie: away from zero
    ("cvt.rna.tf32.f32", "rr", (0x3F800FFF,), 0x3F800000),
]
BITS = {"p": 1, "h": 16, "r": 32, "d": 64}


def computed(opcode: str, widths: str, sources: tuple[int, ...]) -> int:
    """Return what one thread computes. Sources and the result pass through memory, 8 bytes each."""
    names = [f"%{width}{9 + place}" for place, width in enumerate(widths)]
    lines = []
    for place, (width, name) in enumerate(zip(widths[1:], names[1:], strict=True)):
        lines.append(f"ld.global.b64 %d{2 + place}, [%d0+{8 * place}];")
        convert = {"p": f"setp.ne.b64 {name}, %d{{}}, 0;", "d": f"mov.b64 {name}, %d{{}};"}
        lines.append(convert.get(width, f"cvt.u{BITS[width]}.u64 {name}, %d{{}};").format(2 + place))
    lines.append(f"{opcode} {', '.join(names)};")
    convert = {"p": f"selp.b64 %d2, 1, 0, {names[0]};", "d": f"mov.b64 %d2, {names[0]};"}
    lines.append(convert.get(widths[0], f"cvt.u64.u{BITS[widths[0]]} %d2, {names[0]};"))
    out = torch.zeros(1, dtype=torch.int64)
    given = torch.tensor([x % 2**64 - 2**64 * (x % 2**64 >= 2**63) for x in sources])
    kernel("\n".join([*lines, "st.global.b64 [%d1], %d2;"]), inputs=2).run((1,), [given, out])
    return int(out) % 2 ** BITS[widths[0]]


@pytest.mark.parametrize(("opcode", "widths", "sources", "expected"), CASES)
def test_an_opcode_computes_what_it_is_defined_to(
    opcode: str, widths: str, sources: tuple[int, ...], expected: int
) -> None:
    assert computed(opcode, widths, sources) == expected % 2 ** BITS[widths[0]]


@pytest.mark.parametrize(("bits", "whole", "half"), [(32, "r", "h"), (64, "d", "r")])
def test_a_mov_splits_a_register_and_joins_its_halves(bits: int, whole: str, half: str) -> None:
    """The halves change places."""
    body = f"""
      ld.global.b{bits} %{whole}2, [%d0];
      mov.b{bits} {{_, %{half}3}}, %{whole}2;
      mov.b{bits} {{%{half}4, _}}, %{whole}2;
      mov.b{bits} %{whole}5, {{%{half}3, %{half}4}};
      st.global.b{bits} [%d1], %{whole}5;"""
    given, out = torch.tensor([0x1234_5678_1BCD_EF01]), torch.zeros(1, dtype=torch.int64)
    kernel(body, inputs=2).run((1,), [given, out])
    assert int(out) == {32: 0xEF01_1BCD, 64: 0x1BCD_EF01_1234_5678}[bits]


@pytest.mark.parametrize(
    "line",
    [
        "add.sat.s32 %r1, %r2, %r3;",
        "brev.b32 %r1, %r2;",
        "ld.global.v16.b8 {%r1}, [%d0];",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4};",
        "mov.u32 %r1, %smid;",
        "bar.arrive 0, 64;",
        "bar.sync %r1;",
        "bra $L_nowhere;",
        "add.s32 %r1, %r2;",
        "add.s32 _, %r1, %r2;",
        "mov.b32 {%r1}, %r2;",
        "cvt.rn.bf16x2.f32 %r1, %d0, %r2;",
        "@%p1 ld.param.b64 %d1, [array0];",
        "cp.async.ca.shared.global [%r1], [%d0], 16, %p1;",
        "cp.async.ca.shared.global [%r1], [%d0], 16, %r2, %d1;",
        "add.ftz.f16 %h1, %h2, %h3;",
        "fma.rn.ftz.f16x2 %r1, %r2, %r3, %r4;",
        "setp.lt.ftz.f16 %p1, %h2, %h3;",
    ],
)
def test_an_instruction_that_is_not_known_is_named(line: str) -> None:
    with pytest.raises(Unsupported) as caught:
        kernel(line)
    assert line.removesuffix(";") in str(caught.value)


def random_numbers(*shape: int, kind: str) -> tuple[Any, Any]:
    """Return the bits of random numbers of a type, and the numbers in float32."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]
    x = torch.randn(shape).to(dtype)
    if kind == "tf32":
        bits = x.numpy().view(np.uint32) & np.uint32(0xFFFFE000)
        return bits, bits.view(np.float32)
    return x.view(torch.int16).numpy().view(np.uint16), x.float().numpy()


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_mma_multiplies_matrices(kind: str) -> None:
    """Fragments are packed thread by thread, as the tables of the PTX ISA say, for two warps."""
    depth = 8 if kind == "tf32" else 16
    a_bits, a = random_numbers(2, 16, depth, kind=kind)
    b_bits, b = random_numbers(2, depth, 8, kind=kind)
    c = np.random.default_rng(0).standard_normal((2, 16, 8)).astype(np.float32)
    registers = np.zeros((64, 10), np.uint32)
    for warp, lane in itertools.product(range(2), range(32)):
        g, t = divmod(lane, 4)
        row = registers[32 * warp + lane]
        for i in range(4):
            r, k = g + 8 * (i % 2), i // 2
            if kind == "tf32":
                row[i] = a_bits[warp, r, t + 4 * k]
            else:
                row[i] = pair(*map(int, a_bits[warp, r, 2 * t + 8 * k :][:2]))
            row[6 + i] = f32(c[warp, g + 8 * (i // 2), 2 * t + i % 2])
        for i in range(2):
            if kind == "tf32":
                row[4 + i] = b_bits[warp, t + 4 * i, g]
            else:
                row[4 + i] = pair(*map(int, b_bits[warp, 2 * t + 8 * i :, g][:2]))
    body = "mad.wide.u32 %d2, %r0, 40, %d0;\n" + "\n".join(
        f"ld.global.b32 %r{1 + i}, [%d2+{4 * i}];" for i in range(10)
    )
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    body += f"\n{name} {{%r11,%r12,%r13,%r14}}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {{%r7,%r8,%r9,%r10}};"
    body += "\nmad.wide.u32 %d3, %r0, 16, %d1;\nst.global.v4.b32 [%d3], {%r11,%r12,%r13,%r14};"
    out = torch.zeros(64, 4)
    kernel(body, inputs=2, threads=64).run((1,), [torch.from_numpy(registers.view(np.int32)), out])
    expected = a.astype(np.float64) @ b + c
    for warp, lane, i in itertools.product(range(2), range(32), range(4)):
        g, t = divmod(lane, 4)
        assert float(out[32 * warp + lane, i]) == pytest.approx(
            expected[warp, g + 8 * (i // 2), 2 * t + i % 2], abs=1e-5
        )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_distributes_rows(count: int, transposed: bool) -> None:
    """Row j of matrix i is at the address of lane 8 i + j, in any order; here in the opposite one."""
    numbers = np.arange(count * 64, dtype=np.uint16).reshape(count * 8, 8)
    names = [f"%r{10 + i}" for i in range(count)]
    body = f"""
      mad.wide.u32 %d2, %r0, 16, %d0;
      setp.lt.u32 %p1, %r0, {8 * count};
      shl.b32 %r1, %r0, 4;
      sub.s32 %r1, {16 * (8 * count - 1)}, %r1;
      max.s32 %r1, %r1, 0;
      mov.b32 %r2, memory;
      add.s32 %r1, %r1, %r2;
      @%p1 ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d2];
      @%p1 st.shared.v4.b32 [%r1], {{%r3, %r4, %r5, %r6}};
      bar.sync 0;
      ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 {{{", ".join(names)}}}, [%r1];
      mad.wide.u32 %d3, %r0, {4 * count}, %d1;
    """ + "".join(f"st.global.b32 [%d3+{4 * i}], {name};\n" for i, name in enumerate(names))
    out = torch.zeros(32, count, dtype=torch.int32)
    kernel(body, inputs=2, shared=128 * count).run((1,), [torch.from_numpy(numbers.view(np.int16)), out])
    for lane, i in itertools.product(range(32), range(count)):
        matrix = numbers[8 * i : 8 * i + 8]
        row, column = divmod(lane, 4)
        expected = (matrix.T if transposed else matrix)[row, 2 * column : 2 * column + 2]
        assert int(out[lane, i]) == pair(*map(int, expected))


@pytest.mark.parametrize(
    ("mode", "argument", "clamp", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("up", 3, 0, lambda lane: max(lane - 3, 0) if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("idx", 7, 31, lambda lane: 7),
        ("down", 3, 0x181F, lambda lane: lane + 3 if lane % 8 + 3 < 8 else lane),  # segments of 8 lanes
    ],
)
def test_shfl_exchanges_values_within_warps(mode: str, argument: int, clamp: int, source: Any) -> None:
    body = f"""
      shfl.sync.{mode}.b32 %r1|%p1, %r0, {argument}, {clamp}, -1;
      selp.b32 %r2, 1, 0, %p1;
      mad.wide.u32 %d1, %r0, 8, %d0;
      st.global.v2.b32 [%d1], {{%r1, %r2}};
    """
    out = torch.zeros(64, 2, dtype=torch.int32)
    kernel(body, threads=64).run((1,), [out])
    for thread in range(64):
        lane = thread % 32
        assert int(out[thread, 0]) == thread - lane + source(lane)
        assert bool(out[thread, 1]) == (mode == "idx" or source(lane) != lane)


def test_redux_reduces_each_warp() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = (
        "neg.s32 %r1, %r0;\nredux.sync.max.s32 %r2, %r1, -1;\nmad.wide.u32 %d1, %r0, 4, %d0;\nst.global.b32 [%d1], %r2;"
    )
    kernel(body, threads=64).run((1,), [out])
    assert out.tolist() == [0] * 32 + [-32] * 32


def test_threads_that_diverge_meet_again() -> None:
    """Thread t counts to t in a loop; the block to which some go is behind the block where all meet."""
    body = """
      mov.b32 %r1, 0;
      mov.b32 %r3, 0;
      loop:
      setp.ge.u32 %p1, %r1, %r0;
      @%p1 bra done;
      add.s32 %r1, %r1, 1;
      and.b32 %r2, %r1, 1;
      setp.eq.b32 %p2, %r2, 1;
      @%p2 bra odd;
      add.s32 %r3, %r3, 100;
      joined:
      bar.warp.sync -1;
      bra.uni loop;
      odd:
      add.s32 %r3, %r3, 1;
      bra.uni joined;
      done:
      bar.sync 0;
      mad.wide.u32 %d1, %r0, 4, %d0;
      st.global.b32 [%d1], %r3;
    """
    out = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(Divergence, match=r"warp 0 is active with 31 lanes: expected 32"):
        kernel(body, threads=64).run((1,), [out])
    kernel(body.replace("bar.warp.sync -1;", ""), threads=64).run((1,), [out])
    assert out.tolist() == [t // 2 * 100 + (t + 1) // 2 for t in range(64)]


def test_threads_behind_a_barrier_come_to_it_first() -> None:
    body = """
      and.b32 %r2, %r0, 1;
      setp.eq.b32 %p2, %r2, 1;
      @%p2 bra odd;
      mov.b32 %r3, 100;
      joined:
      bar.sync 0;
      mad.wide.u32 %d1, %r0, 4, %d0;
      st.global.b32 [%d1], %r3;
      ret;
      odd:
      mov.b32 %r3, 1;
      bra.uni joined;
    """
    out = torch.zeros(64, dtype=torch.int32)
    kernel(body, threads=64).run((1,), [out])
    assert out.tolist() == [100, 1] * 32


def test_a_loop_comes_before_what_follows_it() -> None:
    """Block 3 begins a loop of 3, 6, 5, in which 5 and 7 follow from 6; 4 follows the loop. No block reaches 1."""
    order = weak_topological_order([[2], [6], [3], [4, 6], [], [3], [5, 7], [5]])
    assert sorted(range(8), key=order.__getitem__) == [0, 2, 3, 6, 7, 5, 4, 1]


def test_programs_know_their_place_in_the_grid() -> None:
    body = """
      mov.u32 %r1, %ctaid.x;
      mov.u32 %r2, %nctaid.x;
      mov.u32 %r3, %ctaid.y;
      mad.lo.s32 %r4, %r3, %r2, %r1;
      mad.wide.u32 %d1, %r4, 4, %d0;
      st.global.b32 [%d1], %r4;
    """
    out = torch.zeros(6, dtype=torch.int32)
    kernel(body).run((3, 2), [out])
    assert out.tolist() == list(range(6))


SHARED = """
  .loc 1 7 0 // kernel.py:7:0
  shl.b32 %r1, %r0, 2;
  mov.b32 %r2, memory;
  add.s32 %r3, %r1, %r2;
  xor.b32 %r4, %r1, 128;
  add.s32 %r4, %r4, %r2;
"""
PLACE_OF_WARP = "shr.u32 %r3, %r0, 5;\n  shl.b32 %r3, %r3, 2;\n  add.s32 %r3, %r3, %r2;\n"
EXCHANGE = (
    SHARED
    + """
  st.shared.b32 [%r3], %r0;
  bar.sync 0;
  ld.shared.b32 %r5, [%r4];
  bar.sync 0;
  st.shared.b32 [%r3], %r5;
"""
)
COPY = (
    SHARED
    + """
  mad.wide.u32 %d1, %r0, 4, %d0;
  cp.async.ca.shared.global [%r3], [%d1], 4, 4;
  cp.async.commit_group;
  cp.async.ca.shared.global [%r3+256], [%d1], 4, 0;
  cp.async.commit_group;
  cp.async.wait_group 0;
  bar.sync 0;
  ld.shared.b32 %r5, [%r4];
  ld.shared.b32 %r6, [%r4+256];
  add.s32 %r5, %r5, %r6;
  st.global.b32 [%d1], %r5;
"""
)

GLOBAL_EXCHANGE = """
  .loc 1 7 0 // kernel.py:7:0
  mad.wide.u32 %d1, %r0, 4, %d0;
  xor.b32 %r1, %r0, 32;
  mad.wide.u32 %d2, %r1, 4, %d0;
  st.global.b32 [%d1], %r0;
  bar.sync 0;
  ld.global.b32 %r2, [%d2];
  bar.sync 0;
  st.global.b32 [%d1], %r2;
"""
GLOBAL_SUM = """
  .loc 1 7 0 // kernel.py:7:0
  ld.global.b32 %r1, [%d0];
  add.s32 %r1, %r1, 1;
  bar.sync 0;
  setp.eq.s32 %p1, %r0, 0;
  @%p1 st.global.b32 [%d0], %r1;
"""


def mma(targets: str) -> str:
    fragments = "{%r5, %r5, %r5, %r5}, {%r5, %r5}, {%r5, %r5, %r5, %r5}"
    return f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{{targets}}}, {fragments};\n"


# Thread t of 0 to 15 copies the first t bytes of its 16.
PARTS = """
  mad.wide.u32 %d1, %r0, 16, %d0;
  shl.b32 %r1, %r0, 4;
  mov.b32 %r2, memory;
  add.s32 %r3, %r1, %r2;
  setp.lt.u32 %p1, %r0, 16;
  @%p1 cp.async.cg.shared.global [%r3], [%d1], 16, %r0;
  cp.async.wait_all;
  @%p1 ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r3];
  @%p1 st.global.v4.b32 [%d1], {%r6, %r7, %r8, %r9};
"""


def run_on_64(body: str, shared: int = 512) -> list[int]:
    out = torch.arange(64, dtype=torch.int32)
    kernel(body, threads=64, shared=shared).run((1,), [out], most_blocks=10_000)
    return list(out.tolist())


def without(body: str, line: str, count: int = 1) -> str:
    assert line in body
    return body.replace(line, "", count)


def test_warps_exchange_numbers_through_shared_memory() -> None:
    run_on_64(EXCHANGE)
    assert run_on_64(COPY) == [thread ^ 32 for thread in range(64)]
    assert run_on_64(COPY.replace("4, 4;", "4, 0;")) == [0] * 64


def test_a_copy_of_some_bytes_is_followed_by_zeros() -> None:
    out = torch.full((16, 16), 7, dtype=torch.uint8)
    kernel(PARTS, shared=512).run((1,), [out])
    assert out.tolist() == [[7] * thread + [0] * (16 - thread) for thread in range(16)]


def test_warps_exchange_numbers_through_global_memory() -> None:
    assert run_on_64(GLOBAL_EXCHANGE) == [thread ^ 32 for thread in range(64)]
    assert run_on_64(GLOBAL_SUM) == [1, *range(1, 64)]
    assert run_on_64(GLOBAL_EXCHANGE.replace("%r0, 32;", "%r0, 16;").replace("bar.sync 0;", ""))  # within a warp


CHANGED = "the source of an asynchronous copy has changed"


@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (without(EXCHANGE, "bar.sync 0;"), SharedRace, "warp 0 read, which warp 1 wrote, and no barrier orders"),
        (EXCHANGE[: EXCHANGE.rindex("bar.sync")] + "st.shared.b32 [%r3], %r5;", SharedRace, "which another warp read"),
        (EXCHANGE.replace("st.shared.b32 [%r3], %r0;", ""), SharedRace, "nothing has been written there"),
        (SHARED + "st.shared.b32 [%r2], %r0;", SharedRace, "two threads store different values at one place"),
        (SHARED + f"{PLACE_OF_WARP}st.shared.b32 [%r3], %r0;", SharedRace, "two threads store different values at one"),
        (SHARED + "st.shared.b32 [%r3+2], %r0;", MemoryFault, "4 bytes at byte 2 of shared memory: .* not aligned"),
        (SHARED + "st.shared.b32 [%r3+508], %r0;", MemoryFault, "byte 512 of shared memory, which has 512 bytes"),
        (COPY.replace("wait_group 0", "wait_group 1"), SharedRace, "an asynchronous copy that nobody has waited for"),
        (without(COPY, "cp.async.wait_group 0;"), SharedRace, "an asynchronous copy that nobody has waited for"),
        (without(COPY, "bar.sync 0;"), SharedRace, "and no barrier orders the two"),
        (without(GLOBAL_EXCHANGE, "bar.sync 0;"), GlobalRace, "warp 0 wrote it, warp 1 read it, and no barrier orders"),
        (GLOBAL_EXCHANGE.replace("bar.sync 0;\n  st", "st"), GlobalRace, "warp 1 read it, warp 0 wrote it, and no"),
        (without(GLOBAL_SUM, "bar.sync 0;"), GlobalRace, "warp 1 read it, warp 0 wrote it"),
        (GLOBAL_SUM.replace("@%p1 ", ""), GlobalRace, "warp 0 wrote it, warp 1 wrote it"),
        (COPY.replace("cp.async.wait_group 0;", "st.global.b32 [%d1], %r1;\ncp.async.wait_all;"), GlobalRace, CHANGED),
        (PARTS.replace("%d1, %r0, 16", "%d1, %r0, 20"), MemoryFault, "of 16 bytes: the address of its source"),
        (SHARED + "cp.async.ca.shared.global [%r3], [%d0+256], 4;", MemoryFault, r"byte 256 of array0 \(256\)"),
        ("ld.global.b32 %r1, [%d0+256];", MemoryFault, r"byte 256 of array0 \(256\): outside all memory"),
        ("ld.global.b32 %r1, [%d0+-4];", MemoryFault, "outside all memory"),
        ("ld.global.b64 %d1, [%d0+4];", MemoryFault, "byte 4 of array0 .* not aligned"),
        ("setp.lt.u32 %p1, %r0, 40;\n@%p1 bar.warp.sync -1;", Unsupported, "under a predicate"),
        (mma("%r1, %r2, %r3, %r4") + "@%p1 " + mma("%r6, %r7, %r8, %r9"), Unsupported, "under a predicate"),
        ("setp.lt.u32 %p1, %r0, 40;\n@%p1 bra a;\nbar.sync 0;\na:", Divergence, "some lanes of a warp wait"),
        ("setp.lt.u32 %p1, %r0, 32;\n@%p1 bra a;\nbar.sync 1;\na:\nbar.sync 0;", Stuck, "32 threads at barrier 1"),
        ("a:\natom.global.sys.acquire.add.u32 %r1, [%d0], 0;\nbra.uni a;", Stuck, "nobody changes them"),
        ("a:\nbra.uni a;", Stuck, "still runs after 10000 blocks"),
    ],
)
def test_a_fault_is_named_with_its_line(
    body: str, fault: type[PtxError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_memory, "_PATIENCE", 99)  # 64 threads read a word 2000 times for seconds
    with pytest.raises(fault, match=message) as caught:
        run_on_64(body)
    assert "line " in str(caught.value)
    if fault in (SharedRace, GlobalRace):
        assert "(kernel.py:7)" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "place"),
    [(torch.zeros(3, dtype=torch.int16), r"0x\w+, byte 4 of array0 \(6\)"), (None, "0x4")],
)
def test_an_access_must_be_inside_a_buffer_to_its_end(given: torch.Tensor | None, place: str) -> None:
    with pytest.raises(MemoryFault, match=f"4 bytes at address {place}: outside all memory"):
        kernel("ld.global.b32 %r1, [%d0+4];").run((1,), [given])


SEQUENTIAL = partial(explore, schedules=[Sequential()])
SEND = """
  mad.wide.u32 %d2, %r0, 4, %d0;
  st.global.b32 [%d2], %r0;
  bar.sync 0;
  setp.eq.s32 %p1, %r0, 0;
  @%p1 atom.global.sys.release.exch.b32 %r1, [%d1], 1;
"""
BEGIN = "cp.async.ca.shared.global [%r3], [%d3], 4;\n"
RECEIVE = (
    SHARED
    + "mad.wide.u32 %d3, %r0, 4, %d0;\nwait:\natom.global.sys.acquire.add.u32 %r5, [%d1], 0;\n"
    + f"setp.ne.s32 %p1, %r5, 1;\n@%p1 bra wait;\n{BEGIN}cp.async.wait_all;\nbar.sync 0;\n"
    + "ld.shared.b32 %r6, [%r4];\nmad.wide.u32 %d3, %r0, 4, %d2;\nst.global.b32 [%d3], %r6;"
)


def received(send: str, receive: str, search: Callable[..., Report] = SEQUENTIAL) -> tuple[list[list[int]], Report]:
    """Return what rank 0 receives of rank 1 in each run, by default if that sends when rank 0 waits, and the report."""
    sends, receives = kernel(send, inputs=2, threads=64), kernel(receive, inputs=3, threads=64, shared=512)
    outs, numbers, running = list[Tensor](), [], []

    @contextmanager
    def launches() -> Iterator[Any]:
        yield running.append

    def program(memory: Any) -> None:
        data, flags = memory.buffer("data", (64,), torch.int32), memory.signals("flags", 1)
        if memory.rank == 1:
            ranks.launch(running[-1], sends, (1,), [data.peers[0], flags.peers[0]])
        else:
            outs.append(torch.zeros(64, dtype=torch.int32))  # at another address in each run
            ranks.launch(running[-1], receives, (1,), [data.local, flags.local, outs[-1]])
            numbers.append(outs[-1].tolist())

    report = search(program, 2, launches=launches)
    return numbers, report


def test_a_copy_may_read_a_peers_data_before_its_wait() -> None:
    """Both when it begins and when it is waited for, the data must be there, and nobody may change them."""
    assert received(SEND, RECEIVE)[0] == [[thread ^ 32 for thread in range(64)]]
    with pytest.raises(RaceError, match="nothing orders these accesses"):
        received(SEND, RECEIVE.replace(BEGIN, "").replace("wait:", f"{BEGIN}wait:"))


def test_a_swap_of_a_number_for_the_same_releases() -> None:
    """A compare-and-swap that succeeds is a write whichever number it stores."""
    swap = "@%p1 st.relaxed.sys.global.b32 [%d1], 1;\n@%p1 atom.global.sys.release.cas.b32 %r1, [%d1], {}, 1;"
    send = SEND[: SEND.rindex("@%p1")] + swap
    assert received(send.format(1), RECEIVE)[0] == [[thread ^ 32 for thread in range(64)]]
    with pytest.raises(RaceError, match="nothing orders these accesses"):
        received(send.format(2), RECEIVE)


ANOTHER = "@%p1 atom.global.sys.release.exch.b32 %r1, [%d1], {};\n"
# Thread 0 waits twice for the word to be at least 1, and tells the others by shared memory. There they keep their
# numbers, and also what it has found first.
POLL = """
{0}:
  mov.b32 %r5, 0;
  @%p2 atom.global.sys.acquire.add.u32 %r5, [%d1], 0;
  @%p2 st.shared.b32 [%r2], %r5;
  bar.sync 0;
  ld.shared.b32 %r6, [%r2];
  bar.sync 0;
  setp.lt.s32 %p1, %r6, 1;
  @%p1 bra {0};
"""
TELL = f"""{SHARED}
  st.shared.b32 [%r3+256], %r0;
  setp.eq.s32 %p2, %r0, 0;
{POLL.format("one")}{POLL.format("two")}
  mad.wide.u32 %d3, %r0, 4, %d0;
  ld.global.b32 %r7, [%d3];
  ld.shared.b32 %r8, [%r4+256];
  add.s32 %r7, %r7, %r8;
  mad.wide.u32 %d3, %r0, 4, %d2;
  st.global.b32 [%d3], %r7;
"""
KEEP = TELL.replace("two:", "@%p2 st.shared.b32 [%r2+4], %r6;\ntwo:").replace(
    "add.s32 %r7, %r7, %r8;", "add.s32 %r7, %r7, %r8;\nld.shared.b32 %r8, [%r2+4];\nmad.lo.s32 %r7, %r8, 100, %r7;"
)
AGAIN = "@%p2 atom.global.sys.acquire.add.u32 %r5, [%d1], 0;\nld.shared.b32 %r6, [%r2];"


@pytest.mark.parametrize(
    ("body", "executions", "first"), [(TELL, 3, [32]), (KEEP, 6, [132, 232, 332])], ids=["left", "kept"]
)
def test_all_executions_of_compiled_kernels_are_run(body: str, executions: int, first: list[int]) -> None:
    """The value that a poll leaves in shared memory counts only where it is read later on."""
    found, report = received(SEND + ANOTHER.format(2) + ANOTHER.format(3), body, explore_all)
    assert sorted({x[0] for x in found}) == first
    assert str(report) == f"2 ranks, {executions} executions, all of them: no fault"


def test_a_kernel_that_reads_shared_memory_again_after_a_word_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"explore_all: shared memory is read before and after .*: use explore"):
        received(SEND, TELL + AGAIN, explore_all)


def test_atomic_operations_follow_one_another() -> None:
    body = "atom.global.sys.acq_rel.add.u32 %r1, [%d0], 1;\nmad.wide.u32 %d1, %r0, 4, %d0;\nst.global.b32 [%d1+4], %r1;"
    out = torch.zeros(65, dtype=torch.int32)
    kernel(body, threads=64).run((1,), [out])
    assert int(out[0]) == 64 and sorted(out[1:].tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("operation", "operands", "expected"),
    [("exch.b32", [3], 3), ("cas.b32", [7, 9], 9), ("cas.b32", [6, 9], 7), ("max.s32", [-1], 7), ("or.b32", [8], 15)],
)
def test_an_atomic_operation_returns_the_old_number(operation: str, operands: Sequence[int], expected: int) -> None:
    given = ", ".join(map(str, operands))
    body = f"setp.eq.b32 %p1, %r0, 0;\n@%p1 atom.global.relaxed.gpu.{operation} %r1, [%d0], {given};\n"
    out = torch.tensor([7, 0], dtype=torch.int32)
    kernel(body + "@%p1 st.global.b32 [%d0+4], %r1;").run((1,), [out])
    assert out.tolist() == [expected, 7]


@pytest.mark.parametrize("loop", ["", "add.s32 %r2, %r2, 1;\nsetp.lt.s32 %p1, %r2, 20;\n@%p1 bra a;"])
def test_an_operation_that_changes_nothing_is_no_wait(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where each program of a grid performs it once, nor where one program looks for a maximum."""
    monkeypatch.setattr(global_memory, "_PATIENCE", 9)
    operation = "max.s32 %r1, [%d0], 5" if loop else "add.u32 %r1, [%d0], 0"
    out = torch.tensor([7], dtype=torch.int32)
    kernel(f"mov.b32 %r2, 0;\na:\natom.global.gpu.relaxed.{operation};\n{loop}").run((1 if loop else 20,), [out])
    assert out.item() == 7


def test_a_parameter_may_be_chosen_by_its_address() -> None:
    body = """
      mov.b32 %r1, array0;
      mov.b32 %r2, array1;
      setp.eq.b32 %p1, %r0, %r0;
      selp.b32 %r3, %r2, %r1, %p1;
      ld.param.b64 %d2, [%r3];
      st.global.b32 [%d2], %r2;
    """
    given = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kernel(body, inputs=2).run((1,), given)
    assert [x.item() for x in given] == [0, 8]


@pytest.mark.parametrize(("kind", "given", "bits"), [("f64", 1.5, 0x3FF8 << 48), ("f16", 1.5, 0x3E00), ("s8", -1, 255)])
def test_a_number_is_given_in_the_type_of_its_parameter(kind: str, given: float, bits: int) -> None:
    whole = Kernel(HEAD.format(parameters=f".param .u64 out, .param .{kind} given", threads=32, body="ret;"))
    assert whole.bind([torch.empty(0), given])["given"] == bits
    with pytest.raises(PtxError, match="parameter out of kernel, of type u64, is given a float"):
        whole.bind([0.5, given])


def test_registers_of_inline_assembly_are_its_own() -> None:
    body = """
      mov.b32 %r1, 1;
      { .reg .b32 %r<2>; mov.b32 %r1, 2; add.s32 %r2, %r1, %r1; }
      add.s32 %r1, %r1, %r2;
      st.global.b32 [%d0], %r1;
    """
    out = torch.zeros(1, dtype=torch.int32)
    kernel(body).run((1,), [out])
    assert int(out) == 5
