"""The assemblers that are found. test_gate.py compiles with the newer one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tpfuse.tools.assembler import newer_ptxas, ptxas

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a ptxas of a version; Triton's two are 12.8.93 and 12.9.86."""

    def written(path: str, version: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
        file.chmod(0o755)
        return file

    monkeypatch.setenv("TRITON_PTXAS_PATH", str(written("ptxas", "12.8.93")))
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(written("ptxas-blackwell", "12.9.86")))
    monkeypatch.syspath_prepend(str(tmp_path))
    return written


def test_the_newest_assembler_is_found(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ptxas().version == "12.8.93" and newer_ptxas().version == "12.9.86"
    package = install("nvidia/cu13/bin/ptxas", "12.10.1")
    assert newer_ptxas() == (str(package), "12.10.1")
    install("nvidia/cuda_nvcc/bin/ptxas", "12.9.100")
    package.chmod(0o644)
    assert newer_ptxas().version == "12.9.100", "the other one does not run"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(install("own", "13.9.1")))
    assert newer_ptxas() is None, "the one in use is the newest"


def test_blackwell_has_an_assembler_of_its_own(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert ptxas().version == "12.9.86" and newer_ptxas() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert ptxas().version == "12.8.93"
