"""What a compiled kernel takes of a multiprocessor, and by which instructions it moves and multiplies.

Registers are read from the cubin by cuobjdump, which comes with Triton; instructions from the PTX, whose matrix
products and wide accesses ptxas takes over one by one. Only loops around wgmma are disassembled, which takes half a
second.
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

from tpfuse.tools.issue_slots import main_loop


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
    """Return how many programs of a kernel fit on a multiprocessor at once; 0 if none fits."""
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
    tensor_cores: list[str] = field(default_factory=list)  # of mma.sync, wgmma, tcgen05
    loads: dict[int, int] = field(default_factory=dict)  # bytes of a thread -> how many such instructions
    stores: dict[int, int] = field(default_factory=dict)
    bulk: bool = False  # whether tiles are moved by TMA
    specialized: bool = False  # whether warps have roles of their own
    serialized: str = ""  # why ptxas makes each wgmma wait for the one before
    issue_share: float = 0.0  # issue slots over tensor cycles of the main loop around wgmma (`issue_slots`)
    barriers: int = 0  # of the program, in that loop
    tile_instructions: int = 0  # of the loop of tiles around it: its epilogue, and what begins a tile
    pending: int = 0  # wgmma groups that a step leaves running
    error: str = ""


def examine(kernel: Any, identity: dict[str, Any], log: str = "") -> Compilation:
    """What Triton's CompiledKernel takes and consists of.

    identity: the first fields of the result; log: what ptxas printed, where Triton has not found the cubin in its cache
    and so has run it.
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
        dot="tt.dot" in kernel.asm["ttir"],
        tensor_cores=tensor_cores(ptx),
        loads=access_widths(ptx, "ld"),
        stores=access_widths(ptx, "st"),
        bulk="cp.async.bulk.tensor" in ptx,
        specialized="ttg.warp_specialize" in kernel.asm["ttgir"],
        serialized=serialized(ptx, log) if wgmma else "",
        **(_product_loop(kernel) if wgmma else {}),
    )


def _product_loop(kernel: Any) -> dict[str, Any]:
    """The fields of a Compilation that are about the loop around wgmma."""
    pending = [int(count) for count in re.findall(r"warp_group_dot_wait .*pendings = (\d+)", kernel.asm["ttgir"])]
    loop = main_loop(disassembly(kernel.asm["cubin"]))
    if loop is None:
        return {}
    return {
        "issue_share": round(loop.issue_share, 2),
        "barriers": loop.barriers,
        "tile_instructions": loop.tile_instructions,
        "pending": max(pending, default=0),
    }


def _run(tool: str, *flags: str, on: bytes) -> str:
    """What a tool prints about a file with these contents."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(on)
        file.flush()
        done = subprocess.run([tool, *flags, file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(tool).name} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of local memory that it has for those that did not fit."""
    text = _run(knobs.nvidia.cuobjdump.path, "-res-usage", on=cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def disassembly(cubin: bytes) -> str:
    """SASS."""
    return _run(knobs.nvidia.nvdisasm.path, "-c", on=cubin)


def serialized(ptx: str, log: str = "") -> str:
    """Why ptxas makes each wgmma of a program for sm_90 wait for the one before; empty where it does not.

    log: what ptxas printed for this program; without it ptxas is run again.
    """
    text = log
    if "ptxas info" not in log:
        text = _run(get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", os.devnull, on=ptx.encode())
    found = re.search(r"serialized due to (.+?)( in (the )?function|$)", text, re.MULTILINE)
    return found[1] if found else ""


_PRODUCTS = ("mma.sync", "wgmma", "tcgen05")  # HMMA, HGMMA and UTCHMMA in SASS


def tensor_cores(ptx: str) -> list[str]:
    """The kinds of matrix instructions in a program."""
    return [name for name in _PRODUCTS if re.search(rf"\b{re.escape(name)}\.(mma|aligned)", ptx)]


def access_widths(ptx: str, name: str) -> dict[int, int]:
    """bytes of a thread -> how many instructions load ("ld") or store ("st") that many in global memory."""
    widths: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b{name}((?:\.[\w:]+)+)\s", ptx):
        parts = modifiers.split(".")
        if "global" in parts:
            vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
            widths[vector * int(parts[-1].lstrip("bfsu")) // 8] += 1
    if name == "ld":  # to shared memory, without a register between
        for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S* [^;]*?\], (\w+)", ptx):
            widths[int(size, 0)] += 1
    return dict(sorted(widths.items()))
