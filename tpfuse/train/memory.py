"""`tpfuse memory` counts the memory that each rank of a training run will hold, without starting or allocating it.

The real model is built on the meta device, as the first tensor-parallel rank would build it: torch's fake process group
stands in for the others. That rank holds the most, since it has the longest shards. `tpfuse.models.saved_activations`
computes the tensors that autograd saves by a formula, and `tpfuse.zero.memory` counts the rest.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.channel import slot_size
from tpfuse.comm.layout import local_tensor
from tpfuse.models.gpt import GPTConfig
from tpfuse.models.saved_activations import MicroBatch, gradient_bytes, saved_bytes
from tpfuse.nearest import nearest
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import schedule_for
from tpfuse.parallel.pipeline.runner import routes
from tpfuse.parallel.pipeline.timeline import Held, most_held
from tpfuse.train.config import PRESETS, parse_train
from tpfuse.train.data import check_named, listed
from tpfuse.train.errors import UserError, instead_of
from tpfuse.train.language_model import ModelConfig, blocks_of, outlined, parameter_count, tied_parameters
from tpfuse.train.options import MemoryCommand, TrainCommand
from tpfuse.train.pipeline import micro_batch_size, own_stages, pipeline_order, rank_count, stage_owners
from tpfuse.train.setup import model_config, ulysses_ranks, with_layout
from tpfuse.train.shape_mesh import shape_mesh
from tpfuse.train.token_file import stated_tokenizer, token_paths
from tpfuse.train.tokenizer import build_tokenizer
from tpfuse.zero.bucket_layout import BUCKET_BYTES, Kind, plan_buckets
from tpfuse.zero.memory import STAGES, MemoryAccount, Width, account, account_sharded
from tpfuse.zero.parameter_takeover import take_partial_gradients

_LINES = ("parameters", "gradients", "master", "moments", "buffers", "activations", "total", "padding")
_VOCABULARIES = {"bytes": 256, "gpt2": 50257}  # the vocabulary sizes of tokenizers that need no file


@dataclass(frozen=True)
class Counted:
    """The memory of the first rank. accounts: its bytes by ZeRO's stage.

    parameters: the number of parameters of the whole model. micro_batches: the micro-batches of a step. unaccumulated:
    the bytes that gradients would take at stages 2 and 3 if a step had one micro-batch; empty if it has one. rank: the
    pipeline rank that is counted.
    """

    options: TrainCommand
    config: ModelConfig
    parameters: int
    micro_batches: int
    accounts: dict[int, MemoryAccount]
    unaccumulated: dict[int, int]
    rank: int = 0


def memory(name: str, command: MemoryCommand) -> str:
    """Returns the table of `tpfuse memory NAME`. Raises UserError."""
    options = _with_command(parse_train(model_arguments(name)), command)
    stages = STAGES if command.stage == "all" else (int(command.stage),)
    return table(name, count(options, vocabulary(options, command.vocab_size), stages))


def model_arguments(name: str) -> list[str]:
    """Returns the options of `tpfuse train` for a preset, a TOML file, or a config.json or its folder.

    A model of Hugging Face is trained in bfloat16. Raises UserError for another name.
    """
    path = Path(name)
    if name in PRESETS:
        return ["--model.preset", name]
    if path.is_dir() or (path.name == "config.json" and path.is_file()):
        folder = path if path.is_dir() else path.parent
        return ["--model.from", str(folder), "--train.dtype", "bfloat16"]
    if path.suffix == ".json" and path.is_file():
        raise UserError(f"{name}: expected the name config.json, by which `tpfuse train` reads it")
    if path.is_file():
        return ["--config", name]
    raise UserError(
        f"{name} is neither a preset ({', '.join(PRESETS)}) nor a TOML file of `tpfuse train` nor a config.json of"
        f" Hugging Face or its folder{nearest(name, PRESETS) or instead_of(path)}"
    )


def _with_command(options: TrainCommand, command: MemoryCommand) -> TrainCommand:
    """Returns `options` with the values of the command's flags and with the layout filled in."""
    given = {"ranks": command.ranks, "tp": command.tp, "cp": command.cp, "pp": command.pp}
    given["micro-batch"] = command.micro_batch
    for flag, value in (given | {"vocab-size": command.vocab_size}).items():
        if value < 0:
            raise UserError(f"--{flag} {value}: expected at least 0")
    parallel, train = options.parallel, options.train
    parallel = replace(
        parallel, tp=command.tp or parallel.tp, cp=command.cp or parallel.cp, pp=command.pp or parallel.pp
    )
    ranks = command.ranks or parallel.tp * parallel.cp * parallel.pp * max(parallel.dp, 1)
    if command.recompute != "config":
        train = replace(train, recompute=command.recompute)
    if command.micro_batch:
        train = replace(train, micro_batch=command.micro_batch)
    return with_layout(replace(options, parallel=replace(parallel, dp=0), train=train), ranks)


