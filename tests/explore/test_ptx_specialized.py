"""The instructions of kernels with specialized warps do what their definitions say, and each fault is named.

The definitions are those of NVIDIA's PTX ISA 8.7: "barrier", "brx.idx", "setmaxnreg", "cp.async.bulk.tensor",
"cp.async.bulk.wait_group" and "Proxies".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.explore.test_ptx import HEAD, kernel
from tests.explore.test_ptx_sm_90 import LOADED, aligned_matrix, changed, store_shared, tensor_map
from tpfuse.explore import RaceError, Sequential, explore
from tpfuse.explore.ptx import (
    Divergence,
    GlobalRace,
    Kernel,
    MemoryFault,
    PtxError,
    SharedRace,
    Stuck,
    Unsupported,
    ranks,
)

ORDERS = [None, 0, 1, 2]  # seeds of the orders of warps

# Two of three warps exchange numbers by a barrier of their own.
PAIR = """
  mov.b32 %r1, memory;
  shl.b32 %r2, %r0, 2;
  add.s32 %r3, %r1, %r2;
  mad.wide.u32 %d1, %r0, 4, %d0;
  setp.ge.u32 %p1, %r0, 64;
  @%p1 bra third;
  st.shared.b32 [%r3], %r0;
  bar.sync 1, 64;
  xor.b32 %r4, %r2, 128;
  add.s32 %r4, %r4, %r1;
  ld.shared.b32 %r5, [%r4];
  st.global.b32 [%d1], %r5;
  barrier.sync 2, 64;
  bra.uni end;
third:
  st.global.b32 [%d1], %r0;
end:
  bar.sync 0;
"""
THIRD = "third:\n"
FIRST_BARRIER = "bar.sync 1, 64;"


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize("count", ["64", "96"])  # without a count, as in the third warp, all 96 meet
def test_some_warps_meet_at_a_barrier(seed: int | None, count: str) -> None:
    body = PAIR if count == "64" else changed(PAIR, ("1, 64", "1, 96"), (THIRD, THIRD + "bar.sync 1;"))
    out = torch.zeros(96, dtype=torch.int32)
    kernel(body, threads=96, shared=256).run((1,), [out], seed=seed)
    assert out.tolist() == [*(thread ^ 32 for thread in range(64)), *range(64, 96)]


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (changed(PAIR, (FIRST_BARRIER, "")), SharedRace, "no barrier orders the two|nothing has been written there"),
        (changed(PAIR, ("1, 64", "1, 96")), Stuck, "64 threads at barrier 1"),
        (changed(PAIR, ("1, 64", "1, 32")), PtxError, "at which 32 meet|no barrier|nothing has been"),
        (
            changed(PAIR, ("1, 64", "1, 96"), (THIRD, THIRD + "bar.sync 1, 128;")),
            Divergence,
            "(all and 128|128 and all)",
        ),
        (
            changed(PAIR, (THIRD, THIRD + "bar.sync 1;")),
            PtxError,
            "different counts: (64|all) and|threads at barrier 1",
        ),
        (changed(PAIR, ("@%p1 bra", "setp.ge.u32 %p1, %r0, 63;\n@%p1 bra")), Divergence, "some lanes of a warp"),
        # These barriers do not order the third warp after the others.
        (changed(PAIR, (THIRD, THIRD + "ld.shared.b32 %r5, [%r1];")), SharedRace, "no barrier orders|nothing has been"),
        (changed(PAIR, (THIRD, THIRD + "ld.global.b32 %r5, [%d0];")), GlobalRace, "warp . (wrote|read) it, warp"),
        (changed(PAIR, ("1, 64", "1, 40")), Unsupported, "line "),
    ],
)
def test_a_fault_of_a_barrier_is_named(body: str, fault: type[PtxError], message: str, seed: int | None) -> None:
    with pytest.raises(fault, match=message):
        kernel(body, threads=96, shared=256).run((1,), [torch.zeros(96, dtype=torch.int32)], seed=seed)


TABLES = ["$L_brx_0: .branchtargets\n a,\n b,\n a;", "JTI0_0:\n .branchtargets a, b, a;"]
BRANCH = """
  TABLE
  and.b32 %r1, %r0, 3;
  brx.idx %r1, LABEL;
a:
  mov.b32 %r2, 1;
  bra.uni end;
b:
  mov.b32 %r2, 2;
end:
  mad.wide.u32 %d1, %r0, 4, %d0;
  st.global.b32 [%d1], %r2;
