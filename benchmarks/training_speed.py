"""Measure the speed of `tpfuse train` on this machine: tokens per second, MFU (model FLOP utilization) and memory.

    python -m benchmarks.training_speed --model.preset gpt2-124m
    python -m benchmarks.training_speed --model.preset gpt2-1558m --parallel.tp 8 --parallel.impl fused

All options but --keep are those of `tpfuse train`, which runs 40 steps without evaluations in a folder that is removed
afterwards. The first 20 steps do not count: in them kernels are compiled and implementations are measured. The row is
appended to build/results/training.jsonl, or with --keep to benchmarks/results/training.jsonl, which git tracks.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import Row, percentiles, write_row
from tpfuse.train.metrics import read_metrics

STEPS, FIRST = 40, 20  # all steps, and those that do not count


def speed(rows: Sequence[Row]) -> Row:
    """Return the figures of a run from the rows of its metrics.jsonl. Raise ValueError where none of them counts."""
    counted = [row for row in rows if row["step"] > FIRST and row.get("tokens_per_second") is not None]
    if not counted:
        raise ValueError(f"the run has no speed after its first {FIRST} steps")
    figures: Row = {key: percentiles([row[key] for row in counted]) for key in ("tokens_per_second", "mfu")}
    return figures | {"memory_bytes": max(row["memory_bytes"] for row in counted)}


def main() -> int:
    """Train, keep the row, and return the exit status of `tpfuse train`."""
    options = [x for x in sys.argv[1:] if x != "--keep"]
    if {"-h", "--help"} & set(options):
        print(__doc__)
        return 0
    fixed = f"--train.steps {STEPS} --train.eval-every 0 --train.log-every 5".split()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "tpfuse", "train", *options, *fixed, "--out", str(run)]
        status = subprocess.run(command).returncode
        if status:
            return status
        figures = speed(read_metrics(run / "metrics.jsonl"))
    tokens, mfu = (figures[key]["median"] for key in ("tokens_per_second", "mfu"))
    print(f"{tokens:.0f} tokens/s, MFU {mfu:.1%}, {figures['memory_bytes'] / 2**20:.0f} MiB")
    row: Row = {"options": options, "gpus": torch.cuda.device_count()} | figures
    print(f"kept in {write_row('training', row, '--keep' in sys.argv)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
