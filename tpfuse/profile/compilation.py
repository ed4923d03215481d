"""Compiles, without a GPU, every kernel that the operators would launch, and says what each takes.

    python -m tpfuse.profile.compilation gemm --families sm_90 --dtypes bfloat16

Launches are recorded on meta tensors (`tpfuse.kernels.launch.recording`), so that what is compiled is what would be
launched: Triton's own binder turns their arguments into a signature, as it would at run time. Each compilation runs in
a process of its own, so that one that fails, or takes the compiler down, is a line of the table.

Kernels are compiled only where they are not interpreted: elsewhere `compile_in_subprocess` starts this module anew.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tpfuse.kernels import configurations, launch
from tpfuse.kernels.configurations import Configuration
from tpfuse.kernels.launch import FAMILIES, Launch
from tpfuse.profile import cases, resources

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Job:
    """One compilation to be done. dtype: of the launches that it was first met in."""

    operator: str
    family: str
    dtype: str
    source: Any  # Triton's ASTSource
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's constexpr parameters, and None for pointers that are not given."""
        named = {self.source.fn.arg_names[path[0]]: value for path, value in self.source.constants.items()}
        declared = {parameter.name for parameter in self.source.fn.params if parameter.is_constexpr}
        return {name: value for name, value in named.items() if name in declared or value is None}


@dataclass(frozen=True)
class Compilation:
    """What came of a Job. Where `error` is set, the rest of the figures are empty."""

    operator: str
    family: str
    dtype: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int  # those of specialised partitions included
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
    error: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was compiled, and the rows of configurations.toml that the launches chose."""

    triton: str
    compilations: list[Compilation]
    rows: list[Configuration]


def source_of(recorded: Launch, family: str) -> Any:
    """The ASTSource of a launch, specialised for its arguments as Triton does at run time."""
    kernel = recorded.kernel
    backend = make_backend(target(family))
    options = {"num_warps": recorded.num_warps, "num_stages": recorded.num_stages}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(**recorded.arguments, **options)
    _, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, rest)
    return ASTSource(kernel, signature, constants, attributes)


def target(family: str) -> GPUTarget:
    """Triton's name of a family."""
    return GPUTarget("cuda", int(family.removeprefix("sm_")), 32)


def compiled(job: Job) -> Any:
    """Triton's CompiledKernel; its `asm` holds "ttir", "ttgir", "ptx" and "cubin"."""
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    return triton.compile(job.source, target=target(job.family), options=options)


@contextlib.contextmanager
def _chosen_rows() -> Iterator[dict[int, Configuration]]:
    """Collects the rows that `configurations.choose` gives, by identity."""
    rows: dict[int, Configuration] = {}
    fits = Configuration.fits

    def watched(row: Configuration, *arguments: Any) -> bool:
        fitting = fits(row, *arguments)
        if fitting:
            rows[id(row)] = row
        return fitting

    with mock.patch.object(configurations.Configuration, "fits", watched):
        yield rows


def record(
    operators: Sequence[str], families: Sequence[str], dtypes: Sequence[str]
) -> tuple[list[Job], list[Configuration]]:
    """What the operators would launch, each compilation once, and the rows of configurations.toml that they chose."""
    assert not launch.INTERPRETED, "kernels are interpreted in this process"
    jobs: dict[tuple[object, ...], Job] = {}
    with _chosen_rows() as rows:
        for operator in operators:
            module = cases.load(operator)
            for family in families:
                for dtype in dtypes:
                    with launch.recording(family) as recording:
                        module.launches(DTYPES[dtype])
                    for x in recording.launches:
                        job = Job(operator, family, dtype, source_of(x, family), x.num_warps, x.num_stages)
                        jobs.setdefault((family, job.source.hash(), x.num_warps, x.num_stages), job)
    return list(jobs.values()), list(rows.values())


def examined(job: Job, kernel: Any) -> Compilation:
    """What a compiled kernel takes and consists of."""
    cubin, ttgir = kernel.asm["cubin"], kernel.asm["ttgir"]
    registers, spilled = resources.registers_and_stack(cubin)
    counts = resources.instructions(resources.disassembly(cubin))
    metadata = kernel.metadata
    tensor_memory = getattr(metadata, "tmem_size", None) or 0
    return Compilation(
        **_identity(job) | {"num_warps": metadata.num_warps},
        registers=registers,
        spilled=spilled,
        shared=metadata.shared,
        programs=resources.occupancy(job.family, registers, metadata.shared, metadata.num_warps, tensor_memory),
        dot="tt.dot" in kernel.asm["ttir"],
        tensor_cores=resources.tensor_cores(counts),
        loads=resources.access_widths(counts, "LDG", "LDGSTS"),
        stores=resources.access_widths(counts, "STG"),
        bulk=any(name.startswith("UTMA") for name in counts),
        specialized="ttg.warp_specialize" in ttgir,
    )


def _identity(job: Job) -> dict[str, Any]:
    return {
        "operator": job.operator,
        "family": job.family,
        "dtype": job.dtype,
        "kernel": job.source.name,
        "constants": {name: x if isinstance(x, int | float) else str(x) for name, x in job.constants.items()},
        "num_warps": job.num_warps,
        "num_stages": job.num_stages,
    }