def vocabulary(options: TrainCommand, given: int) -> int:
    """Returns the vocabulary of a GPT, in tokens: `given`, or, if that is 0, the vocabulary of its tokenizer.

    It is 0 for a model of transformers, whose config.json names it. Raises UserError.
    """
    data = options.data
    if given and options.model.from_ is not None:
        raise UserError(f"--vocab-size {given} is for the GPT: config.json names that of model.from")
    if given or options.model.from_ is not None:
        return given
    named = (None if path is None else token_paths(path) for path in listed(data.path)[0])
    paths = next((each for each in named if each is not None), None)
    if paths is not None:
        stated = stated_tokenizer(paths)
        if stated is not None:
            return stated.vocab_size
        check_named(data.tokenizer, paths[0])
    if data.tokenizer == "chars":
        raise UserError("the tokenizer chars takes its vocabulary from the text: give --vocab-size")
    return _VOCABULARIES.get(data.tokenizer) or build_tokenizer(data.tokenizer).vocab_size


def count(options: TrainCommand, vocabulary: int, stages: Sequence[int]) -> Counted:
    """Counts the memory of the first rank. options: with the layout filled in. Raises UserError."""
    config, parallel = model_config(options, vocabulary), options.parallel
    if parallel.replicas < 1 or parallel.dp * parallel.cp % parallel.replicas:
        raise UserError(
            f"parallel.replicas {parallel.replicas} does not divide {parallel.dp * parallel.cp} data-parallel ranks"
        )
    with shape_mesh(parallel.tp) as mesh:
        return count_on(mesh, options, config, stages)


def count_on(mesh: DeviceMesh | None, options: TrainCommand, config: ModelConfig, stages: Sequence[int]) -> Counted:
    """Counts the memory of this rank of a tensor-parallel mesh. options: checked, with the layout filled in.

    Of a pipeline it counts the rank that holds the most at the first of the ZeRO stages.
    """
    _, micro_batches = _micro_batches(options)
    less = [stage for stage in stages if stage >= 2 and micro_batches > 1]
    found: list[tuple[dict[int, MemoryAccount], dict[int, int]]] = []
    for rank in range(options.parallel.pp):
        part, activations, buffers = _part(mesh, options, config, rank)
        partial = take_partial_gradients(part)  # once for all stages, since a model can be asked only once
        tied = [] if options.parallel.pp == 1 else tied_parameters(config)
        accounts = {
            stage: _account(part, partial, tied, stage, options, micro_batches > 1, activations) for stage in stages
        }
        accounts = {stage: replace(each, buffers=each.buffers + buffers) for stage, each in accounts.items()}
        unaccumulated = {stage: _account(part, partial, tied, stage, options, False, 0).gradients for stage in less}
        found.append((accounts, unaccumulated))
    fullest = max(range(len(found)), key=lambda rank: found[rank][0][stages[0]].total)
    return Counted(options, config, parameter_count(config), micro_batches, *found[fullest], fullest)


