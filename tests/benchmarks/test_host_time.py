"""The benchmark of host time runs with all of Triton: its compiler and the C of its launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.compile
def test_every_operator_has_its_row() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host_time", "--rounds", "1", "--calls", "3", "--markdown"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines() if "|" in line]
    launches = {row[0].replace(" 8 ranks,", "").replace(", 8 ranks", ""): int(row[1]) for row in rows[2:]}
    assert launches == {
        "gemm_forward": 1,
        "gemm as an operator": 1,
        "gemm as an operator, with autograd": 1,
        "all_gather_gemm, copiers": 1,
        "all_gather_gemm, copy engines": 2,
        "gemm_reduce_scatter": 1,
        "gemm_reduce_scatter, copy engines": 10,
    }
    assert all(float(row[2]) > 0 < float(row[3]) for row in rows[2:])
