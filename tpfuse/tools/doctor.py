"""The doctor: what of this machine stops tpfuse or slows it down, each with the way out.

`tpfuse doctor` and `tpfuse verify` print all findings, and `tpfuse profile` asks whether a profiler can record here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

import torch

from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.dispatch import choice_for
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.errors import UserError
from tpfuse.kernels.interpreter import INTERPRETED, interpreter_problem
from tpfuse.switches import chosen_implementation, chosen_kernels, resolved_kernels
from tpfuse.tools.machine import Machine, VisibleGpu
from tpfuse.train.launchers import launched

# The Triton that belongs to each torch, for builds of torch that do not require one.
TRITON_OF_TORCH: dict[tuple[int, ...], str] = {(2, 11): "3.6.0", (2, 12): "3.7.1", (2, 13): "3.7.1", (2, 15): "3.9.0"}
# NCCL's message "Error while creating shared memory segment" names this size for each connection (NVIDIA/nccl#290).
_NCCL_SEGMENT = 9637888
# CPU runs of `tpfuse train` with 2 ranks failed with 18 open files and worked with 24, with 4 ranks 24 and 32.
_FILES, _FILES_OF_A_RANK = 16, 4
# Each profiler's name, and its first version with what tpfuse uses: the reports of `nsys stats`, %q in ncu's names.
_PROFILERS = {"nsys": ("Nsight Systems", (2023, 1)), "ncu": ("Nsight Compute", (2020, 1))}
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")  # a profiler sets them for the programs it runs

_ON = "1|true|yes|on|y"
# Variables with the values that are known to hurt, as an expression without case, and what these do.
_HURTING = {
    # 1 puts the work of all streams into one queue.
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "copies of shards do not overlap with products"),
    "CUDA_LAUNCH_BLOCKING": (_ON, "the host waits for every kernel, so nothing overlaps"),
    "NCCL_P2P_DISABLE": (_ON, "NCCL copies through the host instead of directly between GPUs"),
    "NCCL_SHM_DISABLE": (_ON, "NCCL uses the network between GPUs without peer access"),
    "NCCL_IB_DISABLE": (_ON, "NCCL uses TCP between nodes, even if there is InfiniBand"),
    "NCCL_NVLS_ENABLE": ("0", "NCCL does not let NVLink switches sum"),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "the host waits for every collective, so nothing overlaps"),
    "TORCH_DISTRIBUTED_DEBUG": ("detail", "torch compares all ranks before every collective, which takes time"),
    "TRITON_INTERPRET": (_ON, "Triton interprets every kernel on the host, which takes very long"),
    **dict.fromkeys(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        (r".*expandable_segments:\s*false.*", "torch loses memory to fragmentation; `tpfuse train` sets it to True"),
    ),
}

Status = Literal["ok", "note", "fails"]
# A status and a sentence, perhaps with the way out.
Statement = tuple[Status, str] | tuple[Status, str, str]


@dataclass(frozen=True)
class Finding:
    """One fact about the machine, as a sentence. Status "fails" means that something will fail, and the text says what.

    A note is about something that costs speed, that only some programs need, or that is unknown.
    """

    topic: str
    status: Status
    text: str


def examine(machine: Machine) -> list[Finding]:
    """Return all findings about a machine, those of one topic together."""
    gpus, unshared, versions = machine.gpus(), machine.shared_memory(), machine.versions()
    topics: dict[str, Iterable[Statement]] = {
        "software": _software(machine, versions, bool(gpus)),
        "communication": _communication(machine, versions["nccl"], len(gpus), unshared),
        "limits": _limits(machine, max(2, len(gpus))),
        "GPUs": _gpus(machine, versions, gpus),
        "profilers": _profilers(machine) if machine.gpu_files() else (),
        "environment": _environment(machine, bool(gpus)),
        "what tpfuse will use": _use(machine, gpus, unshared),
    }
    return [
        Finding(topic, status, f"{': '.join(words)}.")
        for topic, statements in topics.items()
        for status, *words in statements
    ]


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _software(machine: Machine, versions: Mapping[str, str], gpus: bool) -> Iterator[Statement]:
    torch, triton = versions["torch"], versions["triton"]
    yield "ok", f"Python is {versions['python']}"
    build = f"CUDA {versions['cuda']}" if versions["cuda"] else "CPUs only"
    yield "ok", f"torch is {torch}, built for {build}"
    pair = versions["pinned"] or TRITON_OF_TORCH.get(_release(torch))
    if pair is None:
        yield "note", f"Triton is {triton}. It is unknown which one belongs to torch {torch}"
    elif _release(triton) != _release(pair):
        text = f"Triton is {triton}, but {pair} belongs to torch {torch}. torch.compile and the kernels may fail"
        yield "note", text, f"pip install triton=={pair}"
    else:
        yield "ok", f"Triton is {triton}, which belongs to this torch"
    if problem := interpreter_problem(triton, versions["numpy"]):
        text = "Kernels cannot be interpreted, so `tpfuse verify` without a GPU will fail"
        yield "note" if gpus else "fails", text, problem
    if gpus:  # Triton compiles the function that launches a kernel.
        text = "so every Triton kernel will fail at its first launch"
        if versions["ptxas"]:
            yield "ok", f"ptxas {versions['ptxas']} assembles the kernels"
        else:
            way = "install Triton again, or unset TRITON_PTXAS_PATH"
            yield "fails", f"Triton finds no ptxas that runs, {text}", way
        if folder := machine.unwritable_cache():
            yield "fails", f"Triton cannot write its cache {folder}, {text}", "name another folder in TRITON_CACHE_DIR"
        compiler = machine.environment.get("CC", "") or machine.program("gcc") or machine.program("clang")
        if not compiler:
            yield "fails", f"There is no C compiler, {text}", "install gcc, or name yours in CC"
        elif not machine.python_header():
            yield "fails", f"The C header of Python (Python.h) is missing, {text}", "install python3-dev or the like"
        else:
            yield "ok", f"Triton builds its launchers with {compiler}"


def _communication(machine: Machine, nccl: str, gpus: int, unshared: str) -> Iterator[Statement]:
    if nccl:
        yield "ok", f"NCCL is {nccl}"
    if unshared:
        text = f"Processes cannot share anonymous memory ({unshared}), so `tpfuse train` on several ranks will fail"
        yield "fails", text, "let the container or sandbox permit memfd_create and /proc/PID/fd"
    else:
        yield "ok", "Processes can share anonymous memory, through which ranks watch each other"
    if gpus < 2:
        return  # only NCCL needs /dev/shm
    space = machine.space("dev/shm")
    if space is None:
        text = "/dev/shm does not exist or cannot be written, so NCCL will fail where it needs shared memory"
        yield "fails", text, "mount it with `mount -t tmpfs -o mode=1777 tmpfs /dev/shm`"
        return
    text = "/dev/shm has {1:.0f} MiB free of {0:.0f} MiB".format(*(count / 2**20 for count in space))
    if space[1] < gpus * _NCCL_SEGMENT:
        text += f". NCCL takes about 10 MiB for each of the {gpus} ranks and will fail"
        yield "fails", text, "delete old files there, or give the container --shm-size=1g"
    else:
        yield "ok", f"{text}, which only NCCL uses"


def _limits(machine: Machine, ranks: int) -> Iterator[Statement]:
    """Yield what limits processes. ranks: the number of ranks that a run here may well have."""
    files, needed = machine.open_files(), _FILES + _FILES_OF_A_RANK * ranks
    if files is not None and files < needed:
        text = f"A process may open {files} files, but each of {ranks} ranks needs about {needed} and will fail"
        yield "fails", text, "ulimit -n 4096"
    else:
        yield "ok", f"A process may open {'any number of' if files is None else files} files"
    cores, given, (threads, most) = machine.cores(), machine.environment.get("OMP_NUM_THREADS", ""), machine.threads()
    if given.isdigit() and int(given) > cores:
        text = f"OMP_NUM_THREADS={given} is more than the {cores:g} cores whose time this process may take"
        yield "note", f"{text}, so threads are paused", f"set it to {max(1, int(cores))} divided by the ranks"
    else:
        yield "ok", f"This process and its ranks may take the time of {cores:g} cores"
    if threads > most:
        text = f"torch takes {threads} threads, but OpenMP gives it {most} (OMP_THREAD_LIMIT, OMP_DYNAMIC or"
        text += f" OMP_MAX_ACTIVE_LEVELS). tpfuse takes {most}, and products of other programs may be wrong"
        yield "note", text, f"unset the variable, or set OMP_NUM_THREADS={most}"
    if wrong := machine.wrong_product():
        text = f"The product {wrong}, is wrong, so training on the CPU will compute wrong numbers"
        yield "fails", text, "set OMP_NUM_THREADS=1, or install another build of torch"
    else:
        yield "ok", "Products on the CPU are right in float32 and bfloat16"


def _gpus(machine: Machine, versions: Mapping[str, str], gpus: Sequence[VisibleGpu]) -> Iterator[Statement]:
    module = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", machine.text("proc/driver/nvidia/version") or "")
    name = f"The NVIDIA driver{f' {module[1]}' if module else ''}"
    cuda, built_for = versions["driver"], versions["cuda"]
    if cuda and built_for and int(cuda.split(".")[0]) < int(built_for.split(".")[0]):
        text = f"{name} supports CUDA {cuda}, but torch is built for CUDA {built_for}, so every use of a GPU will"
        yield "fails", f"{text} fail", f"update the driver, or install torch for CUDA {cuda}"
    elif cuda:
        yield "ok", f"{name} supports CUDA {cuda}"
    if not gpus:
        yield _no_gpu(machine, built_for)
    for number, gpu in enumerate(gpus):
        size, capability = f"{gpu.memory / 2**30:.1f} GiB", ".".join(map(str, gpu.capability))
        text = f"cuda:{number} is {gpu.name} with {size} and compute capability {capability}"
        if gpu.problem:
            advice = f"{gpu.problem}; hide this GPU with CUDA_VISIBLE_DEVICES, or give --kernels torch"
            yield "fails", f"{text}. Triton kernels will fail", advice
        else:
            yield "ok", text


def _no_gpu(machine: Machine, built_for: str) -> Statement:
    if not machine.gpu_files():
        return "ok", "There is no GPU, so tpfuse runs on the CPU"
    if machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "note", "CUDA_VISIBLE_DEVICES hides every GPU of this machine", "unset it to use them"
    text = "This machine has GPUs, but training on them will fail, because torch"
    if not built_for:
        return "fails", f"{text} is built without CUDA", "install a build of torch for CUDA"
    return "fails", f"{text} cannot use them", machine.cuda_error() or "the reason is unknown"


def profiler(machine: Machine, name: str) -> tuple[str, str]:
    """Return (the path of a profiler, why it cannot record here and the way out; empty if it can).

    name: nsys, ncu, or torch for torch.profiler, which has no path and records CPUs in any case.
    """
    path, gpus = "", machine.gpu_files()
    attached = [variable for variable in _INJECTIONS if machine.environment.get(variable)]
    if attached and (gpus or name != "torch"):
        return path, (
            f"another profiler is attached to this process ({attached[0]} is set), and only one can record a GPU:"
            " start tpfuse without that profiler, or unset the variable"
        )
    if name == "torch":
        return path, ""
    if not gpus:
        return path, f"{name} records GPUs, and there is none here (/dev has no file nvidia0): use --with trace"
    title, numbers = _PROFILERS[name]
    oldest, path = ".".join(map(str, numbers)), machine.program(name) or ""
    if not path:
        where = f"{name} is neither on PATH nor in /usr/local/cuda/bin or /opt/nvidia"
        return path, f"{where}: install {title} {oldest} or newer, or use --with trace, which needs no tool"
    version = re.search(r"version\s+(\d+\.\d+)", machine.output(path, "--version") or "", re.IGNORECASE)
    if version is None:
        return path, f"`{path} --version` fails or names no version: install {title} {oldest} or newer"
    if _release(version[1]) < numbers:
        return path, f"{path} is {title} {version[1]}, which is too old: install version {oldest} or newer"
    if name == "ncu" and machine.counters_permitted() is False:
        return path, (
            "this user may not read the performance counters of the GPU, and ncu would fail with ERR_NVGPUCTRPERM: load"
            " the driver with NVreg_RestrictProfilingToAdminUsers=0, give the container --cap-add=SYS_ADMIN, or run as"
            " an administrator"
        )
    return path, ""


def _profilers(machine: Machine) -> Iterator[Statement]:
    for name in _PROFILERS:
        path, problem = profiler(machine, name)
        if problem:
            yield "note", f"`tpfuse profile --with {name}` cannot record", problem
        else:
            yield "ok", f"{path} can record"


def _environment(machine: Machine, gpus: bool) -> Iterator[Statement]:
    """Yield the settings that make tpfuse fail or slow, and the place of this process among a launcher's."""
    for name, (values, consequence) in _HURTING.items():
        value = machine.environment.get(name, "")
        if (gpus or name == "TORCH_DISTRIBUTED_DEBUG") and re.fullmatch(values, value, re.IGNORECASE):
            yield "note", f"{name}={value} hurts", f"{consequence}; unset {name}"
    workspace = machine.environment.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if gpus and workspace not in (":4096:8", ":16:8"):
        text = f"CUBLAS_WORKSPACE_CONFIG={workspace} will make --train.deterministic fail, and repeated runs may differ"
        yield "fails", text, "unset it, and tpfuse sets :4096:8"
    names, interfaces = machine.environment.get("GLOO_SOCKET_IFNAME", ""), machine.names("sys/class/net")
    missing = [name for name in names.split(",") if name and name not in interfaces]
    if missing and interfaces:
        text = f"GLOO_SOCKET_IFNAME={names} names {missing[0]}, which does not exist, so Gloo will fail"
        yield "fails", text, f"choose from {', '.join(interfaces)}, or unset it"
    try:
        found = launched(machine.environment)
    except UserError as error:
        yield "fails", f"Ranks cannot start here: {error}"
    else:
        if found is not None:
            yield "ok", f"This is rank {found.rank} of {found.world} that {found.launcher.name} has started"


