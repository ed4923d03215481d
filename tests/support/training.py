"""A tiny GPT that is trained on the ranks of a pool, on any layout and from any checkpoint.

No tp divides its vocabulary, no cp its sequences, and the tokens of a micro-batch are not always a multiple of tp.
"""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from math import nan
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support.decoders import decoder, exact
from tests.support.meshes import mesh_of
from tpfuse.checkpoint.checkpoint import differing, newest_good, save
from tpfuse.choices import Implementation
from tpfuse.comm.agreement import exchange
from tpfuse.comm.layout import gather_whole, local_tensor
from tpfuse.models.gpt import GPTConfig
from tpfuse.switches import use
from tpfuse.testing.ranks import pool
from tpfuse.train import hardware
from tpfuse.train.batches import Windows
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.launch import RankInfo, StopRequest
from tpfuse.train.loop import TrainingLoop
from tpfuse.train.model_options import ulysses_ranks
from tpfuse.train.options import DataOptions, OptimOptions, ParallelOptions, TrainCommand, TrainOptions, ZeroOptions
from tpfuse.train.pipeline_options import rank_count
from tpfuse.train.rank_model import ModelConfig
from tpfuse.train.setup import PreparedRun, prepare_run
from tpfuse.train.trainer import Trainer
from tpfuse.zero import offload
from tpfuse.zero.gradient_buckets import GradientBuckets

CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=16, n_layer=2, n_head=4, dropout=0.2)
BATCH = 36  # sequences, which suit dp 1, 2 and 3 with 1, 2 and 3 micro-batches

Result = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms of gradients, whole weights


def options_of(accumulation: int = 1, clip: float = 0.5, **options: Any) -> TrainCommand:
    """Return the options of a run; `options` are fields of the options of data, parallel, zero, train and optim.

    optim: further options of the optimizer.
    """
    optim: dict[str, Any] = options.pop("optim", {})
    dp = options.setdefault("dp", 1)
    options = {"dtype": "float64", "batch": BATCH, "steps": 20, "seed": 5, **options}
    options.setdefault("micro_batch", options["batch"] // dp // accumulation)

    def made(kind: Any) -> Any:
        return kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})

    command = TrainCommand(
        parallel=made(ParallelOptions),
        zero=made(ZeroOptions),
        train=made(TrainOptions),
        data=made(DataOptions),
        optim=replace(made(OptimOptions), lr=1e-2, warmup=4, clip=clip, **optim),
    )
    assert not options, f"unknown options: {options}"
    return command


def ranks_of(options: TrainCommand) -> int:
    """Return the number of ranks of a run."""
    return rank_count(options.parallel)


