"""Check a run and prepare it. All bad input is found here, before a rank starts and before anything is written."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w
import torch

from tpfuse import switches
from tpfuse.checkpoint.checkpoint import Checkpoint, checkpoint_folders, newest_good
from tpfuse.checkpoint.durable import replace_file
from tpfuse.comm.stacks import remove_stacks
from tpfuse.errors import CheckpointError, UserError, check_at_least, refusing
from tpfuse.models.gpt import GPTConfig
from tpfuse.parallel.context import check_context, heads_to_exchange
from tpfuse.switches import resolved_kernels, use
from tpfuse.train.compiled import check_compiler
from tpfuse.train.config import BEFORE, profiled_steps, resolved, stored
from tpfuse.train.continuation import check_schedule, check_start, described
from tpfuse.train.corpus import characters, find_text
from tpfuse.train.data import RunData, encode_text, kept_tokens, read_data, store
from tpfuse.train.decoder import DecoderConfig
from tpfuse.train.hardware import device_count
from tpfuse.train.initial_weights import differences, find_source
from tpfuse.train.language_model import ModelConfig, as_json, outlined
from tpfuse.train.messages import warn
from tpfuse.train.muon_options import muon_options
from tpfuse.train.nvtx import nvtx_package
from tpfuse.train.option_marks import check_needs
from tpfuse.train.options import ParallelOptions, PrepareCommand, TrainCommand
from tpfuse.train.pipeline_options import described_layout, pipeline_order, pipeline_stages, rank_count, stage_owners
from tpfuse.train.rules import check_rules
from tpfuse.train.saved_state import saved_state
from tpfuse.train.schedule import lowest, steps_of
from tpfuse.train.token_file import DamagedTokens, TokenFiles, read_descriptions, token_paths
from tpfuse.train.tokenizer import Tokenizer, build_tokenizer, document_start
from tpfuse.zero.bucket_layout import BUCKET_BYTES, KINDS, Kind, plan_buckets
from tpfuse.zero.compression import compression_of
from tpfuse.zero.muon_matrices import hidden_matrices
from tpfuse.zero.offload import check_space, state_bytes

_LONGEST_TIMEOUT = 1e6
_SEARCHED = 1 << 26  # tokens in which a document must begin
_READ = 1 << 22  # tokens in one read
_STAGING = ".tpfuse-tokens-"  # begins the names of folders of tokens that no run has yet


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


def with_layout(options: TrainCommand, world: int | None) -> TrainCommand:
    """Return `options` with dp filled in for `world` ranks.

    world: None for the number of ranks that fits this machine (see `ParallelOptions`). Raise UserError if the world is
    not tp x cp x dp x pp, or if a machine with GPUs has too few of them.
    """
    parallel = options.parallel
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    check_at_least({f"parallel.{name}": (getattr(parallel, name), 1) for name in ("tp", "cp", "pp", "dp")})
    ranks = device_count() if world is None else world
    dp = parallel.dp or max(1, ranks // (tp * cp * pp))
    layout, needed = described_layout(tp=tp, cp=cp, dp=dp, pp=pp), tp * cp * dp * pp
    if world is None and ranks and needed > ranks:
        raise UserError(f"{layout} needs {needed} GPUs, and this machine has {ranks}")
    if world is not None and needed != world:
        raise UserError(f"{layout} needs {needed} ranks, and there are {world}")
    return replace(options, parallel=replace(parallel, dp=dp))


def check_options(options: TrainCommand) -> None:
    """Raise UserError for options that no run can have, whatever its data. options: with the layout filled in."""
    if options.profile.nvtx:
        nvtx_package()
    profiled_steps(options.profile.steps)
    for check in (check_needs, check_rules, _check_ranges, _check_schedule, _check_muon, _check_zero, _check_batch):
        check(options)


def _check_ranges(options: TrainCommand) -> None:
    train, optim, parallel = options.train, options.optim, options.parallel
    at_least: dict[str, tuple[float | None, float]] = {
        "train.steps": (train.steps, 1), "train.batch": (train.batch, 1), "train.micro-batch": (train.micro_batch, 1),
        "train.eval-every": (train.eval_every, 0), "train.eval-batches": (train.eval_batches, 1),
        "train.save-every": (train.save_every, 0), "train.keep": (train.keep, 0),
        "train.log-every": (train.log_every, 1),
        "optim.clip": (optim.clip, 0), "optim.weight-decay": (optim.weight_decay, 0), "optim.lr": (optim.lr, 0),
        "optim.min-lr": (optim.min_lr, 0), "parallel.measure-seconds": (parallel.measure_seconds, 0),
        "parallel.cp-ulysses": (parallel.cp_ulysses, 1), "restarts": (options.restarts, 0),
        "parallel.pp-stages-per-rank": (parallel.pp_stages_per_rank, 1),
    }  # fmt: skip
    check_at_least(at_least)
    if optim.schedule != "constant" and lowest(optim) > optim.lr:
        raise UserError(
            f"--optim.min-lr {optim.min_lr} is above --optim.lr {optim.lr}: the rate would rise after the warm-up;"
            " give less, or None for a tenth"
        )
    check_timeout(options.comm.timeout)
    if not -(2**63) <= train.seed < 2**63:
        raise UserError(f"--train.seed {train.seed}: expected a number of 64 bits with a sign")
    for name, beta in (("beta1", optim.beta1), ("beta2", optim.beta2)):
        if not 0.0 <= beta < 1.0:
            raise UserError(f"--optim.{name} {beta}: expected 0 <= {name} < 1")


def check_timeout(seconds: float) -> None:
    """Raise UserError for a --comm.timeout that is none."""
    check_at_least({"comm.timeout": (seconds, 1)})
    if seconds > _LONGEST_TIMEOUT:
        raise UserError(f"--comm.timeout {seconds}: expected at most {_LONGEST_TIMEOUT:g} seconds")


def _check_batch(options: TrainCommand) -> None:
    """Raise UserError for a batch that the ranks, the pipeline or the memory cannot have."""
    train, dp = options.train, options.parallel.data_ranks
    if train.batch % dp:
        raise UserError(f"--train.batch {train.batch} cannot be divided among {dp} data-parallel ranks")
    share = train.batch // dp
    if train.micro_batch and share % train.micro_batch:
        raise UserError(
            f"--train.micro-batch {train.micro_batch} does not divide the {share} sequences of each rank"
            f" (--train.batch {train.batch}, dp {dp})"
        )
    with refusing(f"--parallel.pp-stages-per-rank {options.parallel.pp_stages_per_rank}: "):
        stage_owners(options.parallel)
    if options.parallel.pp > 1:
        given = f", --train.micro-batch {train.micro_batch}" if train.micro_batch else ""
        with refusing("", f" (--train.batch {train.batch}, dp {dp}{given})"):
            pipeline_order(options)
    held = 8 * (train.batch + share * (options.model.n_positions + 1))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if held > memory:
        raise UserError(
            f"--train.batch {train.batch}: the token ids of one step take {held / 2**30:.0f} GiB on each rank,"
            f" and this machine has {memory / 2**30:.0f} GiB"
        )


def _check_schedule(options: TrainCommand) -> None:
    optim, tokens = options.optim, max(1, options.train.batch * options.model.n_positions)
    lengths = {"warmup": (optim.warmup, 0), "decay-steps": (optim.decay_steps, 1), "decay": (optim.decay, 1)}
    for name, (length, least) in lengths.items():
        if length is not None and steps_of(length, tokens, name) < least:
            raise UserError(f"--optim.{name} {length}: expected at least {least}")


def _check_muon(options: TrainCommand) -> None:
    """Raise UserError for options that no Muon has."""
    optim = options.optim
    if optim.muon_lr is not None and not optim.lr:
        raise UserError("--optim.muon-lr follows the schedule of --optim.lr, which is 0: expected more than 0")
    with refusing("--optim.name muon: "):
        muon_options(optim)


def _check_zero(options: TrainCommand) -> None:
    zero, parallel = options.zero, options.parallel
    if zero.stage not in (0, 1, 2, 3):
        raise UserError(f"--zero.stage {zero.stage}: expected 0, 1, 2 or 3")
    ranks = parallel.data_ranks * parallel.cp
    if parallel.replicas < 1 or ranks % parallel.replicas:
        expected = f"a number that divides the {ranks} data-parallel ranks"
        raise UserError(f"--parallel.replicas {parallel.replicas}: expected {expected}")
    with refusing("--zero."):
        compression_of(zero.compression)


def _check_offload(options: TrainCommand, config: ModelConfig, local_ranks: int) -> None:
    """Raise UserError if the folder has no space for the optimizer state of this host's ranks, without padding."""
    zero, parallel = options.zero, options.parallel
    if zero.offload in ("none", "host"):
        return
    model = outlined(config, None, getattr(torch, options.train.dtype))
    ranks = parallel.data_ranks * parallel.cp
    worlds: dict[Kind, int] = dict.fromkeys(KINDS, ranks // parallel.replicas)
    matrices = hidden_matrices(model) if options.optim.name == "muon" else ()
    layouts = plan_buckets(list(model.named_parameters()), (), worlds, BUCKET_BYTES, matrices=matrices)
    with refusing("--zero."):
        needed = state_bytes(layouts, zero.stage if ranks > 1 else min(zero.stage, 2), options.optim.state_dtype)
        check_space(Path(zero.offload), needed * local_ranks // parallel.tp)


def _check_kernels(options: TrainCommand) -> None:
    with refusing("--"), use(kernels=options.kernels):
        resolved_kernels("cuda" if device_count() else "cpu")
    if options.train.cuda_graph == "yes" and not device_count():
        raise UserError("--train.cuda-graph needs a GPU, and this machine has none: leave it out")
    if options.train.offload_activations and not device_count():
        raise UserError("--train.offload-activations needs a GPU, and this machine has none: leave it out")
    communicates = rank_count(options.parallel) > 1
    if options.parallel.impl == "fused" and communicates and not device_count() and not switches.INTERPRETED:
        raise UserError(
            "--parallel.impl fused on a CPU is interpreted: set TRITON_INTERPRET=1 before the program starts"
        )


def _check_lengths(options: TrainCommand, data: RunData) -> None:
    """Raise UserError if a source has too few tokens for training or validation."""
    fraction, context, evaluates = options.data.val_fraction, options.model.n_positions, options.train.eval_every
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"--data.val-fraction {fraction}: expected 0 <= fraction < 1")
    ways = "more text in --data.val-path" if data.val else "more text, a larger --data.val-fraction,"
    kept = 0.0 if data.val else fraction  # of each source
    found = [(files, files.count - int(files.count * kept), "training", "") for files in data.train.files]
    if evaluates:
        sources, share = (data.val.files, 1.0) if data.val else (data.train.files, kept)
        way = f" ({ways} or --train.eval-every 0)"
        found += [(files, int(files.count * share), "validation", way) for files in sources]
    for files, count, purpose, way in found:
        if count <= context:
            raise UserError(
                f"{files.source} has {count} tokens for {purpose}; a context of {context} needs {context + 1}{way}"
            )


def _check_documents(files: TokenFiles) -> None:
    """Raise UserError if it is not known where documents begin in the training tokens. Raise OSError."""
    start = document_start(files.tokenizer)
    if start is None:
        kind = files.tokenizer.as_json()["kind"]
        raise UserError(
            f"--data.documents mask: the tokenizer {kind} has no token such as <|endoftext|> between documents: give"
            " another --data.tokenizer, or --data.documents attend"
        )
    tokens, looked = files.open(), 0
    while looked < min(len(tokens), _SEARCHED):
        if (tokens[looked : looked + _READ] == start).any():
            return
        looked += _READ
    raise UserError(
        f"--data.documents mask: none of the first {min(len(tokens), _SEARCHED)} tokens of {files.source} is token"
        f" {start}, with which documents begin: prepare them from a folder, jsonl or parquet, or give"
        " --data.documents attend"
    )


def model_config(options: TrainCommand, vocab_size: int, run: Path | None = None) -> ModelConfig:
    """Return the model of these options, whose layout is filled in. Raise UserError if its ranks cannot share it.

    vocab_size: the vocabulary of a GPT. run: the run to continue, whose newest checkpoint describes a model of
    transformers too, if the folder of --model.from is gone.
    """
    model = options.model
    if model.from_ is not None:
        decoder = _decoder_config(options, model.from_, run)
        if options.parallel.pp > 1:
            _check_cut(options, decoder)
        if options.optim.name == "muon":
            with refusing("--optim.name muon: ", ": give --optim.name adamw"):
                hidden_matrices(decoder.empty(torch.float32))
        return decoder
    shape = {item.name: getattr(model, item.name) for item in fields(model) if item.name not in ("preset", "from_")}
    config = GPTConfig(vocab_size, **shape)
    with refusing():
        _check_shared(options.parallel, config)
    _check_cut(options, config)
    return config


def check_layout(options: TrainCommand, config: ModelConfig, name: Path) -> None:
    """Raise UserError if the ranks of these options, whose layout is filled in, cannot share a trained model.

    A rank may have a whole model of any family. name: that of the model in the message.
    """
    parallel = options.parallel
    if isinstance(config, DecoderConfig) and rank_count(parallel) == parallel.data_ranks:
        with refusing(f"{name}: "):
            config.check_whole()
        return
    with refusing(f"{name}: ", "; with --parallel.dp alone each rank has the whole model"):
        _check_shared(parallel, config)
    if parallel.pp > 1:
        _check_cut(options, config)


def _check_cut(options: TrainCommand, config: ModelConfig) -> None:
    """Raise UserError if the layers of the model cannot be cut into the stages of the options."""
    given = "pp-layers " if options.parallel.pp_layers else f"pp {options.parallel.pp}: "
    with refusing(f"--parallel.{given}"):
        pipeline_stages(options, config)


def _decoder_config(options: TrainCommand, folder: Path, run: Path | None) -> DecoderConfig:
    saved = [] if run is None or (folder / "config.json").is_file() else checkpoint_folders(run)
    for checkpoint in saved:
        try:
            config = saved_state(Checkpoint(checkpoint))[1]
        except CheckpointError:
            continue
        if isinstance(config, DecoderConfig):
            return config
    parallel = options.parallel
    with refusing(f"--model.from {folder}: "):
        config = DecoderConfig.read(folder, options.model.n_positions)
        _check_shared(parallel, config)
    if options.data.documents == "mask":  # transformers masks them where context-parallel ranks can share the attention
        try:
            config.check_context(1)
        except ValueError as error:
            reason = str(error).removeprefix("context parallelism: ")
            mask = f"--data.documents mask: {reason}: give --data.documents attend"
            raise UserError(f"--model.from {folder}: {mask}") from None
    return config


def _check_shared(parallel: ParallelOptions, config: ModelConfig) -> None:
    """Raise ValueError, or UserError, if the ranks of a layout cannot share the layers or sequences of a model."""
    config.check(parallel.tp)
    if isinstance(config, DecoderConfig):
        if parallel.cp == 1:
            return
        config.check_context(parallel.tp)
    if parallel.cp > 1:
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


def prepare_run(options: TrainCommand, local_ranks: int | None = None) -> PreparedRun:
    """Check the options, the data and the run folder, and then write the files that ranks read.

    options: with the layout filled in. local_ranks: the number of ranks on this host; None for all. Raise UserError
    (nothing has been written then), and CheckpointError if all checkpoints to resume from are damaged.
    """
    check_options(options)
    _check_kernels(options)
    if options.train.compile:
        check_compiler()
    ranks = local_ranks or rank_count(options.parallel)
    folder = options.out or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    resumes = options.resume == "yes"
    _remove_left(_place(folder))
    if not resumes and os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        is_run = (folder / "config.toml").is_file()
        way = "add --resume to continue its run, or choose" if is_run else "it holds no run: choose"
        raise UserError(f"{folder} exists: {way} another --out")
    for path in (folder, options.data.path, options.data.val_path, options.init_from, options.model.from_):
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UserError(f"{str(path)!r}: the name is not UTF-8: rename it") from None
    run = folder if resumes else None
    config = model_config(options, 1, run)  # checks that need no text come first: reading a large text takes long
    if resumes:
        _lock(folder)
    source = None if resumes else find_source(options, config)
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that no tokens are left
    try:
        with _staging(_place(folder)) as staging:
            data = read_data(options.data, staging, kept_tokens(folder, options.data) if resumes else (None, None))
            weights = None if source is None else source.weights_for(data.train.tokenizer)
            _check_lengths(options, data)
            if options.model.from_ is None:
                config = model_config(options, data.train.tokenizer.vocab_size)
            _check_offload(options, config, ranks)
            if options.data.documents == "mask":
                for files in data.train.files:
                    _check_documents(files)
            folder.mkdir(parents=True, exist_ok=True)
            _lock(folder)
            data = store(folder / "data", data, staging)
    except DamagedTokens as error:
        raise UserError(str(error)) from None
    except OSError as error:
        if not resumes:
            shutil.rmtree(folder / "data", ignore_errors=True)  # so that the next run may use the folder
        raise UserError(f"cannot write the run folder {folder}: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    checkpoint = _resume_point(folder, options, config, data) if resumes else None
    if resumes and checkpoint is None:
        source = find_source(options, config)
        weights = None if source is None else source.weights_for(data.train.tokenizer)
    given = next((files for files in data.train.files if files.paths[0].parent != folder / "data"), None)
    if given is not None:
        options = _with_tokenizer(options, given)
    dropped = check_start(folder / "config.toml", options) if resumes else []
    _write(folder, options, data.train.tokenizer)  # comes last, so that everything it names exists
    if checkpoint is None:
        return PreparedRun(folder, options, config, data, None, weights, tuple(dropped))
    changes = (*dropped, *described(checkpoint.state["config"], options))
    before = stored("train.micro_batch", checkpoint.state["config"]["train"].get("micro_batch"))
    return PreparedRun(folder, options, config, data, checkpoint.folder, weights, changes, before)


def _place(folder: Path) -> Path:
    """Return the folder, on the disk of a run folder, in which its tokens are until all checks have passed."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


@contextlib.contextmanager
def _staging(place: Path) -> Iterator[Path]:
    """Make a hidden folder for tokens, which is locked, and remove it with what is in it then. Raise OSError."""
    folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=place))
    descriptor = _flock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _remove_left(place: Path) -> None:
    """Remove the folders of `_staging` whose process was killed, if the file system tells by its locks."""
    for folder in place.glob(f"{_STAGING}*"):
        with contextlib.suppress(UserError, OSError):
            if (descriptor := _flock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _with_tokenizer(options: TrainCommand, files: TokenFiles) -> TrainCommand:
    """Return the options with the tokenizer of the token files, whose JSON file overrides --data.tokenizer."""
    name, kind = options.data.tokenizer, files.tokenizer.as_json()["kind"]
    if kind in ("bytes", "chars"):
        name = kind
    elif name in ("bytes", "chars"):
        name = str(files.paths[0].with_suffix(".json"))
    return replace(options, data=replace(options.data, tokenizer=name))


_locked: dict[tuple[int, int], int] = {}  # descriptors of run folders, by device and inode, until this process ends


def _lock(folder: Path) -> None:
    """Lock a run folder until this process ends. Raise UserError if another run has locked it."""
    status = folder.stat()
    key = status.st_dev, status.st_ino
    if key not in _locked and (descriptor := _flock(folder)) is not None:
        _locked[key] = descriptor


def _flock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed; return None if its file system has no locks.

    Raise UserError if another process has locked it, and OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{folder} is in use by another run: wait until it has ended, or choose another --out"
        ) from None
    except OSError:
        os.close(descriptor)
        return None


def _write(folder: Path, options: TrainCommand, tokenizer: Tokenizer) -> None:
    try:
        remove_stacks(folder)
        replace_file(folder / "config.toml", tomli_w.dumps(resolved(options)))
        replace_file(folder / "tokenizer.json", json.dumps(tokenizer.as_json()))
    except OSError as error:
        raise UserError(f"cannot write the run folder {folder}: {error.strerror}") from None


def _resume_point(folder: Path, options: TrainCommand, config: ModelConfig, data: RunData) -> Checkpoint | None:
    checkpoint = newest_good(folder, warn=warn)
    if checkpoint is None:
        warn(f"{folder} has no checkpoint yet: starting from step 0")
        return None
    state, model = saved_state(checkpoint)
    before = _described(model)
    before.pop("dropout", None)  # dropout has no weights, so a user may change it on purpose
    if changes := differences(before, _described(config), "checkpoint"):
        raise UserError(f"--resume with a different model: {changes}")
    for name, used in (("sha256", "trained"), ("val_sha256", "validated")):
        before = state["data"].get(name)
        if before != data.digests()[name]:
            tokens = f"tokens with SHA-256 {before}" if before else "the end of its training data"
            raise UserError(f"--resume with different data: {folder} was {used} on {tokens}")
    half = ("bfloat16", "float16")
    wide = {name: "float32" if name in half else name for name in (state["dtype"], options.train.dtype)}
    if wide[state["dtype"]] != wide[options.train.dtype]:
        raise UserError(f"--resume with --train.dtype {options.train.dtype}: the run was trained in {state['dtype']}")
    before = state["config"]["optim"].get("name", BEFORE.optim.name)
    if options.optim.name != before:
        way = "go on with it, or begin a run with its weights by --init-from"
        raise UserError(f"--resume with --optim.name {options.optim.name}: the run was trained by {before}: {way}")
    kept, asked = state["config"]["optim"].get("state_dtype", "float32"), options.optim.state_dtype
    if kept != asked:
        raise UserError(f"--resume with --optim.state-dtype {asked}: the run has moments in {kept}, which stay so")
    check_schedule(state, options)
    return checkpoint


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return the values that two models must have in common if one is to have the other's weights."""
    if not isinstance(config, DecoderConfig):
        return as_json(config)
    settings = {name: value for name, value in config.settings.items() if name != "transformers_version"}
    return settings | {"n_positions": config.n_positions}


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
