"""NVIDIA's assembler (ptxas), which makes machine code of what Triton compiles: the one in use, and a newer one.

Several versions make wrong code of wgmma, and NVIDIA has mended them one by one. Triton's wheel has one ptxas for GPUs
before Blackwell and a newer one for Blackwell, which knows the older GPUs too. A kernel whose results are wrong can
therefore be tried again, in a new process, with the newer one:

    newer = newer_ptxas()
    if newer is not None:
        subprocess.run(command, env=os.environ | {"TRITON_PTXAS_PATH": newer.path})

Triton's cache keeps the results of the two apart. What CUDA 13 assembles needs a driver for CUDA 13 (580 or newer).
"""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
from triton import knobs


class Assembler(NamedTuple):
    """A ptxas: its path, and its version, such as 12.8.93."""

    path: str
    version: str


def _blackwell() -> bool:
    """Return whether this machine's GPU is a Blackwell or newer, for which Triton has a ptxas of its own."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10


def ptxas() -> Assembler | None:
    """Return the ptxas that Triton uses for this machine's GPU, or for Hopper where there is none; None if it fails."""
    return _assembler("ptxas_blackwell" if _blackwell() else "ptxas")


def newer_ptxas() -> Assembler | None:
    """Return the newest ptxas of Triton's wheel and of NVIDIA's package nvidia-cuda-nvcc, for TRITON_PTXAS_PATH.

    None if the one in use is as new, or on Blackwell, where Triton ignores this variable.
    """
    used = ptxas()
    if used is None or _blackwell():
        return None
    found = [_at(str(path)) for path in packaged("ptxas")]
    newest = max(filter(None, [used, _assembler("ptxas_blackwell"), *found]), key=_numbers)
    return None if newest.version == used.version else newest


def packaged(program: str) -> list[Path]:
    """Return the programs of this name that NVIDIA's packages have installed."""
    nvidia = importlib.util.find_spec("nvidia")  # the folder that these packages share
    folders = (nvidia.submodule_search_locations if nvidia else None) or ()
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*/bin/{program}"))]


def _numbers(assembler: Assembler) -> list[int]:
    return [int(number) for number in assembler.version.split(".")]


def _assembler(knob: str) -> Assembler | None:
    """Return the ptxas of Triton's knob; None if Triton finds none that runs."""
    try:
        return _at(getattr(knobs.nvidia, knob).path)
    except (OSError, RuntimeError):
        return None


def _at(path: str) -> Assembler | None:
    """Return the ptxas at a path; None if there is none that runs."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    version = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return Assembler(path, version[1]) if version else None
