"""What a compiled kernel takes of a multiprocessor and which instructions it consists of, read from its cubin.

The tools that print both, cuobjdump and nvdisasm, come with Triton; neither needs a GPU.
"""

import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Limits:
    """A multiprocessor: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".

    Registers are given out 256 at a time to a warp; each program takes 1 KiB of shared memory on top of its own.
    """

    shared_per_program: int  # bytes that one program may ask for
    shared: int  # bytes
    warps: int = 64
    programs: int = 32
    registers: int = 65536
    tensor_memory: int = 512  # columns, where the family has it


LIMITS = {
    "sm_80": Limits(163 * 1024, 164 * 1024),
    "sm_90": Limits(227 * 1024, 228 * 1024),
    "sm_100": Limits(227 * 1024, 228 * 1024),
}


def occupancy(family: str, registers: int, shared: int, num_warps: int, tensor_memory: int = 0) -> int:
    """How many programs of a kernel fit on a multiprocessor at once; 0 where one does not fit."""
    limits = LIMITS[family]
    if shared > limits.shared_per_program:
        return 0
    registers_per_warp = -(-max(registers, 1) * 32 // 256) * 256
    warps = limits.registers // registers_per_warp // 4 * 4  # of each of the four schedulers alike
    fits = [limits.programs, limits.warps // num_warps, warps // num_warps, limits.shared // (shared + 1024)]
    if tensor_memory:
        fits.append(limits.tensor_memory // tensor_memory)
    return min(fits)


@dataclass(frozen=True)
class Compilation:
    """What came of compiling one kernel for one family. Where `error` is set, the figures are empty."""

    operator: str
    family: str
    dtype: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int  # those of specialised roles included
    num_stages: int
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of a thread's local memory
    shared: int = 0  # bytes of a program
    programs: int = 0  # that fit on a multiprocessor
    dot: bool = False
    tensor_cores: list[str] = field(default_factory=list)  # "HMMA", "wgmma", "tcgen05"
    loads: dict[int, int] = field(default_factory=dict)  # bytes of a thread -> how many such instructions
    stores: dict[int, int] = field(default_factory=dict)
    bulk: bool = False  # whether tiles are moved by TMA
    specialized: bool = False  # whether warps have roles of their own
    serialized: bool = False  # whether ptxas made each wgmma wait for the one before
    error: str = ""


def examine(kernel: Any, identity: dict[str, Any]) -> Compilation:
    """What Triton's CompiledKernel takes and consists of. identity: the first fields of the result."""
    registers, spilled = registers_and_stack(kernel.asm["cubin"])
    counts = instructions(disassembly(kernel.asm["cubin"]))
    metadata = kernel.metadata
    tensor_memory = getattr(metadata, "tmem_size", None) or 0
    return Compilation(
        **identity | {"num_warps": metadata.num_warps},
        registers=registers,
        spilled=spilled,
        shared=metadata.shared,
        programs=occupancy(identity["family"], registers, metadata.shared, metadata.num_warps, tensor_memory),
        dot="tt.dot" in kernel.asm["ttir"],
        tensor_cores=tensor_cores(counts),
        loads=access_widths(counts, "LDG", "LDGSTS"),
        stores=access_widths(counts, "STG"),
        bulk=any(name.startswith("UTMA") for name in counts),
        specialized="ttg.warp_specialize" in kernel.asm["ttgir"],
        serialized="wgmma.mma_async" in kernel.asm["ptx"] and serializes(kernel.asm["ptx"]),
    )


def _run(tool: str, *flags: str, on: bytes) -> str:
    """What a tool prints about a file with these contents."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(on)
        file.flush()
        done = subprocess.run([str(_TOOLS / tool), *flags, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of local memory that it has for those that did not fit."""
    text = _run("cuobjdump", "-res-usage", on=cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def disassembly(cubin: bytes) -> str:
    """SASS."""
    return _run("nvdisasm", "-c", on=cubin)


def serializes(ptx: str) -> bool:
    """Whether ptxas says of a program for sm_90 that its wgmma instructions are serialized."""
    return "serialized" in _run("ptxas", "-v", "--gpu-name=sm_90a", "-o", os.devnull, on=ptx.encode())


def instructions(sass: str) -> Counter[str]:
    """How often each instruction occurs in the text of a program, modifiers included ("LDG.E.128")."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE))


_TENSOR_CORES = {"HMMA": "HMMA", "HGMMA": "wgmma", "UTCHMMA": "tcgen05", "UTCQMMA": "tcgen05"}


def tensor_cores(counts: Mapping[str, int]) -> list[str]:
    """The kinds of matrix instructions among `instructions`: HMMA (mma.sync in PTX), wgmma, tcgen05."""
    return sorted({_TENSOR_CORES[name.split(".")[0]] for name in counts if name.split(".")[0] in _TENSOR_CORES})


@functools.cache
def _width(instruction: str) -> int:
    for part in reversed(instruction.split(".")):
        if part in ("U8", "S8", "U16", "S16", "64", "128", "256"):
            return int(part.lstrip("US")) // 8
    return 4


def access_widths(counts: Mapping[str, int], *names: str) -> dict[int, int]:
    """bytes -> how many instructions of these names (LDG, LDGSTS; STG) move that many for a thread."""
    widths: Counter[int] = Counter()
    for instruction, count in counts.items():
        if instruction.split(".")[0] in names:
            widths[_width(instruction)] += count
    return dict(sorted(widths.items()))
