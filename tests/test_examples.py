"""README and docs/ show the files of examples/ unchanged, and each of them runs by its first line."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpfuse.testing.patience import patient

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PIPELINE = ROOT / "docs" / "pipeline.md"
EXPLORER = ROOT / "docs" / "symmetric_memory.md"


@functools.cache
def _run(example: Path, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run the command in the example's first line by this Python, once. Return its output and errors together."""
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
    """A block marked `python` is a whole example, one marked `py` a part of one."""
    pages, texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], [example.read_text() for example in EXAMPLES]
    blocks = re.findall(r"^```(py|python)\n(.*?)^```$", "\n".join(page.read_text() for page in pages), re.M | re.S)
    assert sorted(block for kind, block in blocks if kind == "python") == sorted(texts)
    assert all(any(block in text for text in texts) for kind, block in blocks if kind == "py")
    assert all(f" examples/{example.name}" in _lines(example)[0] for example in EXAMPLES)


# It forks the ranks of one example after another, and has imported what would take each of them seconds.
_SERVER = """
import json, os, runpy, sys
import peft, torch.distributed.tensor, transformers.models.llama.modeling_llama, triton.language
for line in sys.stdin:
    example, output, ranks = json.loads(line)
    processes = []
    for environment in ranks:
        process = os.fork()
        if process == 0:
            written = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(written, 1)
            os.dup2(written, 2)
            os.environ |= environment
            sys.argv = [example]
            runpy.run_path(example, run_name="__main__")
            sys.exit()
        processes.append(process)
    print(json.dumps([os.waitpid(process, 0)[1] for process in processes]), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[str]"]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], cwd=ROOT, env=environment, text=True, process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def _ranks(example: Path) -> int:
    """Return how many ranks the example's first line starts, or 1 for one process; 0 if Triton must interpret."""
    first, run = _lines(example)[0], f"examples/{example.name}"
    found = re.fullmatch(rf"# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node (\d) {run}", first)
    return int(found[1]) if found else int(first == f"# python {run}")


_ELSEWHERE = ("pipeline", "missing_barrier", "chat")  # the tests below run them


@pytest.mark.processes
@pytest.mark.parametrize(
    "example", [x for x in EXAMPLES if _ranks(x) and x.stem not in _ELSEWHERE], ids=lambda example: example.stem
)
def test_an_example_runs_on_its_ranks(example: Path, server: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Several ranks have torchrun's variables; torchrun itself starts those of the pipeline below."""
    assert _printed(example, _ranks(example), server, tmp_path).strip(), "an example prints what it shows"


def _printed(example: Path, world: int, server: "subprocess.Popen[str]", folder: Path) -> str:
    """Return what the example prints on ranks that the server forks. folder: for a file."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    ranks = [common | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(world)]
    if not _lines(example)[0].startswith("# OMP_NUM_THREADS=1 torchrun"):
        ranks = [{}]
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([str(example), str(folder / "printed"), ranks]), file=server.stdin, flush=True)
    statuses = json.loads(server.stdout.readline())
    printed = (folder / "printed").read_text()
    assert statuses == [0] * world, printed
    return printed


@pytest.mark.processes
def test_a_chat_is_learnt_from_the_tokens_of_the_assistant(server: "subprocess.Popen[str]", tmp_path: Path) -> None:
    printed = _printed(ROOT / "examples" / "chat.py", 2, server, tmp_path)
    assert printed.endswith("\ntrained on Lima<|end|>\nCapital of Peru? Lima\n"), printed
    assert "`Capital of Peru? Lima`" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("example", [x for x in EXAMPLES if not _ranks(x)], ids=lambda example: example.stem)
def test_an_example_runs(example: Path) -> None:
    done = _run(example)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() and f"`{done.stdout.strip()}`" in EXPLORER.read_text()


@pytest.mark.processes
def test_the_pipeline_prints_the_losses_of_one_process(server: "subprocess.Popen[str]", tmp_path: Path) -> None:
    example = ROOT / "examples" / "pipeline.py"
    done = _run(example)
    assert done.returncode == 0, done.stdout
    printed = [done.stdout, _printed(example, 1, server, tmp_path)]
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
    assert printed.replace("hand_over.py", "/tmp/race.py") in (ROOT / "README.md").read_text()
    (compiled,) = re.findall(r"it prints:\n\n```\n(.*?)^```$", EXPLORER.read_text(), re.M | re.S)
    assert _run(ROOT / "examples" / "missing_barrier.py").stdout == compiled
