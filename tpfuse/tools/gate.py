"""The conditions that every compiled kernel must meet, and the table of the resources that kernels use.

A kernel that spills, that does not use tensor cores or that loads few bytes at a time is correct but slow, and no other
test detects it. A kernel whose machine code has hazards is wrong on a GPU alone.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import triton

from tpfuse.kernels.launch import FAMILIES
from tpfuse.tools.resources import LIMITS, Compilation

# The newest matrix instruction of each family.
NEWEST = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}

# Pattern of `named` -> why these products are slower than the family allows. They must still use tensor cores.
EXCEPTIONS = {
    r"float32 \w*attention_\w+ .*BLOCK_M=(16|32) ": "64 rows of operands in three parts, for wgmma and tcgen05, spill",
    r" ring_attention_forward_kernel .*BLOCK_D=256 DROPOUT=True BLOCK_M=32 ": "64 rows and dropout's hashes spill",
}

# Pattern of `named` -> why a kernel without products may move most of its bytes in accesses of less than 16 bytes.
NARROW_EXCEPTIONS = {r" ((open|close)_copies|await_part)_kernel ": "it is one program, which moves only signals"}

# Version of Triton -> pattern of `named` -> (the most bytes that a kernel may spill, why they are accepted).
_SMALL = "3.7.1 compiles the same rows without a spill; we have not searched for rows for 3.6 only"
_FEW = "ptxas chose so few registers that one more program fits on a multiprocessor; memory limits the kernel's speed"
_PARTS = "operands have three bfloat16 parts; on an H100 a tile that spilled 24 bytes was faster than half of it"
_HIDDEN = "192 sums leave few registers, above all for erf, but another group's products hide this epilogue"
# The norm_forward kernel that spills reads rows longer than a block. The norm_backward kernel of BLOCK_C=256 computes
# no dx, and the others compute all gradients.
SPILLS = {
    "3.6": {
        r" float32 \w*attention_\w+ ": (32, _PARTS),
        r" gemm_ping_pong_kernel ACTIVATION=gelu ": (104, _HIDDEN),
        r" gemm_ping_pong_kernel ACTIVATION=swiglu ": (8, _HIDDEN),
        r" all_gather_gemm_ping_pong_kernel .*ACTIVATION=gelu ": (88, _HIDDEN),
        r" all_gather_gemm_ping_pong_kernel .*ACTIVATION=(gelu_tanh|swiglu) ": (16, _HIDDEN),
        r"sm_90 (bfloat16|float16) all_gather_gemm_forward_kernel .*ACTIVATION=geglu ": (8, _SMALL),
        r"sm_90 (bfloat16|float16) ring_attention_forward_kernel .*RING=True .*BLOCK_D=256 DROPOUT=True ": (8, _SMALL),
        r"sm_90 (bfloat16|float16) attention_backward_dkdv_kernel .*BLOCK_D=64 .*DROPOUT=True ": (8, _SMALL),
        r"sm_90 (bfloat16|float16) ring_attention_dkdv_kernel .*BLOCK_D=64 DROPOUT=True ": (24, _SMALL),
        r"layer_norm sm_80 bfloat16 norm_forward_kernel .*BLOCK_C=8192 ": (16, _FEW),
        r"layer_norm sm_80 float32 norm_backward_kernel .*BLOCK_C=256 ": (8, _FEW),
        r"rms_norm sm_100 bfloat16 norm_backward_kernel .*BLOCK_C=4096 ": (8, _FEW),
    },
    "3.7": {
        r" float32 \w*attention_\w+ ": (72, _PARTS),
        r" gemm_ping_pong_kernel ACTIVATION=gelu ": (112, _HIDDEN),
        r" gemm_ping_pong_kernel ACTIVATION=swiglu ": (8, _HIDDEN),
        r" all_gather_gemm_ping_pong_kernel .*ACTIVATION=gelu ": (112, _HIDDEN),
        r" all_gather_gemm_ping_pong_kernel .*ACTIVATION=(gelu_tanh|swiglu) ": (16, _HIDDEN),
        r" gemm_reduce_scatter_ping_pong_kernel WORLD=8 ": (32, _HIDDEN),
        r"layer_norm sm_80 bfloat16 norm_forward_kernel .*BLOCK_C=8192 ": (16, _FEW),
        r"layer_norm sm_80 float32 norm_backward_kernel .*BLOCK_C=256 ": (8, _FEW),
    },
    "3.9": {
        r" float32 \w*attention_\w+ ": (64, _PARTS),
        r" gemm_ping_pong_kernel ACTIVATION=gelu ": (208, _HIDDEN),
        r" gemm_ping_pong_kernel ACTIVATION=(gelu_tanh|silu|swiglu) ": (16, _HIDDEN),
        r" all_gather_gemm_ping_pong_kernel .*ACTIVATION=gelu ": (168, _HIDDEN),
        r" all_gather_gemm_ping_pong_kernel .*ACTIVATION=(gelu_tanh|silu|swiglu) ": (16, _HIDDEN),
        r"layer_norm sm_90 float16 norm_backward_kernel .*BLOCK_C=1024 ": (8, _FEW),
        r"rms_norm sm_100 bfloat16 norm_backward_kernel .*BLOCK_C=4096 ": (8, _FEW),
    },
}

# The rows of sm_80 also serve GPUs that have less shared memory than an A100.
SHARED = {family: limits.shared_per_program for family, limits in LIMITS.items()} | {"sm_80": 99 * 1024}


def violations(result: Compilation, version: str = triton.__version__) -> Iterator[str]:
    """Yield one line for each condition that a kernel violates, compiled by this version of Triton."""
    if result.error:
        yield f"{named(result)}: {result.error}"
        return
    for violation in _violations(result, version):
        yield f"{named(result)}: {violation}"


def _violations(result: Compilation, version: str) -> Iterator[str]:
    if result.spilled > accepted_spill(result, version):
        yield f"it spills {result.spilled} bytes of registers"
    if result.shared > SHARED[result.family]:
        yield f"it uses {result.shared} bytes of shared memory; {SHARED[result.family]} are allowed"
    if result.dot and not result.tensor_cores:
        yield "its dot does not use tensor cores"
    elif result.dot and slow(result) and not listed(EXCEPTIONS, result):
        yield slow(result)
    if moves_little(result) and not listed(NARROW_EXCEPTIONS, result):
        yield (
            f"it moves {narrow(result):.0%} of its bytes in accesses of less than 16 bytes:"
            f" loads {result.loads}, stores {result.stores}"
        )
    if result.hazards:
        more = f", and {len(result.hazards) - 1} more such accesses" if len(result.hazards) > 1 else ""
        yield f"its machine code is wrong: {result.hazards[0]}{more}"
    if result.unequal:
        yield f"two lanes have different sums (see `kernels.tiles.product`): {result.unequal}"


def accepted_spill(result: Compilation, version: str) -> int:
    """Return how many bytes a result may spill under a version of Triton."""
    listed = SPILLS.get(".".join(version.split(".")[:2]), {})
    return max((size for pattern, (size, _) in listed.items() if re.search(pattern, named(result))), default=0)


def slow(result: Compilation) -> str:
    """Return why products are slower than the family allows (an older instruction, no overlap); "" if they are not."""
    if NEWEST[result.family] not in result.tensor_cores:
        return f"its dot uses {'+'.join(result.tensor_cores)} instructions instead of {NEWEST[result.family]}"
    if result.serialized:
        return f"its wgmma instructions wait for one another: {result.serialized}"
    return ""


def listed(patterns: Iterable[str], result: Compilation) -> str | None:
    """Return the first of the patterns of exceptions that matches a result, or None."""
    return next((pattern for pattern in patterns if re.search(pattern, named(result))), None)


def moves_little(result: Compilation) -> bool:
    """Return whether a kernel without products moves more than a third of its bytes in narrow accesses (`narrow`)."""
    return not result.dot and narrow(result) > 1 / 3


def narrow(result: Compilation) -> float:
    """Return the share of all loaded and stored bytes that instructions of less than 16 bytes of a thread move."""
    moved = [(width, width * count) for widths in (result.loads, result.stores) for width, count in widths.items()]
    return sum(size for width, size in moved if width < 16) / max(1, sum(size for _, size in moved))


def named(result: Compilation) -> str:
    """Return the operator, the family and the configuration on one line."""
    prefix = f"{result.operator} {result.family} {result.dtype}"
    if not result.kernel:  # the launcher raised an exception
        return prefix
    return f"{prefix} {result.kernel} {_constants(result)} num_warps={result.num_warps} num_stages={result.num_stages}"


def _constants(result: Compilation) -> str:
    return " ".join(f"{name}={value}" for name, value in result.constants.items() if value != "None")


def describe(result: Compilation) -> str:
    """Return a description of a result for people, on two lines."""
    if result.error:
        return f"{named(result)}\n    {result.error}"
    features = "".join(f"  {text}" for text in _features(result))
    return (
        f"{named(result)}\n    registers {result.registers}  spilled {result.spilled}  shared {result.shared}"
        f"  programs {result.programs}{features}  loads {result.loads}  stores {result.stores}"
    )


def _features(result: Compilation) -> list[str]:
    return [*result.tensor_cores, *["TMA"] * result.bulk]


HEADER = """\
# The resources that the kernels use

