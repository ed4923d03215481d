"""The step with optimizer state on disk: counted before it is made, less resident than in memory, one line where it
cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.offload_step import Phase, bytes_on_disk, gpt2, report
from tpfuse.models.gpt import GPT
from tpfuse.parallel.offload import _file_system

ROOT = Path(__file__).resolve().parents[2]


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.offload_step", "--preset", "tiny", "--tokens", "8", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_step_of_the_tiny_model(tmp_path: Path) -> None:
    if _file_system(tmp_path) == "tmpfs":
        pytest.skip("this machine's temporary files are in memory")
    done = _run("--folder", str(tmp_path), "--steps", "2")
    assert done.returncode == 0, done.stderr
    *_, losses, goal = done.stdout.splitlines()
    first, second = (float(x) for x in losses.partition(": ")[2].partition(";")[0].split(", "))
    assert second < first, "the update has done nothing"
    assert goal.startswith("goal met: 0.")
    assert _run("--folder", str(tmp_path), "--limit", "0.01").returncode == 1
    assert not list(tmp_path.iterdir())


def test_without_a_folder_it_is_one_line() -> None:
    done = _run("--folder", "/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("benchmarks.offload_step: error: offload path /nowhere is not a folder")


def test_state_is_counted_without_the_model() -> None:
    config = gpt2("gpt2-1558m")
    parameters = sum(p.numel() for p in GPT(config, device="meta").parameters())
    assert parameters == 1_557_611_200  # https://huggingface.co/openai-community/gpt2-xl
    assert 12 * parameters <= bytes_on_disk(config) < 12 * parameters * 1.0001


@pytest.mark.parametrize(("peak", "met"), [(9, True), (11, False)])
def test_a_goal_that_is_missed_is_said(peak: int, met: bool, capsys: pytest.CaptureFixture[str]) -> None:
    reached, row = report(gpt2("tiny"), [Phase("step 1, update", 1.0, peak * 2**30)], [5.0], 10.0)
    assert reached == met and row["peak_bytes"] == peak * 2**30
    assert capsys.readouterr().out.splitlines()[-1].startswith("goal met: 9.00" if met else "goal MISSED: 11.00")
