"""The tables that Nsight Systems prints of its report. test_command.py has its commands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpfuse.errors import RunError, UserError
from tpfuse.profile import nsys
from tpfuse.testing.patience import patient


def stand_in(folder: Path, script: str) -> str:
    """Write a program in the place of nsys, and return its path."""
    program = folder / "nsys"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_the_tables_are_those_of_nsys(tmp_path: Path) -> None:
    report = tmp_path / "r.nsys-rep"
    report.touch()
    tool = stand_in(tmp_path, 'echo "$*"; echo "60.0  tpfuse:step 3"')
    words = "stats --report nvtx_sum,cuda_gpu_kern_sum --format table --output - --force-export=true"
    assert nsys.summarise(report, tool=tool) == f"{words} {report}\n60.0  tpfuse:step 3"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo one line >&2; echo the file is damaged >&2; exit 1", "the file is damaged"),
        ("echo tables; exit 3", "tables"),
        ("exit 0", "exit status 0"),
        ("exec sleep 60", r".* timed out after 0\.1 seconds"),
    ],
)
def test_a_report_that_nsys_cannot_read_is_an_error(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, tool = tmp_path / "r.nsys-rep", stand_in(tmp_path, script)
    with pytest.raises(UserError, match=r"there is no report .*r\.nsys-rep: nsys writes it if the program has called"):
        nsys.summarise(report, tool=tool)
    report.touch()
    if "sleep" in script:
        monkeypatch.setattr(nsys, "_PATIENCE", 0.1)
    with pytest.raises(RunError, match=f"nsys stats cannot read .*r.nsys-rep: {reason}"):
        nsys.summarise(report, tool=tool)
    with pytest.raises(RunError, match="No such file"):
        nsys.summarise(report, tool=str(tmp_path / "absent"))


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
def test_nsys_records_a_program_and_reads_its_report(tmp_path: Path) -> None:
    code = "import torch\nwith torch.cuda.nvtx.range('x'): print(torch.ones(9, device='cuda').sum())"
    command = nsys.command([sys.executable, "-c", code], tmp_path, capture=False)
    subprocess.run(command, check=True, timeout=patient(240.0))
    (report,) = tmp_path.glob("nsys-*.nsys-rep")
    assert "Kernel" in nsys.summarise(report)
