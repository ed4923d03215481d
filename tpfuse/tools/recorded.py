"""The list of kernels to compile: the launches that operators would make on GPUs of each family, recorded without one.

The launchers run on meta tensors (`tpfuse.kernels.launch.recording`), and Triton's own binder turns the arguments of
each launch into a signature, as it would at run time: None and 1 become constants, and arguments that are divisible by
16 are marked.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tpfuse.explore.ptx import launches
from tpfuse.kernels import launch
from tpfuse.kernels.configurations import TABLE, Configuration, override, read_table
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.kernels.launch import Launch
from tpfuse.tools import operators as cases

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Job:
    """A kernel to compile. dtype: the dtype of the first recorded launch of it."""

    operator: str
    family: str
    dtype: str
    source: Any  # Triton's ASTSource
    num_warps: int
    num_stages: int

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for jobs that compile to the same kernel."""
        return self.family, self.source.hash(), self.num_warps, self.num_stages

    @property
    def constants(self) -> dict[str, Any]:
        """Return the kernel's constexpr parameters, and None for each pointer that is not given."""
        named = {self.source.fn.arg_names[path[0]]: value for path, value in self.source.constants.items()}
        declared = {parameter.name for parameter in self.source.fn.params if parameter.is_constexpr}
        return {name: value for name, value in named.items() if name in declared or value is None}


def target(family: str) -> GPUTarget:
    """Return Triton's target for a family."""
    return GPUTarget("cuda", int(family.removeprefix("sm_")), 32)


def source_of(recorded: Launch, family: str) -> Any:
    """Return what Triton compiles for a launch, specialised for its arguments."""
    kernel = recorded.kernel
    backend = make_backend(target(family))
    options = {"num_warps": recorded.num_warps, "num_stages": recorded.num_stages}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(**recorded.arguments, **options)
    _, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, rest)
    return launches.source_of(kernel, signature, constants, attributes)


@dataclass
class Recorded:
    """The kernels to compile. errors: (operator, family, dtype, message on one line) of each launcher that raised."""

    jobs: list[Job]
    rows: list[Configuration]
    errors: list[tuple[str, str, str, str]]


def _pairs(families: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """Return every (family, dtype), except that float16 occurs with one family only if bfloat16 is compiled too.

    The kernels of the two dtypes differ in conversions alone: of 622 pairs that Triton 3.7.1 compiled, 507 used the
    same registers and shared memory, and no pair differed by more than 18 registers.
    """
    shared = "float16" in dtypes and "bfloat16" in dtypes
    only = "sm_90" if "sm_90" in families else families[0]
    return [
        (family, dtype)
        for family, dtype in itertools.product(families, dtypes)
        if not shared or dtype != "float16" or family == only
    ]


def record(operators: Sequence[str], families: Sequence[str], dtypes: Sequence[str]) -> Recorded:
    """Return the kernels that the operators would launch, each once, and the rows of configurations.toml they chose.

    Only one family has float16 if bfloat16 is asked for too (`_pairs`). This process must not interpret kernels.
    """
    assert not INTERPRETED, "kernels are interpreted in this process"
    jobs: dict[tuple[object, ...], Job] = {}
    errors = []
    rows = read_table(TABLE)
    with override(*rows) as chosen:
        for operator, (family, dtype) in itertools.product(operators, _pairs(families, dtypes)):
            try:
                for job in _launched(operator, family, dtype):
                    jobs.setdefault((operator, *job.key), job)
            except Exception as error:
                errors.append((operator, family, dtype, f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return Recorded(list(jobs.values()), [row for row in rows if row in chosen], errors)


def _launched(operator: str, family: str, dtype: str) -> list[Job]:
    with launch.recording(family) as recording:
        cases.load(operator).launches(DTYPES[dtype])
    return [Job(operator, family, dtype, source_of(x, family), x.num_warps, x.num_stages) for x in recording.launches]
