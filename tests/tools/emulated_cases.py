"""Runs kernels as they are compiled for a GPU, on the CPU; test_emulated.py starts it in a Python without interpreter.

Its argument is a family. Each line that it reads is a JSON list of works, [name of a function below, arguments …]. It
prints a JSON list for it: what is wrong with each of them, or "".
"""

import gc
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import gluon_kernels
import torch
import triton
import triton.language as tl
import tutorial_kernels
from torch import Tensor

from tpfuse.explore import ExploreError, Sequential, SimulatedMemory, explore, explore_all
from tpfuse.explore.ptx import Kernel, PtxError, compiled, launches
from tpfuse.kernels.activations import activate, activation_gradient
from tpfuse.kernels.gemm import gemm_forward
from tpfuse.testing.compare import evaluate
from tpfuse.testing.inputs import normal
from tpfuse.tools import emulated, operators, verify
from tpfuse.tools.rank_programs import PROGRAMS, TINY, VARIANTS, iterate

FAMILY = sys.argv[1]


def case(operator: str, name: str, dtype: str) -> str:
    """Compare a case of `tpfuse verify` with its reference, output and gradients."""
    with emulated.emulated(FAMILY):
        result = verify.comparisons(operator, torch.device("cpu"))[name](dtype)
    return "" if result.passed else str(result)


def as_compiled(operator: str, name: str, dtype: str) -> str:
    """Compare a case without the proxy fences that `emulated` adds."""
    with emulated.emulated(FAMILY, edit=str):
        result = verify.comparisons(operator, torch.device("cpu"))[name](dtype)
    return result.failure


def program(name: str, world: int, dtype: str, rounds: int) -> str:
    """Explore a program of ranks, whose epochs wrap around in the middle of the rounds."""
    sizes = replace(TINY, dtype=getattr(torch, dtype))

    def run(memory: SimulatedMemory) -> None:
        different = iterate(memory, PROGRAMS[name](memory, sizes), rounds)
        assert different == [], f"rounds {different} differ"

    try:
        explore(run, world, schedules=[Sequential()], resident=3, launches=partial(emulated.emulated, FAMILY))
    except ExploreError as error:
        return str(error)
    return ""


def every_execution(name: str) -> str:
    """Run all executions of three rounds of a program on two ranks, and return the report or the fault."""
    sizes = replace(TINY, shard=4096)  # whole blocks, whose addresses are in tensors and so the same in every run

    def run(memory: SimulatedMemory) -> Iterator[int]:
        work = PROGRAMS[name](memory, sizes)
        for variant in range(VARIANTS):
            work.check(variant, work.run(variant))
            yield variant

    try:
        return str(explore_all(run, 2, seconds=900, launches=partial(emulated.emulated, FAMILY)))
    except ExploreError as error:
        return str(error)


def tutorials() -> str:
    """Run the kernels of Triton's tutorials, and compare their results."""
    wrong = []
    for name, (make, bound) in tutorial_kernels.CASES.items():
        given, pairs = make()
        with compiled(FAMILY):
            for x in given:
                x.kernel[x.grid](**x.arguments, num_warps=x.num_warps, num_stages=x.num_stages)
        errors = [float((out - expected).abs().max()) for out, expected in pairs]
        if not all(error <= bound for error in errors):
            wrong.append(f"{name}: errors {errors}")
    return "\n".join(wrong)


# A fault of the product in Gluon -> a pattern in its PTX and what replaces the first place that it matches
GLUON_FAULTS = {
    "": (r"$^", ""),
    "no proxy fence before a TMA store": (r"fence\.proxy\.async\.shared::cta;(?=[^@]*@%p\d+ \S*bulk_group)", ""),
    "a store's buffer is used too early": (r"\n\s*cp\.async\.bulk\.wait_group\.read\s+0;\n", "\n"),
    "sums are not waited for": (r"wgmma\.wait_group\.sync\.aligned 0;", ""),
    "a stage is released one product early": (r"(wgmma\.wait_group\.sync\.aligned) 1;", r"\1 2;"),
    "a turn is not given": (r"@%p\d+ mbarrier\.arrive\.[^;]*;((?:(?!mbarrier)[^;]*;)*?[^;]*wait_group\S* 1;)", r"\1"),
    "too few bytes are expected": (r", 16384;", ", 8192;"),
    "no fence after tensor maps": (r"fence\.proxy\.async\.shared::cta;", ""),
}


