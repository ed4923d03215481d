"""A trained model on one rank, or on ranks that share it: what `tpfuse evaluate`, `sample` and `export` load.

`on_ranks` starts the ranks of a command, or joins those of a launcher. The first rank reads what the user has named and
tells the others what it has found (`ModelRanks.from_first`). Then each rank reads its shards alone (`ModelRanks.load`).
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.checkpoint import Checkpoint, Shard, Shards
from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.collectives.collective import set_timeout
from tpfuse.comm.dispatch import connected
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.comm.limits import core_time, set_threads
from tpfuse.comm.mesh import build_mesh, flat_group, rank_and_size
from tpfuse.comm.settings import set_settings
from tpfuse.errors import RunError, UserError, ending_run, of_disk, refusing
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.train.batches import MicroBatch
from tpfuse.train.check_options import check_timeout, with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.initial_weights import decoder_source, load_weights
from tpfuse.train.language_model import Drawing, LanguageModel
from tpfuse.train.launch import STOP_SIGNALS, RankInfo, by_first, device_of, in_group, join, launched_rank, start_ranks
from tpfuse.train.model_options import check_layout
from tpfuse.train.options import CommOptions, LayoutOptions, ParallelOptions, TrainCommand
from tpfuse.train.pipeline_options import rank_count
from tpfuse.train.rank_model import ModelConfig, language_model, pipeline_logits, pipeline_runner
from tpfuse.train.saved_state import open_run
from tpfuse.train.tokenizer import Tokenizer, build_tokenizer

_PREPARATION = 1800.0  # seconds that ranks wait for each other while they read files
_ROUNDS = 4  # micro-batches for each pipeline rank

T = TypeVar("T")


@dataclass(frozen=True)
class SavedModel:
    """A trained model in a folder, before it is loaded.

    folder: of a checkpoint, or of Hugging Face. sound: the files of the checkpoint that this process has verified.
    """

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype = torch.float32
    sound: frozenset[str] | None = None

    def load(self, shards: Shards, *, verified: bool) -> None:
        """Fill shards. verified: whether this process has made this object. Raise as `Checkpoint.load` does."""
        if self.sound is None:
            load_weights(self.folder, self.config, shards)
            return
        saved = Checkpoint(self.folder)
        saved.sound.update(self.sound if verified else ())
        saved.load(shards)


def saved_run(folder: Path) -> SavedModel:
    """Return the model of a run's newest good checkpoint: float64 if it was trained in float64, else float32.

    Raise UserError if there is no checkpoint, and CheckpointError if all are damaged.
    """
    saved, state, config, tokenizer = open_run(folder)
    dtype = torch.float64 if state["dtype"] == "float64" else torch.float32
    return SavedModel(saved.folder, config, tokenizer, dtype, frozenset(saved.sound))


def saved_model(folder: Path) -> SavedModel:
    """Return the model of a run (`saved_run`), or of a Hugging Face folder, which is float32. Raise as that does."""
    if not (folder / "config.json").is_file():
        return saved_run(folder)
    options = parse_train(["--model.from", str(folder)])
    with refusing():
        config = DecoderConfig.read(folder)
    source = decoder_source(folder, config)
    if source.folder is None:
        raise UserError(f"{folder} has a config.json and no weights: expected model.safetensors beside it")
    tokenizer = build_tokenizer(options.data.tokenizer)
    source.weights_for(tokenizer)
    return SavedModel(source.folder, config, tokenizer)


def load_run(folder: Path, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """Return the model of `saved_run` on this rank alone, and its tokenizer. Raise as that does."""
    saved = saved_run(folder)
    return ModelRanks(options_of(LayoutOptions(), CommOptions(), None), None, device).load(saved), saved.tokenizer


class ModelRanks:
    """The ranks of a command, as one of them sees them. They call its methods together.

    options: with the layout filled in. mesh: as of `build_mesh`; None for one rank.
    """

    # This rank's part of the model, and what runs the stages of a pipeline, after `load`.
    model: LanguageModel
    runner: Runner | None = None

    def __init__(self, options: TrainCommand, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.options, self.mesh, self.device = options, mesh, device
        self.group = None if mesh is None else dist.group.WORLD
        self.first = rank_and_size(self.group)[0] == 0
        self.replica, self.replicas = rank_and_size(flat_group(mesh, "dp"))

    def from_first(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which the first rank alone calls. Raise RunError on all ranks for bad input."""
        if self.group is None:
            return work()
        set_timeout(self.group, _PREPARATION)
        return by_first(self.group, work, "reading the model")

    def find(self, folder: Path) -> SavedModel:
        """Return `saved_model` if these ranks can share it, else raise UserError. For the first rank alone."""
        saved = saved_model(folder)
        check_layout(self.options, saved.config, folder)
        return saved

    def load(self, saved: SavedModel) -> LanguageModel:
        """Make this rank's part of a model and read its weights. Raise RunError on all ranks if one cannot."""
        config, options = saved.config, self.options
        try:
            self.model = model = language_model(config, options, self.mesh, self.device, saved.dtype)
        except ValueError as error:
            raise RunError(str(error), UserError.status) from error
        groups = [flat_group(self.mesh, name) for name in ("tp", "dp", "pp")]
        if groups[-1] is not None:
            self.runner = pipeline_runner(model, options, groups[-1], self.device)
        with agreement(f"loading {saved.folder}", self.group, alike=RunError), ending_run():
            saved.load(_shards(model), verified=self.first)
        for group in (self.group, *groups, *model.context.groups):
            if group is not None:
                set_timeout(group)
        model.module.eval()
        return model

    def losses(self, batches: Sequence[MicroBatch]) -> Sequence[Tensor]:
        """Return the losses of as many micro-batches as a step has, or of one: this rank's parts of their sums."""
        return [self.model.loss(batch) for batch in batches] if self.runner is None else self.runner.forward(batches)

    def generate(self, ids: Tensor, tokens: int, drawing: Drawing, ends: tuple[int, ...]) -> Tensor:
        """Return texts as `LanguageModel.generate` does."""
        logits = None if self.runner is None else partial(pipeline_logits, self.model, self.runner)
        return self.model.generate(ids, tokens, drawing, ends, logits)

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks. Raise the errors of operations that have failed on this rank."""
        for memory in connected():
            memory.check()
        return exchange(value, self.group, op="gathering results")


def _shards(model: LanguageModel) -> Shards:
    """Return this rank's shards of the model's parameters, without their elements on other ranks."""
    shards: dict[str, list[Shard]] = {}
    for name, parameter in model.module.named_parameters():
        local = local_tensor(parameter)
        stored = model.stored(name, local, local_slices(parameter), tuple(parameter.shape))
        shards[f"model.{name}"] = [Shard(shape, slices, tensor, False) for shape, tensor, slices in stored]
    return shards


def options_of(layout: LayoutOptions, comm: CommOptions, world: int | None) -> TrainCommand:
    """Return the options of a model on `world` ranks of a launcher, or on those that this process will start (None).

    A pipeline has several micro-batches at once, any other rank one. Raise UserError for a layout that the ranks cannot
    have.
    """
    check_timeout(comm.timeout)
    dp = 1 if layout.dp is None and world is None else layout.dp
    options = TrainCommand(parallel=ParallelOptions(tp=layout.tp, cp=layout.cp, dp=dp, pp=layout.pp), comm=comm)
    options = with_layout(options, world)
    parallel = options.parallel
    batch = parallel.data_ranks * (_ROUNDS * parallel.pp if parallel.pp > 1 else 1)
    return replace(options, train=replace(options.train, batch=batch, micro_batch=1))


def on_ranks(work: Callable[..., str], layout: LayoutOptions, comm: CommOptions, *arguments: Any) -> str | int:
    """Return the result of work(ranks, *arguments) on the first rank, or an exit status if another process prints it.

    The ranks are those that a launcher has started, or else this process starts them. Raise as `options_of` and
    `tpfuse.train.launch.start_ranks` do.
    """
    info = launched_rank()
    options = options_of(layout, comm, None if info is None else info.world)
    world = rank_count(options.parallel)
    if info is None and world > 1:
        return start_ranks(_print_result, world, work, options, arguments, timeout=comm.timeout)
    info = info or RankInfo(0, 1, 0, 1, None)
    result = _joined(info, work, options, arguments)
    return result if info.rank == 0 else 0


def _joined(info: RankInfo, work: Callable[..., str], options: TrainCommand, arguments: tuple[Any, ...]) -> str:
    """Return the result of work(ranks, *arguments) as a rank that joins the others and leaves them at the end."""
    device = device_of(info)
    if device.type == "cpu":
        set_threads(core_time() / info.local_world)
    if info.world == 1:
        return work(ModelRanks(options, None, device), *arguments)
    set_settings(timeout=options.comm.timeout)
    join(info, device, options.comm.timeout)
    parallel, cure = options.parallel, "give more ranks by --parallel.tp or --parallel.pp"
    with in_group(info, lambda: "the computation", cure):
        sizes = {"dp": parallel.data_ranks, "cp": parallel.cp, "tp": parallel.tp, "pp": parallel.pp}
        return work(ModelRanks(options, build_mesh(device.type, **sizes), device), *arguments)


def _print_result(info: RankInfo, work: Callable[..., str], options: TrainCommand, arguments: tuple[Any, ...]) -> int:
    """Print the result of `_joined` on the first rank, and return 0. SIGTERM ends this rank at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes it on as SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were blocked while this rank was starting
    result = _joined(info, work, options, arguments)
    try:
        if info.rank == 0:
            print(result, flush=True)
    except OSError as error:
        raise RunError(of_disk(error)) from None
    return 0
