"""torchrun starts `tpfuse train` on two nodes of two ranks each, which are network namespaces of this machine."""

import contextlib
import os
import re
import signal
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from tests.support.command import losses
from tests.support.meshes import mesh_of
from tests.support.nodes import run_on_nodes, torchrun_on_nodes, why_not_permitted
from tests.support.training import CONFIG, Result, check_same, options_of, train, trained
from tpfuse.cli import run
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.mesh import group_of
from tpfuse.testing.patience import Deadline, patient

pytestmark = [pytest.mark.nodes, pytest.mark.skipif(bool(why_not_permitted()), reason=why_not_permitted())]


def _on_one_rank(flags: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        assert run(["train", *flags, "--parallel.dp", "1", "--out", f"{folder}/one"]) == 0
        return losses(Path(folder) / "one")


ZERO = {"3 --parallel.replicas 2": 1e-5, "2 --zero.compression bf16 --parallel.pp 2": 1e-3}


@pytest.mark.parametrize("stage", ZERO)
def test_two_nodes_train_to_the_losses_of_one_rank(flags: list[str], tmp_path: Path, stage: str) -> None:
    """At stage 3 a rank is killed after the first checkpoint, and torchrun starts all ranks again."""
    killed = stage[0] == "3"
    steps = "40" if killed else "12"
    flags = [*flags, "--train.log-every", "1", "--kernels", "torch", "--train.dtype", "float32", "--train.steps", steps]
    zero, out = ["--zero.stage", *stage.split()], tmp_path / uuid.uuid4().hex
    command = ["tpfuse", "train", *flags, *zero, "--resume", "auto", "--out", str(out)]
    with ThreadPoolExecutor(1) as executor:
        run, deadline = executor.submit(torchrun_on_nodes, command, restarts=int(killed)), Deadline(60.0)
        while killed and deadline.left() and not (out / "step-10").exists():
            sleep(0.01)
        if killed:
            os.kill(_process_of_rank_3(str(out)), signal.SIGKILL)
    for node, ended in enumerate(run.result()):
        assert ended.returncode == 0, ended.stderr
        assert (", continuing after step 10" in ended.stdout) == (killed and node == 0), ended.stdout
        layout = "dp 2 x pp 2" if "--parallel.pp 2" in stage else "dp 4"
        assert bool(re.search(f"^ranks .*{layout} on cpu", ended.stdout, re.M)) == (node == 0)
        assert ("2 nodes of 2 ranks" in ended.stdout) == (node == 0 and stage[0] != "3"), "the split that compresses"
    one, two = _on_one_rank(flags), losses(out)
    assert len(one) == int(steps) and one[-1] < one[0]
    assert two == pytest.approx(one, rel=ZERO[stage])


def _process_of_rank_3(mark: str) -> int:
    """Return the process of rank 3 of the run in whose command `mark` is."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ranks = (folder / "environ").read_bytes().split(b"\0")
            if mark.encode() in (folder / "cmdline").read_bytes() and b"RANK=3" in ranks:
                return int(folder.name)
    raise LookupError("no process of rank 3")


def test_a_killed_rank_of_another_node_is_named(flags: list[str], tmp_path: Path) -> None:
    """Rank 3 is killed. Rank 0 waits for it through rank 1 or rank 2, and has no parent that could tell."""
    layout = "--parallel.pp 2 --parallel.tp 2"
    out = tmp_path / uuid.uuid4().hex
    endless = ["--train.steps", "100000", "--train.log-every", "1", "--comm.timeout", f"{patient(8.0):.1f}"]
    endless += ["--train.save-every", "0", "--train.eval-every", "0"]  # it is killed in a training step
    command = ["tpfuse", "train", *flags, *endless, *layout.split(), "--out", str(out)]
    with ThreadPoolExecutor(1) as executor:
        ended, deadline = executor.submit(torchrun_on_nodes, command), Deadline(60.0)
        while deadline.left() and not ((out / "metrics.jsonl").exists() and len(losses(out)) > 3):
            sleep(0.1)
        os.kill(_process_of_rank_3(str(out)), signal.SIGKILL)
        first, second = ended.result()
    assert first.returncode and second.returncode
    said = [line for line in (first.stderr + second.stderr).splitlines() if line.startswith("tpfuse train: error:")]
    assert len(said) == 1 and re.search(r" rank 0 .*waited \d+\.\d s for rank 3\b", said[0]), first.stderr


FOUR = replace(CONFIG, n_layer=4)


@pytest.mark.parametrize(
    "layout", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "replicas": 2}, {"stage": 3}], ids=str
)
def test_two_nodes_have_the_same_bits_as_one_rank(layout: dict[str, Any]) -> None:
    ordered = {"dtype": "float32", "batch": 16, "micro_batch": 1, "virtual_ranks": 8}
    expected = trained(options_of(**ordered), 10)[0]
    for found, norms, weights in run_on_nodes(train, options_of(**ordered, **layout, dp=4), 10):
        assert (found, norms) == expected[:2]
        assert all(torch.equal(weights[name], weight) for name, weight in expected[2].items())


def _across(layout: dict[str, Any]) -> tuple[Result, dict[str, str]]:
    """Train; return the result, and the implementation that served each group of this rank."""
    result = train(options_of(**layout), 10, config=FOUR)
    mesh = mesh_of(layout.get("dp", 1), layout.get("tp", 1), pp=2)
    groups = {name: group_of(mesh[name]) for name in ("pp", "dp", "tp")}
    cpu = torch.device("cpu")
    return result, {
        name: choose_implementation(cpu, torch.float64, group).implementation for name, group in groups.items() if group
    }


@pytest.mark.parametrize(
    "layout", [{"pp_schedule": "zbv", "tp": 2, "accumulation": 6}, {"dp": 2, "stage": 1, "accumulation": 3}], ids=str
)
def test_a_pipeline_across_nodes_trains_like_one_rank(layout: dict[str, Any]) -> None:
    expected = trained(options_of(), 10, "auto", None, None, FOUR)[0]
    within = "tp" if "tp" in layout else "dp"
    for found, implementations in run_on_nodes(_across, {"pp": 2, **layout}):
        check_same(found, expected, 1e-9)
        assert implementations == {"pp": "collective", within: "direct"}
