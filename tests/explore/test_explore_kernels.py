"""Kernels under the explorer: programs of one grid, masks, and the atomic operations that Triton 3.9 added."""

import pytest
import torch
import triton
import triton.language as tl

from tpfuse.explore import RaceError, explore

# Programs of one grid


@triton.jit
def count_kernel(box_ptr, state_ptr, PROGRAMS: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(box_ptr + pid, pid + 1)
    tl.debug_barrier()
    if tl.atomic_add(state_ptr, 1, sem=SEM, scope=SCOPE) == PROGRAMS - 1:
        total = 0
        for other in range(PROGRAMS):
            total += tl.load(box_ptr + other)
        tl.store(state_ptr + 1, total)
        tl.store(state_ptr, 0)


@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize("sem", ["acq_rel", "relaxed", "acquire", "release"])
def test_programs_of_one_grid_are_ordered_by_atomics_alone(sem, resident) -> None:
    def program(memory):
        box, state = memory.buffer("box", (3,), torch.int32), memory.signals("state", 2)
        for _ in range(2):
            count_kernel[(3,)](box.local, state.local, 3, sem, "gpu")
            assert state.local.tolist() == [0, 6]

    if sem == "acq_rel":
        explore(program, 2, resident=resident)
    else:
        with pytest.raises(RaceError, match=r"semantics at|has not waited|signals nothing"):
            explore(program, 2, resident=resident)


def test_a_scope_that_spans_one_block_is_too_narrow_for_a_grid() -> None:
    def program(memory):
        box, state = memory.buffer("box", (2,), torch.int32), memory.signals("state", 2)
        count_kernel[(2,)](box.local, state.local, 2, "acq_rel", "cta")

    with pytest.raises(RaceError, match='scope="cta" spans no two programs: "gpu" is needed'):
        explore(program, 1)


def test_a_launch_with_an_empty_grid_does_nothing() -> None:
    explore(
        lambda memory: poll_with_timeout_kernel[(0,)](memory.signals("flags", 1).local, torch.zeros(1)), 1, resident=2
    )


# Triton 3.9


@triton.jit
def poll_kernel(slots_ptr, flags_ptr, out_ptr, rank, N: tl.constexpr, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr):
    offs = tl.arange(0, N)
    right = 1 - rank
    tl.store(tl.load(slots_ptr + right).to(tl.pointer_type(tl.float32)) + offs, tl.full((N,), rank, tl.float32))
    tl.debug_barrier()
    tl.atomic_store(tl.load(flags_ptr + right).to(tl.pointer_type(tl.int32)), 1, sem=RELEASE, scope="sys")
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_poll(own, 1, sem=ACQUIRE, scope="sys")
    tl.store(out_ptr, tl.atomic_load(own, sem="relaxed", scope="sys"))
    tl.store(out_ptr + 1 + offs, tl.load(tl.load(slots_ptr + rank).to(tl.pointer_type(tl.float32)) + offs))


@triton.jit
def poll_with_timeout_kernel(flags_ptr, out_ptr):
    tl.store(out_ptr, tl.atomic_poll(flags_ptr, 1, timeout_ns=5).to(tl.int32))


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="since Triton 3.9")
@pytest.mark.parametrize(
    ("release", "acquire"), [("release", "acquire"), ("relaxed", "acquire"), ("release", "relaxed")]
)
def test_atomic_load_store_and_poll(release, acquire) -> None:
    def program(memory):
        slots, flags = memory.buffer("slots", (2,), torch.float32), memory.signals("flags", 1)
        out = torch.zeros(3)
        poll_kernel[(1,)](slots.addresses, flags.addresses, out, memory.rank, 2, release, acquire)
        assert out.tolist() == [1.0, 1.0 - memory.rank, 1.0 - memory.rank]

    if "relaxed" in (release, acquire):
        with pytest.raises(RaceError, match="semantics at"):
            explore(program, 2)
    else:
        explore(program, 2)


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="since Triton 3.9")
def test_atomic_poll_times_out_if_no_rank_can_continue() -> None:
    def program(memory):
        out = torch.zeros(1, dtype=torch.int32)
        flags = memory.signals("flags", 1)
        poll_with_timeout_kernel[(1,)](flags.local, out)
        assert out.item() == 0

    explore(program, 2)


# Masks


@triton.jit
def masked_store_kernel(box_ptr, first, stop, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(box_ptr + offs, offs + 1, mask=(offs >= first) & (stop > first) & (offs < stop))


def test_a_combined_mask_selects_and_does_not_index() -> None:
    def program(memory):
        box = memory.buffer("box", (8,), torch.int32)
        first = 4 * memory.rank  # each rank writes one half of rank 0's box: no two ranks write the same element
        masked_store_kernel[(1,)](box.peers[0], first, first + 4, 8)

    explore(program, 2)
