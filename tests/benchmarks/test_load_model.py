"""The measurement of loading: its ranks print what they hold, and its file is removed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.processes
def test_each_rank_holds_its_shards_and_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["-m", "benchmarks.load_model", "--preset", "tiny", "--folder", str(tmp_path)]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    found = re.findall(r"rank (\d): tiny float32, (\d+) MiB, .* peak (-?\d+) MiB for (\d+) MiB of shards", ran.stdout)
    assert sorted(rank for rank, *_ in found) == ["0", "1"]
    for _, whole, peak, held in found:
        assert int(held) < int(whole) and int(peak) >= 0
    assert not list(tmp_path.iterdir())
