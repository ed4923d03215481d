"""README and docs/ show the files of examples/ unchanged, and each of them runs by its first line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpfuse.testing.patience import patient

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PIPELINE = ROOT / "docs" / "pipeline.md"
EXPLORER = ROOT / "docs" / "symmetric_memory.md"


def _run(example: Path, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run the command in the example's first line by this Python. Return its output and errors together."""
    settings, program, arguments = re.fullmatch(r"# ((?:\w+=\S+ )*)(torchrun|python) (.*)", _lines(example)[0]).groups()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= dict(setting.split("=") for setting in settings.split())
    start = [sys.executable, "-m", "torch.distributed.run"] if program == "torchrun" else [sys.executable]
    command, one = [*start, *arguments.split()], subprocess.STDOUT
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, timeout=patient(120.0), stdout=subprocess.PIPE, stderr=one
    )


def _lines(example: Path) -> list[str]:
    return example.read_text().splitlines()


def test_pages_show_the_examples() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)]
    assert sorted(shown) == sorted(example.read_text() for example in EXAMPLES)
    assert all(f" examples/{example.name}" in _lines(example)[0] for example in EXAMPLES)


@pytest.mark.processes
@pytest.mark.parametrize("example", [x for x in EXAMPLES if x.stem != "pipeline"], ids=lambda example: example.stem)
def test_an_example_runs(example: Path) -> None:
    done = _run(example)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip(), "an example prints what it shows"
    if "TRITON_INTERPRET" in _lines(example)[0]:
        assert f"`{done.stdout.strip()}`" in EXPLORER.read_text()


@pytest.mark.processes
def test_the_pipeline_prints_the_losses_of_one_process(tmp_path: Path) -> None:
    example = ROOT / "examples" / "pipeline.py"
    text = example.read_text()
    assert text.count("--nproc-per-node 2 examples/") == 1
    (tmp_path / "pipeline.py").write_text(text.replace("--nproc-per-node 2 examples/", "--nproc-per-node 1 "))
    done = [_run(example), _run(tmp_path / "pipeline.py", tmp_path)]
    assert [each.returncode for each in done] == [0, 0], [each.stdout for each in done]
    printed = [each.stdout for each in done]
    losses, expected = ([float(x) for x in re.findall(r"^step \d+: loss (.*)$", each, re.M)] for each in printed)
    (explained,) = re.findall(r"prints before the first step:\n\n```\n(.*?)^```$", PIPELINE.read_text(), re.M | re.S)
    assert printed[0].partition("step 0:")[0].endswith(explained)
    assert len(losses) == len(expected) == 20 and expected[-1] < 0.2 < 2.0 < expected[0]
    assert losses == pytest.approx(expected, abs=2e-4)


@pytest.mark.processes
def test_the_explorer_prints_what_the_page_shows(tmp_path: Path) -> None:
    """The example runs without the line that the page deletes."""
    example = ROOT / "examples" / "hand_over.py"
    text = example.read_text()
    assert text.count("    tl.debug_barrier()\n") == 1
    (tmp_path / "hand_over.py").write_text(text.replace("    tl.debug_barrier()\n", "").replace(" examples/", " "))
    (printed,) = re.findall(r"the explorer says:\n\n```\n(.*?)^```$", EXPLORER.read_text(), re.M | re.S)
    assert _run(tmp_path / "hand_over.py", tmp_path).stdout.endswith(printed)
    assert printed.replace("hand_over.py", "race.py") in (ROOT / "README.md").read_text()
    (compiled,) = re.findall(r"it prints:\n\n```\n(.*?)^```$", EXPLORER.read_text(), re.M | re.S)
    assert _run(ROOT / "examples" / "missing_barrier.py").stdout == compiled