def _part(mesh: DeviceMesh | None, options: TrainCommand, config: ModelConfig, rank: int) -> tuple[nn.Module, int, int]:
    """Returns the model of a pipeline rank, the most bytes that it holds of micro-batches, and those of its slots."""
    dtype, (sequences, _) = getattr(torch, options.train.dtype), _micro_batches(options)
    parallel = options.parallel
    if parallel.pp == 1 and not isinstance(config, GPTConfig):
        return outlined(config, mesh, dtype), 0, 0
    order, stages = pipeline_order(options), own_stages(options, config, rank)
    ulysses = ulysses_ranks(parallel, config.n_head // parallel.tp)
    tokens = _own_tokens(options, config, ulysses)
    # The GPT pads the tokens of all sequences together, models of transformers those of each sequence.
    gpt = isinstance(config, GPTConfig)
    rows = -(-sequences * tokens // parallel.tp) if gpt else sequences * -(-tokens // parallel.tp)
    message, activations = rows * config.n_embd * dtype.itemsize, 0
    if isinstance(config, GPTConfig):
        batch = _micro_batch(options, config, sequences, ulysses)
        held = {stage.index: Held(saved_bytes(batch, options.train.recompute, stage)) for stage in stages}
        for stage in stages:
            if not stage.first:  # it has an input, which is a message, and computes the gradient of it
                held[stage.index] = Held(held[stage.index].saved - message, gradient_bytes(batch, stage))
        activations = most_held(order, rank, held, message)
    slots = Counter({rank: 0})  # by rank; in symmetric memory all ranks allocate as many as the one with the most
    for route in routes(order)[0]:
        slots[route.target] += route.slots
    part = outlined(config, mesh, dtype, stages)
    return part, activations, max(slots.values()) * slot_size(message)


def _own_tokens(options: TrainCommand, config: ModelConfig, ulysses: int) -> int:
    """Returns how many tokens of each sequence a context-parallel rank has."""
    parallel = options.parallel
    if parallel.cp == 1:
        return config.n_positions
    return SequenceLayout(config.n_positions, parallel.cp, parallel.cp_balance, ulysses).local_length


def _micro_batches(options: TrainCommand) -> tuple[int, int]:
    """Returns (sequences of a rank's micro-batch, micro-batches of a step). Raises UserError."""
    batch, dp = options.train.batch, options.parallel.dp
    share, rest = divmod(batch, dp)
    if rest or not share:
        raise UserError(f"train.batch {batch} cannot be divided among {dp} data-parallel ranks")
    sequences = micro_batch_size(options)
    if share % sequences:
        raise UserError(f"micro-batches of {sequences} do not divide the {share} sequences of each rank")
    return sequences, share // sequences


def _micro_batch(options: TrainCommand, config: GPTConfig, sequences: int, ulysses: int) -> MicroBatch:
    parallel, tokens = options.parallel, _own_tokens(options, config, ulysses)
    dtype = getattr(torch, options.train.dtype)
    autocast = None if options.train.autocast == "none" else getattr(torch, options.train.autocast)
    schedule = parallel.cp_schedule
    if parallel.cp > 1 and schedule == "auto":
        # Only running ranks know which implementation "auto" stands for. That of any group can be collective.
        implementation = "collective" if parallel.impl == "auto" else parallel.impl
        heads = config.n_head // parallel.tp
        shape = (sequences, heads, tokens, config.n_embd // config.n_head)
        schedule, _ = schedule_for(implementation, shape, heads, autocast or dtype, parallel.cp)
    triton = options.kernels != "torch" and dtype is not torch.float64
    exchanged = parallel.cp > 1 and schedule in ("ulysses", "ulysses_ring")
    return MicroBatch(config, sequences, tokens, dtype, parallel.tp, exchanged, triton, autocast)


def _account(
    model: nn.Module,
    partial: set[str],
    tied: list[str],
    stage: int,
    options: TrainCommand,
    accumulating: bool,
    activations: int,
) -> MemoryAccount:
    parallel, zero = options.parallel, options.zero
    replicas = parallel.dp * parallel.cp
    accumulated: Width = zero.gradient_dtype
    sent: Width = accumulated if zero.reduce_dtype == "gradient" else zero.reduce_dtype
    if stage == 3 and replicas * parallel.tp > 1:
        blocks = [[tuple(local_tensor(p).shape) for p in block.parameters()] for block in blocks_of(model)]
        inside = {p for block in blocks_of(model) for p in block.parameters()}
        rest = [tuple(local_tensor(p).shape) for p in model.parameters() if p not in inside]
        units, world, dtype = [*blocks, rest], replicas // parallel.replicas, getattr(torch, options.train.dtype)
        more = {"accumulating": accumulating, "pipelined": parallel.pp > 1}
        return account_sharded(units, world, dtype, sent, activations=activations, **more)
    worlds: dict[Kind, int] = {"sharded": replicas, "replicated": replicas, "partial": replicas * parallel.tp}
    worlds["tied"] = 2 * replicas  # those of the first and of the last stage
    owners = stage_owners(parallel)
    parameters = list(model.named_parameters())[::-1]
    shared = set(tied) & dict(parameters).keys() if owners[0] != owners[-1] else ()
    layouts = plan_buckets(parameters, partial, worlds, BUCKET_BYTES, shared)
    return account(layouts, min(stage, 2), accumulated, sent, accumulating=accumulating, activations=activations)


def table(name: str, counted: Counted) -> str:
    """Returns the table, which has a line for each kind of memory and a column for each stage."""
    options, parallel, accounts = counted.options, counted.options.parallel, counted.accounts
    sequences = options.train.batch // parallel.dp // counted.micro_batches
    columns = [["", *_LINES]]
    for stage, account_of_stage in accounts.items():
        values = [getattr(account_of_stage, kind) for kind in _LINES]
        most = len(f"{max(values):,}")
        columns.append([f"stage {stage}", *(f"{value / 2**30:.3f} GiB  {value:>{most},}" for value in values)])
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "    ".join([head.ljust(widths[0]), *(x.rjust(width) for x, width in zip(cells, widths[1:], strict=True))])
        for head, *cells in zip(*columns, strict=True)
    ]
    return "\n".join(
        [
            f"{name}: {counted.parameters:,} parameters, {options.train.dtype}; ranks"
            f" {rank_count(parallel)}: tp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp}"
            + (f" x pp {parallel.pp}" if parallel.pp > 1 else ""),
            f"micro-batches of {sequences} x {counted.config.n_positions} tokens, {counted.micro_batches} in each step;"
            f" recompute {options.train.recompute}",
            "",
            *rows,
            "",
            f"The table shows the bytes of {_ranked(counted)}, which holds the most. Parameters include the padding.",
            _activations(counted),
            *_accumulated(counted),
            *_offloaded(options),
        ]
    )


def _activations(counted: Counted) -> str:
    if not isinstance(counted.config, GPTConfig):
        return "Activations of models of transformers, and transient workspaces, are not counted."
    held = "the rank holds of the most micro-batches in flight"
    held = "autograd saves of one micro-batch" if counted.options.parallel.pp == 1 else held
    return f"Activations are what {held}. Transient workspaces are not counted."


def _ranked(counted: Counted) -> str:
    return "the first rank" if counted.options.parallel.pp == 1 else f"pipeline rank {counted.rank}"


def _accumulated(counted: Counted) -> list[str]:
    """Returns lines that say why gradients take more memory at stages 2 and 3 than one would expect."""
    if not counted.unaccumulated:
        return []
    count = counted.micro_batches
    less = [f"{size / 2**30:.3f} GiB at stage {stage}" for stage, size in counted.unaccumulated.items()]
    return [
        f"Gradients: {count} micro-batches are accumulated in whole gradients before ranks exchange them, at stages 2",
        f"and 3 too. In a step of one micro-batch gradients would be {' and '.join(less)}.",
    ]


def _offloaded(options: TrainCommand) -> list[str]:
    destination = {"none": "", "host": "the host's memory"}.get(options.zero.offload, "files")
    return [f"Masters and moments are in {destination} (zero.offload)."] if destination else []
