"""What the compiler makes of signals: each kernel that signals, for sm_90, at several sizes of the group.

The explorer proves the protocol as it is written; this is about the instructions it becomes. A program's threads are
ordered by `bar.sync` alone, so one belongs between their accesses and each release, and between each acquire and what
they access afterwards. `make compiled-matrix` runs this file under other Tritons.
"""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test waits for all compilations

SCRIPT = """
import json, sys
import torch
from tpfuse.kernels import launch
from tpfuse.profile import cases
from tpfuse.profile.cases import collectives
from tpfuse.profile.compilation import compiled
from tpfuse.profile.recorded import Job, source_of

def signals(kernel):
    return any(getattr(x, "__module__", "") == "tpfuse.kernels.signals" for x in kernel.fn.__globals__.values())

with launch.recording("sm_90") as recording:
    for operator in cases.names():
        cases.load(operator).launches(torch.bfloat16)
    for world, n in ((1, 1), (2, 1003), (3, 64)):
        collectives.launches(torch.float32, world, n)
found = {}
for x in recording.launches:
    if signals(x.kernel):
        job = Job("", "sm_90", "", source_of(x, "sm_90"), x.num_warps, x.num_stages)
        if job.key not in found:
            constants = " ".join(f"{name}={value}" for name, value in job.constants.items())
            found[job.key] = f"{job.source.name} {constants} {job.source.hash()[:6]}", compiled(job).asm["ptx"]
json.dump(dict(found.values()), sys.stdout)
"""


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    """PTX by kernel; compiled in a Python that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?((?:atom|red|ld|st|bar|barrier|fence|cp)\.[\w.:]+)|^(\$L__BB\w+):")
ATOMIC, BARRIER, PLAIN, LABEL = "atomic", "barrier", "plain", "label"


def instructions(ptx: str) -> list[tuple[str, set[str]]]:
    """(kind, parts of its name) of what touches global memory, barriers and the labels of blocks, in order."""
    found = []
    for line in ptx.splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        parts = set((match[1] or "").split("."))
        if match[2]:
            found.append((LABEL, parts))
        elif parts & {"bar", "barrier"}:
            found.append((BARRIER, parts))
        elif "global" in parts:
            ordered = parts & {"atom", "red", "relaxed", "acquire", "release", "acq_rel"}
            found.append((ATOMIC if ordered else PLAIN, parts))
    return found


def complaints(ptx: str) -> list[str]:
    """What is wrong with a program that signals."""
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
        if "nc" in parts or "bulk" in parts:
            wrong.append(f"{name}: not ordered by signals")
    return wrong


def test_every_release_and_acquire_is_next_to_a_barrier(programs: dict[str, str]) -> None:
    wrong = [f"{name}: {complaint}" for name, ptx in programs.items() for complaint in complaints(ptx)]
    assert not wrong, "\n".join(wrong)


def test_every_collective_is_here_and_signals(programs: dict[str, str]) -> None:
    kernels = {"all_gather_forward", "all_to_all_forward", "reduce_scatter_forward"}
    kernels |= {"all_reduce_one_shot", "all_reduce_two_shot"}
    assert {f"{kernel}_kernel" for kernel in kernels} <= {name.split()[0] for name in programs}
    for name, ptx in programs.items():
        atomics = [parts for kind, parts in instructions(ptx) if kind == ATOMIC]
        rounds = 2 if "two_shot" in name else 1
        assert sum({"release", "exch"} <= parts for parts in atomics) == rounds, name
        assert sum({"acquire"} <= parts for parts in atomics) == rounds, name
        assert sum({"acq_rel", "add"} <= parts for parts in atomics) == 1, name
        assert sum("relaxed" in parts for parts in atomics) == rounds + 1, f"{name}: the abort word"


RELEASE = "@%p1 atom.global.sys.release.exch.b32 %r1, [ %rd1 + 0 ], %r2;"
ACQUIRE = "@%p1 ld.global.sys.acquire.b32 %r3, [ %rd1 + 0 ];"
SOUND = ["$L__BB0_1:", "st.global.v4.b32 [ %rd1 + 0 ], { %r3, %r4, %r5, %r6 };", "bar.sync 0;", RELEASE,
         "$L__BB0_2:", "bar.sync 0;", ACQUIRE, "st.shared.b32 [ %r26 + 0 ], %r98;", "bar.sync 0;",
         "ld.global.b32 { %r27 }, [ %rd160 + 0 ];"]  # fmt: skip


def test_what_is_missing_is_seen() -> None:
    assert not complaints("\n".join(SOUND))
    without_first = SOUND[:2] + SOUND[3:]
    assert complaints("\n".join(without_first)) == [
        "atom.b32.exch.global.release.sys: between it and the barrier of the program before there is a plain"
    ]
    assert "before there is a label" in complaints("\n".join([*SOUND[:3], "$L__BB0_5:", *SOUND[3:]]))[0]
    without_last = SOUND[:8] + SOUND[9:]
    assert "after there is a plain" in complaints("\n".join(without_last))[0]
    narrow = "\n".join(SOUND).replace("sys.release", "gpu.release")
    assert "scope" in complaints(narrow)[0]
    assert complaints("ld.global.nc.b32 %r1, [%rd1];")
