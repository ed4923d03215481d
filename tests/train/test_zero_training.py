"""Training has the same losses at every stage of ZeRO, and checkpoints resume at any other stage and layout."""

import functools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.settings import set_settings
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.forked_ranks import LIMIT, Rank, ranks
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.nodes import pretended_nodes
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.train import trainer as trainer_module
from tpfuse.train.batches import Windows
from tpfuse.train.checkpoint import newest_good, save
from tpfuse.train.errors import RunError
from tpfuse.train.options import OptimOptions, ParallelOptions, TrainCommand, TrainOptions, ZeroOptions
from tpfuse.train.trainer import Trainer
from tpfuse.zero import offload
from tpfuse.zero.reducer.shard_update import ShardUpdate

CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=16, n_layer=2, n_head=4, dropout=0.2)
BATCH = 12
# (stage, dp, tp, cp, replicas, other options of ZeRO)
Layout = tuple[int, int, int, int, int, dict[str, Any]]


def options_for(layout: Layout, dtype: str = "float64", accumulation: int = 1) -> TrainCommand:
    stage, dp, tp, cp, replicas, more = layout
    return TrainCommand(
        train=TrainOptions(steps=20, batch=BATCH, micro_batch=BATCH // dp // accumulation, seed=5, dtype=dtype),
        optim=OptimOptions(lr=1e-2, warmup=4, clip=0.5),
        parallel=ParallelOptions(dp=dp, tp=tp, cp=cp, replicas=replicas),
        zero=ZeroOptions(stage=stage, **more),
    )


def new_trainer(options: TrainCommand) -> tuple[Trainer, Windows]:
    parallel, mesh = options.parallel, None
    if dist.get_world_size() > 1:
        mesh = mesh_of(parallel.dp, parallel.tp, parallel.cp)
    count = np.arange(1000)
    tokens = ((count * 7 + count // 5) % CONFIG.vocab_size).astype(np.uint16)
    windows = Windows(tokens, CONFIG.n_positions, options.train.seed, "train", options.train.batch)
    return Trainer(options, CONFIG, mesh, torch.device("cpu")), windows


def whole(trainer: Trainer) -> dict[str, Tensor]:
    parameters = dict(trainer.model.named_parameters())
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in parameters.items()}


Result = tuple[list[float], list[float], dict[str, Tensor]]


def train(options: TrainCommand, steps: int, folder: Path | None = None, resume: Path | None = None) -> Result:
    """Returns losses, norms and whole weights. Starts from the checkpoint in `resume`, and saves one in `folder`."""
    offload._IN_MEMORY = ()  # if the checkout is in memory, the file may be too
    trainer, windows = new_trainer(options)
    if resume is not None:
        for parameter in trainer.model.parameters():
            local_tensor(parameter).fill_(float("nan"))
        found = newest_good(resume, warn=pytest.fail)
        assert found is not None
        found.load(trainer.shards())
        trainer.restore(found.state)
    results = [trainer.train_step(windows, lambda: False) for _ in range(steps)]
    if folder is not None:
        group = trainer.world_group
        assert save(folder, trainer.step, trainer.shards(), trainer.state(), keep=0, group=group, warn=pytest.fail)
    return [r.loss for r in results], [r.grad_norm for r in results], whole(trainer)


ONE: Layout = (0, 1, 1, 1, 1, {})
# The options that are trained, and the number of micro-batches of a step.
TRAINED: list[tuple[Layout, int]] = [
    ((1, 3, 1, 1, 1, {"offload": "optimizer"}), 1),
    ((2, 2, 1, 1, 1, {}), 3),
    ((2, 2, 1, 1, 1, {"offload": "nvme"}), 1),
    ((3, 2, 1, 1, 1, {}), 3),
    ((3, 4, 1, 1, 2, {}), 1),
]
MORE_TRAINED: list[tuple[Layout, int]] = [
    ((0, 1, 1, 1, 1, {"offload": "nvme"}), 3),
    ((1, 2, 1, 1, 1, {}), 1),
    ((1, 2, 1, 1, 1, {}), 3),
    ((1, 2, 2, 1, 1, {}), 3),
    ((1, 3, 1, 1, 1, {"offload": "optimizer"}), 3),
    ((2, 1, 1, 2, 1, {}), 3),
    ((2, 1, 2, 1, 1, {}), 1),
    ((2, 2, 1, 1, 1, {}), 1),
    ((3, 1, 1, 3, 1, {}), 1),
    ((3, 2, 1, 1, 1, {}), 1),
    ((3, 2, 2, 1, 1, {}), 3),
    ((3, 4, 1, 1, 2, {}), 3),
]


def on_disk(layout: Layout, folder: Path) -> Layout:
    stage, dp, tp, cp, replicas, more = layout
    if more.get("offload") == "nvme":
        more = {**more, "offload_path": folder}
    return stage, dp, tp, cp, replicas, more


def world(layout: Layout) -> int:
    return layout[1] * layout[2] * layout[3]


@functools.cache
def one_rank(steps: int, accumulation: int = 1) -> Result:
    result: Result = pool(1).run(train, options_for(ONE, accumulation=accumulation), steps)[0]
    return result


def compare(found: Result, expected: Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    assert found[1] == pytest.approx(expected[1], rel=1e-10)
    for name, weight in expected[2].items():
        torch.testing.assert_close(found[2][name], weight, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("layout", "accumulation"), [*TRAINED, *exhaustive(*MORE_TRAINED)], ids=str)
def test_every_stage_has_the_same_losses(tmp_path: Path, layout: Layout, accumulation: int) -> None:
    options = options_for(on_disk(layout, tmp_path), accumulation=accumulation)
    compare(pool(world(layout)).run(train, options, 10)[0], one_rank(10, accumulation))


SAVED: list[Layout] = [
    (0, 2, 1, 1, 1, {}),
    (1, 3, 1, 1, 1, {}),
    (2, 2, 2, 1, 1, {}),
    (3, 2, 1, 1, 1, {}),
    (3, 2, 2, 1, 1, {}),
    (3, 4, 1, 1, 2, {}),
]


# Every layout resumes at three others. Those of the first tier resume at another stage and number of ranks.
GOES_ON = [(1, 5), (4, 0), (3, 2)]
MORE_GO_ON = [(b, (b + step) % len(SAVED)) for b in range(len(SAVED)) for step in (1, 2, 4)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((SAVED[before], SAVED[after]) for before, after in GOES_ON),
        *exhaustive(*((SAVED[before], SAVED[after]) for before, after in MORE_GO_ON if (before, after) not in GOES_ON)),
        *exhaustive(*((before, ONE) for before in SAVED)),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_at_any_stage(tmp_path: Path, before: Layout, after: Layout) -> None:
    pool(world(before)).run(train, options_for(before), 4, tmp_path)
    found = pool(world(after)).run(train, options_for(after), 6, None, tmp_path)[0]
    expected = one_rank(10)
    compare(found, (expected[0][4:], expected[1][4:], expected[2]))


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (2, "bfloat16"),
        (3, "float32"),
        *exhaustive((1, "float32"), (1, "bfloat16"), (2, "float16"), (3, "bfloat16"), (3, "float16")),
    ],
)
def test_resuming_at_the_same_stage_is_bit_exact(tmp_path: Path, stage: int, dtype: str) -> None:
    options = options_for((stage, 2, 1, 1, 1, {}), dtype)
    straight = pool(2).run(train, options, 10)[0]
    first = pool(2).run(train, options, 4, tmp_path)[0]
    second = pool(2).run(train, options, 6, None, tmp_path)[0]
    assert first[0] + second[0] == straight[0] and first[1] + second[1] == straight[1]
    assert all(torch.equal(weight, second[2][name]) for name, weight in straight[2].items())


@pytest.mark.parametrize("dtype", ["bfloat16", *exhaustive("float32")])
def test_stages_are_equal_to_the_bit_without_clipping(dtype: str) -> None:
    results = []
    for stage in (0, 1, 2):
        options = options_for((stage, 2, 1, 1, 1, {}), dtype)
        options = replace(options, optim=replace(options.optim, clip=0.0))
        results.append(pool(2).run(train, options, 10)[0])
    for result in results[1:]:
        assert result[0] == results[0][0]
        assert all(torch.equal(weight, result[2][name]) for name, weight in results[0][2].items())


GRADIENTS, REDUCED = {"gradient_dtype": "parameter"}, {"reduce_dtype": "parameter"}


@pytest.mark.parametrize(
    ("stage", "more"),
    [(2, GRADIENTS), (1, REDUCED), *exhaustive((0, GRADIENTS), (1, GRADIENTS), (0, REDUCED), (2, REDUCED))],
    ids=str,
)
def test_losses_with_16_bit_gradients_are_near_those_with_32(stage: int, more: dict[str, Any]) -> None:
    """bfloat16 has 8 bits, so two roundings of a gradient change the losses by at most 1 %."""
    plain = pool(2).run(train, options_for((0, 2, 1, 1, 1, {}), "bfloat16", 3), 10)[0]
    found = pool(2).run(train, options_for((stage, 2, 1, 1, 1, more), "bfloat16", 3), 10)[0]
    assert found[0] == pytest.approx(plain[0], rel=1e-2)
    assert found[0] != plain[0]


def remainders_resume(folder: Path, stage: int, dtype: str, resumed_at: int) -> None:
    """Compares four steps with two steps after a checkpoint of two, on two pretended nodes under PowerSGD."""

    def fresh(stage: int, dtype: str) -> tuple[Trainer, Windows]:
        powersgd = {"compression": "powersgd", "powersgd_rank": 1}
        trainer, windows = new_trainer(options_for((stage, 4, 1, 1, 1, powersgd), dtype))
        assert "2 nodes of 2 ranks" in trainer.exchanged_by
        return trainer, windows

    def steps(trainer: Trainer, windows: Windows) -> list[float]:
        return [trainer.train_step(windows, lambda: False).grad_norm for _ in range(2)]

    def errors(trainer: Trainer) -> list[Tensor]:
        kept = {name: shards for name, shards in trainer.shards().items() if name.startswith("powersgd.")}
        return [shard.tensor.clone() for name, (shard,) in kept.items() if name.endswith("error")]

    with pretended_nodes(2, 2) as group, mock.patch.object(trainer_module, "flat_group") as flat_group:
        flat_group.side_effect = lambda mesh, *names: None if names == ("tp",) else group
        straight, windows = fresh(stage, dtype)
        steps(straight, windows)
        shards, state = straight.shards(), straight.state()
        assert save(folder, 2, shards, state, keep=0, group=straight.world_group, warn=pytest.fail)
        norms, weights = steps(straight, windows), whole(straight)
        found = newest_good(folder, warn=pytest.fail)
        assert found is not None
        for known in (True, False):
            if not known:
                found.state["layout"].pop("powersgd")  # as in older checkpoints
            resumed, windows = fresh(resumed_at, dtype)
            complete = known and resumed_at == stage
            assert resumed.load(found) == complete == bool(errors(resumed))
            resumed.restore(found.state)
            if complete and dtype == "float16":  # a run that does not scale its loss resumes with unscaled remainders
                other, _ = fresh(stage, "bfloat16")
                assert other.load(found)
                other.restore(found.state)
                pairs = zip(errors(other), errors(resumed), strict=True)
                assert all(torch.equal(error * resumed.loss_scale, scaled) for error, scaled in pairs)
            assert (steps(resumed, windows) == norms) == complete
            assert all(torch.equal(weight, weights[name]) for name, weight in whole(resumed).items()) == complete


@pytest.mark.parametrize(
    ("stage", "dtype", "resumed_at"),
    [
        (1, "float32", 1),
        *exhaustive((0, "float32", 0), (2, "bfloat16", 2), (2, "float16", 2), (1, "float64", 1), (1, "float32", 2)),
    ],
)
def test_the_remainders_of_powersgd_are_in_checkpoints(tmp_path: Path, stage: int, dtype: str, resumed_at: int) -> None:
    # A mesh of all ranks has the default group, whose nodes are determined only once, so the ranks must be new.
    pool(4).close()
    try:
        pool(4).run(remainders_resume, tmp_path, stage, dtype, resumed_at)
    finally:
        pool(4).close()


def until_killed(rank: Rank, options: TrainCommand, folder: Path) -> None:
    """Saves after every step. Rank 1 kills itself in the third update, between two blocks of its buckets."""
    rank.join()
    set_settings(timeout=patient(LIMIT))
    trainer, windows = new_trainer(options)
    for _ in range(2):
        trainer.train_step(windows, lambda: False)
        save(
            folder, trainer.step, trainer.shards(), trainer.state(), keep=0, group=trainer.world_group, warn=pytest.fail
        )
    if rank.rank == 1:
        ShardUpdate.block = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    trainer.train_step(windows, lambda: False)


@pytest.mark.parametrize("stage", [2, *exhaustive(1)])
def test_a_rank_that_dies_in_the_update_is_named_and_the_last_checkpoint_resumes(tmp_path: Path, stage: int) -> None:
    options, folder = options_for((stage, 3, 1, 1, 1, {})), tmp_path / "run"
    with ranks(3, tmp_path, until_killed, options, folder) as running:
        for survivor in (0, 2):
            _, error = running.result(survivor)
            assert isinstance(error, PeerTimeout), error
            assert (error.peer, error.rank, error.step) == (1, survivor, 2)
            assert f"its process ({running.processes[1].pid}) has ended" in str(error) and "update" in str(error)
    found = pool(3).run(train, options, 8, None, folder)[0]
    expected = one_rank(10)
    compare(found, (expected[0][2:], expected[1][2:], expected[2]))


def without_room(options: TrainCommand) -> str:
    """Makes a trainer on two ranks, the second of which has a full disk."""
    real = trainer_module.state_store
    if dist.get_rank() == 1:
        trainer_module.state_store = lambda *_: full_disk()
    try:
        with pytest.raises(RunError) as caught:
            new_trainer(options)
    finally:
        trainer_module.state_store = real
    return str(caught.value)


def full_disk() -> None:
    raise ValueError("offload path /x has too little space")


def test_all_ranks_end_if_one_has_no_space_for_its_state() -> None:
    said = pool(2).run(without_room, options_for((1, 2, 1, 1, 1, {})))
    assert said == ["another rank has no space for its optimizer state", "offload path /x has too little space"]
