"""An H100's stand-in for measurements on the host: Triton compiles for it and launches, and no kernel runs.

All of Triton is real, and so is the C of its launcher. The CUDA driver under it is `libcuda_stand_in.c`, built by the C
compiler that Triton needs on GPUs as well. CPU tensors take the place of the device's. So a measured time contains
everything but the work of the driver and that of torch's CUDA build: allocations, events and streams.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from torch import Tensor

from tpfuse import switches
from tpfuse.kernels import compiled_launch, launch

_SOURCE = Path(__file__).with_name("libcuda_stand_in.c")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


class DriverStandIn:
    """A stand-in that makes this process's CPU tensors look like an H100's to the launchers, permanently.

    Kernels must not be interpreted. The stand-in of libcuda is in `_folder`, which is removed with this object.
    """

    def __init__(self) -> None:
        assert not launch.INTERPRETED, "kernels are interpreted in this process"
        self._folder = tempfile.TemporaryDirectory()
        library = _build(Path(self._folder.name))
        os.environ["TRITON_LIBCUDA_PATH"] = self._folder.name
        self._launches = ctypes.c_long.in_dll(library, "launches")
        from triton.backends.nvidia.driver import CudaDriver

        driver = CudaDriver()
        driver.get_current_device = lambda: -1  # the device index of CPU tensors
        driver.get_current_stream = lambda device: 0
        driver.get_device_capability = lambda device: (9, 0)
        triton.runtime.driver.set_active(driver)
        launch._gpus[torch.device("cpu")] = "sm_90", 132
        compiled_launch._scratch = _scratch
        switches.INTERPRETED = True  # this means that Triton runs kernels on CPU tensors
        _keep_pages()

    @property
    def launches(self) -> int:
        """Return the number of launched kernels."""
        return self._launches.value


def _build(folder: Path) -> ctypes.CDLL:
    """Build and load libcuda.so.1. The libraries that Triton builds find it by this name."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("there is no C compiler, which Triton's launcher is built by: install gcc, or set CC")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    target = folder / "libcuda.so.1"
    flags = ["-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8)


def _keep_pages() -> None:
    """Make large tensors cost as little as small ones: torch's allocator on GPUs keeps memory, malloc returns it."""
    library = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        library.mallopt(option, 2**30)
