"""What a compiled kernel takes of a multiprocessor and which instructions it consists of, read from its cubin.

The tools that print both, cuobjdump and nvdisasm, come with Triton; neither needs a GPU.
"""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia

_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Limits:
    """A multiprocessor of a family: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".

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


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of local memory that it has for those that did not fit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def disassembly(cubin: bytes) -> str:
    """SASS."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("nvdisasm", "-c", file.name)


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
