"""Processes that compile kernels, under each supported version of Triton, and the report that one prints."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import triton

from tpfuse.kernels.configurations import Configuration
from tpfuse.tools.compilation import CompilationReport, _read

ROOT = Path(__file__).resolve().parents[2]
TRITONS = ("3.6.0", "3.7.1", "3.9.0")
OTHER_TRITONS = tuple(version for version in TRITONS if version != triton.__version__)


def compiling(version: str = triton.__version__) -> dict[str, str]:
    """Return the environment of a Python process that does not interpret kernels, with a version of Triton.

    Skip the test if that version is not installed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    if version != triton.__version__:
        folder = ROOT / "build" / f"triton-{version}"
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is not in {folder}: `make build/triton-{version}`")
        folders.insert(0, str(folder))
    return environment | {"PYTHONPATH": os.pathsep.join(folders)}


def answers(script: Path, works: Sequence[Any], version: str = triton.__version__) -> list[Any]:
    """Return the lines of JSON that a script prints for works, which it reads as JSON, under a version of Triton."""
    command = [sys.executable, str(script)]
    done = subprocess.run(command, input=json.dumps(works), env=compiling(version), text=True, stdout=subprocess.PIPE)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


def read_report(text: str) -> CompilationReport:
    """Return the report that was printed. Raise JSONDecodeError if it is none."""
    document = json.loads(text)
    return CompilationReport(
        document["triton"],
        [_read(fields) for fields in document["compilations"]],
        [Configuration(**row) for row in document["rows"]],
    )
