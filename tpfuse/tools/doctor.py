"""The doctor: what of this machine stops tpfuse or slows it down, each with the way out.

`tpfuse doctor` and `tpfuse verify` print all findings, and `tpfuse profile` asks whether a profiler can record here.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import triton

from tpfuse.comm.cuda_calls import CudaCalls
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.decisions import driver
from tpfuse.comm.dispatch import choice_for
from tpfuse.comm.limits import core_time, openmp_threads, set_threads
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.errors import UserError
from tpfuse.kernels.interpreter import INTERPRETED, interpreter_problem
from tpfuse.kernels.launch import family
from tpfuse.switches import chosen_implementation, chosen_kernels, resolved_kernels
from tpfuse.testing.inputs import normal
from tpfuse.tools.assembler import ptxas
from tpfuse.train.launchers import launched

# The Triton that belongs to each torch, for builds of torch that do not require one.
TRITON_OF_TORCH: dict[tuple[int, ...], str] = {(2, 11): "3.6.0", (2, 12): "3.7.1", (2, 13): "3.7.1", (2, 15): "3.9.0"}
# NCCL's message "Error while creating shared memory segment" names this size for each connection (NVIDIA/nccl#290).
_NCCL_SEGMENT = 9637888
# CPU runs of `tpfuse train` with 2 ranks failed with 18 open files and worked with 24, with 4 ranks 24 and 32.
_FILES, _FILES_OF_A_RANK = 16, 4
# Rows, terms and columns of products. oneDNN divides those in bfloat16 among the threads, the smaller one unevenly.
_PRODUCTS = ((192, 52, 48), (300, 101, 200))
_PATIENCE = 10.0  # seconds that a program gets
_OPEN = "import sys; open(sys.argv[1], 'r+b').close()"
# Where CUDA and NVIDIA's profilers are installed on machines whose PATH does not contain them.
_FOLDERS = ("usr/local/cuda/bin", "opt/nvidia/nsight-systems/*/bin", "opt/nvidia/nsight-compute/*")
_ADMINISTRATOR, _PERFORMANCE_MONITOR = 1 << 21, 1 << 38  # bits of CapEff: CAP_SYS_ADMIN and CAP_PERFMON
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


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that torch can use. memory: bytes. problem: why Triton kernels cannot run on it; empty if they can."""

    name: str
    memory: int
    capability: tuple[int, int]
    uuid: str
    problem: str = ""


