"""The front ends of the Triton versions of torch 2.11 to 2.15 accept every kernel, as far as they distinguish kernels.

`make test` installs the other two compilers next to the installed one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.support.compilations import read_report
from tests.support.tiers import exhaustive
from tpfuse.tools import operators
from tpfuse.tools.compilation import CompilationReport
from tpfuse.tools.gate import violations

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "3.6.0", "3.9.0"
# The second tier compiles every kernel by the installed version (test_compilation.py).
OTHERS = tuple(version for version in (OLDEST, "3.7.1", NEWEST) if version != triton.__version__)
# Versions, how many features occur together (`front_end.representatives`), family and dtypes. The other families have
# no constants of their own except sizes: launches that TMA cannot read are among those of sm_90. The front end accepts
# float16 wherever it accepts bfloat16.
KERNELS = [
    ((OLDEST, NEWEST), 1, "sm_90", "bfloat16"),
    *exhaustive((OTHERS, 2, "sm_90", "bfloat16 float32")),
]


def _folder(version: str) -> Path | None:
    """Return the folder that PYTHONPATH must begin with for a version, or None for the installed version."""
    return None if version == triton.__version__ else ROOT / "build" / f"triton-{version}"


def _start(version: str, *flags: str) -> subprocess.Popen[str]:
    """Start a Python process that does not interpret kernels, with this version of Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = _folder(version)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tpfuse.tools.compilation", "--json", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def _report(version: str, process: subprocess.Popen[str]) -> CompilationReport:
    printed, errors = process.communicate()
    try:
        return read_report(printed)
    except json.JSONDecodeError:
        pytest.fail(f"Triton {version} ended with status {process.returncode}: {errors}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("versions", "together", "family", "dtypes"), KERNELS)
def test_every_kernel_passes(versions: tuple[str, ...], together: int, family: str, dtypes: str) -> None:
    """All versions run at the same time."""
    missing = [version for version in versions if (folder := _folder(version)) and not folder.is_dir()]
    flags = ("--front-end", str(together), "--families", family, "--dtypes", *dtypes.split())
    started = {version: _start(version, *flags) for version in versions if version not in missing}
    for version, process in started.items():
        report = _report(version, process)
        assert report.triton == version
        assert {result.operator for result in report.compilations} >= OWN_KERNELS
        wrong = [line for result in report.compilations for line in violations(result) if result.error]
        assert not wrong, "\n".join([version, *wrong])
    if missing:
        pytest.skip(
            "; ".join(
                f"Triton {version} is not installed: `make build/triton-{version}`, or `pip install --no-deps --target"
                f" build/triton-{version} triton=={version}`"
                for version in missing
            )
        )


# These operators launch a kernel that no operator before them launches.
OWN_KERNELS = set(operators.names()) - {"rms_norm", "linear_cross_entropy", "attention_forward"}
