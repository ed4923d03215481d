"""Prepare a run. All bad input is found here, before a rank starts and before anything is written."""

from dataclasses import dataclass, replace
from pathlib import Path

from tpfuse.checkpoint.checkpoint import checkpoint_folders
from tpfuse.train.check_options import check_kernels, check_options
from tpfuse.train.config import resolved
from tpfuse.train.continuation import check_start, described
from tpfuse.train.data import RunData, read_data
from tpfuse.train.data_checks import check_data
from tpfuse.train.initial_weights import find_source
from tpfuse.train.messages import warn
from tpfuse.train.model_options import check_offload, model_config
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import rank_count
from tpfuse.train.rank_model import ModelConfig
from tpfuse.train.resume_point import resume_point
from tpfuse.train.run_folder import run_folder, staging, store_tokens, write_run


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start. Every rank receives it."""

    folder: Path
    options: TrainCommand
    config: ModelConfig
    data: RunData
    # The folder of the checkpoint to continue from, or None.
    checkpoint: Path | None
    # Without a checkpoint, the folder of the initial weights; None if they are drawn.
    weights: Path | None
    # Lines that say what a resumed run does otherwise than before.
    changes: tuple[str, ...] = ()
    # The size of the checkpoint's micro-batches; None if they had all sequences of a rank.
    micro_batch: int | None = None


def prepare_run(options: TrainCommand, local_ranks: int | None = None) -> PreparedRun:
    """Check the options, the data and the run folder, and then write the files that ranks read.

    options: with the layout filled in. local_ranks: the number of ranks on this host; None for all. Raise UserError
    (nothing has been written then), and CheckpointError if all checkpoints to resume from are damaged.
    """
    check_options(options)
    check_kernels(options)
    resumes = options.resume == "yes"
    folder = run_folder(options.out, resumes=resumes)
    run = folder if resumes else None
    continues = resumes and bool(checkpoint_folders(folder))
    if resumes and not continues:
        warn(f"{folder} has no checkpoint yet: starting from step 0")
    # Checks that need no text come first: reading a large text takes long.
    config = model_config(options, 1, run)
    source = None if continues else find_source(options.model, options.init_from, options.train.dtype, config)
    with staging(folder, resumes=resumes) as tokens:
        data = read_data(options.data, tokens, run)
        check_data(data, options.data, options.model.n_positions, evaluates=options.train.eval_every > 0)
        if not config.family:
            config = replace(config, vocab_size=data.train.tokenizer.vocab_size)
        weights = None if source is None else source.weights_for(data.train.tokenizer)
        check_offload(options, config, local_ranks or rank_count(options.parallel))
        data = store_tokens(folder, data, tokens)
    checkpoint = resume_point(folder, options, config, data) if continues else None
    options = _with_tokenizer(options, folder, data)
    dropped = check_start(folder / "config.toml", options) if resumes else []
    write_run(folder, resolved(options), data.train.tokenizer)  # comes last, so that everything it names exists
    if checkpoint is None:
        return PreparedRun(folder, options, config, data, None, weights, tuple(dropped))
    before = checkpoint.state["config"]
    changes = (*dropped, *described(before, options))
    size = before["train"].get("micro_batch")
    return PreparedRun(folder, options, config, data, checkpoint.folder, weights, changes, size)


def _with_tokenizer(options: TrainCommand, folder: Path, data: RunData) -> TrainCommand:
    """Return the options with the tokenizer of given token files, whose JSON file overrides --data.tokenizer."""
    given = next((files for files in data.train.files if files.paths[0].parent != folder / "data"), None)
    if given is None:
        return options
    name, kind = options.data.tokenizer, given.tokenizer.as_json()["kind"]
    if kind in ("bytes", "chars"):
        name = kind
    elif name in ("bytes", "chars"):
        name = str(given.paths[0].with_suffix(".json"))
    return replace(options, data=replace(options.data, tokenizer=name))