class Machine:
    """This machine. Each method reads one fact and raises nothing; tests replace them to simulate machines.

    root: the folder that contains /proc, /sys and /dev, to which paths are relative. environment: the variables of this
    process. A fact that cannot be read is None, or empty.
    """

    def __init__(self, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
        self.root, self.environment = root, environment

    def text(self, path: str) -> str | None:
        """Return the text of a file, without blanks around it."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder."""
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except OSError:
            return []

    def output(self, *command: str) -> str | None:
        """Return what a command prints; None if it is not found, fails, or takes too long."""
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return None

    def program(self, name: str) -> str | None:
        """Return the path of an installed command: one on PATH, else the newest in the folders of CUDA and Nsight."""
        found = shutil.which(name, path=self.environment.get("PATH", os.defpath))
        folders = (str(folder) for pattern in _FOLDERS for folder in sorted(self.root.glob(pattern), reverse=True))
        return found or next((path for folder in folders if (path := shutil.which(name, path=folder))), None)

    def gpu_files(self) -> list[str]:
        """Return the device files of NVIDIA's GPUs. /proc shows a container also those that it may not use."""
        return [name for name in self.names("dev") if re.fullmatch(r"nvidia\d+", name)]

    def counters_permitted(self) -> bool | None:
        """Return whether this process may read performance counters of GPUs; None if the driver does not say."""
        only = re.search(r"RmProfilingAdminOnly: (\d)", self.text("proc/driver/nvidia/params") or "")
        effective = re.search(r"CapEff:\s*([\da-f]+)", self.text("proc/self/status") or "")
        privileged = effective is not None and int(effective[1], 16) & (_ADMINISTRATOR | _PERFORMANCE_MONITOR) != 0
        return None if only is None else only[1] == "0" or privileged

    def versions(self) -> dict[str, str]:
        """Return versions by name; empty where there is none.

        cuda: for which torch was built; driver: of CUDA, which the driver supports; pinned: the Triton that this torch
        requires, which CPU builds do not; ptxas: the assembler that Triton uses, if one runs.
        """
        pins = (re.match(r"triton==([\d.]+)", text) for text in importlib.metadata.requires("torch") or [])
        assembler, supported, nccl = ptxas(), driver(), ""
        with contextlib.suppress(Exception):  # Builds without NCCL raise errors of several classes.
            nccl = ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda or "",
            "driver": f"{int(supported) // 1000}.{int(supported) % 1000 // 10}" if supported.isdigit() else "",
            "nccl": nccl,
            "pinned": next((pin[1] for pin in pins if pin), ""),
            "ptxas": assembler.version if assembler else "",
        }

    def python_header(self) -> bool:
        """Return whether the C header of this Python is installed."""
        return Path(sysconfig.get_path("include"), "Python.h").is_file()

    def cuda_error(self) -> str:
        """Return why torch can use no GPU; empty if it can."""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return next(iter(str(error).splitlines()), type(error).__name__)
        return ""

    def gpus(self) -> list[VisibleGpu]:
        """Return the GPUs that torch can use, in its order."""
        found = []
        with contextlib.suppress(RuntimeError):  # CUDA does not start, and `cuda_error` says why.
            for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                properties, problem = torch.cuda.get_device_properties(number), ""
                try:
                    family(torch.device("cuda", number))
                except ValueError as error:
                    problem = str(error)
                capability, uuid = (properties.major, properties.minor), str(properties.uuid)
                found.append(VisibleGpu(properties.name, properties.total_memory, capability, uuid, problem))
        return found

    def gpu_obstacle(self, gpus: Sequence[VisibleGpu]) -> str:
        """Return why the ranks of these GPUs cannot share memory; empty if they can. A rank asks the same."""
        for number in range(len(gpus)):
            calls = CudaCalls(torch.device("cuda", number))
            if reason := calls.why_not():
                return reason
            for other, gpu in enumerate(gpus):
                if number != other and (reason := calls.obstacle(gpu.uuid)):
                    return f"{reason} between cuda:{number} and cuda:{other}"
        models = sorted({gpu.name for gpu in gpus})
        return f"kernels of a group need GPUs of one model, not {' and '.join(models)}" if len(models) > 1 else ""

    def lost_signal(self, gpus: Sequence[VisibleGpu]) -> str:
        """Return which GPU's signals to the next GPU fail, which ranks send in the same ways; empty if all arrive."""
        for number in range(len(gpus) if not INTERPRETED else 0):
            here, there = torch.device("cuda", number), torch.device("cuda", (number + 1) % len(gpus))
            try:
                words, calls = torch.zeros(2, dtype=torch.int32, device=there), CudaCalls(here)
                with torch.cuda.device(here):
                    calls.copy_word(words, 0, torch.ones(1, dtype=torch.int32, device=here))
                    calls.set_word(torch.tensor([words.data_ptr()], device=here), 0, 1, 1)
                    calls.synchronize()
                arrived, reason = words.tolist() == [1, 1], "words of its memory keep their values"
            except Exception as error:  # of CUDA, of the compiler of kernels, or of the one of their launchers
                arrived, reason = False, next(iter(str(error).splitlines()), type(error).__name__)
            if not arrived:
                return f"{here} to {there} ({reason})"
        return ""

    def shared_memory(self) -> str:
        """Return why processes of this user cannot share anonymous memory; empty if they can."""
        try:
            descriptor = os.memfd_create("tpfuse doctor", os.MFD_CLOEXEC)
        except (OSError, AttributeError) as error:
            return f"memfd_create: {error}"
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        try:
            os.posix_fallocate(descriptor, 0, 4096)
            opened = self.output(sys.executable, "-I", "-S", "-c", _OPEN, path)
        except OSError as error:
            return str(error)
        finally:
            os.close(descriptor)
        return "" if opened is not None else f"another process cannot open {path}"

    def space(self, folder: str) -> tuple[int, int] | None:
        """Return (size, free space) of a folder's file system in bytes; None if no file can be made in the folder."""
        try:
            tempfile.TemporaryFile(dir=self.root / folder).close()
            usage = shutil.disk_usage(self.root / folder)
        except OSError:
            return None
        return usage.total, usage.free

    def unwritable_cache(self) -> str:
        """Return the folder of Triton's cache if no file can be made in it, or it cannot be made; empty if one can."""
        folder = Path(triton.knobs.cache.dir).absolute()
        existing = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
        return "" if self.space(str(existing)) else str(folder)

    def open_files(self) -> int | None:
        """Return the number of files that a process may open; None if there is no limit."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if soft == resource.RLIM_INFINITY else soft

    def cores(self) -> float:
        """Return the number of cores whose time this process may take."""
        return core_time(self.root)

    def threads(self) -> tuple[int, int]:
        """Return the number of threads that torch has by itself, and the most that OpenMP gives to it."""
        return torch.get_num_threads(), openmp_threads()

    def wrong_product(self) -> str:
        """Return which product of matrices is wrong on the CPU with the threads of a command; empty if none is.

        The bound: sums in float32, whose terms are added in any order, and one rounding to the dtype.
        """
        set_threads(self.cores())
        for (m, k, n), dtype in product(_PRODUCTS, (torch.float32, torch.bfloat16)):
            a, b = normal(1, m, k, dtype=dtype), normal(2, k, n, dtype=dtype)
            out = torch.mm(a, b, out=torch.full((m, n), torch.nan, dtype=dtype)).double()
            exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            bound = torch.finfo(dtype).eps * exact.abs() + k * torch.finfo(torch.float32).eps * terms
            if not ((out - exact).abs() <= bound).all():
                return f"[{m}, {k}] x [{k}, {n}] in {dtype}, computed with {torch.get_num_threads()} threads"
        return ""


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
