"""The table of figures that need a GPU forgets none, and shows what the rows of results have."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contact_steps, gpu, harness
from benchmarks.apart import Row, append
from benchmarks.contact_steps import TIMED, Plan
from benchmarks.gpu import LIMITS, UNKNOWN, figures, keep, measured_in, plan_of
from benchmarks.harness import OURS, RESULTS
from tpfuse.train.config import parse_train

ROOT = Path(__file__).resolve().parents[2]
CUDA = {"machine": "NVIDIA H100", "date": "2026-12-01"}
PLACE = "(NVIDIA H100, 2026-12-01)"


def test_the_committed_table_is_current() -> None:
    assert (RESULTS / "gpu.md").read_text() == plan_of(measured_in(RESULTS)), "python -m benchmarks.gpu --plan --keep"


def test_every_limit_that_is_not_measured_has_a_command() -> None:
    found = set()
    for path in (*(ROOT / "tpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")):
        for comment, name, rest in re.findall(r"((?:^#.*\n)*)^(\w+) = (.*)$", path.read_text(), re.M):
            if UNKNOWN in (comment + rest).lower():
                found.add(f"{path.relative_to(ROOT)}: {name}")
    assert found == LIMITS.keys()


def test_commands_exist() -> None:
    for figure in figures():
        words = shlex.split(figure.command)
        if "benchmarks.training_speed" in words:
            assert parse_train(words[3:]).model.preset.startswith("gpt2-")
        elif words[0] == "tpfuse" and words[1] == "train":
            assert parse_train(words[2:]).parallel.cp == 8
        elif words[0] == "tpfuse":
            assert words == ["tpfuse", "tune"]
        else:
            module = words[words.index("-m") + 1]
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
            assert set(words[words.index("--only") + 1 :] if "--only" in words else []) <= TIMED.keys()


def _lines(folder: Path) -> dict[str, str]:
    """Return what the table says is measured, by the name of the figure."""
    cells = [line.split(" | ") for line in plan_of(measured_in(folder)).splitlines() if line.startswith("| ")]
    return {name: measured for _, name, _, measured, _ in cells[1:]}


def _write(folder: Path, name: str, rows: list[Row]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _timed(operator: str, candidate: str, median: float, **more: Any) -> Row:
    row: Row = {"operator": operator, "case": "a", "asked": True, "mode": "forward", "candidate": candidate}
    return row | {f"{key}_us": median for key in ("median", "p20", "p80")} | {"host_us": 7.0, "rounds": 9} | more


def _run(folder: Path) -> None:
    """Write the rows of a run: the device, ceilings and the times of three operators."""
    device: Row = {"step": "device", "row": "device", "seconds": 1.0, **CUDA, "torch": "2.13", "triton": "3.7"}
    device |= {"cuda": "13", "commit": "abc", "command": "python -m benchmarks.gpu", "driver": "600", "python": "3.12"}
    append(folder, device)
    append(folder, {"step": "ceilings", "row": "ceilings", "ceilings": {"matrix": 1e15, "copy": 3e12}})
    for operator, rows in {
        "layer_norm": [_timed("layer_norm", OURS, 1000.0, bytes=2.7e9)],
        "cross_entropy": [
            _timed("cross_entropy", OURS, 20.0),
            _timed("cross_entropy", "plain torch", 80.0),
            _timed("cross_entropy", "torch.compile", 30.0),
            _timed("cross_entropy", OURS, 10.0, mode="backward", host_us=9.0),
            _timed("cross_entropy", "plain torch", 25.0, mode="backward"),
        ],
        "gemm": [
            _timed("gemm", OURS, 10.0, mode="backward"),
            _timed("gemm", "F.linear", 9.0, mode="backward"),
            _timed("gemm", OURS, 10.0, mode="inference"),
            _timed("gemm", "F.linear", 30.0, mode="inference"),
        ],
    }.items():
        append(folder, {"step": f"timings: {operator}", "row": "a", "measurements": rows})
    append(folder, {"step": "timings: adamw", "row": "124m", "error": "RuntimeError: no"})


def test_a_run_on_a_gpu_fills_its_figures(tmp_path: Path) -> None:
    folder, results = tmp_path / "run", tmp_path / "results"
    folder.mkdir()
    _run(folder)
    keep(folder, results)
    document = json.loads((results / "gpu-nvidia-h100.json").read_text())
    assert document["machine"] == "NVIDIA H100" and "step" not in document and len(document["rows"]) == 11
    assert document["rows"][1]["median_ms"] == 0.02 and document["rows"][-1]["error"] == "RuntimeError: no"
    page = (results / "gpu-nvidia-h100.md").read_text()
    assert "| cross_entropy | a; forward | 20 µs | 80 µs, plain torch; 30 µs, torch.compile |" in page
    lines = _lines(results)
    assert lines["layer_norm forward, part of copy bandwidth"] == f"0.90, pass {PLACE}"
    assert lines["cross_entropy, speed / fastest peer"] == f"1.50 to 2.50 {PLACE}"
    assert lines["gemm backward, speed / fastest peer (backward_products.md)"] == f"0.90 {PLACE}"
    assert lines["host time of a call, µs (host_time.md)"] == f"7.00 to 9.00 {PLACE}"
    assert sum(text != UNKNOWN for text in lines.values()) == 4
    assert (results / "gpu.md").read_text() == plan_of(measured_in(results))


def test_rows_between_gpus_fill_their_figures(tmp_path: Path) -> None:
    def product(layer: str, fused: float | None, **more: Any) -> Row:
        times = {"by hand": 30.0, "torch.ops.symm_mem": 15.0} | ({} if fused is None else {"tpfuse fused": fused})
        row: Row = {**CUDA, "ranks": 8, "layer": layer, "M": 8192, "us": {k: {"median": x} for k, x in times.items()}}
        return row | more

    def collective(nbytes: int, tpfuse: float, peer: str = "nccl", **more: Any) -> Row:
        times = {f"{peer}_us": {"median": 30.0}, "tpfuse_us": {"median": tpfuse}}
        return {**CUDA, "ranks": 8, "op": "all_reduce", "bytes": nbytes, **times, **more}

    products = [
        product("70b tp8 qkv", 1.0),  # an older row of the next one
        product("70b tp8 qkv", 20.0),
        product("70b tp8 up", 30.0),
        product("70b tp8 down", 15.0, ranks=4),
        product("70b tp8 proj", None),
    ]
    _write(tmp_path, "node", products)
    rows = [collective(4, 1.0), collective(4, 15.0), collective(8, 60.0), collective(4, 1.0, "gloo", machine="CPU")]
    rows.append(collective(4, 10.0, ranks=4))
    _write(tmp_path, "collectives", rows)
    lines = _lines(tmp_path)
    place = "(8 x NVIDIA H100, 2026-12-01)"
    assert lines["all_gather_gemm on a node, fused, speed / NCCL and cuBLAS"] == f"1.00 to 1.50 {place}"
    assert lines["all_gather_gemm on a node, fused, speed / torch.ops.symm_mem"] == f"0.50 to 0.75 {place}"
    assert lines["gemm_reduce_scatter on a node, fused, speed / NCCL and cuBLAS"] == f"2.00 {place.replace('8', '4')}"
    assert lines["all_reduce, speed / NCCL"] == f"0.50 to 2.00 {place}; 3.00 {place.replace('8', '4')}"
    assert lines["all_gather, speed / NCCL"] == UNKNOWN


def test_the_newest_training_run_of_a_machine_is_shown_and_compared(tmp_path: Path) -> None:
    def row(tokens: float, options: str, gpus: int = 8) -> Row:
        figures = {"tokens_per_second": {"median": tokens}, "mfu": {"median": 0.41}}
        return {**CUDA, "gpus": gpus, "options": options.split(), **figures}

    small, staged = "--model.preset gpt2-124m", "--model.preset gpt2-1558m --parallel.pp 8 --parallel.impl"
    rows = [row(1.0, small), row(2e6, small), row(3e5, small, 1), row(9.0, small, 0), row(8.0, "--train.batch 1")]
    rows += [row(1.0, f"{staged} fused"), row(3.0, f"{staged} fused"), row(2.0, f"{staged} collective", gpus=4)]
    _write(tmp_path, "training", rows)
    lines = _lines(tmp_path)
    first, second = (f"{x} x NVIDIA H100, 2026-12-01" for x in (8, 1))
    assert lines[f"tokens per second, MFU: {small}"] == f"2000000, 41% ({first}); 300000, 41% ({second})"
    figure = "messages between stages, fused, training speed / NCCL"
    assert lines[figure] == UNKNOWN
    _write(tmp_path, "training", [*rows, row(2.0, f"{staged} collective")])
    assert _lines(tmp_path)[figure] == "1.50 (8 x NVIDIA H100, 2026-12-01)"


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    return gpu.main()


def test_without_a_gpu_there_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(harness, "SCRATCH", tmp_path / "results")
    assert _main(monkeypatch, "--out", str(tmp_path / "run")) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("benchmarks.gpu: error: there is no CUDA GPU") and error.count("\n") == 1
    assert _main(monkeypatch, "--plan") == 0
    assert (tmp_path / "results" / "gpu.md").read_text() == plan_of(measured_in(tmp_path))


def test_programs_between_gpus_run_on_all_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "a table\n", "")

    monkeypatch.setattr(contact_steps.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    contact_steps.time_node(Plan(tmp_path, False, 0, ()), contact_steps.Rows(tmp_path, "nodes", float("inf")))
    assert [command[command.index("--nproc-per-node") + 1] for command in commands] == ["8", "8"]
    programs = [command[command.index("-m", 2) + 1] for command in commands]
    assert programs == ["benchmarks.node", "benchmarks.collectives"]
    rows = gpu.read(tmp_path)
    assert [(row["row"], row["table"]) for row in rows] == [("node", ["a table"]), ("collectives", ["a table"])]
