"""Prepare a run. All bad input is found here, before a rank starts and before anything is written."""

from dataclasses import dataclass, replace
from pathlib import Path

from tpfuse.errors import UserError
from tpfuse.train.check_options import check_kernels, check_options
from tpfuse.train.continuation import check_start, described
from tpfuse.train.corpus import characters, find_text
from tpfuse.train.data import RunData, encode_text, kept_tokens, read_data
from tpfuse.train.data_checks import check_documents, check_lengths
from tpfuse.train.initial_weights import find_source
from tpfuse.train.model_options import check_offload, model_config
from tpfuse.train.options import PrepareCommand, TrainCommand
from tpfuse.train.pipeline_options import rank_count
from tpfuse.train.rank_model import ModelConfig
from tpfuse.train.resume_point import resume_point
from tpfuse.train.run_folder import claimed, run_folder, store_tokens, write_run
from tpfuse.train.token_file import read_descriptions, token_paths
from tpfuse.train.tokenizer import build_tokenizer


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
    ranks, resumes = local_ranks or rank_count(options.parallel), options.resume == "yes"
    folder = run_folder(options)
    # Checks that need no text come first: reading a large text takes long.
    config = model_config(options, 1, folder if resumes else None)
    source = None if resumes else find_source(options, config)
    with claimed(folder, resumes=resumes) as staging:
        data = _read(options, staging, folder if resumes else None)
        weights = None if source is None else source.weights_for(data.train.tokenizer)
        if options.model.from_ is None:
            config = model_config(options, data.train.tokenizer.vocab_size)
        check_offload(options, config, ranks)
        data = store_tokens(folder, data, staging)
    checkpoint = resume_point(folder, options, config, data) if resumes else None
    if resumes and checkpoint is None:
        source = find_source(options, config)
        weights = None if source is None else source.weights_for(data.train.tokenizer)
    options = _with_tokenizer(options, folder, data)
    dropped = check_start(folder / "config.toml", options) if resumes else []
    write_run(folder, options, data.train.tokenizer)  # comes last, so that everything it names exists
    if checkpoint is None:
        return PreparedRun(folder, options, config, data, None, weights, tuple(dropped))
    changes = (*dropped, *described(checkpoint.state["config"], options))
    before = checkpoint.state["config"]["train"].get("micro_batch")
    return PreparedRun(folder, options, config, data, checkpoint.folder, weights, changes, before)


def _read(options: TrainCommand, staging: Path, run: Path | None) -> RunData:
    """Read the data, and check it. run: the run to continue, which may have kept its tokens."""
    data = read_data(options.data, staging, (None, None) if run is None else kept_tokens(run, options.data))
    check_lengths(options, data)
    if options.data.documents == "mask":
        for files in data.train.files:
            check_documents(files)
    return data


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


def prepare(options: PrepareCommand) -> str:
    """Write the token file of `tpfuse prepare` and return a line that describes it. Raise UserError."""
    if (options.out / "tokens.bin").exists():
        raise UserError(f"{options.out / 'tokens.bin'} exists: choose another --out")
    try:
        read_descriptions((options.out / "tokens.bin",))  # one is there without its tokens if a prepare was interrupted
    except UserError as error:
        raise UserError(f"{error}: choose another --out") from None
    data = options.data
    if data.path is not None and token_paths(data.path):
        raise UserError(f"{data.path} holds tokens, which `tpfuse train` reads as they are: give it --data.path")
    text = find_text(data.path, data.field)
    try:
        file = encode_text(options.out, text, build_tokenizer(data.tokenizer, characters([text])), continues=True)
    except OSError as error:
        raise UserError(f"cannot write {options.out}: {error.strerror}") from None
    return f"{file.paths[0]}: {file.count} tokens of {file.source}, vocabulary {file.tokenizer.vocab_size}"
