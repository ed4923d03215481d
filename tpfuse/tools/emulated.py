"""Runs tpfuse's kernels as they are compiled, on CPU tensors: every launch executes its PTX (`tpfuse.explore.ptx`).

    with emulated("sm_80"):
        out = tpfuse.ops.gemm.gemm(x, weight)       # on CPU tensors, under use(kernels="triton")
    explore(program, world=2, launches=partial(emulated, "sm_80"))

Launchers choose their configuration as on a GPU of the family. This process must not interpret kernels.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

from tpfuse import switches
from tpfuse.explore.ptx import compiled
from tpfuse.explore.run import ExploredRun
from tpfuse.kernels import compiled_launch, launch


def fenced(text: str) -> str:
    """Return a PTX text with the proxy fences that Triton 3.7.1 and older leave out, in the same lines.

    The definition of wgmma asks for a fence.proxy.async after cp.async if wgmma reads what was copied. Triton puts
    it there since its pull request 9610. H100s were not seen to need it.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) or "wgmma" not in text:
        return text
    return re.sub(r"(cp\.async\.wait_group\s+\d+;)", r"\1 fence.proxy.async.shared::cta;", text)


@contextmanager
def emulated(
    family: str, edit: Callable[[str], str] = fenced, seed: int | None = None
) -> Iterator[Callable[[ExploredRun], None]]:
    """Within the block, launches on CPU tensors run compiled for a GPU of `family` with three multiprocessors.

    edit, seed: as of `tpfuse.explore.ptx.compiled`, and what this yields too.
    """

    def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int, num_stages: int) -> None:
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)

    cpu, before = torch.device("cpu"), (compiled_launch.run, switches.INTERPRETED)
    with compiled(family, edit, seed) as enter:
        launch._gpus[cpu] = family, 3
        compiled_launch.run, switches.INTERPRETED = run, True
        launch.forget_plans()
        try:
            yield enter
        finally:
            compiled_launch.run, switches.INTERPRETED = before
            del launch._gpus[cpu]
            launch.forget_plans()
