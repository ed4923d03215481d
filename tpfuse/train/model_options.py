"""The model that the options of a run mean, and whether its ranks can share it."""

import contextlib
from dataclasses import fields
from pathlib import Path

import torch

from tpfuse.checkpoint.checkpoint import Checkpoint, checkpoint_folders
from tpfuse.errors import CheckpointError, UserError, refusing
from tpfuse.models.gpt import GPTConfig
from tpfuse.parallel.context import check_context, heads_to_exchange
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.options import ModelOptions, ParallelOptions, TrainCommand
from tpfuse.train.pipeline_options import pipeline_stages, rank_count
from tpfuse.train.rank_model import ModelConfig, outlined
from tpfuse.train.saved_state import saved_state
from tpfuse.zero.bucket_layout import BUCKET_BYTES, KINDS, Kind, plan_buckets
from tpfuse.zero.muon_matrices import block_matrices
from tpfuse.zero.offload import check_space, state_bytes


def model_config(options: TrainCommand, vocab_size: int, run: Path | None = None) -> ModelConfig:
    """Return the model of these options, whose layout is filled in. Raise UserError if its ranks cannot share it.

    vocab_size: the vocabulary of a GPT. run: the run to continue, whose newest checkpoint describes a model of
    transformers too, if the folder of --model.from is gone.
    """
    config = _described(options.model, vocab_size, run)
    for check in (_check_ranks, _check_mask, _check_cut, _check_muon):
        check(options, config)
    return config


def _described(model: ModelOptions, vocab_size: int, run: Path | None) -> ModelConfig:
    folder = model.from_
    if folder is None:
        shape = {item.name: getattr(model, item.name) for item in fields(model) if item.name not in ("preset", "from_")}
        return GPTConfig(vocab_size, **shape)
    for checkpoint in [] if run is None or (folder / "config.json").is_file() else checkpoint_folders(run):
        with contextlib.suppress(CheckpointError):
            config = saved_state(Checkpoint(checkpoint))[1]
            if config.family:  # of transformers
                return config
    with refusing(f"--model.from {folder}: "):
        return DecoderConfig.read(folder, model.n_positions)


def check_layout(options: TrainCommand, config: ModelConfig, name: Path) -> None:
    """Raise UserError if the ranks of these options, whose layout is filled in, cannot share a trained model.

    A rank may have a whole model of any family. name: that of the model in the message.
    """
    parallel = options.parallel
    if rank_count(parallel) == parallel.data_ranks:
        with refusing(f"{name}: "):
            config.check_whole()
        return
    with refusing(f"{name}: ", "; with --parallel.dp alone each rank has the whole model"):
        _check_shared(parallel, config)
    _check_cut(options, config)


def _check_ranks(options: TrainCommand, config: ModelConfig) -> None:
    folder = options.model.from_
    with refusing("" if folder is None else f"--model.from {folder}: "):
        _check_shared(options.parallel, config)


def _check_mask(options: TrainCommand, config: ModelConfig) -> None:
    """Raise UserError if the model cannot mask documents."""
    if options.data.documents == "mask":
        given = f"--model.from {options.model.from_}: --data.documents mask: "
        with refusing(given, ": give --data.documents attend"):
            config.check_documents()


def _check_cut(options: TrainCommand, config: ModelConfig) -> None:
    """Raise UserError if the layers of the model cannot be cut into the stages of the options."""
    if options.parallel.pp > 1:
        if options.train.virtual_ranks and isinstance(config, DecoderConfig) and (config.tied or config.drops):
            why = "has dropout, which follows from the stage" if config.drops else "ties its embedding and its head"
            raise UserError(
                f"--train.virtual-ranks with --parallel.pp {options.parallel.pp}: the model {why}, so that its bits"
                " depend on the pipeline: use one pipeline rank"
            )
        given = "pp-layers " if options.parallel.pp_layers else f"pp {options.parallel.pp}: "
        with refusing(f"--parallel.{given}"):
            pipeline_stages(options.parallel, config)


def _check_muon(options: TrainCommand, config: ModelConfig) -> None:
    """Raise UserError if Muon cannot tell the matrices of a model of transformers."""
    if options.optim.name == "muon" and config.family:
        with refusing("--optim.name muon: ", ": give --optim.name adamw"):
            block_matrices(outlined(config, None, torch.float32))


def _check_shared(parallel: ParallelOptions, config: ModelConfig) -> None:
    """Raise ValueError, or UserError, if the ranks of a layout cannot share the layers or sequences of a model."""
    config.check(parallel.tp)
    if parallel.cp > 1:
        config.check_context(parallel.tp)
        heads = config.n_head // parallel.tp
        ulysses = ulysses_ranks(parallel, heads)
        check_context(config.n_positions, heads, parallel.cp, parallel.cp_schedule, parallel.cp_balance, ulysses)


def ulysses_ranks(parallel: ParallelOptions, heads: int) -> int:
    """Return how many context-parallel ranks exchange heads under ulysses_ring, and 1 under the other schedules.

    heads: the attention heads of one tensor-parallel rank. Raise ValueError if no number of ranks fits.
    """
    if parallel.cp == 1 or parallel.cp_schedule != "ulysses_ring":
        return 1
    return parallel.cp_ulysses or heads_to_exchange(parallel.cp, heads)


def check_offload(options: TrainCommand, config: ModelConfig, local_ranks: int) -> None:
    """Raise UserError if the folder has no space for the optimizer state of this host's ranks, without padding."""
    zero, parallel = options.zero, options.parallel
    if zero.offload in ("none", "host"):
        return
    model = outlined(config, None, getattr(torch, options.train.dtype))
    ranks = parallel.data_ranks * parallel.cp
    worlds: dict[Kind, int] = dict.fromkeys(KINDS, ranks // parallel.replicas)
    matrices = block_matrices(model) if options.optim.name == "muon" else ()
    layouts = plan_buckets(list(model.named_parameters()), (), worlds, BUCKET_BYTES, matrices=matrices)
    with refusing("--zero."):
        needed = state_bytes(layouts, zero.stage if ranks > 1 else min(zero.stage, 2), options.optim.state_dtype)
        check_space(Path(zero.offload), needed * local_ranks // parallel.tp)