def _mesh(options: TrainCommand, config: ModelConfig) -> DeviceMesh | None:
    parallel = options.parallel
    if ranks_of(options) == 1:
        return None
    ulysses = ulysses_ranks(parallel, config.n_head // parallel.tp)
    return mesh_of(parallel.data_ranks, parallel.tp, parallel.cp, ulysses, parallel.pp)


def new_trainer(
    options: TrainCommand, config: ModelConfig = CONFIG, device: str = "cpu", mesh: DeviceMesh | None = None
) -> tuple[Trainer, Windows]:
    """Return a trainer on all ranks of the pool, and batches of a sequence that can be learned. mesh: that of GPUs."""
    mesh = _mesh(options, config) if mesh is None else mesh
    count = np.arange(1000)
    tokens = ((count * 7 + count // 5) % config.vocab_size).astype(np.uint16)
    seed, batch, order = options.train.seed, options.train.batch, options.data.order
    windows = Windows(tokens, config.n_positions, seed, "train", batch, order)
    return Trainer(options, config, mesh, torch.device(device)), windows


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of all weights, whole, of all stages of a pipeline."""
    weights = {name: gather_whole(parameter).clone() for name, parameter in trainer.model.named_parameters()}
    if trainer.pipeline_group is None:
        return weights
    parts = exchange(weights, trainer.pipeline_group, op="weights of all stages")
    for name in parts[0].keys() & parts[-1].keys():  # tied parameters
        assert torch.equal(parts[0][name], parts[-1][name])
    return {name: weight for part in parts for name, weight in part.items()}


def checkpoint(trainer: Trainer, folder: Path) -> None:
    """Save a checkpoint of the trainer's step."""
    group = trainer.world_group
    assert save(folder, trainer.step, trainer.shards(), trainer.state(), keep=0, group=group, warn=pytest.fail)


def train(
    options: TrainCommand,
    steps: int,
    name: Implementation = "auto",
    save_to: Path | None = None,
    resume: Path | None = None,
    config: ModelConfig = CONFIG,
) -> Result:
    """Train on this rank of a pool, from the checkpoint in `resume` if there is one, and save one in `save_to`."""
    with mock.patch.object(offload, "_IN_MEMORY", ()):  # if the checkout is in memory, the file may be too
        trainer, windows = new_trainer(options, config)
    if resume is not None:
        trainer.evaluate(windows, 1)  # at stage 3 it leaves parameters gathered
        for shard in (shard for shards in trainer.shards().values() for shard in shards):
            shard.tensor.detach().fill_(nan)
        if isinstance(trainer.engine, GradientBuckets):
            for parameter in trainer.model.parameters():
                local_tensor(parameter).fill_(nan)
        found = newest_good(resume, warn=pytest.fail)
        assert found is not None
        found.load(trainer.shards())
        trainer.restore(found.state)
        windows.ahead = trainer.ahead // config.n_positions
        assert differing(found, trainer.shards(), trainer.world_group) == []
        assert trainer.optimizer.updates == found.step
    with use(implementation=name):
        results = [trainer.train_step(windows, lambda: False) for _ in range(steps)]
    if save_to is not None:
        checkpoint(trainer, save_to)
    return [r.loss for r in results], [r.grad_norm for r in results], whole_weights(trainer)


def trained(options: TrainCommand, steps: int, *more: Any) -> list[Result]:
    """Return the results of `train` on the ranks of a pool."""
    return pool(ranks_of(options)).run(train, options, steps, *more)


def decoder_config(family: str, n_positions: int = 7, **settings: Any) -> DecoderConfig:
    """Describe a model of transformers as the file config.json of its folder does. settings: as of `decoder`."""
    described = json.loads(decoder(family, **settings).config.to_json_string())
    return DecoderConfig.of(described, n_positions)


def train_decoder(
    config: DecoderConfig, options: TrainCommand, steps: int, save_to: Path | None = None, resume: Path | None = None
) -> Result:
    """Train a model of transformers on this rank of a pool as `train` does, with its norms and losses in float64."""
    with exact(config.empty(torch.float64)):
        return train(options, steps, "auto", save_to, resume, config)


def trained_decoder(config: DecoderConfig, options: TrainCommand, steps: int, *folders: Path | None) -> Result:
    """Return the result of `train_decoder` on the ranks of a pool. Raise AssertionError if they differ.

    folders: `save_to` and `resume` of `train`.
    """
    results: list[Result] = pool(ranks_of(options)).run(train_decoder, config, options, steps, *folders)
    for other in results[1:]:
        check_same(other, results[0])
    return results[0]


def check_same(found: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """Raise AssertionError unless losses, norms and weights are the same up to rounding."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1] == pytest.approx(expected[1], rel=tolerance)
    assert found[2].keys() == expected[2].keys()
    for name, weight in expected[2].items():
        actual = found[2][name].reshape(weight.shape)  # tensor-parallel ranks keep a packed projection part by part
        torch.testing.assert_close(actual, weight, rtol=tolerance, atol=tolerance / 100, msg=name)


def prepared(words: Sequence[object], world: int) -> PreparedRun:
    """Return the run of the command line `tpfuse train WORDS` on the ranks of a pool."""
    return prepare_run(with_layout(parse_train([*map(str, words)]), world))


def looped(run: PreparedRun, stop: Callable[[], bool] = lambda: False) -> str:
    """Take all steps of a run on this rank of a pool, and return what this rank prints. stop: whether it must stop."""
    mesh = _mesh(run.options, run.config)
    rank, world = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
    info = RankInfo(rank, world, rank, world, None)
    with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch.object(hardware, "PROBE_SECONDS", 0.01):
        TrainingLoop(info, run, mesh, torch.device("cpu"), cast(StopRequest, stop)).run_to_end()
    return out.getvalue()
