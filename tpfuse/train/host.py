"""What commands ask of the machine without torch: files of the kernel, installed programs, rights of this process.

Every method reads one fact and raises nothing: a fact that cannot be read is None, or an empty collection. Tests
replace the methods, or the root and the environment, to simulate machines.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PATIENCE = 10.0  # seconds that a command gets: nvidia-smi takes some where the driver is not kept loaded
# Where CUDA and NVIDIA's profilers are installed on machines whose PATH does not contain them.
_FOLDERS = ("usr/local/cuda/bin", "opt/nvidia/nsight-systems/*/bin", "opt/nvidia/nsight-compute/*")
_ADMINISTRATOR, _PERFORMANCE_MONITOR = 1 << 21, 1 << 38  # bits of CapEff: CAP_SYS_ADMIN and CAP_PERFMON


class Host:
    """This machine. root: the folder that contains /proc, /sys and /dev; environment: the variables of this process."""

    def __init__(self, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
        self.root = root
        self.environment = environment

    def text(self, path: str) -> str | None:
        """Returns the text of a file, without blanks around it. path: relative to the root."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Returns the sorted names in a folder. folder: relative to the root."""
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except OSError:
            return []

    def gpu_files(self) -> list[str]:
        """Returns the device files of NVIDIA's GPUs. /proc shows a container also those that it may not use."""
        return [name for name in self.names("dev") if re.fullmatch(r"nvidia\d+", name)]

    def output(self, *command: str) -> str | None:
        """Returns what a command prints; None if it is not found, fails, or takes too long."""
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=True
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return None
        return done.stdout

    def program(self, name: str) -> str | None:
        """Returns the path of an installed command: one on PATH, else the newest in the folders of CUDA and Nsight."""
        found = shutil.which(name, path=self.environment.get("PATH", os.defpath))
        if found is not None:
            return found
        folders = (folder for pattern in _FOLDERS for folder in sorted(self.root.glob(pattern), reverse=True))
        return next((path for folder in folders if (path := shutil.which(name, path=str(folder)))), None)

    def privileged(self) -> bool:
        """Returns whether this process may read performance counters that only administrators may read."""
        effective = re.search(r"CapEff:\s*([\da-f]+)", self.text("proc/self/status") or "")
        return effective is not None and bool(int(effective[1], 16) & (_ADMINISTRATOR | _PERFORMANCE_MONITOR))

    def counters_permitted(self) -> bool | None:
        """Returns whether this process may read performance counters of GPUs; None if the driver does not say."""
        only = re.search(r"RmProfilingAdminOnly: (\d)", self.text("proc/driver/nvidia/params") or "")
        return None if only is None else only[1] == "0" or self.privileged()
