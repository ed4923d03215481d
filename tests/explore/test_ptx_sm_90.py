"""The instructions of sm_90 do what their definitions say, and a missing wait, fence or barrier is a named fault.

The definitions are those of NVIDIA's PTX ISA 8.7: "Asynchronous Warpgroup Level Matrix Instructions", "Tensors",
"tensormap.replace", "cp.async.bulk.tensor" and "mbarrier".
"""

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.explore.test_ptx import kernel, mma, random_numbers
from tpfuse.explore.ptx import (
    Divergence,
    GlobalRace,
    MbarrierFault,
    MemoryFault,
    PtxError,
    SharedRace,
    Stuck,
    WgmmaHazard,
)
from tpfuse.explore.ptx.parser import SHARED_BASE

WIDTHS = {0: 1, 1: 8, 2: 4, 3: 2}  # of a row of the swizzling pattern in 16 bytes, by the mode of a matrix descriptor


def place(row: int, depth: int, size: int, width: int, transposed: bool, leading: int, stride: int) -> int:
    """Return the byte of an element of `size` bytes, from the canonical layouts in units of elements, then swizzled."""
    t = 16 // size
    if transposed:
        inner, outer, atom = row % t, row // t % width, row // t // width
        first = leading if width > 1 else stride
        second = stride if width > 1 else leading
        byte = (inner + t * outer + t * width * (depth % 8)) * size + atom * first + depth // 8 * second
    else:
        along = depth // t * (t * size if width > 1 else leading)
        byte = (row % 8 * t * width + depth % t) * size + row // 8 * stride + along
    return byte ^ (byte >> 7 & width - 1) << 4


def descriptor(start: int, leading: int, stride: int, mode: int) -> int:
    return (SHARED_BASE + start) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def image(matrix: Any, mode: int, transposed: bool) -> tuple[Any, int, int]:
    """Return the bytes of a matrix [rows, depth] in shared memory, and the two offsets of its descriptor."""
    rows, depth = matrix.shape
    size, width = matrix.dtype.itemsize, WIDTHS[mode]
    if transposed:  # of atoms [t * width rows, 8]
        atoms = rows * size // 16 // width
        leading, stride = (128 * width, 128 * width * atoms) if width > 1 else (128 * atoms, 128)
    else:
        leading, stride = 128 * rows // 8, 128 * width
    result = np.zeros(max(rows * depth * size, rows * 16 * width), np.uint8)
    for row in range(rows):
        for column in range(depth):
            at = place(row, column, size, width, transposed, leading, stride)
            result[at : at + size] = matrix[row, column : column + 1].view(np.uint8)
    return result, leading, stride


def load_image(size: int) -> str:
    """Return PTX by which 128 threads copy so many bytes of array0 to shared memory."""
    lines = [
        "mov.b32 %r1, memory;",
        "shl.b32 %r2, %r0, 4;",
        "add.s32 %r1, %r1, %r2;",
        "mad.wide.u32 %d3, %r0, 16, %d0;",
    ]
    for at in range(0, size, 2048):
        lines.append(f"setp.lt.u32 %p1, %r0, {(size - at) // 16};")
        lines.append(f"@%p1 ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d3+{at}];")
        lines.append(f"@%p1 st.shared.v4.b32 [%r1+{at}], {{%r3, %r4, %r5, %r6}};")
    return "\n".join(lines)


