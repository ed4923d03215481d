"""The commands of Nsight Systems, and the table of what took longest in its report."""

import json
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
RANGES = [
    {"Time (%)": 60.0, "Total Time (ns)": 3_000_000, "Instances": 3, "Style": "PushPop", "Range": "tpfuse:step 3"},
    {"Time (%)": 20.0, "Total Time (ns)": 9_000_000, "Instances": 1, "Style": "PushPop", "Range": ":other"},
    {"Time (%)": 20.0, "Total Time (ns)": "1,000,000", "Instances": "6", "Style": "PushPop", "Range": "tpfuse:linear"},
]
KERNELS = [
    {"Time (%)": 25.0, "Total Time (ns)": 500_000, "Instances": 8, "Name": "gemm_forward_kernel"},
    {"Time (%)": 75.0, "Total Time (ns)": 1_500_000, "Instances": 2, "Name": "ncclDevKernel_AllReduce [1, 2]"},
]
NO_KERNELS = "\nSKIPPED: r.sqlite does not contain CUDA kernel data.\n"
StandIn = Callable[..., Path]


def _printed(*tables: object, other: str = "") -> str:
    """Returns what `nsys stats` prints: a line before each table, with brackets of its own."""
    text = "Generating SQLite file [r.sqlite] from [1]\n"
    for table in tables:
        text += f"Processing [r.sqlite] with [/opt/reports/sum.py]... \n{json.dumps(table, indent=2)}\n"
    return text + other


def test_a_program_is_recorded_in_its_marked_steps() -> None:
    out = ["--force-overwrite=true", "--output=p/q/nsys-%h"]
    assert nsys.command(["python", "x.py", "--a=1"], Path("p/q"), capture=True) == [
        "nsys", "profile", *RECORD, *CAPTURE, *out, "python", "x.py", "--a=1",
    ]  # fmt: skip
    assert nsys.command(["x"], Path("p/q"), capture=False, tool="/opt/nsys") == [
        "/opt/nsys", "profile", *RECORD, *out, "x",
    ]  # fmt: skip


def test_ranges_and_kernels_with_the_most_time_come_first(stand_in: StandIn, tmp_path: Path) -> None:
    report = tmp_path / "r.nsys-rep"
    report.touch()
    tool = stand_in("nsys", {"stats": _printed(RANGES, KERNELS)})
    assert nsys.summarise(report).splitlines() == [
        f"{'ranges of tpfuse':<60}         total   share   times",
        f"{'step 3':<60}      3.000 ms     75%       3",
        f"{'linear':<60}      1.000 ms     25%       6",
        "",
        f"{'kernels':<60}         total   share   times",
        f"{'ncclDevKernel_AllReduce [1, 2]':<60}      1.500 ms     75%       2",
        f"{'gemm_forward_kernel':<60}      0.500 ms     25%       8",
    ]
    words = "stats --report nvtx_sum,cuda_gpu_kern_sum --format json --output - --force-export=true"
    assert Path(f"{tool}.words").read_text() == f"{words} {report}\n"
    assert "gemm" not in nsys.summarise(report, rows=1) and "linear" not in nsys.summarise(report, rows=1)


def test_a_report_without_kernels_still_has_its_ranges(stand_in: StandIn, tmp_path: Path) -> None:
    report = tmp_path / "r.nsys-rep"
    report.touch()
    stand_in("nsys", {"stats": _printed(RANGES, other=NO_KERNELS)})
    assert nsys.summarise(report).endswith("6\n\nkernels: there are none in the report")


@pytest.mark.parametrize(
    ("said", "status", "errors", "reason"),
    [
        ("", 1, "one line\nthe file is damaged\n", "the file is damaged"),
        ("[\n{", 0, "", "{"),
        (_printed(other=NO_KERNELS), 0, "", "SKIPPED: .* does not contain CUDA kernel data"),
        (_printed(RANGES), 3, "", "."),
        ("", 3, "", "exit status 3"),
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
    assert "kernels" in nsys.summarise(report)
