"""A run that is saved resumes as if it had never been interrupted: at any stage of ZeRO, layout and number of ranks."""

import contextlib
import functools
import json
import os
import re
import signal
import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.forked_ranks import LIMIT, Rank, ranks
from tests.support.nodes import pretended_nodes
from tests.support.tiers import exhaustive
from tests.support.training import (
    CONFIG,
    Result,
    check_same,
    checkpoint,
    looped,
    new_trainer,
    options_of,
    prepared,
    ranks_of,
    trained,
    whole_weights,
)
from tpfuse.checkpoint.checkpoint import newest_good
from tpfuse.comm.decisions import add_decisions, machine, read_decisions
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.settings import set_settings
from tpfuse.errors import RunError
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.train.batches import Windows
from tpfuse.train.options import TrainCommand
from tpfuse.train.setup import PreparedRun
from tpfuse.train.trainer import Trainer
from tpfuse.zero import offload, sharding
from tpfuse.zero.reducer.shard_update import ShardUpdate

Layout = dict[str, Any]
FOUR = replace(CONFIG, n_layer=4)
P4: Layout = {"pp": 4, "accumulation": 4}
ZBV: Layout = {"pp": 2, "pp_schedule": "zbv", "accumulation": 6}
# Ranks with several stages have prefetched parameters that have not been used when a checkpoint is loaded.
ZBV_3: Layout = {**ZBV, "dp": 2, "stage": 3}
# Layouts in which a run takes its steps, one after another. The first tier has another stage and number of ranks.
CHAINS: list[list[Layout]] = [
    [{"dp": 3, "stage": 1}, {"dp": 4, "stage": 3, "replicas": 2}],
    [{"dp": 2}, {"dp": 2, "tp": 2, "stage": 2}, {"dp": 2, "stage": 3}, {"dp": 4, "stage": 3, "replicas": 2}, {}],
    [{}, {"tp": 4}, {"dp": 2, "tp": 2, "stage": 3}, {"dp": 3, "stage": 1}, {"tp": 2, "cp": 2}],
    [{"tp": 2, "cp": 2, "stage": 2}, ZBV_3, {"pp": 4, "pp_schedule": "zero_bubble", "accumulation": 4}, {"dp": 2}, P4],
    [{"cp": 3}, {**ZBV, "dp": 2, "stage": 1}, ZBV, ZBV_3, {"tp": 2, "stage": 1}],
]


@functools.cache
def one_rank() -> Result:
    return trained(options_of(), 10, "auto", None, None, FOUR)[0]


@pytest.mark.parametrize("layouts", [CHAINS[0], *exhaustive(*CHAINS[1:])], ids=str)
def test_a_checkpoint_resumes_at_any_stage_and_layout(tmp_path: Path, layouts: list[Layout]) -> None:
    losses, norms, weights = one_rank()
    steps, source = 10 // len(layouts), None
    for place, layout in enumerate(layouts):
        save_to, done = tmp_path / str(place), slice(steps * place, steps * (place + 1))
        for found in trained(options_of(**layout), steps, "auto", save_to, source, FOUR):
            check_same(found, (losses[done], norms[done], weights if done.stop == 10 else found[2]))
        saved = newest_good(save_to, warn=pytest.fail)
        assert saved is not None
        for name, entry in saved.manifest["tensors"].items():
            written = sum(prod(stop - start for start, stop in part["ranges"]) for part in entry["slices"])
            assert written == prod(entry["shape"]), f"{name} is written once"
        assert len(saved.manifest["files"]) == ranks_of(options_of(**layout)), "all ranks share the writing"
        tied = [name for name in saved.manifest["tensors"] if name.endswith(".transformer.wte.weight")]
        assert len(tied) == 3, "both ends of a pipeline have them"
        source = save_to


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp": 2, "dtype": "bfloat16"},
        *exhaustive(*({"dp": 2, "stage": 3, "dtype": dtype} for dtype in ("float16", "bfloat16"))),
        *exhaustive({"dp": 2, "stage": 2, "dtype": "float16"}, {"dtype": "float32"}),
    ],
    ids=str,
)
def test_resuming_in_the_same_layout_is_bit_exact(tmp_path: Path, layout: Layout) -> None:
    options = options_of(**layout)
    straight, first = trained(options, 10), trained(options, 4, "auto", tmp_path)
    second = trained(options, 6, "auto", None, tmp_path)
    for whole, begun, resumed in zip(straight, first, second, strict=True):
        assert begun[0] + resumed[0] == whole[0] and begun[1] + resumed[1] == whole[1]
        assert all(torch.equal(weight, resumed[2][name]) for name, weight in whole[2].items())


