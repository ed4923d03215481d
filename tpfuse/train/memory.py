"""`tpfuse memory` says what memory each rank of a training run will need, without starting or allocating it.

The formula is that of `tpfuse plan` (`tpfuse.plan.memory`).
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import local_tensor
from tpfuse.errors import UserError, check_at_least, instead_of
from tpfuse.nearest import nearest
from tpfuse.plan.memory import RankMemory, memories, uncounted
from tpfuse.plan.sizes import ModelSizes, TrainingProgram
from tpfuse.plan.states import rank_parameters
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import PRESETS, parse_train
from tpfuse.train.data import check_named, listed
from tpfuse.train.decoder_config import shape_mesh
from tpfuse.train.decoder_sizes import EXACT
from tpfuse.train.model_options import model_config
from tpfuse.train.option_marks import meaningless, without
from tpfuse.train.options import MemoryCommand, TrainCommand
from tpfuse.train.pipeline_options import micro_batch_size, micro_batch_sizes, rank_count
from tpfuse.train.predicted import layout_of, program_of, sizes_of, stage_blocks
from tpfuse.train.rank_model import ModelConfig, outlined, parameter_count
from tpfuse.train.token_file import stated_tokenizer, token_paths
from tpfuse.train.tokenizer import build_tokenizer

_KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "workspace", "total")
_VOCABULARIES = {"bytes": 256, "gpt2": 50257}  # the vocabulary sizes of tokenizers that need no file
_ACCUMULATED = {
    "sharded": "shards: each one is reduced (--zero.accumulate whole reduces once, in whole gradients)",
    "whole": "whole gradients, which are reduced once",
}


def memory(name: str, command: MemoryCommand) -> str:
    """Return the table of `tpfuse memory NAME`. Raise UserError."""
    given = parse_train(model_arguments(name))
    options = _with_command(given, command)
    config = model_config(options, vocabulary(options, command.vocab_size))
    stages = (0, 1, 2, 3) if command.stage is None else (int(command.stage),)
    with shape_mesh(options.parallel.tp) as mesh:
        found = memory_of(options, config, mesh, stages)
    table = _table(name, options, config, found)
    if command.micro_batch or given.train.micro_batch:
        return table
    return f"{table}\nThis is the smallest micro-batch. A run takes as many sequences as its free memory holds."


def model_arguments(name: str) -> list[str]:
    """Return the options of `tpfuse train` for a preset, a TOML file, or a config.json or its folder.

    A model of Hugging Face is trained in bfloat16. Raise UserError for another name.
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
    """Return `options` with the values of the command's flags and with the layout filled in."""
    numbers = ("ranks", "tp", "cp", "pp", "micro_batch", "vocab_size")
    check_at_least({name.replace("_", "-"): (getattr(command, name), 1) for name in numbers})
    parallel, train = options.parallel, options.train
    parallel = replace(
        parallel, tp=command.tp or parallel.tp, cp=command.cp or parallel.cp, pp=command.pp or parallel.pp
    )
    ranks = command.ranks or parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    recompute, micro_batch = command.recompute or train.recompute, command.micro_batch or train.micro_batch
    train = replace(train, recompute=recompute, micro_batch=micro_batch)
    options = with_layout(replace(options, parallel=replace(parallel, dp=None), train=train), ranks)
    stages = [replace(options, zero=replace(options.zero, stage=stage)) for stage in range(4)]
    options = without(options, set.intersection(*(set(meaningless(each)) for each in stages)))
    sequences = options.train.micro_batch or micro_batch_sizes(options)[-1]
    return replace(options, train=replace(options.train, micro_batch=sequences))


def vocabulary(options: TrainCommand, given: int | None) -> int:
    """Return the vocabulary of a GPT, in tokens: `given`, or else the vocabulary of its tokenizer.

    It is 0 for a model of transformers, whose config.json names it. Raise UserError.
    """
    data = options.data
    if given and options.model.from_ is not None:
        raise UserError(f"--vocab-size {given} is for the GPT: config.json names that of model.from")
    if given or options.model.from_ is not None:
        return given or 0
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


def memory_of(
    options: TrainCommand, config: ModelConfig, mesh: DeviceMesh | None, stages: Iterable[int]
) -> dict[int, tuple[int, RankMemory]]:
    """Return the pipeline rank that needs the most memory at each stage of ZeRO, and that memory. Raise UserError.

    options: with the layout filled in. mesh: the tensor-parallel mesh.
    """
    parallel, train = options.parallel, options.train
    if parallel.replicas < 1 or parallel.data_ranks * parallel.cp % parallel.replicas:
        ranks = parallel.data_ranks * parallel.cp
        raise UserError(f"parallel.replicas {parallel.replicas} does not divide {ranks} data-parallel ranks")
    if train.batch % parallel.data_ranks:
        raise UserError(f"train.batch {train.batch} cannot be divided among {parallel.data_ranks} data-parallel ranks")
    share, sequences = train.batch // parallel.data_ranks, micro_batch_size(options)
    if not share or share % sequences:
        raise UserError(f"micro-batches of {sequences} do not divide the {share} sequences of each rank")
    sizes, program, blocks = counted_model(options, config, mesh)
    layout, most = layout_of(options), {}
    for stage in stages:
        ranks_of_stage = memories(sizes, replace(layout, zero=stage), program, blocks)
        most[stage] = max(ranks_of_stage.items(), key=lambda each: each[1].total)
    return most


