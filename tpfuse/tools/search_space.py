"""The search space of `tpfuse tune`: the values of each parameter, in steps, for every operator of configurations.toml.

A step is a set of parameters that depend on each other and are tried in all combinations. The next step starts from the
best combination. Candidates that cannot be correct or fast are not tried: tiles whose stages do not fit in shared
memory, accumulators that do not fit in the registers, and specialised warps on hardware that does not support them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tpfuse.kernels.configurations import Configuration
from tpfuse.tools.gate import SHARED

Step = Mapping[str, tuple[Any, ...]]

_GEMM: tuple[Step, ...] = (
    {
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (64,),
        "TMA": (False, True),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    },
    {"BLOCK_K": (32, 64, 128), "num_stages": (2, 3, 4, 5, 6)},
    {"num_warps": (4, 8), "EPILOGUE_PARTS": (1, 2, 4), "GROUP_M": (4, 8, 16)},
)
_PING_PONG: Step = {"PING_PONG": (False, True)}
_SCORES: Step = {"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
_TILES: tuple[Step, ...] = ({"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)},)

SPACES: dict[str, tuple[Step, ...]] = {
    "gemm": (*_GEMM, _PING_PONG),
    "gemm_reduce_scatter": (*_GEMM, {"SUM_WIDTH": (8, 16, 32, 64, 128)}, _PING_PONG),
    "all_gather_gemm": (*_GEMM, _PING_PONG),  # COPIERS and BLOCK_COPY depend on the links, which no trial uses
    "activation_backward": ({"BLOCK_M": (4, 8, 16, 32), "BLOCK_N": (128, 256, 512), "num_warps": (4, 8)},),
    "gemm_sum_partials": ({"BLOCK_M": (8, 16, 32), "BLOCK_N": (64, 128, 256), "num_warps": (4, 8)},),
    "attention_forward": (_SCORES, {"TMA": (False, True), "num_warps": (4, 8)}),
    "ring_attention_forward": (_SCORES, {"COPIERS": (2, 4, 8, 16), "BLOCK_COPY": (2048, 4096, 8192, 16384)}),
    "attention_backward_dkdv": ({**_SCORES, "BLOCK_M": (32, 64, 128)},),
    "attention_backward_dq": (_SCORES,),
    "ring_attention_dkdv": ({**_SCORES, "BLOCK_M": (16, 32, 64)},),
    "ring_attention_dq": (_SCORES, {"COPIERS": (2, 4, 8, 16), "BLOCK_COPY": (4096, 8192, 16384)}),
    "attention_backward_delta": ({"TILE": (2048, 4096, 8192, 16384), "num_warps": (2, 4, 8)},),
    "attention_merge": ({"BLOCK_M": (4, 8, 16, 32, 64), "num_warps": (2, 4, 8)},),
    "layer_norm": ({"BLOCK_M": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8, 16)},),
    "layer_norm_sum_parts": ({"BLOCK_P": (32, 64, 128), "BLOCK_C": (32, 64, 128), "num_warps": (4, 8)},),
    "cross_entropy": ({"BLOCK_M": (1, 2), "BLOCK_V": (1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8)},),
    "cross_entropy_combine": ({"BLOCK_M": (64, 128, 256, 512), "num_warps": (1, 2, 4)},),
    "dropout": ({"BLOCK_M": (1, 2, 4, 8, 16), "BLOCK_C": (256, 512, 1024), "num_warps": (4, 8)},),
    **dict.fromkeys(("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "stage"), _TILES),
    "adamw": ({"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)},),
    **dict.fromkeys(("shard_sum", "sharded_adamw"), ({"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)},)),
}


def candidates(row: Configuration, step: Step) -> Iterator[Configuration]:
    """Yield `row` with every sensible combination of a step's values. `row` itself may be among them.

    Parameters that the row's kernel does not have are ignored.
    """
    known = {name: values for name, values in step.items() if name in row.blocks or name.startswith("num_")}
    for values in itertools.product(*known.values()):
        chosen = dict(zip(known, values, strict=True))
        warps, stages = (chosen.pop(name, getattr(row, name)) for name in ("num_warps", "num_stages"))
        blocks = {name: chosen.get(name, value) for name, value in row.blocks.items()}
        candidate = replace(row, blocks=blocks, num_warps=warps, num_stages=stages)
        if sensible(candidate):
            yield candidate


def sensible(row: Configuration) -> bool:
    """Return whether a candidate can be right and fast, as far as that can be said without compiling it."""
    blocks, family = row.blocks, row.family
    if blocks.get("TMA") and family == "sm_80":
        return False
    if blocks.get("TMA") and row.operator == "attention_forward" and row.bits == 32:
        return False  # wide heads of float32 are read in parts, through pointers
    if "BLOCK_C" in blocks and "BLOCK_M" in blocks and not 8 <= _elements(row, "BLOCK_M", "BLOCK_C") <= 128:
        return False
    if "BLOCK_V" in blocks and not 8 <= _elements(row, "BLOCK_M", "BLOCK_V") <= 64:
        return False
    if "BLOCK_K" not in blocks:
        return True
    tile = (blocks["BLOCK_M"] + blocks["BLOCK_N"]) * blocks["BLOCK_K"] * row.bits // 8
    fits = family not in SHARED or tile * row.num_stages <= SHARED[family]
    return fits and 16 <= _elements(row, "BLOCK_M", "BLOCK_N") <= 128


def _elements(row: Configuration, *names: str) -> int:
    """Return the number of a tile's elements that each thread holds."""
    return math.prod(int(row.blocks[name]) for name in names) // (32 * row.num_warps)