@pytest.mark.parametrize("dtype", ["bfloat16", *exhaustive("float32")])
def test_stages_are_equal_to_the_bit_without_clipping(dtype: str) -> None:
    plain, *others = (trained(options_of(dp=2, stage=stage, dtype=dtype, clip=0.0), 10)[0] for stage in (0, 1, 2))
    for losses, _, weights in others:
        assert losses == plain[0]
        assert all(torch.equal(weight, weights[name]) for name, weight in plain[2].items())


GRADIENTS, REDUCED = {"gradient_dtype": "parameter"}, {"reduce_dtype": "parameter"}


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, GRADIENTS | REDUCED | {"accumulate": "whole"}),
        *exhaustive((1, REDUCED), (0, GRADIENTS)),
    ],
    ids=str,
)
def test_losses_with_16_bit_gradients_are_near_those_with_32(stage: int, more: dict[str, Any]) -> None:
    """bfloat16 has 8 bits, so two roundings of a gradient change the losses by at most 1 %."""
    common = {"dp": 2, "dtype": "bfloat16", "accumulation": 3}
    plain, found = trained(options_of(**common), 10)[0], trained(options_of(stage=stage, **common, **more), 10)[0]
    assert found[0] == pytest.approx(plain[0], rel=1e-2)
    assert found[0] != plain[0]


