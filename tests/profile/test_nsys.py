"""The commands of Nsight Systems, and the table of what took longest in its report."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpfuse.profile import nsys
from tpfuse.testing.patience import patient
from tpfuse.train.errors import RunError, UserError

RECORD = [
    "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
]  # fmt: skip
CAPTURE = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
StandIn = Callable[..., Path]


def test_a_program_is_recorded_in_its_marked_steps() -> None:
    out = ["--force-overwrite=true", "--output=p/q/nsys-%h"]
    assert nsys.command(["python", "x.py", "--a=1"], Path("p/q"), capture=True) == [
        "nsys", "profile", *RECORD, *CAPTURE, *out, "python", "x.py", "--a=1",
    ]  # fmt: skip
    assert nsys.command(["x"], Path("p/q"), capture=False, tool="/opt/nsys") == [
        "/opt/nsys", "profile", *RECORD, *out, "x",
    ]  # fmt: skip


def test_the_tables_are_those_of_nsys(stand_in: StandIn, tmp_path: Path) -> None:
    report = tmp_path / "r.nsys-rep"
    report.touch()
    tool = stand_in("nsys", {"stats": "\nTime (%)  Range\n60.0  tpfuse:step 3\n"})
    assert nsys.summarise(report) == "Time (%)  Range\n60.0  tpfuse:step 3"
    words = "stats --report nvtx_sum,cuda_gpu_kern_sum --format table --output - --force-export=true"
    assert Path(f"{tool}.words").read_text() == f"{words} {report}\n"


@pytest.mark.parametrize(
    ("said", "status", "errors", "reason"),
    [
        ("", 1, "one line\nthe file is damaged\n", "the file is damaged"),
        ("tables", 3, "", "tables"),
        ("", 0, "", "exit status 0"),
    ],
)
def test_a_report_that_nsys_cannot_read_is_an_error(
    stand_in: StandIn, tmp_path: Path, said: str, status: int, errors: str, reason: str
) -> None:
    report = tmp_path / "r.nsys-rep"
    report.touch()
    stand_in("nsys", {"stats": said}, status=status, errors=errors)
    with pytest.raises(RunError, match=f"nsys stats cannot read .*r.nsys-rep: {reason}"):
        nsys.summarise(report)


def test_a_slow_or_missing_nsys_is_an_error(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "r.nsys-rep"
    report.touch()
    with pytest.raises(RunError, match="No such file"):
        nsys.summarise(report)
    stand_in("nsys", {}).write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nsys, "_PATIENCE", 0.1)
    with pytest.raises(RunError, match=r"timed out after 0\.1 seconds"):
        nsys.summarise(report)


def test_a_missing_report_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no report .*r\.nsys-rep: nsys writes it if the program has called"):
        nsys.summarise(tmp_path / "r.nsys-rep")


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
def test_nsys_records_a_program_and_reads_its_report(tmp_path: Path) -> None:
    code = "import torch\nwith torch.cuda.nvtx.range('x'): print(torch.ones(9, device='cuda').sum())"
    command = nsys.command([sys.executable, "-c", code], tmp_path, capture=False)
    subprocess.run(command, check=True, timeout=patient(240.0))
    (report,) = tmp_path.glob("nsys-*.nsys-rep")
    assert "Kernel" in nsys.summarise(report)
