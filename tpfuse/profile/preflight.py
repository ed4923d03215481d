"""Checks that a profiler can record here, before a program runs: a tool, its version, rights, other profilers, a GPU.

Each function raises UserError with a sentence that says what to do. They read the machine from a `Host`, so tests pass
them simulated machines.
"""

import re

from tpfuse.train.errors import UserError
from tpfuse.train.host import Host
from tpfuse.train.messages import warn

# The first version with what tpfuse uses: the names of the reports of `nsys stats`, and %q in names of files of ncu.
_OLDEST = {"nsys": (2023, 1), "ncu": (2020, 1)}
_NAMES = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
_LOCKSTEP = ("--lockstep-kernel-launch", "--communicator-tcp-num-peers")
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")  # a profiler sets them for the programs it runs


def nsys(host: Host) -> str:
    """Returns the path of nsys, if it can record programs on GPUs here."""
    _no_other_profiler(host)
    _gpu(host, "nsys")
    return _tool(host, "nsys")


def ncu(host: Host, *, lockstep: bool = False) -> str:
    """Returns the path of ncu, if it can measure kernels here. lockstep: on several ranks, each with an ncu."""
    _no_other_profiler(host)
    _gpu(host, "ncu")
    path = _tool(host, "ncu")
    if host.counters_permitted() is False:
        raise UserError(
            "this user may not read the performance counters of the GPU, and ncu would fail with ERR_NVGPUCTRPERM: load"
            " the driver with NVreg_RestrictProfilingToAdminUsers=0, give the container --cap-add=SYS_ADMIN, or run as"
            " an administrator"
        )
    options = (host.output(path, "--help") or "") if lockstep else ""
    if lockstep and not all(option in options for option in _LOCKSTEP):
        raise UserError(
            f"{path} has no option {' or '.join(_LOCKSTEP)}, which the measurement on several ranks needs: install a"
            " newer Nsight Compute, 2026.1 for example"
        )
    if _dcgm(host):
        warn(
            "DCGM runs on this machine (nv-hostengine). If ncu says that a driver resource is unavailable, call"
            " `dcgmi profile --pause` before, and `dcgmi profile --resume` afterwards"
        )
    return path


def torch_profiler(host: Host) -> None:
    """Checks that torch.profiler can record the GPUs here. It can record CPUs in any case."""
    if host.gpu_files():
        _no_other_profiler(host)


def _tool(host: Host, name: str) -> str:
    path, oldest = host.program(name), ".".join(map(str, _OLDEST[name]))
    if path is None:
        raise UserError(
            f"{name} is neither on PATH nor in /usr/local/cuda/bin or /opt/nvidia: install {_NAMES[name]} {oldest} or"
            " newer, or use --with trace, which needs no tool"
        )
    said = host.output(path, "--version")
    if said is None:
        raise UserError(f"`{path} --version` fails: install {_NAMES[name]} again")
    version = re.search(r"version\s+(\d+)\.(\d+)", said, re.IGNORECASE)
    if version is None:
        raise UserError(f"`{path} --version` names no version: install {_NAMES[name]} {oldest} or newer")
    if (int(version[1]), int(version[2])) < _OLDEST[name]:
        found = f"{version[1]}.{version[2]}"
        raise UserError(f"{path} is {_NAMES[name]} {found}, which is too old: install version {oldest} or newer")
    return path


def _gpu(host: Host, name: str) -> None:
    if not host.gpu_files():
        raise UserError(f"{name} records GPUs, and there is none here (/dev has no file nvidia0): use --with trace")


def _no_other_profiler(host: Host) -> None:
    found = [name for name in _INJECTIONS if host.environment.get(name)]
    if found:
        raise UserError(
            f"another profiler is attached to this process ({found[0]} is set), and only one can record a GPU: start"
            " tpfuse without that profiler, or unset the variable"
        )


def _dcgm(host: Host) -> bool:
    return any(host.text(f"proc/{name}/comm") == "nv-hostengine" for name in host.names("proc") if name.isdigit())