def accumulators(columns: int) -> str:
    return "{" + ", ".join(f"%acc{i}" for i in range(columns // 2)) + "}"


def product(columns: int, kind: str, left: str, right: str, flags: str, adds: str = "%p2") -> str:
    """Return PTX of a wgmma, whose sums begin at 1, and which stores them in array1 [threads, columns / 2]."""
    depth = 8 if kind == "tf32" else 16
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}"
    begin = "\n".join(f"mov.b32 %acc{i}, 0f3F800000;" for i in range(columns // 2))
    end = "\n".join(f"st.global.b32 [%d7+{4 * i}], %acc{i};" for i in range(columns // 2))
    return f"""
      .reg .b32 %acc<{columns // 2}>;
      setp.eq.u32 %p2, %r0, %r0;
      {begin}
      fence.proxy.async.shared::cta;
      bar.sync 0;
      mov.b64 %d5, {left if not left.startswith("{") else 0};
      mov.b64 %d6, {right};
      wgmma.fence.sync.aligned;
      {name} {accumulators(columns)}, {"%d5" if not left.startswith("{") else left}, %d6, {adds}, {flags};
      wgmma.commit_group.sync.aligned;
      wgmma.wait_group.sync.aligned 0;
      mad.wide.u32 %d7, %r0, {2 * columns}, %d1;
      {end}
    """


def sums_of(out: torch.Tensor, columns: int) -> Any:
    """Return D [64, columns] of what `product` stored, thread by thread as the PTX ISA's figure of it says."""
    result = np.zeros((64, columns), np.float32)
    for thread in range(128):
        for i in range(columns // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            result[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] = out[thread, i]
    return result


def run_product(left: Any, right: Any, columns: int, kind: str, modes: tuple[int, int], transposed: str) -> Any:
    """Return what wgmma makes of the bits of A [64, depth] and of B [columns, depth] in shared memory."""
    (a, *a_offsets), (b, *b_offsets) = (
        image(x, mode, flag == "1") for x, mode, flag in zip((left, right), modes, transposed, strict=True)
    )
    start = -(-len(a) // 1024) * 1024
    memory = np.concatenate([a, np.zeros(start - len(a), np.uint8), b])
    descriptors = descriptor(0, *a_offsets, modes[0]), descriptor(start, *b_offsets, modes[1])
    flags = "1, 1" if kind == "tf32" else f"1, 1, {transposed[0]}, {transposed[1]}"
    body = load_image(len(memory)) + product(columns, kind, *map(str, descriptors), flags)
    out = torch.zeros(128, columns // 2)
    code = kernel(body, inputs=2, threads=128, shared=len(memory))
    code.run((1,), [torch.from_numpy(memory.view(np.int32)), out])
    return sums_of(out, columns)


@pytest.mark.parametrize("mode", WIDTHS)
@pytest.mark.parametrize(
    ("kind", "columns", "transposed"),
    [("bf16", 128, "00"), ("f16", 128, "01"), ("bf16", 128, "11"), ("tf32", 32, "00")],
)
def test_wgmma_multiplies_matrices_in_shared_memory(kind: str, columns: int, transposed: str, mode: int) -> None:
    depth = 8 if kind == "tf32" else 16
    (a_bits, a), (b_bits, b) = random_numbers(64, depth, kind=kind), random_numbers(columns, depth, kind=kind)
    got = run_product(a_bits, b_bits, columns, kind, (mode, mode), transposed)
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.T + 1, atol=1e-5)


@pytest.mark.parametrize(("kind", "flags"), [("bf16", "1, 1, 0"), ("f16", "-1, 1, 0"), ("tf32", "1, 1")])
def test_wgmma_takes_fragments_of_registers(kind: str, flags: str) -> None:
    """Each warp has 16 rows, in the fragments of mma.sync; without adding, the sums before do not count."""
    depth, columns = 8 if kind == "tf32" else 16, 16
    (a_bits, a), (b_bits, b) = random_numbers(64, depth, kind=kind), random_numbers(columns, depth, kind=kind)
    fragments = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        g, t = 16 * (thread // 32) + thread % 32 // 4, thread % 4
        for i in range(4):
            row, part = g + 8 * (i % 2), i // 2
            two = (
                a_bits[row, t + 4 * part : t + 4 * part + 1] if kind == "tf32" else a_bits[row, 2 * t + 8 * part :][:2]
            )
            fragments[thread, i] = int.from_bytes(two.tobytes(), "little")
    memory, *offsets = image(b_bits, 3, False)
    names = "{%r10, %r11, %r12, %r13}"
    load = f"mad.wide.u32 %d4, %r0, 16, %d2;\nld.global.v4.b32 {names}, [%d4];\n"
    body = load_image(len(memory)) + load + product(columns, kind, names, str(descriptor(0, *offsets, 3)), flags, "0")
    out = torch.zeros(128, columns // 2)
    given = [torch.from_numpy(x.view(np.int32)) for x in (memory, fragments)]
    kernel(body, inputs=3, threads=128, shared=len(memory)).run((1,), [given[0], out, given[1]])
    sign = -1 if flags.startswith("-") else 1
    np.testing.assert_allclose(sums_of(out, columns), sign * (a.astype(np.float64) @ b.T), atol=1e-5)


ZEROS = load_image(4096)
PRODUCT = product(16, "bf16", str(descriptor(0, 1024, 256, 3)), str(descriptor(2048, 1024, 256, 3)), "1, 1, 0, 0")
STORE = "st.shared.b32 [%r1], %r0;\n"
TWO_PRODUCTS = mma("%r10, %r11, %r12, %r13") + mma("%acc3, %r14, %r15, %r16")
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)


def changed(body: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    return body


def wgmma_body(*changes: tuple[str, str]) -> str:
    return changed(ZEROS + PRODUCT, *changes)


@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (wgmma_body((FENCE, "")), WgmmaHazard, "no wgmma.fence comes before"),
        (wgmma_body((FENCE, FENCE + "mov.b32 %acc3, %r0;")), WgmmaHazard, "no wgmma.fence comes between"),
        (wgmma_body((WAIT, TWO_PRODUCTS + WAIT)), WgmmaHazard, "is accessed while"),
        (wgmma_body((WAIT, "")), WgmmaHazard, "is accessed while a wgmma that nobody has waited for"),
        (wgmma_body((COMMIT, "")), WgmmaHazard, "is accessed while"),
        (wgmma_body((WAIT, WAIT[:-2] + "1;")), WgmmaHazard, "is accessed while"),
        (wgmma_body(("fence.proxy.async.shared::cta;", "")), SharedRace, "no fence.proxy.async comes between"),
        (wgmma_body(("bar.sync 0;", "")), SharedRace, "which warp 1 wrote, and no barrier orders the two"),
        (wgmma_body((WAIT, STORE + WAIT)), SharedRace, "write, but a wgmma or TMA store that nobody has waited"),
        (wgmma_body((WAIT, WAIT + STORE)), SharedRace, "which another warp read"),
        (wgmma_body((WAIT, WAIT + "bar.sync 0;" + STORE)), PtxError, ""),
        (wgmma_body((WAIT, "ret;")), WgmmaHazard, "the program ends before"),
        (wgmma_body((FENCE, FENCE + "setp.lt.u32 %p1, %r0, 96;\n@%p1 bra a;\nret;\na:")), Divergence, "warpgroup"),
        (
            wgmma_body(("%d6, %p2", "%d6, %p1"), (FENCE, FENCE + "setp.lt.u32 %p1, %r0, 1;")),
            Divergence,
            "differs among",
        ),
    ],
)
def test_a_hazard_of_wgmma_is_named(body: str, fault: type[PtxError], message: str) -> None:
    given = torch.zeros(1024, dtype=torch.int32), torch.zeros(128, 8)
    code = kernel(body, inputs=2, threads=128, shared=4096)
    if not message:
        code.run((1,), given)
        return
    with pytest.raises(fault, match=message) as caught:
        code.run((1,), given)
    assert "line " in str(caught.value)


@pytest.mark.parametrize("changing", ["", "@%p3", "@!%p3"])
def test_each_warpgroup_needs_its_own_fence(changing: str) -> None:
    """One warpgroup begins its product after the other one, and `changing` has changed a register since the fence."""
    zeros = "\n".join(load_image(4096).split("\n")[:7])  # by 256 threads, each once
    (line,) = re.findall(r"wgmma\.mma_async.*;", PRODUCT)
    change = f"{changing} mov.b32 %acc3, %r0;" if changing else ""
    apart = f"setp.ge.u32 %p3, %r0, 128;\n{change}\n@%p3 bra a;\n{line}\nbra.uni b;\na:\n{line}\nb:"
    code = kernel(zeros + changed(PRODUCT, (line, apart)), inputs=2, threads=256, shared=4096)
    given = torch.zeros(1024, dtype=torch.int32), torch.zeros(256, 8)
    if not changing:
        code.run((1,), given)
        assert (given[1] == 1).all()
        return
    with pytest.raises(WgmmaHazard, match=r"no wgmma\.fence comes between"):
        code.run((1,), given)


def tensor_map(kind: int, stride: int, sizes: str, box: str, mode: int) -> str:
    """Return PTX by which the first warp makes a tensor map of array0 in shared memory and copies it to array2."""
    field = "tensormap.replace.tile.{}.shared::cta.b1024.b{}"
    lines = [
        ("global_address", 64, "%d0"),
        ("rank", 32, "1"),
        *((f"{name}", 32, f"{axis}, {value}") for name, text in (("box_dim", box), ("global_dim", sizes))
          for axis, value in enumerate(text.split(", "))),
        ("global_stride", 64, f"0, {stride}"),
        ("element_stride", 32, "0, 1"),
        ("element_stride", 32, "1, 1"),
        ("elemtype", 32, f"{kind}"),
        ("interleave_layout", 32, "0"),
        ("swizzle_mode", 32, f"{mode}"),
        ("fill_mode", 32, "0"),
    ]  # fmt: skip
    copy = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    return (
        "setp.lt.u32 %p1, %r0, 32;\nsetp.eq.u32 %p2, %r0, 0;\nmov.b32 %r1, memory;\nadd.s32 %r1, %r1, 8192;\n"
        "shl.b32 %r2, %r0, 2;\nadd.s32 %r2, %r2, %r1;\ncvt.u64.u32 %d4, %r1;\n@%p1 st.shared.b32 [%r2], 0;\n"
        "bar.warp.sync -1;\n"
        + "\n".join(f"@%p2 {field.format(name, bits)} [%d4], {value};" for name, bits, value in lines)
        + f"\n@%p1 {copy} [%d2], [%d4], 128;\n@%p1 fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;\n"
    )


LOADED = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"


def tile(x: int, y: int, nbytes: int) -> str:
    """Return PTX by which a program gets a tile to the start of shared memory."""
    return f"""
      mov.b32 %r1, memory;
      add.s32 %r5, %r1, 8320;
      elect.sync %r6|%p3, -1;
      and.pred %p3, %p3, %p1;
      @%p3 mbarrier.init.shared::cta.b64 [%r5], 1;
      fence.proxy.async.shared::cta;
      bar.sync 0;
      mov.b32 %r7, {x};
      mov.b32 %r8, {y};
      @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], {nbytes};
      @%p3 {LOADED} [%r1], [%d2, {{%r7, %r8}}], [%r5];
      {{
      .reg .pred complete;
      wait:
      mbarrier.try_wait.parity.shared::cta.b64 complete, [%r5], 0;
      @!complete bra.uni wait;
      }}
    """


def store_shared(size: int) -> str:
    """Return PTX by which 64 threads store so many bytes of shared memory in array1."""
    lines = ["shl.b32 %r9, %r0, 4;", "add.s32 %r9, %r9, %r1;", "mad.wide.u32 %d5, %r0, 16, %d1;"]
    for at in range(0, size, 1024):
        lines.append(f"ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r9+{at}];")
        lines.append(f"st.global.v4.b32 [%d5+{at}], {{%r10, %r11, %r12, %r13}};")
    return "\n".join(lines)


def run_tile(body: str, given: Any, size: int) -> Any:
    out = torch.full((size,), 7, dtype=torch.uint8)
    scratch = torch.zeros(256, dtype=torch.uint8)
    aligned = scratch[-scratch.data_ptr() % 128 :][:128]
    kernel(body, inputs=3, threads=64, shared=8336).run((1,), [given, out, aligned], most_blocks=10_000)
    return out.numpy()


def aligned_matrix(rows: int, columns: int, dtype: Any) -> tuple[torch.Tensor, Any]:
    """Return random bits in memory that begins at a multiple of 16 bytes, as torch and NumPy see it."""
    size = np.dtype(dtype).itemsize
    memory = torch.randint(0, 256, (rows * columns * size + 16,), dtype=torch.uint8)
    inside = memory[-memory.data_ptr() % 16 :][: rows * columns * size]
    return inside, inside.numpy().view(dtype).reshape(rows, columns)


@pytest.mark.parametrize(
    ("kind", "dtype", "mode", "width"),
    [
        (10, np.uint16, 3, 64),
        (6, np.uint16, 2, 32),
        (10, np.uint16, 1, 16),
        (7, np.float32, 3, 32),
        (7, np.uint32, 0, 24),
    ],
)
@pytest.mark.parametrize(("x", "y"), [(0, 0), (16, 8), (-8, -3), (200, 0)])
def test_a_tile_is_copied_with_zeros_outside(kind: int, dtype: Any, mode: int, width: int, x: int, y: int) -> None:
    given, matrix = aligned_matrix(21, 48, dtype)
    size, height = np.dtype(dtype).itemsize, 32
    padded = np.zeros((height, width), dtype)
    for row in range(height):
        for column in range(width):
            if 0 <= y + row < 21 and 0 <= x + column < 44:
                padded[row, column] = matrix[y + row, x + column]
    nbytes, pattern = height * width * size, {0: 1, 1: 2, 2: 4, 3: 8}[mode]
    expected = np.zeros(nbytes, np.uint8)
    for at, byte in enumerate(padded.tobytes()):
        expected[at ^ (at >> 7 & pattern - 1) << 4] = byte
    body = tensor_map(kind, 48 * size, "44, 21", f"{width}, {height}", mode) + tile(x, y, nbytes)
    np.testing.assert_array_equal(run_tile(body + store_shared(nbytes), given, nbytes), expected)


TILE = tensor_map(10, 96, "48, 21", "64, 16", 3) + tile(0, 8, 2048)
END = "ld.shared.b32 %r9, [%r1];\n"
TILE_WAIT = re.search(r"mbarrier.try_wait.*\n.*wait;", TILE)[0]  # type: ignore[index]
EXPECT = "@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 2048;"
INIT = "@%p3 mbarrier.init.shared::cta.b64 [%r5], 1;"
ASYNC = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (TILE, PtxError, ""),
        (re.sub(r"@%p1 fence.proxy.tensormap.*", "", TILE), MemoryFault, "no fence.proxy.tensormap was executed"),
        (re.sub(r"@%p1 tensormap.cp_fence.*", "", TILE), PtxError, "a tensor map with element strides other than 1"),
        (changed(TILE, ("0, 96", "0, 90")), MemoryFault, "strides .90,.: no multiple of 16"),
        (changed(TILE, ("1, 16;", "1, 300;")), MemoryFault, "a box of .64, 300. is not allowed"),
        (changed(TILE, ("0, 64;", "0, 72;")), MemoryFault, "rows have 144 bytes: at most 128"),
        (changed(TILE, ("1, 21;", "1, 23;")), MemoryFault, "outside all memory it was given"),
        (changed(TILE, (TILE_WAIT, "")), SharedRace, "an asynchronous copy that nobody has waited for"),
        (changed(TILE, ("[%r5], 0;", "[%r5], 1;")), SharedRace, "an asynchronous copy that nobody has waited for"),
        (
            changed(TILE, ("[%r5], 2048;", "[%r5], 2064;")),
            Stuck,
            "64 threads at an mbarrier .* 0 arrivals and 16 bytes",
        ),
        (changed(TILE, (EXPECT, "")), Stuck, "that still needs 1 arrivals and 0 bytes"),
        (changed(TILE, (EXPECT, EXPECT + EXPECT)), MbarrierFault, "more than 1 threads arrive"),
        (changed(TILE, (INIT, INIT + INIT)), MbarrierFault, "is initialized where there is one already"),
        (changed(TILE, ("[%r5], 1;", "[%r5], 0;")), MbarrierFault, "initialized for 0 arrivals"),
        (changed(TILE, (INIT, "")), SharedRace, "read, but nothing has been written there"),
        (changed(TILE, (ASYNC + "\n      bar.sync 0;", ASYNC)), SharedRace, "no barrier orders the two"),
        (changed(TILE, (TILE_WAIT, "@%p3 mbarrier.inval.shared::cta.b64 [%r5];")), MbarrierFault, "have not ended"),
        (changed(TILE, (ASYNC, "st.shared.b32 [%r1], 7;" + ASYNC)), PtxError, ""),
        (changed(TILE, (ASYNC, "st.shared.b32 [%r1], 7;")), SharedRace, "no fence.proxy.async comes between"),
        (changed(TILE, ("%r0, 32;", "%r0, 31;")), Divergence, "active with 31 lanes"),
        (
            changed(
                TILE,
                ("and.pred %p3, %p3, %p1;", "not.pred %p4, %p1;\nand.pred %p3, %p3, %p4;"),
                (EXPECT, EXPECT.replace("%p2", "%p3")),
                (ASYNC + "\n      bar.sync 0;", ASYNC),
            ),
            MemoryFault,
            "no barrier orders the use of a tensor map",
        ),
        (changed(TILE, ("{%r7, %r8}", "{%r7}"), ("tensor.2d", "tensor.1d")), MemoryFault, "given 1 coordinates"),
        (changed(TILE, ("[%r1], [%d2", "[%r1+64], [%d2")), MemoryFault, "no multiple of 128"),
    ],
)
def test_a_fault_of_a_tile_is_named(body: str, fault: type[PtxError], message: str) -> None:
    given, _ = aligned_matrix(21, 48, np.uint16)
    if not message:
        run_tile(body + END, given, 2048)
        return
    with pytest.raises(fault, match=message) as caught:
        run_tile(body + END, given, 2048)
    assert "line " in str(caught.value)


def test_a_tile_may_be_read_until_its_wait_ends() -> None:
    """A copy takes what is stored before it begins. Of what is stored while it runs, it may take anything."""
    given, matrix = aligned_matrix(21, 48, np.uint16)
    store = "setp.eq.s32 %p9, %r0, 0;\n@%p9 st.global.b32 [%d0+768], 7;\nfence.proxy.async.global;\n"
    got = run_tile(changed(TILE, (ASYNC, store + ASYNC)) + store_shared(2048), given, 2048).view(np.uint16)
    assert matrix[8, 0] == 7 and got[0] == 7
    with pytest.raises(GlobalRace, match=r"wrote it, warp 0 read it by TMA, and no fence\.proxy\.async comes between"):
        run_tile(changed(TILE, (ASYNC, store.replace("fence.proxy.async.global;", ASYNC) + ASYNC)), given, 2048)
    with pytest.raises(GlobalRace, match="the source of a bulk copy has changed") as caught:
        run_tile(changed(TILE, ("wait:", f"{store.replace('7;', '8;')}wait:")), given, 2048)
    assert LOADED in str(caught.value)


def test_the_program_must_wait_for_its_copies() -> None:
    given, _ = aligned_matrix(21, 48, np.uint16)
    with pytest.raises(MbarrierFault, match="the program ends before a bulk copy has ended"):
        run_tile(changed(TILE, (TILE_WAIT, "")), given, 2048)


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r1];\n"
MBARRIER_WAIT = """{
      .reg .pred complete;
      wait:
      mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], 0;
      @!complete bra.uni wait;
      }
"""


def test_an_mbarrier_orders_warps_in_global_memory() -> None:
    body = f"""
      mov.b32 %r1, memory;
      setp.eq.s32 %p1, %r0, 0;
      @%p1 mbarrier.init.shared::cta.b64 [%r1], 64;
      bar.sync 0;
      mad.wide.u32 %d2, %r0, 4, %d0;
      st.global.b32 [%d2], %r0;
      {ARRIVE}{MBARRIER_WAIT}
      xor.b32 %r2, %r0, 32;
      mad.wide.u32 %d2, %r2, 4, %d0;
      ld.global.b32 %r3, [%d2];
      mad.wide.u32 %d2, %r0, 4, %d1;
      st.global.b32 [%d2], %r3;
    """

    def exchanged(body: str) -> list[int]:
        given, out = torch.zeros(2, 64, dtype=torch.int32)
        kernel(body, inputs=2, threads=64, shared=16).run((1,), [given, out])
        return list(out.tolist())

    assert exchanged(body) == [thread ^ 32 for thread in range(64)]
    for wrong in (
        changed(body, (MBARRIER_WAIT, "")),
        changed(body, (ARRIVE, "")).replace("st.global", ARRIVE + "st.global", 1),
    ):
        with pytest.raises(GlobalRace, match="warp 0 wrote it, warp 1 read it, and no barrier orders the two"):
            exchanged(wrong)


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_is_the_inverse_of_ldmatrix(count: int, transposed: str) -> None:
    names = [f"%r{10 + i}" for i in range(count)]
    loaded = [f"%r{20 + i}" for i in range(count)]
    form = f"sync.aligned.m8n8.x{count}{transposed}.shared.b16"
    body = f"""
      mad.wide.u32 %d2, %r0, {4 * count}, %d0;
      mad.wide.u32 %d3, %r0, {4 * count}, %d1;
      mov.b32 %r1, memory;
      and.b32 %r2, %r0, {8 * count - 1};
      shl.b32 %r2, %r2, 4;
      sub.s32 %r1, %r1, %r2;
      add.s32 %r1, %r1, {16 * (8 * count - 1)};
    """
    body += "".join(f"ld.global.b32 {name}, [%d2+{4 * i}];\n" for i, name in enumerate(names))
    body += f"stmatrix.{form} [%r1], {{{', '.join(names)}}};\nldmatrix.{form} {{{', '.join(loaded)}}}, [%r1];\n"
    body += "".join(f"st.global.b32 [%d3+{4 * i}], {name};\n" for i, name in enumerate(loaded))
    given, out = torch.arange(32 * count, dtype=torch.int32), torch.zeros(32 * count, dtype=torch.int32)
    kernel(body, inputs=2, shared=128 * count).run((1,), [given, out])
    assert torch.equal(out, given)


def test_one_lane_is_elected() -> None:
    body = "elect.sync %r1|%p1, -1;\nselp.b32 %r2, 1, 0, %p1;\nmad.wide.u32 %d1, %r0, 8, %d0;\n"
    out = torch.zeros(64, 2, dtype=torch.int32)
    kernel(body + "st.global.v2.b32 [%d1], {%r1, %r2};", threads=64).run((1,), [out])
    leader = int(out[0, 0])
    assert out[:, 0].tolist() == [leader] * 64 and out[:, 1].nonzero().flatten().tolist() == [leader, leader + 32]


def test_labels_of_inline_assembly_are_its_own() -> None:
    loop = "{ .reg .pred done; again: add.s32 %r1, %r1, 1; setp.ge.s32 done, %r1, N; @!done bra.uni again; }\n"
    body = "mov.b32 %r1, 0;\n" + loop.replace("N", "5") + loop.replace("N", "3") + "st.global.b32 [%d0], %r1;"
    out = torch.zeros(1, dtype=torch.int32)
    kernel(body).run((1,), [out])
    assert int(out) == 6
