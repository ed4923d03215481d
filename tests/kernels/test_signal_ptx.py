"""The instructions into which the compiler translates signals, for each kernel that signals.

The explorer proves the protocol as it is written; this file checks the compiled instructions: for sm_90 of every launch
and at several sizes of the group, for sm_80 and sm_100 of one launch of each kind, and the machine code of one launch
of each kind. A program's threads are ordered by `bar.sync` alone, so one belongs between their accesses and each
release, and between each acquire and the accesses that follow. In machine code an acquire is an access of the system's
scope and CCTL.IVALL, which empties the first cache. `make compiled-matrix` runs this file under other Tritons.
"""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Collection
from typing import NamedTuple

import pytest

from tests.support.compilations import compiling
from tpfuse.kernels.launch import FAMILIES

SCRIPT = """
import json, multiprocessing, os, sys
import torch
from triton.compiler import make_backend
from tpfuse.kernels import launch
from tpfuse.kernels.trace import KernelTrace
from tpfuse.tools import operators as cases
from tpfuse.tools.operators import collectives
from tpfuse.tools.compilation import compiled
from tpfuse.tools.front_end import lower
from tpfuse.tools.recorded import Job, source_of, target
from tpfuse.tools.resources import disassembly

def signals(kernel):
    return any(getattr(x, "__module__", "") == "tpfuse.kernels.signals" for x in kernel.fn.__globals__.values())

def kinds(launches):
    a = lambda x: x.arguments
    key = lambda x: (x.kernel, a(x).get("COPIERS") == 0, a(x).get("RING"), a(x).get("out_ptr") is None)
    return list({key(x): x for x in launches if signals(x.kernel)}.values())

def every_operator():
    for operator in cases.names():
        cases.load(operator).launches(torch.bfloat16)

def ptx(job):
    backend, stages = make_backend(target(job.family)), {}
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    backend.add_stages(stages, options, job.source.language)
    code, metadata = lower(job), {**vars(options), "target": target(job.family)}
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        code = stages[stage](code, metadata) if stage in stages else code  # Gluon begins with "ttgir"
    return code

def program(index):
    job, launched, whole, disassembled = jobs[index]
    constants = " ".join(f"{name}={value}" for name, value in job.constants.items())
    constants += " traced" if launched.arguments["trace_ptr"] is not None else ""
    code = compiled(job).asm if whole else {"ptx": ptx(job)}
    name = f"{job.source.name} {constants} {job.source.hash()[:6]} {job.family}"
    return job.family, name, code["ptx"], disassembly(code["cubin"]) if disassembled else ""

found = {}
for family in launch.FAMILIES:
    with launch.recording(family) as recording:
        every_operator()
    representatives, others, parts = kinds(recording.launches), [], []
    if family == "sm_90":
        with launch.recording(family) as worlds:
            for world, n in ((1, 1), (3, 1003)):
                collectives.launches(torch.float32, world, n)
        with launch.recording(family) as traced, KernelTrace(most_bytes=2**50):
            every_operator()
        waiting = [x for x in traced.launches if x.arguments.get("trace_ptr") is not None]
        others, parts = recording.launches, [*worlds.launches, *kinds(waiting)]
    for number, x in enumerate([*representatives, *others, *parts]):
        job = Job("", family, "", source_of(x, family), x.num_warps, x.num_stages)
        if signals(x.kernel) and job.key not in found:
            whole = number < len(representatives) + len(others)  # test_compilation.py puts these in Triton's cache
            found[job.key] = job, x, whole, number < len(representatives)
jobs = list(found.values())  # forked processes have them; Triton's functions cannot be pickled
with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
    json.dump(pool.map(program, range(len(jobs)), chunksize=1), sys.stdout)
"""