"""


@pytest.mark.parametrize("table", TABLES)
def test_a_table_chooses_the_target_of_a_branch(table: str) -> None:
    body, out = (
        BRANCH.replace("TABLE", table).replace("LABEL", table.partition(":")[0]),
        torch.zeros(32, dtype=torch.int32),
    )
    with pytest.raises(MemoryFault, match="a branch to target 3 of 3"):
        kernel(body).run((1,), [out])
    kernel(body.replace("and.b32 %r1, %r0, 3", "rem.u32 %r1, %r0, 3")).run((1,), [out])
    assert out.tolist() == [(1, 2, 1)[thread % 3] for thread in range(32)]


# Half of the threads take registers from the others.
REGISTERS = """
  setp.lt.u32 %p1, %r0, 128;
  @%p1 bra more;
  setmaxnreg.dec.sync.aligned.u32 24;
  bra.uni end;
more:
  setmaxnreg.inc.sync.aligned.u32 104;
end:
"""


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (REGISTERS, None, ""),
        (changed(REGISTERS, ("104", "112")), Stuck, r"threads that need \d+ registers, of which \d+ are free"),
        (changed(REGISTERS, ("dec.sync.aligned.u32 24", "dec.sync.aligned.u32 72")), Divergence, "has 64 registers"),
        (changed(REGISTERS, ("inc.sync.aligned.u32 104", "inc.sync.aligned.u32 56")), Divergence, "has 64 registers"),
        (changed(REGISTERS, ("104", "100")), Unsupported, "setmaxnreg"),
    ],
)  # fmt: skip
def test_warps_share_the_registers_of_a_program(
    body: str, fault: type[PtxError] | None, message: str, seed: int | None
) -> None:
    text = HEAD.format(parameters="", threads="256\n.maxnreg 64", body=f"mov.u32 %r0, %tid.x;\n{body}\nret;")
    if fault is None:
        Kernel(text).run((1,), [], seed=seed)
        return
    with pytest.raises(fault, match=message):
        Kernel(text).run((1,), [], seed=seed)


def test_seeds_give_different_orders_of_warps() -> None:
    body = "atom.global.relaxed.gpu.add.u32 %r1, [%d0], 1;\nmad.wide.u32 %d1, %r0, 4, %d0;\nst.global.b32 [%d1+4], %r1;"

    def order(seed: int | None) -> list[int]:
        out = torch.zeros(129, dtype=torch.int32)
        kernel("bra.uni a;\na:\n" + body, threads=128).run((1,), [out], seed=seed)
        return list(out[1::32].tolist())

    assert order(None) == [0, 32, 64, 96] and order(5) == order(5)
    assert len({tuple(order(seed)) for seed in range(8)}) > 3


STORED = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
ASYNC, GLOBAL_ASYNC = "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"
ALL_WRITTEN = "@%p2 cp.async.bulk.wait_group 0;"
ALL_READ = ALL_WRITTEN.replace("group 0", "group.read 0")


def store_tile(x: int, y: int) -> str:
    """Return PTX by which 64 threads copy 2048 bytes of array1 to shared memory, and one of them to a tile."""
    return f"""
      mov.b32 %r1, memory;
      shl.b32 %r9, %r0, 4;
      add.s32 %r9, %r9, %r1;
      mad.wide.u32 %d5, %r0, 16, %d1;
      setp.lt.u32 %p4, %r0, 64;
      @%p4 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d5];
      @%p4 st.shared.v4.b32 [%r9], {{%r10, %r11, %r12, %r13}};
      @%p4 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d5+1024];
      @%p4 st.shared.v4.b32 [%r9+1024], {{%r10, %r11, %r12, %r13}};
      {ASYNC}
      bar.sync 0;
      mov.b32 %r7, {x};
      mov.b32 %r8, {y};
      @%p2 {STORED} [%d2, {{%r7, %r8}}], [%r1];
      cp.async.bulk.commit_group;
      {ALL_WRITTEN}
    """


def run_store(body: str, seed: int | None = None, threads: int = 64) -> tuple[Any, Any]:
    """Return the matrix [21, 48] that a program has changed, and the bytes that it has stored there."""
    (memory, matrix), given = aligned_matrix(21, 48, np.uint16), torch.randint(0, 256, (2048,), dtype=torch.uint8)
    memory.fill_(0)
    scratch = torch.zeros(256, dtype=torch.uint8)
    aligned = scratch[-scratch.data_ptr() % 128 :][:128]
    kernel(body, inputs=3, threads=threads, shared=8336).run((1,), [memory, given, aligned], seed=seed)
    return matrix, given.numpy()


@pytest.mark.parametrize(("mode", "width", "height"), [(3, 64, 16), (0, 32, 32)])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (16, 8), (-8, -3), (200, 0)])
def test_a_tile_is_stored_without_what_is_outside(mode: int, width: int, height: int, x: int, y: int) -> None:
    body = tensor_map(10, 96, "44, 21", f"{width}, {height}", mode) + store_tile(x, y)
    matrix, given = run_store(body)
    pattern = {0: 1, 3: 8}[mode]
    tile = np.array([given[at ^ (at >> 7 & pattern - 1) << 4] for at in range(2048)], np.uint8)
    expected = np.zeros_like(matrix)
    for (row, column), number in np.ndenumerate(tile.view(np.uint16).reshape(height, width)):
        if 0 <= y + row < 21 and 0 <= x + column < 44:
            expected[y + row, x + column] = number
    np.testing.assert_array_equal(matrix, expected)


MAP = tensor_map(10, 96, "48, 21", "64, 16", 3)
MAP_OF_NUMBERS = tensor_map(10, 64, "32, 32", "32, 32", 0)  # of 2048 bytes
STORE = MAP + store_tile(0, 0)
FILL, READ, READ_BY_ALL = (
    "@%p4 st.shared.b32 [%r9], 7;\n",
    "@%p2 ld.global.b32 %r10, [%d0];\n",
    "ld.global.b32 %r10, [%d0];\n",
)
WRITE = "@%p2 st.global.b32 [%d0], 7;\n"
TWICE = f"@%p2 {STORED} [%d2, {{%r7, %r8}}], [%r1];\n"
BY_ANOTHER_WARP = "setp.eq.u32 %p5, %r0, 32;\n@%p5 st.global.b32 [%d0], 7;\nfence.proxy.async.global;\n"
BARRIER, COMMIT = "bar.sync 0;\n", "cp.async.bulk.commit_group;\n"


@pytest.mark.parametrize("seed", ORDERS[:2])
@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        # Shared memory may be used again after the read, and the target may be read after the whole wait.
        (STORE.replace(ALL_WRITTEN, ALL_READ) + BARRIER + FILL, None, ""),
        (STORE + BARRIER + READ_BY_ALL, None, ""),
        (STORE + READ, None, ""),
        (STORE + BARRIER + TWICE + COMMIT + ALL_WRITTEN, None, ""),
        (STORE.replace(ALL_WRITTEN, ALL_READ), None, ""),
        (STORE.replace(ALL_WRITTEN, COMMIT + ALL_WRITTEN.replace("0;", "1;")) + READ, None, ""),
        (changed(STORE, (ASYNC, "")), SharedRace, "no fence.proxy.async comes between"),
        (changed(STORE, (ASYNC, GLOBAL_ASYNC)), SharedRace, "no fence.proxy.async comes between"),
        (STORE.replace(ALL_WRITTEN, "") + BARRIER + FILL, SharedRace, "a wgmma or TMA store that nobody"),
        (STORE.replace("group 0", "group.read 1") + BARRIER + FILL, SharedRace, "TMA store that nobody has waited for"),
        (STORE.replace(COMMIT.strip(), "") + BARRIER + FILL, SharedRace, "TMA store that nobody has waited for"),
        (STORE.replace(ALL_WRITTEN, ALL_READ) + FILL, SharedRace, "which another warp read|nobody has waited for"),
        (STORE.replace(ALL_WRITTEN, ""), SharedRace, "ends before this store has read shared memory"),
        (STORE.replace(ALL_WRITTEN, ALL_READ) + READ, GlobalRace, "read it, but a TMA store that nobody has waited"),
        (STORE.replace(ALL_WRITTEN, ALL_READ) + BARRIER + READ_BY_ALL, GlobalRace, "but a TMA store that nobody"),
        (STORE.replace(ALL_WRITTEN, ALL_READ) + WRITE, GlobalRace, "wrote it, but a TMA store that nobody has waited"),
        (STORE + READ_BY_ALL, GlobalRace, "by TMA, warp 1 read it, and no barrier|nobody has waited for writes it"),
        (STORE.replace(ALL_WRITTEN, TWICE + COMMIT + ALL_WRITTEN), GlobalRace, "by TMA, but a TMA store that nobody"),
        (changed(STORE, (ASYNC, WRITE + ASYNC)), GlobalRace, "warp 0 wrote it, .*by TMA, and no fence.proxy.async"),
        (changed(STORE, (ASYNC, WRITE + ASYNC + GLOBAL_ASYNC)), None, ""),
        (changed(STORE, ("mov.b32 %r7", BY_ANOTHER_WARP + "mov.b32 %r7")), GlobalRace, "no barrier|nobody has waited"),
    ],
)  # fmt: skip
def test_a_fault_of_a_store_is_named(body: str, fault: type[PtxError] | None, message: str, seed: int | None) -> None:
    if fault is None:
        run_store(body, seed)
        return
    with pytest.raises(fault, match=message) as caught:
        run_store(body, seed)
    assert "line " in str(caught.value)


# Rank 1 sends numbers to rank 0 by TMA, and the first thread of its other warp signals. Warps meet by groups.
SEND = (
    MAP_OF_NUMBERS
    + changed(store_tile(0, 0), ("bar.sync 0;", "bar.sync 0;\nsetp.ge.u32 %p5, %r0, 64;\n@%p5 bra end;"))
    + "bar.sync 1, 64;\nsetp.eq.u32 %p6, %r0, 32;\n@%p6 atom.global.sys.release.exch.b32 %r10, [%d3], 1;\nend:\n"
)
# The third warp of rank 0 waits for the signal and loads by TMA, and the others wait for its mbarrier.
RECEIVE = f"""
  {MAP_OF_NUMBERS}
  mov.b32 %r1, memory;
  add.s32 %r5, %r1, 8320;
  @%p2 mbarrier.init.shared::cta.b64 [%r5], 1;
  bar.sync 0;
  setp.lt.u32 %p5, %r0, 64;
  @%p5 bra others;
  setp.eq.u32 %p6, %r0, 64;
  mov.b32 %r11, 1;
