"""Compile, without a GPU, every kernel that the operators would launch, and report the resources that each one uses.

    python -m tpfuse.tools.compilation gemm --families sm_90 --dtypes bfloat16
    python -m tpfuse.tools.compilation --front-end

The results are stored in Triton's cache, beside the kernels, so that a second run compiles only those that have
changed; with TRITON_ALWAYS_COMPILE=1 it compiles all. The front end alone (`tpfuse.tools.front_end`) takes seconds for
all kernels.

Each whole compilation runs in a process of its own, so that a compilation that fails, or that crashes the compiler, is
reported on one line. Kernels that are interpreted cannot be compiled.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from tpfuse.comm.limits import core_time
from tpfuse.kernels.configurations import Configuration
from tpfuse.kernels.launch import FAMILIES
from tpfuse.tools import front_end, gate, resources, wgmma_hazards
from tpfuse.tools import operators as cases
from tpfuse.tools.recorded import DTYPES, Job, Recorded, record, target
from tpfuse.tools.resources import Compilation


@dataclass(frozen=True)
class CompilationReport:
    """The results of all compilations, and the rows of configurations.toml that the launches chose."""

    triton: str
    compilations: list[Compilation]
    rows: list[Configuration]


def compiled(job: Job) -> Any:
    """Return Triton's CompiledKernel of a job; its `asm` holds "ttir" (not Gluon's), "ttgir", "ptx" and "cubin"."""
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    return triton.compile(job.source, target=target(job.family), options=options)


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
    """Write the output of each stage of the compiler to a file, for people who want to read it."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for stage in {"ttir", "ttgir", "ptx"} & kernel.asm.keys():  # Gluon's have no TTIR
        stem.with_suffix(f".{stage}").write_text(kernel.asm[stage])
    stem.with_suffix(".sass").write_text(resources.disassembly(kernel.asm["cubin"]))


def _reason(error: BaseException, printed: str) -> str:
    """Return one line: the error that the compiler printed, or else the first cause in the chain of exceptions."""
    lines = [line.partition("error:")[2] for line in printed.splitlines() if "error:" in line]
    while error.__cause__ is not None:
        error = error.__cause__
    if lines:
        return " ".join(lines[0].split())[:300]
    return " ".join(str(error).split())[-300:] or type(error).__name__  # Triton shows the source before the reason


def _work(job: Job, sender: Connection, keep: Path | None, examined: bool) -> None:
    """Run a worker process: compile a job and send the result. The compiler's output does not reach the terminal."""
    with tempfile.TemporaryFile() as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        try:
            knobs.nvidia.dump_ptxas_log = examined
            kernel = compiled(job)
            result = Compilation(**_identity(job))
            if examined:
                result = resources.examine(kernel, _identity(job), _printed(output))
                entry, name = _store(job)
                entry.put(json.dumps(asdict(result)), name)
            if keep is not None:
                _keep(kernel, keep)
        except BaseException as error:
            result = Compilation(**_identity(job), error=_reason(error, _printed(output)))
        sender.send(result)


def _printed(output: IO[bytes]) -> str:
    """Return the text that this process has printed to a file."""
    sys.stdout.flush()
    output.seek(0)
    return output.read().decode(errors="replace")


def compile_jobs(
    jobs: Iterable[Job], keep: Path | None = None, *, examined: bool = True
) -> Iterator[tuple[int, Compilation]]:
    """Compile the jobs on all cores, and yield (index, result) of each job when it is done.

    A job is taken from `jobs` when a core is free for it, and not compiled if its result is stored by then. keep: a
    folder to which the compiler's output is written, for which all jobs are compiled. examined: whether the results
    contain the resources that a kernel uses, for which ptxas may run a second time.
    """
    most = max(1, int(core_time()))
    context = multiprocessing.get_context("fork")  # jobs hold functions of Triton, which cannot be pickled
    waiting = enumerate(jobs)
    running: dict[Any, tuple[int, Job, BaseProcess]] = {}
    while True:
        while len(running) < most and (taken := next(waiting, None)):
            index, job = taken
            if keep is None and (stored := _stored(job)) is not None:
                yield index, stored
                continue
            receiver, sender = context.Pipe(duplex=False)
            stem = None if keep is None else keep / f"{job.operator}-{index}-{job.family}-{job.source.name}"
            worker = context.Process(target=_work, args=(job, sender, stem, examined))
            worker.start()
            sender.close()
            running[receiver] = index, job, worker
        if not running:
            return
        for done in wait(list(running)):
            index, job, process = running.pop(done)
            result_end: Any = done
            try:
                result: Compilation = result_end.recv()
            except EOFError:
                process.join()
                reason = f"the compiler ended with exit status {process.exitcode}"
                result = Compilation(**_identity(job), error=reason)
            process.join()
            yield index, result


@cache
def _reader() -> str:
    """Return the digest of the code that makes a Compilation from a compiled kernel."""
    files = resources.__file__, wgmma_hazards.__file__
    return hashlib.sha256(b"".join(Path(str(file)).read_bytes() for file in files)).hexdigest()[:16]