Triton {version} compiled the kernels without a GPU. `make compiled` writes this file, and a test compares it. Each line
shows the smallest and the largest figure of a kernel on a GPU family, over all launches that follow from the rows of
kernels/configurations.toml and from the dtypes. Registers: of a thread. Spilled: the number of launches that spill.
Shared: the bytes of shared memory of a program. Programs: the number that fits on a multiprocessor at once. float16 is
compiled for sm_90 only, since it differs from bfloat16 only in conversions. `python -m tpfuse.tools.compilation
OPERATOR` prints each launch.

"""

COLUMNS = ("kernel", "family", "launches", "registers", "spilled", "shared", "programs", "instructions")


def table(results: Sequence[Compilation], version: str) -> str:
    """Return a table in Markdown, with a line for each kernel and family."""
    groups: dict[tuple[str, str], list[Compilation]] = {}
    for result in results:
        kernel = result.kernel.removesuffix("_kernel") or f"{result.operator}'s launcher"
        groups.setdefault((kernel, result.family), []).append(result)
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    lines += [_row([*group, *_cells(groups[group])]) for group in sorted(groups, key=_by_kernel)]
    return HEADER.format(version=version) + "\n".join(lines) + "\n"


def _by_kernel(group: tuple[str, str]) -> tuple[str, int]:
    kernel, family = group
    return kernel, FAMILIES.index(family)


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cells(results: Sequence[Compilation]) -> list[object]:
    whole = [result for result in results if not result.error]
    features = {name for result in whole for name in _features(result)}
    return [
        f"{len(results)}{f', {len(results) - len(whole)} failed' * (len(whole) < len(results))}",
        _range(result.registers for result in whole),
        sum(bool(result.spilled) for result in whole) or "",
        _range(result.shared for result in whole),
        _range(result.programs for result in whole),
        " ".join(sorted(features)),
    ]


def _range(values: Iterable[float]) -> str:
    distinct = sorted(set(values))
    return f"{distinct[0]}" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}" if distinct else ""