class Program(NamedTuple):
    """A compiled kernel. sass: "" where there is another launch of the same kind."""

    family: str
    name: str
    ptx: str
    sass: str


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """Return the programs, compiled in a Python that does not interpret; for a trace one for each kind of launch."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=compiling(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Program(*fields) for fields in json.loads(done.stdout)]


INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?((?:atom|red|ld|st|bar|barrier|fence|cp)\.[\w.:]+)|^(\$L__BB\w+):")
ATOMIC, BARRIER, PLAIN, LABEL = "atomic", "barrier", "plain", "label"


def instructions(ptx: str) -> list[tuple[str, set[str]]]:
    """Return (kind, parts of its name) of accesses to global memory, barriers and the labels of blocks, in order."""
    result = []
    for line in ptx.splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        parts = set((match[1] or "").split("."))
        if match[2]:
            result.append((LABEL, parts))
        elif parts & {"bar", "barrier"}:
            result.append((BARRIER, parts))
        elif "global" in parts:
            ordered = parts & {"atom", "red", "relaxed", "acquire", "release", "acq_rel"}
            result.append((ATOMIC if ordered else PLAIN, parts))
    return result


def violations(ptx: str, by_tma: Collection[str] = ()) -> list[str]:
    """Return the violations of a program that signals. by_tma: whether TMA may do "loads" and "stores"."""
    wrong = []
    code = instructions(ptx)
    for index, (kind, parts) in enumerate(code):
        name = ".".join(sorted(parts))
        if kind == ATOMIC and "sys" not in parts:
            wrong.append(f"{name}: its scope is not the system")
        if parts & {"release", "acq_rel"}:
            before = next(kind for kind, _ in reversed(code[:index]) if kind != ATOMIC)
            if before != BARRIER:
                wrong.append(f"{name}: between it and the barrier of the program before there is a {before}")
        if parts & {"acquire", "acq_rel"}:
            after = next((kind for kind, _ in code[index + 1 :] if kind != ATOMIC), "end")
            if after != BARRIER:
                wrong.append(f"{name}: between it and the barrier of the program after there is a {after}")
        bulk = "loads" if any(part.startswith("mbarrier") for part in parts) else "stores"
        if "nc" in parts or ("bulk" in parts and bulk not in by_tma):
            wrong.append(f"{name}: not ordered by signals")
    return wrong


ACCESS = re.compile(r"\b(LDG|LDGSTS|ATOMG|RED|REDG|STG|CCTL|BAR)((?:\.\w+)*)\s")


def machine_violations(sass: str, ptx: str) -> list[str]:
    """Return the violations of the machine code of a program that signals. ptx: the same program."""
    accesses = [(match[1], set(match[2].split(".")[1:])) for match in ACCESS.finditer(sass)]
    wrong = [f"{name} through the constant cache" for name, parts in accesses if "CONSTANT" in parts]
    emptied = 0
    for (name, parts), (_, after) in itertools.pairwise(accesses):
        emptied += name in ("LDG", "ATOMG") and {"STRONG", "SYS"} <= parts and "IVALL" in after
    acquires = sum(bool(parts & {"acquire", "acq_rel"}) for _, parts in instructions(ptx))
    if emptied < acquires:
        wrong.append(f"{acquires} acquires, of which {emptied} empty the first cache")
    return wrong


# How often each kernel calls signal and wait_signal, counts its programs, and looks at the abort word.
SIGNALS = {
    "all_gather_forward_kernel": (1, 1, 1, 2),
    "all_to_all_forward_kernel": (1, 1, 1, 2),
    "reduce_scatter_forward_kernel": (1, 1, 1, 2),
    "all_reduce_one_shot_kernel": (1, 1, 1, 2),
    "all_reduce_two_shot_kernel": (2, 2, 1, 3),
    "gemm_reduce_scatter_forward_kernel": (3, 2, 1, 3),
    "gemm_reduce_scatter_forward_kernel out_ptr=None": (1, 0, 0, 1),
    "gemm_reduce_scatter_ping_pong_kernel": (1, 1, 1, 2),
    "await_part_kernel": (0, 1, 0, 1),
    "sum_parts_kernel": (0, 1, 1, 2),
    "all_gather_gemm_forward_kernel": (2, 2, 1, 3),
    "all_gather_gemm_forward_kernel COPIERS=0": (0, 1, 1, 2),
    "all_gather_gemm_ping_pong_kernel": (0, 1, 1, 2),
    "open_copies_kernel": (1, 1, 0, 2),
    "close_copies_kernel": (1, 1, 1, 2),
    "ring_attention_forward_kernel": (2, 2, 1, 3),
    "ring_attention_forward_kernel RING=True": (3, 2, 1, 3),
    "ring_attention_forward_kernel COPIERS=0": (0, 0, 0, 0),
    "ring_attention_dq_kernel": (4, 3, 1, 4),
    "ring_attention_dq_kernel RING=True": (6, 3, 1, 4),
    "ring_attention_dq_kernel COPIERS=0": (0, 0, 0, 0),
    "shard_sum_kernel": (1, 1, 1, 2),
    "sharded_adamw_kernel": (2, 2, 1, 3),
    "send_message_kernel": (1, 1, 1, 2),
}
# These are the numbers of waits for one word; a kernel's other waits are for a block of words.
ONE_WORD = {
    "all_gather_gemm_forward_kernel": 1,
    "all_gather_gemm_ping_pong_kernel": 1,
    "gemm_reduce_scatter_ping_pong_kernel": 1,
    "ring_attention_forward_kernel": 1,
    "ring_attention_forward_kernel RING=True": 1,
    "ring_attention_dq_kernel": 2,
    "ring_attention_dq_kernel RING=True": 2,
    "send_message_kernel": 1,
}
BY_TMA = {
    # Operands that no peer writes are loaded.
    "all_gather_gemm_forward_kernel": ("loads",),
    "all_gather_gemm_forward_kernel COPIERS=0": ("loads",),
    "gemm_reduce_scatter_forward_kernel": ("loads",),
    "gemm_reduce_scatter_forward_kernel out_ptr=None": ("loads",),
    "gemm_reduce_scatter_ping_pong_kernel": ("loads",),
    # Chunks are loaded behind a proxy fence, which the emulator checks, and results stored that no peer reads.
    "all_gather_gemm_ping_pong_kernel": ("loads", "stores"),
}
ON_HOPPER_ALONE = {"all_gather_gemm_ping_pong_kernel", "gemm_reduce_scatter_ping_pong_kernel"}


def variant(name: str) -> str:
    """Return the part of a program's name on which the number of its signals depends."""
    kernel, *constants = name.split()
    return " ".join([kernel, *(text for text in constants if text in ("COPIERS=0", "RING=True", "out_ptr=None"))])


