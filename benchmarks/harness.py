"""What every benchmark shares: percentiles, and rows that say where, when and with what they were measured."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def percentiles(times: list[float]) -> dict[str, float]:
    """Median, p20 and p80 of times in any unit."""
    p20, median, p80 = np.percentile(times, [20, 50, 80])
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def machine() -> str:
    """The GPU's name, or the CPU's with the number of cores this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(": ")[2] if lines else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _commit() -> str:
    root = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    return (found.stdout.strip() or "unknown") + ("+changes" if changed.stdout.strip() else "")


def _portable(argument: str) -> str:
    """An argument without the folders of this machine."""
    return Path(argument).name if argument.startswith("/") else argument


def keep(name: str, figures: dict[str, Any]) -> Path:
    """Appends a row to benchmarks/results/NAME.jsonl with the machine, versions, commit and command."""
    row = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_portable, sys.argv[1:])]),
        **figures,
    }
    path = RESULTS / f"{name}.jsonl"
    RESULTS.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return path