def _keep(kernel: Any, stem: Path) -> None:
    """Writes what the compiler made, stage by stage, for people who want to read it."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for stage in ("ttir", "ttgir", "ptx"):
        stem.with_suffix(f".{stage}").write_text(kernel.asm[stage])
    stem.with_suffix(".sass").write_text(resources.disassembly(kernel.asm["cubin"]))


def _reason(error: BaseException, printed: str) -> str:
    """One line: the compiler's own error where it printed one."""
    lines = [line.partition("error:")[2] for line in printed.splitlines() if "error:" in line]
    text = str(error).strip().splitlines()
    return " ".join((lines[0] if lines else text[-1] if text else "").split()) or type(error).__name__


def _work(job: Job, sender: Connection, keep: Path | None) -> None:
    """The whole of a worker process: what the compiler prints is kept from the terminal."""
    with tempfile.TemporaryFile() as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        try:
            kernel = compiled(job)
            result = examined(job, kernel)
            if keep is not None:
                _keep(kernel, keep)
        except BaseException as error:
            sys.stdout.flush()
            output.seek(0)
            reason = _reason(error, output.read().decode(errors="replace"))
            result = Compilation(**_identity(job), error=reason)
        sender.send(result)


def compile_jobs(jobs: Sequence[Job], keep: Path | None = None) -> Iterator[tuple[int, Compilation]]:
    """(index, result) of each job as it is done, on all cores. keep: a folder for what the compiler makes."""
    context = multiprocessing.get_context("fork")  # jobs hold functions of Triton, which cannot be sent
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Any, tuple[int, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            index, job = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            stem = None if keep is None else keep / f"{job.operator}-{index}-{job.family}-{job.source.name}"
            process = context.Process(target=_work, args=(job, sender, stem))
            process.start()
            sender.close()
            running[receiver] = index, process
        for done in wait(list(running)):
            index, process = running.pop(done)
            try:
                result = done.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                result = Compilation(**_identity(jobs[index]), error=f"the compiler ended with {process.exitcode}")
            process.join()
            yield index, result


def compile_here(
    operators: Sequence[str], families: Sequence[str], dtypes: Sequence[str], keep: Path | None = None
) -> Report:
    """Records and compiles in this process's children. The kernels must not be interpreted here."""
    jobs, rows = record(operators, families, dtypes)
    results = dict(compile_jobs(jobs, keep))
    return Report(triton.__version__, [results[index] for index in range(len(jobs))], rows)


def compile_in_subprocess(operators: Sequence[str], families: Sequence[str], dtypes: Sequence[str]) -> Report:
    """`compile_here` in a Python of its own that does not interpret. Raises RuntimeError where it fails as a whole."""
    flags = ["--json", "--families", *families, "--dtypes", *dtypes]
    done = subprocess.run(
        [sys.executable, "-m", "tpfuse.profile.compilation", *operators, *flags],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"compiling {', '.join(operators)} failed: {done.stderr.strip()}")
    document = json.loads(done.stdout)
    return Report(
        document["triton"],
        [_read(entry) for entry in document["compilations"]],
        [Configuration(**row) for row in document["rows"]],
    )


def _read(entry: dict[str, Any]) -> Compilation:
    widths = {name: {int(width): count for width, count in entry[name].items()} for name in ("loads", "stores")}
    return Compilation(**entry | widths)


def describe(result: Compilation) -> str:
    """One line for people."""
    constants = " ".join(f"{name}={value}" for name, value in result.constants.items() if value != "None")
    head = f"{result.operator:<20} {result.family:<6} {result.dtype:<8} {result.kernel}"
    head += f" warps={result.num_warps} stages={result.num_stages} {constants}"
    if result.error:
        return f"{head}\n    error: {result.error}"
    units = "+".join(result.tensor_cores) or ("no tensor cores" if result.dot else "")
    return (
        f"{head}\n    registers {result.registers}  spilled {result.spilled}  shared {result.shared}"
        f"  programs/multiprocessor {result.programs}  {units}{'  TMA' if result.bulk else ''}"
        f"{'  specialized' if result.specialized else ''}  loads {result.loads}  stores {result.stores}"
    )


def main() -> int:
    """Exit status 1 where something does not compile or spills."""
    parser = argparse.ArgumentParser(prog="python -m tpfuse.profile.compilation", description=__doc__.split("\n")[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(cases.names())}; default: all")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="write TTIR, TTGIR, PTX and SASS of each kernel there"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    unknown = sorted(set(options.operators) - set(cases.names()))
    if unknown:
        parser.error(f"there is no operator {unknown[0]}: expected one of {', '.join(cases.names())}")
    report = compile_here(options.operators or cases.names(), options.families, options.dtypes, options.keep)
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        for result in report.compilations:
            print(describe(result))
    return int(any(result.error or result.spilled for result in report.compilations))


if __name__ == "__main__":
    sys.exit(main())
