"""The resources of a multiprocessor that a compiled kernel uses, and the instructions that move data and multiply.

The registers are read from the cubin by cuobjdump, which comes with Triton. The instructions are read from the PTX,
whose matrix products and wide accesses ptxas translates one by one. Only kernels with wgmma are disassembled, for their
hazards, which takes half a second.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from tpfuse.tools.wgmma_hazards import hazards


@dataclass(frozen=True)
class Limits:
    """The limits of a multiprocessor.

    Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Registers are
    allocated to a warp 256 at a time; each program takes 1 KiB of shared memory in addition to its own.
    """

    shared_per_program: int  # the most bytes of one program
    shared: int  # bytes
    warps: int = 64
    programs: int = 32
    registers: int = 65536
    tensor_memory: int = 512  # columns, if the family has tensor memory


LIMITS = {
    "sm_80": Limits(163 * 1024, 164 * 1024),
    "sm_90": Limits(227 * 1024, 228 * 1024),
    "sm_100": Limits(227 * 1024, 228 * 1024),
}


def occupancy(family: str, registers: int, shared: int, num_warps: int, tensor_memory: int = 0) -> int:
    """Return how many programs of a kernel fit on a multiprocessor at once; 0 if none fits."""
    limits = LIMITS[family]
    if shared > limits.shared_per_program:
        return 0
    registers_per_warp = -(-max(registers, 1) * 32 // 256) * 256
    warps = limits.registers // registers_per_warp // 4 * 4  # the same number for each of the four schedulers
    fits = [limits.programs, limits.warps // num_warps, warps // num_warps, limits.shared // (shared + 1024)]
    if tensor_memory:
        fits.append(limits.tensor_memory // tensor_memory)
    return min(fits)


@dataclass(frozen=True)
class Compilation:
    """The result of compiling one kernel for one family. If `error` is set, the figures are empty."""

    operator: str
    family: str
    dtype: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    registers: int = 0  # per thread
    spilled: int = 0  # bytes of local memory per thread
    shared: int = 0  # bytes per program
    programs: int = 0  # how many fit on a multiprocessor
    dot: bool = False
    tensor_cores: list[str] = field(default_factory=list)  # some of mma.sync, wgmma, tcgen05
    loads: dict[int, int] = field(default_factory=dict)  # bytes per thread -> number of instructions
    stores: dict[int, int] = field(default_factory=dict)
    bulk: bool = False  # whether TMA moves tiles
    serialized: str = ""  # why ptxas makes each wgmma wait for the previous one
    hazards: list[str] = field(default_factory=list)  # accesses to registers of a running wgmma (`wgmma_hazards`)
    unequal: str = ""  # an instruction that gives two lanes different sums (`unequal_sum`)
    error: str = ""


def examine(kernel: Any, identity: dict[str, Any], log: str = "") -> Compilation:
    """Return the resources and instructions of Triton's CompiledKernel.

    identity: the first fields of the result. log: the output of ptxas, which exists if Triton did not find the cubin in
    its cache and therefore ran ptxas.
    """
    registers, spilled = registers_and_stack(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    wgmma = "wgmma.mma_async" in ptx
    metadata = kernel.metadata
    tensor_memory = getattr(metadata, "tmem_size", None) or 0
    return Compilation(
        **identity | {"num_warps": metadata.num_warps},
        registers=registers,
        spilled=spilled,
        shared=metadata.shared,
        programs=occupancy(identity["family"], registers, metadata.shared, metadata.num_warps, tensor_memory),
        dot=re.search(r"\b(tt\.dot|warp_group_dot|tc_gen5_mma)\b", kernel.asm["ttgir"]) is not None,
        tensor_cores=tensor_cores(ptx),
        loads=access_widths(ptx, "ld"),
        stores=access_widths(ptx, "st"),
        bulk="cp.async.bulk.tensor" in ptx,
        serialized=serialized(ptx, log) if wgmma else "",
        hazards=hazards(disassembly(kernel.asm["cubin"])) if wgmma else [],
        unequal=unequal_sum(ptx),
    )


def _run(tool: str, *flags: str, on: bytes) -> str:
    """Return the output of a tool for a file with these contents."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(on)
        file.flush()
        done = subprocess.run([tool, *flags, file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(tool).name} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its local memory, which holds the spilled registers."""
    text = _run(knobs.nvidia.cuobjdump.path, "-res-usage", on=cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2]) + int(match[3])


def disassembly(cubin: bytes) -> str:
    """Return the SASS of a cubin."""
    # -ndf: without the analysis of the branch stack, which no GPU has since Volta; it takes a quarter of the time.
    return _run(knobs.nvidia.nvdisasm.path, "-c", "-ndf", on=cubin)


def serialized(ptx: str, log: str = "") -> str:
    """Return why ptxas makes each wgmma of a program for sm_90 wait for the previous one; "" if it does not.

    log: the output of ptxas for this program. If it is missing, ptxas runs again.
    """
    text = log
    if "ptxas info" not in log:
        text = _run(get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, on=ptx.encode())
    match = re.search(r"serialized due to (.+?)( in (the )?function|$)", text, re.MULTILINE)
    return match[1] if match else ""


_PRODUCTS = ("mma.sync", "wgmma", "tcgen05")  # HMMA, HGMMA and UTCHMMA in SASS


def tensor_cores(ptx: str) -> list[str]:
    """Return the kinds of matrix instructions in a program."""
    return [name for name in _PRODUCTS if re.search(rf"\b{re.escape(name)}\.(mma|aligned)", ptx)]


_STEPS = re.compile(r"(mul|shfl|fma|mov)\.\S+\s+(%\w+)(?:\|%\w+)?, (%\w+)(?:, (%\w+))?(?:, (%\w+))?")


def unequal_sum(ptx: str) -> str:
    """Return the first fma of a program that adds a lane's own product to another lane's rounded one; "" if none does.

    The sums of the two lanes then differ in the last bit (`kernels.tiles.product`).
    """
    factors: dict[str, set[str]] = {}  # of products
    values: dict[str, str] = {}  # what a register has, from this lane or another one
    for match in _STEPS.finditer(ptx):
        name, target, *given = match.groups()
        source = values.get(given[0], given[0])
        if name == "mul":
            factors[target] = {*given[:2]}
        elif name in ("mov", "shfl"):
            values[target] = source
        elif (addend := given[2]) in values and factors.get(values[addend]) == {*given[:2]}:
            return match[0]
    return ""


def access_widths(ptx: str, name: str) -> dict[int, int]:
    """Return, by the number of bytes per thread, how many instructions load ("ld") or store ("st") global memory."""
    widths: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b{name}((?:\.[\w:]+)+)\s", ptx):
        parts = modifiers.split(".")
        if "global" in parts:
            vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
            widths[vector * int(parts[-1].lstrip("bfsu")) // 8] += 1
    if name == "ld":  # copies to shared memory without a register in between
        for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S* [^;]*?\], (\w+)", ptx):
            widths[int(size, 0)] += 1
    return dict(sorted(widths.items()))