def _store(job: Job) -> tuple[Any, str]:
    """Return the entry of a job in Triton's cache, and the name of the file in it that has the result.

    The entry's key covers the source of the kernel and of every function that it calls, the types and constants of the
    launch, the options, Triton, ptxas and the environment variables that Triton reads. The name covers the code that
    reads the figures.
    """
    backend = make_backend(target(job.family))
    options = backend.parse_options({"num_warps": job.num_warps, "num_stages": job.num_stages})
    key = get_cache_key(job.source, backend, options, env_vars=get_cache_invalidating_env_vars())
    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), f"tpfuse-{_reader()}.json"


def _stored(job: Job) -> Compilation | None:
    """Return the stored result of a job, of whichever operator; None if there is none."""
    entry, name = _store(job)
    path = None if knobs.compilation.always_compile else entry.get_file(name)
    if path is None:
        return None
    result = _read(json.loads(Path(path).read_text(encoding="utf-8")))
    return replace(result, operator=job.operator, dtype=job.dtype)


def compile_here(
    operators: Sequence[str],
    families: Sequence[str],
    dtypes: Sequence[str],
    keep: Path | None = None,
    on_done: Callable[[Compilation], object] = lambda result: None,
    *,
    examined: bool = True,
) -> CompilationReport:
    """Record launches in this process and compile them in its children. This process must not interpret kernels.

    keep, examined: as for `compile_jobs`.
    """
    recorded = record(operators, families, dtypes)
    unique: dict[tuple[object, ...], Job] = {}
    for job in recorded.jobs:
        unique.setdefault(job.key, job)  # some operators launch the same kernels
    jobs, finished = list(unique.values()), dict[tuple[object, ...], Compilation]()
    # Processes that compile at the same time seldom take the same job then, and share their results. Files that are
    # kept have the numbers of the launches.
    if keep is None:
        random.shuffle(jobs)
    for index, result in compile_jobs(jobs, keep, examined=examined):
        finished[jobs[index].key] = result
        on_done(result)
    results = [replace(finished[job.key], operator=job.operator, dtype=job.dtype) for job in recorded.jobs]
    return CompilationReport(triton.__version__, results + _refused(recorded), recorded.rows)


def _refused(recorded: Recorded) -> list[Compilation]:
    """Return a result with an error for each launcher that raised."""
    return [
        Compilation(operator, family, dtype, "", {}, 0, 0, error=reason)
        for operator, family, dtype, reason in recorded.errors
    ]


def front_end_here(
    operators: Sequence[str], families: Sequence[str], dtypes: Sequence[str], together: int
) -> CompilationReport:
    """Record launches, and run the compiler's front end on representatives of them, in this process.

    together: as for `front_end.representatives`.
    """
    recorded = record(operators, families, dtypes)
    results = _refused(recorded)
    for job in front_end.representatives(recorded.jobs, together):
        try:
            front_end.lower(job)
            results.append(Compilation(**_identity(job)))
        except Exception as error:
            results.append(Compilation(**_identity(job), error=_reason(error, "")))
    return CompilationReport(triton.__version__, results, recorded.rows)


def _read(document: dict[str, Any]) -> Compilation:
    """Return the Compilation with the fields of a JSON document, in which the widths are strings."""
    widths = {name: {int(width): count for width, count in document[name].items()} for name in ("loads", "stores")}
    return Compilation(**document | widths)


def _arguments() -> argparse.Namespace:
    known = cases.names()
    parser = argparse.ArgumentParser(prog="python -m tpfuse.tools.compilation", description=__doc__)
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help=f"compile these operators (default: all of {', '.join(known)})"
    )
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="compile for these families of GPUs"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="compile for inputs of these dtypes"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write TTIR, TTGIR, PTX and SASS to this folder")
    parser.add_argument(
        "--front-end",
        nargs="?",
        type=int,
        choices=(1, 2),
        const=2,
        help="run only the front end, and show what it refuses; with 1, on fewer launches, which have every branch",
    )
    parser.add_argument(
        "--warm", action="store_true", help="only fill Triton's cache of this machine, and show what does not compile"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--markdown", action="store_true", help="print the table of benchmarks/results/compiled.md")
    options = parser.parse_args()
    for name in set(options.operators) - set(known):
        parser.error(f"there is no operator {name}: expected one of {', '.join(known)}")
    options.operators = options.operators or known
    return options


def main() -> int:
    """Run the command. Return 1 if a kernel does not pass the gate, else 0."""
    options = _arguments()
    document = options.json or options.markdown
    asked = options.operators, options.families, options.dtypes
    if options.front_end:
        report = front_end_here(*asked, options.front_end)
        if not document:
            print(f"Triton {report.triton}: {len(report.compilations)} launches taken through its front end")
    else:
        described = gate.named if options.warm else gate.describe
        tell = (lambda result: None) if document else (lambda result: print(described(result), flush=True))
        report = compile_here(*asked, options.keep, tell, examined=not options.warm)
    if options.json:
        print(json.dumps(asdict(report)))
    if options.markdown:
        print(gate.table(report.compilations, report.triton), end="")
    judged = [result for result in report.compilations if result.error or not (options.front_end or options.warm)]
    violations = [text for result in judged for text in gate.violations(result)]
    print(*violations, sep="\n", file=sys.stderr, end="\n" if violations else "")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