def remainders_resume(folder: Path, before: Layout, after: Layout) -> None:
    """Compare four steps with two steps after a checkpoint of two, on pretended nodes of two ranks under PowerSGD."""

    def fresh(layout: Layout) -> tuple[Trainer, Windows]:
        trainer, windows = new_trainer(options_of(**layout, compression="powersgd-1"), FOUR)
        assert "2 nodes of 2 ranks" in trainer.exchanged_by
        return trainer, windows

    def steps(trainer: Trainer, windows: Windows) -> list[float]:
        return [trainer.train_step(windows, lambda: False).grad_norm for _ in range(2)]

    def errors(trainer: Trainer) -> list[Tensor]:
        kept = {name: shards for name, shards in trainer.shards().items() if name.startswith("powersgd.")}
        return [shard.tensor.clone() for name, (shard,) in kept.items() if name.endswith("error")]

    with pretended_nodes(*[2] * (dist.get_world_size() // 2)):
        straight, windows = fresh(before)
        steps(straight, windows)
        checkpoint(straight, folder)
        norms, weights = steps(straight, windows), whole_weights(straight)
        found = newest_good(folder, warn=pytest.fail)
        assert found is not None
        for known in (True, False):
            if not known:
                found.state["layout"].pop("powersgd")  # as in older checkpoints
            resumed, windows = fresh(after)
            complete = known and before == after
            assert resumed.load(found) == complete == bool(errors(resumed))
            resumed.restore(found.state)
            if complete and before["dtype"] == "float16":  # a run that does not scale its loss resumes unscaled
                other, _ = fresh({**before, "dtype": "bfloat16"})
                assert other.load(found)
                other.restore(found.state)
                pairs = zip(errors(other), errors(resumed), strict=True)
                assert all(torch.equal(error * resumed.loss_scale, scaled) for error, scaled in pairs)
            assert (steps(resumed, windows) == norms) == complete
            assert (
                all(torch.equal(weight, weights[name]) for name, weight in whole_weights(resumed).items()) == complete
            )


D4: Layout = {"dp": 4, "dtype": "float32"}
P2: Layout = {**D4, "pp": 2, "stage": 1, "accumulation": 3}


@pytest.mark.parametrize(
    ("before", "after"),
    exhaustive(
        *((layout,) * 2 for layout in ({**D4, "stage": 2, "dtype": "float16"}, P2)),
        ({**D4, "stage": 1}, {**D4, "stage": 2}),
        (P2, {**P2, "pp_layers": "3,1"}),
    ),
    ids=str,
)
def test_the_remainders_of_powersgd_are_in_checkpoints(tmp_path: Path, before: Layout, after: Layout) -> None:
    world = ranks_of(options_of(**before))
    # A mesh of all ranks has the default group, whose nodes are determined only once, so the ranks must be new.
    pool(world).close()
    try:
        pool(world).run(remainders_resume, tmp_path, before, after)
    finally:
        pool(world).close()


def measured(run: PreparedRun, cache: Path) -> str:
    """Train with decisions that are kept in a folder, and return what the run prints."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        return looped(run)


@pytest.mark.exhaustive
def test_a_resumed_run_uses_the_measurements_of_its_first_step(flags: list[str], tmp_path: Path) -> None:
    out, kept, here = tmp_path / "run", tmp_path / "tpfuse" / "decisions.json", machine("cpu")

    def said(steps: int, *words: str) -> str:
        words = (*words, "--parallel.tp", "2", "--parallel.measure-seconds", "20", "--train.steps", str(steps))
        first, _ = pool(2).run(measured, prepared([*words, "--out", out], 2), tmp_path)
        return re.search(r"^auto     .*$", first, re.MULTILINE)[0]

    def taken(steps: int) -> dict[str, str]:
        state = json.loads((out / f"step-{steps}" / "manifest.json").read_text())["state"]
        return {case: decision["taken"] for case, decision in state["decisions"]["cases"].items()}

    found = re.fullmatch(r"(auto     (\d+) \w+(?:, (\d+) \w+)?); measured in \d+\.\d s", said(3, *flags))
    decisions = taken(3)
    assert int(found[2]) + int(found[3] or 0) == len(decisions) == 8  # four products of a layer, forward and backward
    before = read_decisions(kept, here)
    assert {case: decision.taken for case, decision in before.items()} == decisions
    changed = {}
    for case, decision in before.items():  # as a run on another day might decide
        (other,) = decision.milliseconds.keys() - {decision.taken}
        changed[case] = replace(decision, taken=other)
    add_decisions(kept, here, changed)
    assert read_decisions(kept, here) == changed
    assert said(5, "--resume") == f"{found[1]}; measured in 0.0 s"
    assert taken(5) == decisions


def until_killed(rank: Rank, options: TrainCommand, folder: Path) -> None:
    """Save after every step. Rank 1 kills itself in the third update, between two blocks of its buckets."""
    rank.join()
    set_settings(timeout=patient(LIMIT))
    trainer, windows = new_trainer(options, FOUR)
    for _ in range(2):
        trainer.train_step(windows, lambda: False)
        checkpoint(trainer, folder)
    if rank.rank == 1:
        ShardUpdate.block = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    trainer.train_step(windows, lambda: False)


@pytest.mark.parametrize("stage", [2, *exhaustive(1)])
def test_a_rank_that_dies_in_the_update_is_named_and_the_last_checkpoint_resumes(tmp_path: Path, stage: int) -> None:
    options, folder = options_of(dp=3, stage=stage), tmp_path / "run"
    with ranks(3, tmp_path, until_killed, options, folder) as running:
        for survivor in (0, 2):
            _, error = running.result(survivor)
            assert isinstance(error, PeerTimeout), error
            assert (error.peer, error.rank, error.step) == (1, survivor, 2)
            assert f"its process ({running.processes[1].pid}) has ended" in str(error) and "update" in str(error)
    losses, norms, weights = one_rank()
    check_same(trained(options, 8, "auto", None, folder, FOUR)[0], (losses[2:], norms[2:], weights))


@on_ranks(2)
def test_all_ranks_end_if_one_has_no_space_for_its_state() -> None:
    """The second rank has a full disk."""
    folder, full = tempfile.gettempdir(), mock.Mock(side_effect=ValueError("offload /x has too little space"))
    expected = f"offload {folder} failed on rank 1: ValueError: offload /x has too little space"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(offload, "_IN_MEMORY", ()))
        if dist.get_rank() == 1:
            expected = "offload /x has too little space"
            stack.enter_context(mock.patch.object(sharding, "state_store", full))
        with pytest.raises(RunError, match=f"^{expected}$"):
            new_trainer(options_of(dp=2, stage=1, offload=folder))
