"""The front ends of the Triton versions of torch 2.11 to 2.15 accept every kernel, as far as they distinguish kernels.

`make test` installs the other two compilers next to the installed one.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.support.tiers import exhaustive
from tpfuse.tools import operators
from tpfuse.tools.compilation import CompilationReport, read_report
from tpfuse.tools.gate import violations

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
# Families and dtype. sm_100 has no constants of its own except sizes. The front end accepts float16 wherever it accepts
# bfloat16.
KERNELS = ["sm_90 bfloat16", *exhaustive("sm_80 bfloat16", "sm_80 sm_90 float32")]


def _folder(version: str) -> Path | None:
    """Return the folder that PYTHONPATH must begin with for a version, or None for the installed version."""
    return None if version == triton.__version__ else ROOT / "build" / f"triton-{version}"


def _run(version: str, *flags: str, script: tuple[str, ...] = ("-m", "tpfuse.tools.compilation")) -> Any:
    """Run a Python process that does not interpret kernels, with this version of Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = _folder(version)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, *script, "--front-end", "--json", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def _needed(version: str) -> None:
    folder = _folder(version)
    if folder is not None and not folder.is_dir():
        pytest.skip(
            f"Triton {version} is not in {folder}: `make build/triton-{version}`, or "
            f"`pip install --no-deps --target build/triton-{version} triton=={version}`"
        )


@pytest.fixture(scope="module", params=KERNELS)
def report_of(request: pytest.FixtureRequest) -> Callable[[str], CompilationReport]:
    """Return a function that returns the report of a version. All versions run at the same time."""
    *families, dtype = request.param.split()
    done: dict[str, Any] = {}

    def run(version: str) -> None:
        done[version] = _run(version, "--families", *families, "--dtypes", dtype)

    there = [version for version in VERSIONS if (folder := _folder(version)) is None or folder.is_dir()]
    threads = {version: threading.Thread(target=run, args=(version,)) for version in there}
    for thread in threads.values():
        thread.start()

    def of(version: str) -> CompilationReport:
        _needed(version)
        threads[version].join()
        try:
            return read_report(done[version].stdout)
        except json.JSONDecodeError:
            pytest.fail(f"Triton {version} ended with status {done[version].returncode}: {done[version].stderr}")

    return of


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_passes(report_of: Callable[[str], CompilationReport], version: str) -> None:
    report = report_of(version)
    assert report.triton == version
    assert {result.operator for result in report.compilations} >= OWN_KERNELS
    wrong = [line for result in report.compilations for line in violations(result) if result.error]
    assert not wrong, "\n".join(wrong)


# These operators launch a kernel that no operator before them launches.
OWN_KERNELS = set(operators.names()) - {"ring_attention", "rms_norm", "linear_cross_entropy", "attention_forward"}
