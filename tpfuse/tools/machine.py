"""What the doctor reads of this machine: software, GPUs, memory that processes share, and limits of a process."""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import triton

from tpfuse.comm.cuda_calls import CudaCalls
from tpfuse.comm.decisions import driver
from tpfuse.comm.limits import core_time, openmp_threads, set_threads
from tpfuse.kernels.interpreter import INTERPRETED
from tpfuse.kernels.launch import family
from tpfuse.testing.inputs import normal
from tpfuse.tools.assembler import ptxas

# Rows, terms and columns of products. oneDNN divides those in bfloat16 among the threads, the smaller one unevenly.
_PRODUCTS = ((192, 52, 48), (300, 101, 200))
_PATIENCE = 10.0  # seconds that a program gets
_OPEN = "import sys; open(sys.argv[1], 'r+b').close()"
# Where CUDA and NVIDIA's profilers are installed on machines whose PATH does not contain them.
_FOLDERS = ("usr/local/cuda/bin", "opt/nvidia/nsight-systems/*/bin", "opt/nvidia/nsight-compute/*")
_ADMINISTRATOR, _PERFORMANCE_MONITOR = 1 << 21, 1 << 38  # bits of CapEff: CAP_SYS_ADMIN and CAP_PERFMON


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
