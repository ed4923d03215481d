"""A run that is saved and resumed is the run that was never interrupted."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import build_mesh
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.train.batches import Windows
from tpfuse.train.checkpoint import newest_good, save
from tpfuse.train.options import OptimOptions, ParallelOptions, TrainCommand, TrainOptions
from tpfuse.train.trainer import Trainer

CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=16, n_layer=2, n_head=4, dropout=0.2)


@functools.cache
def built(tp: int, dp: int, dtype: str, cp: int) -> tuple[TrainCommand, Any]:
    options = TrainCommand(
        train=TrainOptions(steps=12, batch=12, seed=5, dtype=dtype),  # type: ignore[arg-type]
        optim=OptimOptions(lr=1e-2, warmup=4, clip=0.5),
        parallel=ParallelOptions(tp=tp, dp=dp, cp=cp),
    )
    mesh = build_mesh("cpu", dp=dp, tp=tp, cp=cp) if dist.get_world_size() > 1 else None
    return options, mesh


def fresh(tp: int, dp: int, dtype: str, cp: int) -> tuple[Trainer, Windows]:
    options, mesh = built(tp, dp, dtype, cp)
    tokens = (np.arange(1000) * 7 % CONFIG.vocab_size).astype(np.uint16)
    windows = Windows(tokens, CONFIG.n_positions, 5, "train", 12)
    return Trainer(options, CONFIG, mesh, torch.device("cpu")), windows


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns the whole weights and moments."""
    state = {}
    for name, p in trainer.model.named_parameters():
        state[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return state


def saved_run(folder: str, tp: int, dp: int, dtype: str, cp: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains six steps, saves a checkpoint and trains six more steps."""
    trainer, windows = fresh(tp, dp, dtype, cp)
    losses = [trainer.train_step(windows, lambda: False).loss for _ in range(6)]
    saved = save(
        Path(folder), 6, trainer.shards(), trainer.state(), keep=0, group=trainer.world_group, warn=pytest.fail
    )
    assert saved is not None
    losses += [trainer.train_step(windows, lambda: False).loss for _ in range(6)]
    return losses, state_of(trainer)


def resumed_run(
    folder: str, tp: int, dp: int, dtype: str, cp: int = 1
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Trains the last six steps from the checkpoint. The seed's initial weights are destroyed first."""
    trainer, windows = fresh(tp, dp, dtype, cp)
    for parameter in trainer.model.parameters():
        local_tensor(parameter).fill_(float("nan"))
    found = newest_good(Path(folder), warn=pytest.fail)
    assert found is not None
    found.load(trainer.shards())
    trainer.restore(found.state)
    losses = [trainer.train_step(windows, lambda: False).loss for _ in range(6)]
    return losses, state_of(trainer), trainer.optimizer.updates


@pytest.mark.parametrize(
    ("tp", "dp", "dtype"),
    [
        (2, 1, "float32"),
        (2, 2, "bfloat16"),
        *exhaustive((1, 1, "float32"), (1, 1, "bfloat16"), (1, 1, "float16"), (2, 1, "float64")),
        *exhaustive((2, 1, "float16"), (2, 2, "float32")),
    ],
)
def test_resuming_in_the_same_layout_is_bit_exact(tmp_path: Path, tp: int, dp: int, dtype: str) -> None:
    whole = pool(tp * dp).run(saved_run, str(tmp_path), tp, dp, dtype)
    again = pool(tp * dp).run(resumed_run, str(tmp_path), tp, dp, dtype)
    for (losses, weights), (resumed_losses, resumed_weights, updates) in zip(whole, again, strict=True):
        assert resumed_losses == losses[6:]
        assert updates == 12
        assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("saved_at", "resumed_at"),
    [((2, 1), (1, 2)), *exhaustive(((1, 2), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (4, 1)))],
)
def test_resuming_in_another_layout_gives_the_same_losses(
    tmp_path: Path, saved_at: tuple[int, int], resumed_at: tuple[int, int]
) -> None:
    losses, weights = pool(saved_at[0] * saved_at[1]).run(saved_run, str(tmp_path), *saved_at, "float64")[0]
    for found, found_weights, _ in pool(resumed_at[0] * resumed_at[1]).run(
        resumed_run, str(tmp_path), *resumed_at, "float64"
    ):
        np.testing.assert_allclose(found, losses[6:], rtol=1e-9)
        for name, weight in weights.items():
            assert (found_weights[name] - weight).abs().max() <= 1e-9 * weight.abs().max(), name


@pytest.mark.parametrize("layouts", [((1, 3),), *exhaustive((((1, 1), (2, 1), (1, 3)),))])
def test_resuming_with_another_number_of_context_parallel_ranks(
    tmp_path: Path, layouts: tuple[tuple[int, int], ...]
) -> None:
    losses, weights = pool(4).run(saved_run, str(tmp_path), 2, 1, "float64", 2)[0]
    for dp, cp in layouts:
        found, found_weights, _ = pool(dp * cp).run(resumed_run, str(tmp_path), 1, dp, "float64", cp)[0]
        np.testing.assert_allclose(found, losses[6:], rtol=1e-9)
        for name, weight in weights.items():
            assert (found_weights[name] - weight).abs().max() <= 1e-9 * weight.abs().max(), name


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), *exhaustive((1, 2))])
def test_each_tensor_is_written_once(tmp_path: Path, dp: int, cp: int) -> None:
    pool(4).run(saved_run, str(tmp_path), 2, dp, "float32", cp)
    found = newest_good(tmp_path, warn=pytest.fail)
    assert found is not None
    for name, entry in found.manifest["tensors"].items():
        size = int(np.prod(entry["shape"]))
        written = sum(int(np.prod([b - a for a, b in piece["ranges"]])) for piece in entry["slices"])
        assert written == size, name
    assert len(found.manifest["files"]) == 4, "all ranks share the writing"
