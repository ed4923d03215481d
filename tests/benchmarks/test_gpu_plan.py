"""The page of figures that need a GPU forgets none, and a run on a GPU writes what it measured."""

import json
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contact_steps, harness
from benchmarks.apart import Row, Rows, append, read
from benchmarks.contact_steps import Plan
from benchmarks.first_contact import measurements, summary, write_results
from benchmarks.harness import OURS, RESULTS
from tpfuse.train.config import parse_train

ROOT = Path(__file__).resolve().parents[2]
PAGE = (RESULTS / "gpu.md").read_text()


def test_every_limit_that_is_not_measured_has_a_command() -> None:
    found = set()
    for path in (*(ROOT / "tpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")):
        for comment, name, rest in re.findall(r"((?:^#.*\n)*)^(\w+) = (.*)$", path.read_text(), re.M):
            if "not measured yet" in (comment + rest).lower():
                found.add(f"{path.relative_to(ROOT)}: {name}")
    assert found == set(re.findall(r"^\| (\S+\.py: \w+) \| `", PAGE, re.M))


def test_commands_exist() -> None:
    commands = re.findall(r"`((?:python -m|torchrun|tpfuse) [^`]+)`", PAGE)
    assert len(commands) > 15
    for words in map(shlex.split, commands):
        if "benchmarks.training_speed" in words:
            assert parse_train(words[3:]).model.preset.startswith("gpt2-")
        elif words[:2] == ["tpfuse", "train"]:
            assert parse_train(words[2:]).parallel.cp == 8
        elif words != ["tpfuse", "tune"]:
            module = words[words.index("-m") + 1]
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
            if "--steps" in words:
                named = takewhile(lambda word: word != "--keep", words[words.index("--steps") + 1 :])
                assert set(named) <= contact_steps.steps(Plan(Path(), True, 0, ())).keys()


def _timed(operator: str, candidate: str, median: float, mode: str = "forward", **more: Any) -> Row:
    row: Row = {"operator": operator, "case": "a", "mode": mode, "candidate": candidate, "asked": True}
    times = {f"{key}_us": median for key in ("median", "p20", "p80")}
    return row | times | {"times_bound": 1.0} | more


def test_a_run_on_a_gpu_writes_its_rows_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of fewer cases does not replace the files that are to be committed."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "committed")
    monkeypatch.setattr(harness, "SCRATCH", tmp_path / "build")
    device: Row = {"step": "device", "row": "device", "seconds": 1.0, "machine": "NVIDIA H100", "date": "2026-12-01"}
    device |= {"torch": "2.13", "triton": "3.7", "commit": "abc", "command": "python -m benchmarks.first_contact"}
    append(tmp_path, device)
    append(tmp_path, {"step": "ceilings", "row": "ceilings", "ceilings": {"matrix": 1e15, "copy": 3e12}})
    rows = [_timed("layer_norm", OURS, 1000.0, bytes=2.7e9), _timed("layer_norm", "eager", 2000.0)]
    append(tmp_path, {"step": "timings: layer_norm", "row": "a", "measurements": rows})
    append(tmp_path, {"step": "timings: adamw", "row": "124m", "error": "RuntimeError: no"})
    whole, measured = summary(tmp_path, [], False), measurements(read(tmp_path))
    committed = write_results(whole, measured, True)
    assert committed == tmp_path / "committed"
    assert write_results(whole, measured[:2], True) == write_results(whole, measured, False) == tmp_path / "build"
    document = json.loads((committed / "gpu-nvidia-h100.json").read_text())
    assert document["machine"] == "NVIDIA H100" and "step" not in document and document["rows"][:2] == rows
    assert document["rows"][2]["error"] == "RuntimeError: no"
    page = (tmp_path / "build" / "gpu-nvidia-h100.md").read_text()
    assert re.search(r"^layer_norm forward, part of copy bandwidth +>= 0.85 +0.90 +pass +a$", page, re.M)
    assert re.search(r"^layer_norm +a +forward +eager +2000.0", page, re.M)


@pytest.mark.parametrize("keep", [False, True])
def test_programs_between_gpus_run_on_all_of_them(keep: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(rows: Rows, command: list[str]) -> tuple[list[str], Row]:
        commands.append(command)
        return ["a table"], {}

    monkeypatch.setattr(contact_steps, "run_program", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    contact_steps.time_node(Plan(tmp_path, False, 0, (), keep), Rows(tmp_path, "nodes", float("inf")))
    assert [command[command.index("--nproc-per-node") + 1] for command in commands] == ["8", "8"]
    programs = [command[command.index("-m", 2) + 1] for command in commands]
    assert programs == ["benchmarks.node", "benchmarks.collectives"]
    assert [command[-1] == "--keep" for command in commands] == [keep, keep]
    rows = read(tmp_path)
    assert [(row["row"], row["table"]) for row in rows] == [("node", ["a table"]), ("collectives", ["a table"])]