def gluon(fault: str, seed: int | None) -> str:
    """Compare a product in Gluon, of six tiles with four steps each. Return the error's first line, if there is one."""

    def edit(text: str) -> str:
        changed, count = re.subn(*GLUON_FAULTS[fault], text, count=1)
        assert count == bool(fault), fault
        return changed

    x, weight, out = normal(0, 160, 200).bfloat16(), normal(1, 104, 200).bfloat16(), torch.zeros(160, 104).bfloat16()
    try:
        with compiled("sm_90", edit, seed):
            gluon_kernels.product_kernel[(1,)](x, weight, out, 160, 104, 200, num_warps=4)
    except PtxError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    exact = x.double() @ weight.double().T
    return "" if ((out.double() - exact).abs() <= exact.abs() / 128 + 1e-3).all() else "other numbers"


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, slope_ptr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Store act(x) and act'(x) as they are before they are rounded to DTYPE."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, activate(x, ACTIVATION, DTYPE))
    if SLOPE:
        tl.store(slope_ptr + offs, activation_gradient(x * 0.0 + 1.0, x, ACTIVATION, DTYPE))


def _activated(x: Tensor, name: str, dtype: tl.dtype, slope: bool = True) -> tuple[Tensor, Tensor, str]:
    """Return act(x), act'(x), and the PTX that has computed them."""
    out, slopes, block = torch.empty_like(x), torch.empty_like(x), 512
    launches._kernels.clear()
    with compiled(FAMILY):
        _activation_kernel[(len(x) // block,)](x, out, slopes, name, dtype, slope, block, num_warps=4)
    return out, slopes, "".join(kernel.text for kernel in launches._kernels.values())


def activations() -> str:
    """Compare the sigmoids of half types, and those of float32, with float64."""
    tails = torch.tensor([89.0, 1e4, 1e18, 3e38])
    x = torch.cat([torch.linspace(-12, 12, 2040), tails, -tails])
    wrong = []
    for name in ("gelu_tanh", "silu"):
        wide = x.double().requires_grad_()
        # (1 + tanh u) / 2 loses all digits of float64 where tanh is near -1.
        exact = wide * torch.sigmoid(wide if name == "silu" else 2 * (2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3))
        (slope,) = torch.autograd.grad(exact.sum(), wide)
        for dtype in (tl.bfloat16, tl.float16, tl.float32):
            out, slopes, _ = _activated(x, name, dtype)
            error = ((out - exact).abs() / exact.abs().clamp(min=1e-30)).detach()
            worst = {
                "value, x > -3": (error[x > -3].max().item(), 2e-6),
                "value, x > -9": (error[x > -9].max().item(), 1e-5),
                "value": ((out - exact).abs().max().item() / 3e38, 1e-6),
                "slope": ((slopes - slope).abs().max().item(), 1e-5),
            }
            wrong += [f"{name}, {dtype}, {what}: {e:.2e}" for what, (e, bound) in worst.items() if not e <= bound]
    return "\n".join(wrong)


def activation_instructions(name: str, slope: bool) -> float:
    """Return the instructions of PTX for an element that an activation, or its gradient, adds to a copy in bfloat16."""
    x, counts = torch.linspace(-12, 12, 512), []
    for activation in (name, "none"):
        text = _activated(x, activation, tl.bfloat16, slope)[2]
        counts.append(len(re.findall(r"(?:^|;)\s*(?:@%p\d+ )?[a-z][\w.]*\s+[{%\[]", text, re.M)))
        assert counts[-1] > 4, text
    return (counts[0] - counts[1]) / 4  # a thread has four elements


def _raised(by: int) -> Callable[[re.Match[str]], str]:
    """Return what replaces a number, the second group, which follows the first one: the number plus `by`."""
    return lambda found: f"{found[1]}{int(found[2]) + by}"


# A pattern in a line of PTX, and what replaces it in a mutant.
MUTATIONS: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "no barrier": (r"^\s*bar\.sync.*", ""),
    "no wait for copies": (r"^\s*cp\.async\.wait_group.*", ""),
    "a wait for one group of copies less": (r"(wait_group\s+)(\d+)", _raised(1)),
    "no commit of copies": (r"^\s*cp\.async\.commit_group.*", ""),
    "no copy": (r"^.*cp\.async\.c[ag]\..*", ""),
    "no store to shared memory": (r"^.*\bst\.shared\..*", ""),
    "another place in shared memory": (r"(shared.*\[ ?%r\d+ ?\+ ?)(\d+)", _raised(16)),
    "another place in global memory": (r"(\b(?:ld|st)\.global\..*\[ ?%rd\d+ ?\+ ?)(\d+)", _raised(16)),
    "a shuffle that exchanges nothing": (r"(shfl\.sync\.bfly.*%r\d+, )\d+(?=, 31)", r"\g<1>0"),
    "two registers of a product swapped": (r"(mma\.sync.*?\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"),
    "two registers of a difference swapped": (r"(sub\.f32\s+%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    "two registers of a selection swapped": (r"(selp\.\w+\s+%r\d+, )(\w+|%r\d+), (%r\d+)", r"\1\3, \2"),
    "no release": (r"\.release\b", ".relaxed"),
    "no acquire": (r"\.acquire\b", ".relaxed"),
    "a release of the GPU alone": (r"\.sys\.(release|acq_rel)", r".gpu.\1"),
    "an acquire of the GPU alone": (r"\.sys\.acquire", ".gpu.acquire"),
    "no proxy fence": (r"fence\.proxy\.async.*", ""),
    "no fence of a tensor map": (r"^.*fence\.proxy\.tensormap.*", ""),
    "no fence of registers": (r"^\s*wgmma\.fence.*", ""),
    "no wait for products": (r"^\s*wgmma\.wait_group.*", ""),
    "a wait for one group of products less": (r"(wgmma\.wait_group.* )0;", r"\g<1>1;"),
    "no commit of products": (r"^\s*wgmma\.commit_group.*", ""),
    "no product": (r"^\s*wgmma\.mma_async.*", ""),
    "no tile": (r"^.*cp\.async\.bulk\.tensor.*", ""),
    "no bytes are expected": (r"^.*mbarrier\.arrive.*", ""),
    "no wait for a tile": (r"^\s*mbarrier\.try_wait.*", ""),
    "a wait for another phase": (r"(mbarrier\.try_wait.*\], )(%r\d+);", r"\g<1>1;"),
    "no end of an mbarrier": (r"^.*mbarrier\.inval.*", ""),
}


@cache
def workload(name: str) -> Any:
    """Return a function that runs kernels and returns their results."""
    if name == "persistent gemm":  # four tiles of ten steps for three programs
        operands = normal(0, 130, 584).bfloat16(), normal(1, 144, 584).bfloat16(), normal(2, 144).bfloat16()
        return lambda: gemm_forward(*operands, activation="gelu_tanh", keep_preactivation=True)
    if name == "gemm":  # four tiles, the first of which is whole; rows are loaded by asynchronous copies
        x, weight, bias = normal(0, 130, 192), normal(1, 144, 192), normal(2, 144)
        half = [tensor.bfloat16() for tensor in (x, weight, bias)]
        return lambda: gemm_forward(*half, activation="gelu_tanh", keep_preactivation=True)
    shape = operators.load(name.removeprefix("wide ")).cases[0]
    if name == "attention":  # long enough for several rounds of each loop
        shape = replace(shape, T=300)
    if name == "layer_norm":  # more tiles than programs
        shape = replace(shape, M=112)
    if name == "wide layer_norm":  # rows of two blocks, the second of which is not whole
        shape = replace(shape, M=3, C=15000)
    inputs = shape.seeded(torch.bfloat16)
    grad = normal(0, *shape.reference(**inputs).shape, dtype=torch.bfloat16)

    def run() -> tuple[torch.Tensor, ...]:
        with verify.use(kernels="triton"):
            return tuple(evaluate(shape.function, inputs, grad).values())

    return run


def mutants(text: str, mutation: str, most: int) -> list[tuple[str, str]]:
    """Return at most so many (line, PTX) with one line changed."""
    lines = text.split("\n")
    pattern, by = MUTATIONS[mutation]
    changed = {index: re.sub(pattern, by, line, count=1) for index, line in enumerate(lines)}
    places = [index for index, line in enumerate(lines) if changed[index] != line]
    chosen = places if len(places) <= most else sorted(random.Random(0).sample(places, most))
    return [
        (f"{index + 1}: {lines[index].strip()}", "\n".join([*lines[:index], changed[index], *lines[index + 1 :]]))
        for index in chosen
    ]


class Recorded(NamedTuple):
    """A launch of a kernel. before, after: copies of the tensors among its arguments; the last one is scratch."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: list[Any]
    before: list[torch.Tensor]
    after: list[torch.Tensor]

    def found(self, kernel: Kernel) -> bool:
        """Return whether another kernel raises an error for this launch, or leaves another number."""
        tensors = [x for x in self.arguments if isinstance(x, torch.Tensor)]
        for x, before in zip(tensors, self.before, strict=True):
            x.detach().copy_(before)
        try:
            kernel.run(self.grid, self.arguments)
        except PtxError:
            return True
        results = len(tensors) - (self.kernel.scratch > 0)
        pairs = zip(tensors[:results], self.after, strict=False)
        return not all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)


@cache
def recorded(name: str, kernel: str) -> list[Recorded]:
    """Run a workload, and return its launches of a kernel."""
    result, run = [], Kernel.run

    def noting(self: Kernel, grid: tuple[int, ...], arguments: list[Any], **more: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        before = [x.detach().clone() for x in tensors]
        run(self, grid, arguments, **more)
        if self.name == kernel:
            result.append(Recorded(self, grid, arguments, before, [x.detach().clone() for x in tensors]))

    Kernel.run = noting
    with emulated.emulated(FAMILY):
        workload(name)()
    Kernel.run = run
    assert len({id(x.kernel) for x in result}) == 1, f"{name} launches more than one {kernel}"
    return result


def planted(name: str, kernel: str, mutation: str, most: int) -> str:
    """Return the mutants of a kernel that neither a check nor a different number finds, and how many there were."""
    launched = recorded(name, kernel)
    whole, survivors = launched[0].kernel, []
    changed = mutants(whole.text, mutation, most)
    for line, text in changed:
        try:
            mutant = Kernel(text, whole.shared, whole.scratch)
        except PtxError:
            continue
        if not any(x.found(mutant) for x in launched):
            survivors.append(line)
    return "\n".join([*survivors, f"{len(changed)} mutants"])


@cache
def kernels_of(name: str) -> dict[Any, Kernel]:
    """Run a program, and return the kernels that it launches as `launches` keeps them."""
    launches._kernels.clear()
    assert program(name, 2, "float32", 1) == ""
    return dict(launches._kernels)


def planted_in_protocol(name: str, kernel: str, mutation: str) -> str:
    """Return the mutants of a program's kernels that the exploration does not find, and how many there were.

    kernel: the kernel that is changed, or "" for all.
    """
    survivors, count = [], 0
    launches._kernels.update(kernels_of(name))
    for key, whole in kernels_of(name).items():
        for line, text in mutants(whole.text, mutation, 99) if kernel in whole.name else ():
            count += 1
            launches._kernels[key] = Kernel(text, whole.shared, whole.scratch)
            if not program(name, 2, "float32", 1):
                survivors.append(f"{whole.name} {line}")
        launches._kernels[key] = whole
    return "\n".join([*survivors, f"{count} mutants"])


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # the collector does not look at modules again and again while kernels are compiled
    for asked in sys.stdin:
        print(json.dumps([globals()[name](*arguments) for name, *arguments in json.loads(asked)]), flush=True)
