"""An H100's stand-in for what is measured on the host: Triton compiles for it and launches, and nothing runs.

All of Triton is its own, the C of its launcher too; the CUDA driver under it is `libcuda_stand_in.c`, built by the C
compiler that Triton needs on GPUs as well. CPU tensors pose as the device's. So everything is in a measured time but
the driver's own work and that of torch's CUDA build: allocations, events and streams.
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

from tpfuse import backend
from tpfuse.kernels import compiled_launch, launch

_SOURCE = Path(__file__).with_name("libcuda_stand_in.c")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


class DriverStandIn:
    """Makes this process's CPU tensors look like an H100's to the launchers, for good. Kernels must not be interpreted.

    folder: the stand-in of libcuda lies there.
    """

    def __init__(self) -> None:
        assert not launch.INTERPRETED, "kernels are interpreted in this process"
        self._folder = tempfile.TemporaryDirectory()
        library = _build(Path(self._folder.name))
        os.environ["TRITON_LIBCUDA_PATH"] = self._folder.name
        self._launches = ctypes.c_long.in_dll(library, "launches")
        from triton.backends.nvidia.driver import CudaDriver

        driver = CudaDriver()
        driver.get_current_device = lambda: -1  # as CPU tensors say
        driver.get_current_stream = lambda device: 0
        driver.get_device_capability = lambda device: (9, 0)
        triton.runtime.driver.set_active(driver)
        launch._gpus[torch.device("cpu")] = "sm_90", 132
        compiled_launch._scratch = _scratch
        backend.INTERPRETED = True  # that is: Triton runs kernels on CPU tensors
        _keep_pages()

    @property
    def launches(self) -> int:
        """How many kernels were launched."""
        return self._launches.value


def _build(folder: Path) -> ctypes.CDLL:
    """libcuda.so.1, loaded under this name, by which what Triton builds finds it."""
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
    """Makes large tensors cost as little as small ones: torch's allocator on GPUs keeps memory, malloc returns it."""
    library = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        library.mallopt(option, 2**30)