again:
  @%p6 atom.global.sys.acquire.add.u32 %r11, [%d3], 0;
  setp.ne.u32 %p7, %r11, 1;
  @%p7 bra again;
  bar.warp.sync -1;
  {GLOBAL_ASYNC}
  mov.b32 %r7, 0;
  @%p6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 2048;
  @%p6 {LOADED} [%r1], [%d2, {{%r7, %r7}}], [%r5];
  bra.uni end;
others:
  bar.sync 1, 64;
  {{
  .reg .pred complete;
  wait:
  mbarrier.try_wait.parity.shared::cta.b64 complete, [%r5], 0;
  @!complete bra.uni wait;
  }}
  {store_shared(2048)}
end:
"""


def received(send: str, receive: str, seed: int | None) -> bool:
    """Return whether rank 0 receives what rank 1 sends while rank 0 waits."""
    sends, receives = (kernel(body, inputs=4, threads=96, shared=8336) for body in (send, receive))
    numbers, out = torch.randint(0, 256, (2048,), dtype=torch.uint8), torch.zeros(2048, dtype=torch.uint8)
    running: list[Any] = []

    @contextmanager
    def launches() -> Iterator[Any]:
        yield running.append

    def program(memory: Any) -> None:
        data, flags = memory.buffer("data", (512,), torch.int32), memory.signals("flags", 1)
        scratch = torch.zeros(256, dtype=torch.uint8)
        aligned = scratch[-scratch.data_ptr() % 128 :][:128]
        if memory.rank == 1:
            ranks.launch(running[-1], sends, (1,), [data.peers[0], numbers, aligned, flags.peers[0]], seed)
        else:
            ranks.launch(running[-1], receives, (1,), [data.local, out, aligned, flags.local], seed)

    explore(program, 2, schedules=[Sequential()], launches=launches)
    return torch.equal(out, numbers)


@pytest.mark.parametrize("seed", ORDERS[:2])
@pytest.mark.parametrize(
    ("send", "receive"),
    [
        (SEND, RECEIVE),
        (SEND.replace(ALL_WRITTEN, ALL_READ), RECEIVE),
        (SEND.replace("bar.sync 1, 64;", ""), RECEIVE),
        (SEND.replace("release.exch", "relaxed.exch"), RECEIVE),
        (SEND, RECEIVE.replace("sys.acquire", "sys.relaxed")),
        (SEND, RECEIVE.replace(GLOBAL_ASYNC, "")),
        (SEND, RECEIVE.replace(GLOBAL_ASYNC, ASYNC)),
        (SEND, RECEIVE.replace(GLOBAL_ASYNC, "").replace("again:", GLOBAL_ASYNC + "\nagain:")),
    ],
)  # fmt: skip
def test_a_signal_passes_a_tile_on_after_the_whole_wait(send: str, receive: str, seed: int | None) -> None:
    """Rule 4 of the protocol, and the proxy fence between an acquire and a load by TMA of what was acquired."""
    if (send, receive) == (SEND, RECEIVE):
        assert received(send, receive, seed)
        return
    with pytest.raises(RaceError, match=r"race on data\[0\] of rank 0(.|\n)*TMA store(.|\n)*TMA load"):
        received(send, receive, seed)