def counted_model(
    options: TrainCommand, config: ModelConfig, mesh: DeviceMesh | None
) -> tuple[ModelSizes, TrainingProgram, tuple[int, ...]]:
    """Return a run's model, program and blocks as `tpfuse.plan.memory.memories` takes them. Raise UserError.

    options, mesh: as for `memory_of`.
    """
    sizes = sizes_of("the model", config, options.train.dtype)
    program = program_of(options, config.n_head)
    if mesh is not None:
        held = sum(local_tensor(parameter).numel() for parameter in outlined(config, mesh, torch.float32).parameters())
        counted = rank_parameters(sizes, mesh.size())
        if abs(held / counted - 1) > EXACT:
            raise UserError(
                f"a rank of tp {mesh.size()} has {held:,} parameters, and {counted:,} if the ranks shared all layers:"
                " the memory is not known for models of which tpfuse.parallelize leaves layers alone: count it for tp 1"
            )
    return sizes, program, stage_blocks(options, config)


def _table(name: str, options: TrainCommand, config: ModelConfig, found: dict[int, tuple[int, RankMemory]]) -> str:
    """Return the table, which has a line for each kind of memory and a column for each stage."""
    parallel = options.parallel
    values = {kind: [int(getattr(needed, kind)) for _, needed in found.values()] for kind in _KINDS}
    most = len(f"{max(values['total']):,}")
    rows = [" " * 12 + "".join(f"{f'stage {stage}':>{most + 20}}" for stage in found)]
    for kind in _KINDS:
        rows.append(f"{kind:<12}" + "".join(f"{value / 2**30:>14.3f} GiB  {value:>{most},}" for value in values[kind]))
    layout = layout_of(options)
    return "\n".join(
        [
            f"{name}: {parameter_count(config):,} parameters, {options.train.dtype}; ranks {rank_count(parallel)}:"
            f" tp {parallel.tp} x cp {parallel.cp} x dp {parallel.data_ranks}"
            + (f" x pp {parallel.pp}" if parallel.pp > 1 else ""),
            f"micro-batches of {layout.micro_batch} x {config.n_positions} tokens, {layout.micro_batches} in each step;"
            f" recompute {options.train.recompute}",
            "",
            *rows,
            "",
            *_notes(options, config, found),
        ]
    )


def _notes(options: TrainCommand, config: ModelConfig, found: dict[int, tuple[int, RankMemory]]) -> list[str]:
    """Return the lines that say what the numbers of the table are."""
    ranks = sorted({rank for rank, _ in found.values()})
    numbers = "the first rank" if options.parallel.pp == 1 else f"pipeline rank {' or '.join(map(str, ranks))}"
    held = "autograd saves of one micro-batch" if options.parallel.pp == 1 else "the micro-batches in flight hold"
    sizes = sizes_of("the model", config, options.train.dtype)
    unknown = uncounted(sizes, program_of(options, config.n_head))
    lines = [
        f"These are the bytes of {numbers}, which needs the most. Optimizer: masters and moments.",
        f"Activations of {unknown} are not counted." if unknown else f"Activations are what {held}.",
        "The workspace is what comes and goes, and 1.5 GiB for CUDA and its allocator.",
    ]
    count = layout_of(options).micro_batches
    if count > 1 and max(found) >= 2:
        held = _ACCUMULATED[program_of(options, config.n_head).accumulate]
        lines.append(f"At stages 2 and 3 {count} micro-batches are added up in {held}.")
    if options.train.offload_activations and options.train.recompute == "full":
        lines.append("The inputs of blocks are in the host's memory, but one (train.offload_activations).")
    return [*lines, *(f"{remark}." for remark in remarks(options, max(found)))]


def remarks(options: TrainCommand, stage: int) -> list[str]:
    """Return in words which bytes are not counted, and which of the counted ones are not on the device.

    options: with the layout filled in. A single rank shards nothing, so that its parameters stay on the device.
    """
    found = []
    if options.zero.compression.startswith("powersgd"):
        found.append(
            "The remainders of PowerSGD are not counted (zero.compression): on several nodes they take 4 bytes for each"
            " parameter of the shard that a rank has in its node"
        )
    if options.zero.offload == "none":
        return found
    on_host, host = options.zero.offload == "host", "the host's memory"
    place = f"Masters and moments are in {host if on_host else 'files'} (zero.offload)"
    if stage < 3 or options.parallel.data_ranks * options.parallel.cp == 1:
        return [*found, place]
    files = f"files have the parameters too, and {host} the gradients"
    return [*found, f"{place}; at stage 3 {f'{host} has the parameters and gradients too' if on_host else files}"]
