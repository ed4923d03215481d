"""The files of torch.profiler are there after the steps, also when a step ends because memory ran out."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tpfuse.train import step_profile
from tpfuse.train.step_profile import torch_profile

CPU = torch.device("cpu")


def _events(folder: Path, rank: int) -> list[dict[str, Any]]:
    with gzip.open(folder / f"rank{rank}.json.gz", "rt") as file:
        return list(json.load(file)["traceEvents"])


def test_steps_operators_shapes_and_allocations_are_recorded(tmp_path: Path) -> None:
    x = torch.ones(3, 5)
    with torch_profile(tmp_path / "new", 2, CPU) as recorded:
        for _ in range(2):
            torch.mm(x, x.t())
            recorded.step()
    events = _events(tmp_path / "new", 2)
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == 2
    assert products[0]["args"]["Input Dims"] == [[3, 5], [5, 3]]
    assert "[memory]" in names
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank2.json.gz"]


def test_a_step_without_memory_leaves_the_trace_and_its_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"), torch_profile(tmp_path, 0, CPU):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.empty(2**60)
    assert "aten::mm" in [event.get("name") for event in _events(tmp_path, 0)]


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    """The profiler has stopped all the same: torch lets a process crash at its end whose profiler runs."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError), torch_profile(tmp_path / "file", 0, CPU):
        assert torch.autograd._profiler_enabled()
    assert not torch.autograd._profiler_enabled()


def test_a_gpu_gets_a_snapshot_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that torch gets, in their order: there is no GPU in this test."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class Profiler:
        def __init__(self, **options: Any) -> None:
            calls.append(("profile", {name: options[name] for name in ("activities", "record_shapes")}))

        def start(self) -> None:
            calls.append(("start", {}))

        def stop(self) -> None:
            calls.append(("stop", {}))

        def export_chrome_trace(self, path: str) -> None:
            calls.append(("export", {"path": path}))

    memory = torch.cuda.memory
    monkeypatch.setattr(step_profile, "profile", Profiler)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(("history", options)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(("snapshot", {"path": path})))
    with pytest.raises(torch.OutOfMemoryError), torch_profile(tmp_path, 1, torch.device("cuda", 0)):
        raise torch.OutOfMemoryError("planted")
    both = [step_profile.ProfilerActivity.CPU, step_profile.ProfilerActivity.CUDA]
    assert calls == [
        ("profile", {"activities": both, "record_shapes": True}),
        ("history", {"max_entries": 200_000}),
        ("start", {}),
        ("stop", {}),
        ("snapshot", {"path": str(tmp_path / "rank1.memory.pickle")}),
        ("history", {"enabled": None}),
        ("export", {"path": str(tmp_path / "rank1.json.gz")}),
    ]