def _use(machine: Machine, gpus: Sequence[VisibleGpu], unshared: str) -> Iterator[Statement]:
    """Yield which kernels, memory and implementation ranks of this machine use, each with its reason."""
    device, where = ("cuda", "GPUs") if gpus else ("cpu", "CPUs")
    kernels, chosen = resolved_kernels(device), chosen_kernels()
    triton = "interpreted Triton kernels" if INTERPRETED else "Triton kernels"
    name = triton if kernels == "triton" else kernels
    yield "ok", f"tpfuse computes with {name}, which --kernels {chosen} means on {where}"
    if len(gpus) == 1:
        yield "ok", "One rank runs on the one GPU, so nothing is communicated"
        return
    obstacle = unshared or (machine.gpu_obstacle(gpus) if gpus else "")  # ranks on GPUs share memory of the host too
    if obstacle:
        link = gpus and "between" in obstacle
        ways = ("check the driver, and nvidia-fabricmanager if there are NVSwitches",) if link else ()
        yield "note", f"Ranks have no symmetric memory, because {obstacle}", *ways
    elif gpus and (lost := machine.lost_signal(gpus)):
        text = f"Signals from {lost} do not arrive, so ranks with symmetric memory will fail"
        yield "fails", text, "check the driver, and give --parallel.impl collective until they do"
    else:
        backend = CudaMemory.backend if gpus else SharedMemory.backend
        yield "ok", f"Ranks have symmetric memory with the backend {backend}"
    choice = choice_for(device, torch.float32, chosen_implementation(), chosen, obstacle)
    text = f"Tensor-parallel products use {choice.implementation} ({choice.reason})"
    if gpus and choice.state == "default":
        text += ". `tpfuse train` measures them in its first step, and keeps what it finds"
    yield "note" if choice.state == "fallback" else "ok", text


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text, under their topics."""
    lines = []
    for topic, group in groupby(findings, lambda finding: finding.topic):
        lines += [topic, *(f"  {finding.status:<6} {finding.text}" for finding in group)]
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the report."""
    fails, notes = (sum(finding.status == status for finding in findings) for status in ("fails", "note"))
    rest = f"{notes} note{'s' * (notes != 1)}"
    problems = f"{fails} finding{'s' * (fails != 1)} will make something fail"
    return f"{problems if fails else 'nothing fails'}, {rest}"


def run(as_json: bool, machine: Machine | None = None) -> int:
    """Run the command. Return 1 if something will fail, else 0."""
    findings = examine(Machine() if machine is None else machine)
    failed = any(finding.status == "fails" for finding in findings)
    if as_json:
        print(json.dumps({"passed": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        print(f"{report(findings)}\n\n{verdict(findings)}")
    return int(failed)