def turns(name: str) -> tuple[int, ...]:
    """Return how often a kernel may have its one signal and its one wait, if the compiler unrolls their loops."""
    if variant(name) != "gemm_reduce_scatter_ping_pong_kernel":
        return (1,)
    (world,) = re.findall(r" WORLD=(\d+) ", name)
    return 1, int(world) - 1


def traced(name: str) -> bool:
    """Return whether a program with this name was compiled for a trace."""
    return "traced" in name.split()


@pytest.mark.compile
@pytest.mark.timeout(1200)  # the first test waits for all compilations, which Triton's own cache keeps
def test_every_release_and_acquire_is_next_to_a_barrier(programs: list[Program]) -> None:
    wrong = [
        f"{x.name}: {violation}" for x in programs for violation in violations(x.ptx, BY_TMA.get(variant(x.name), ()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.compile
@pytest.mark.timeout(1200)
def test_every_acquire_of_the_machine_code_empties_the_first_cache(programs: list[Program]) -> None:
    disassembled = [x for x in programs if x.sass]
    assert {(x.family, variant(x.name)) for x in disassembled} == {(x.family, variant(x.name)) for x in programs}
    wrong = [f"{x.name}: {violation}" for x in disassembled for violation in machine_violations(x.sass, x.ptx)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.compile
@pytest.mark.timeout(1200)
def test_every_kernel_is_here_and_signals(programs: list[Program]) -> None:
    """Kernels signal as often as their source does: roles of warps copy some signals and drop the rest (Triton 3.7)."""
    for family in FAMILIES:
        expected_here = SIGNALS.keys() - (ON_HOPPER_ALONE if family != "sm_90" else set())
        assert {variant(x.name) for x in programs if x.family == family} == expected_here
    for _, name, ptx, _ in programs:
        atomics = [parts for kind, parts in instructions(ptx) if kind == ATOMIC]
        kinds = ({"release", "exch"}, {"acquire"}, {"acq_rel", "add"}, {"relaxed"})
        counts = tuple(sum(kind <= parts for parts in atomics) for kind in kinds)
        expected = SIGNALS[variant(name)]
        if counts[0] in turns(name)[1:]:
            expected = (counts[0], counts[0], 1, 1 + counts[0])
        if "WORLD=2" in name.split() and variant(name) == "gemm_reduce_scatter_forward_kernel":
            expected = (expected[0] - 1, *expected[1:])  # with one other owner no turn of its loop signals
        if traced(name):  # the compiler copies the first turn of some loops that wait
            expected = (expected[0], max(expected[1], counts[1]), expected[2], max(expected[3], counts[3]))
        assert counts == expected, name


@pytest.mark.compile
@pytest.mark.timeout(1200)
def test_waits_for_one_word_and_the_abort_word_only_read(programs: list[Program]) -> None:
    """Triton turns an addition of 0 to one word into a load. One to a block of words stays an atomic operation."""
    for _, name, ptx, _ in programs:
        atomics = [parts for kind, parts in instructions(ptx) if kind == ATOMIC]
        assert all("ld" in parts for parts in atomics if "relaxed" in parts), name
        loads = sum({"ld", "acquire"} <= parts for parts in atomics)
        expected = ONE_WORD.get(variant(name), 0)
        assert loads in {expected * n for n in turns(name)} or (traced(name) and loads > expected > 0), name


@pytest.mark.compile
@pytest.mark.timeout(1200)
def test_only_traced_kernels_read_the_timer(programs: list[Program]) -> None:
    timed = {x.name for x in programs if "globaltimer" in x.ptx}
    assert timed == {x.name for x in programs if traced(x.name)}
    assert {name.split()[0] for name in timed} == {name.split()[0] for name in SIGNALS}


RELEASE = "@%p1 atom.global.sys.release.exch.b32 %r1, [ %rd1 + 0 ], %r2;"
ACQUIRE = "@%p1 ld.global.sys.acquire.b32 %r3, [ %rd1 + 0 ];"
SOUND = ["$L__BB0_1:", "st.global.v4.b32 [ %rd1 + 0 ], { %r3, %r4, %r5, %r6 };", "bar.sync 0;", RELEASE,
         "$L__BB0_2:", "bar.sync 0;", ACQUIRE, "st.shared.b32 [ %r26 + 0 ], %r98;", "bar.sync 0;",
         "ld.global.b32 { %r27 }, [ %rd160 + 0 ];"]  # fmt: skip


def test_missing_barriers_and_signals_are_found() -> None:
    assert not violations("\n".join(SOUND))
    without_first = SOUND[:2] + SOUND[3:]
    assert violations("\n".join(without_first)) == [
        "atom.b32.exch.global.release.sys: between it and the barrier of the program before there is a plain"
    ]
    assert "before there is a label" in violations("\n".join([*SOUND[:3], "$L__BB0_5:", *SOUND[3:]]))[0]
    without_last = SOUND[:8] + SOUND[9:]
    assert "after there is a plain" in violations("\n".join(without_last))[0]
    narrow = "\n".join(SOUND).replace("sys.release", "gpu.release")
    assert "scope" in violations(narrow)[0]
    assert violations("ld.global.nc.b32 %r1, [%rd1];")
    loads = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"
    stores = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1];"
    assert violations(loads) and not violations(loads, ("loads",))
    assert violations(stores, ("loads",)) and not violations(stores, ("loads", "stores"))


MACHINE = """
        /*0090*/                   LDG.E.STRONG.SYS R2, desc[UR16][R2.64] ;
        /*00f0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*08a0*/               @P0 ATOMG.E.ADD.STRONG.SYS PT, R3, desc[UR16][R4.64], RZ ;
        /*08b0*/               @P0 CCTL.IVALL ;
        /*08e0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0bc0*/                   LDG.E.64 R4, desc[UR16][R4.64] ;
"""


def test_acquires_without_an_empty_cache_and_constant_loads_are_found() -> None:
    assert not machine_violations(MACHINE, ACQUIRE)
    (missing,) = machine_violations(MACHINE.replace("CCTL.IVALL", "CCTL.IV"), ACQUIRE)
    assert missing == "1 acquires, of which 0 empty the first cache"
    narrow = MACHINE.replace("ADD.STRONG.SYS", "ADD.STRONG.GPU")
    late = MACHINE.replace("CCTL.IVALL", "BAR.SYNC 0x1 ;\n @P0 CCTL.IVALL")
    assert machine_violations(narrow, ACQUIRE) == machine_violations(late, ACQUIRE) == [missing]
    assert machine_violations(MACHINE.replace("LDG.E.64", "LDG.E.64.CONSTANT"), ACQUIRE) == [
        "LDG through the constant cache"
    ]
