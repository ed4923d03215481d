"""The subject of `tpfuse plan`: the model, how `tpfuse train` is told to train it, and the GPUs."""

from dataclasses import dataclass, replace
from pathlib import Path

from tpfuse.choices import Recompute
from tpfuse.errors import UserError
from tpfuse.plan.hardware import NO_LINK, Cluster, known_tables, load_gpu, network_kind, parse_network, read_tables
from tpfuse.plan.sizes import ModelSizes, TrainingProgram
from tpfuse.train.config import parse_train
from tpfuse.train.memory import model_arguments, vocabulary
from tpfuse.train.model_options import model_config
from tpfuse.train.option_marks import suited
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.predicted import check_timed, check_timed_model, program_of, sizes_of
from tpfuse.train.rank_model import parameter_count

PER_NODE = 8  # GPUs of a node by default
_USUAL_TOKENS = 2**20  # of a step: GPT-3's batches begin at half a million tokens (arXiv:2005.14165, table 2.1)
_GPT_LENGTH = 1024  # tokens, GPT-2's


@dataclass(frozen=True)
class PlannedModel:
    """A model and the run that trains it."""

    # The options of `tpfuse train` that name the model.
    arguments: tuple[str, ...]
    # What they mean; their layout is not planned yet.
    options: TrainCommand
    # The vocabulary of a GPT; 0 for a model of transformers.
    vocabulary: int
    sizes: ModelSizes
    program: TrainingProgram
    # The number of parameters, counted in the model.
    parameters: int

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Return what the backward pass can compute again, the least first. Only the GPT has a selection."""
        return ("none", "selective", "full") if self.options.model.from_ is None else ("none", "full")


def planned_model(command: PlanCommand) -> PlannedModel:
    """Return the model that the command names. Raise UserError."""
    arguments = [*_source(command)]
    if command.tokens:
        arguments += ["--model.n-positions", str(command.tokens)]
    elif not command.model:
        arguments += ["--model.n-positions", str(_GPT_LENGTH)]
    options = parse_train(arguments)
    length = options.model.n_positions
    batch = command.batch
    if not batch and not {"--model.preset", "--config"} & set(arguments):
        batch = -(-_USUAL_TOKENS // (length * command.gpus)) * command.gpus
    if batch:
        arguments += ["--train.batch", str(batch)]
        options = replace(options, train=replace(options.train, batch=batch))
    undivided = suited(replace(options, parallel=replace(options.parallel, tp=1, cp=1, dp=1, pp=1)))
    check_timed(undivided)
    size = vocabulary(options, command.vocab_size)
    config = model_config(undivided, size)
    sizes = sizes_of(_name(command), config, options.train.dtype)
    check_timed_model(sizes)
    program = program_of(undivided, config.n_head)
    return PlannedModel(tuple(arguments), options, size, sizes, program, parameter_count(config))


def _name(command: PlanCommand) -> str:
    if not command.model:
        return f"GPT of {command.layers} x {command.width}"
    path = Path(command.model)
    return path.absolute().parent.name if path.name == "config.json" else path.name


def _source(command: PlanCommand) -> list[str]:
    """Return the options of `tpfuse train` that name the model, without the length of its sequences."""
    sizes = {"layers": command.layers, "width": command.width, "heads": command.heads}
    numbers = sizes | {"vocab-size": command.vocab_size, "tokens": command.tokens, "batch": command.batch}
    for flag, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"--{flag} {value}: expected at least 1")
    given = [f"--{flag}" for flag, value in sizes.items() if value]
    if not command.model:
        if len(given) < len(sizes):
            raise UserError("give --model, or --layers, --width and --heads together")
        flags = {"n-layer": command.layers, "n-embd": command.width, "n-head": command.heads}
        shape = [word for flag, value in flags.items() for word in (f"--model.{flag}", str(value))]
        return [*shape, "--data.tokenizer", "gpt2", "--train.dtype", "bfloat16"]
    if given:
        raise UserError(f"--model {command.model} has its own sizes: leave out {', '.join(given)}")
    return model_arguments(command.model)


def planned_cluster(command: PlanCommand) -> Cluster:
    """Return the GPUs that the command describes. Raise UserError."""
    for flag, value in (("gpus", command.gpus), ("nodes", command.nodes)):
        if value is not None and value < 1:
            raise UserError(f"--{flag} {value}: expected at least 1")
    nodes = command.nodes or -(-command.gpus // PER_NODE)
    if command.gpus % nodes or (not command.nodes and nodes > 1 and command.gpus % PER_NODE):
        shares = f"--nodes {nodes}" if command.nodes else f"nodes of {PER_NODE}"
        raise UserError(f"--gpus {command.gpus} cannot be divided equally among {shares}: give --nodes that divide it")
    try:
        cluster = Cluster(load_gpu(command.gpu), command.gpus, command.gpus // nodes, parse_network(command.network))
    except ValueError as error:
        raise UserError(str(error)) from None
    if cluster.per_node > 1 and cluster.gpu.link == NO_LINK:
        raise UserError(
            f"--gpu {command.gpu} does not say what connects {cluster.per_node} GPUs: add the table [link] to it, or"
            ' link = { value = "nvlink4", source = "..." }'
        )
    return cluster


def sources_of(command: PlanCommand, cluster: Cluster) -> dict[str, str]:
    """Return where the numbers of the GPU, of its link and of the network come from, by the number."""
    known, gpu = known_tables(), cluster.gpu
    own = dict(known["gpu"].get(command.gpu) or read_tables(Path(command.gpu)))
    link = own.pop("link", {})
    tables = {gpu.name: own}
    if "value" in link:
        own["link"] = link
        tables[gpu.link.name] = known["link"][gpu.link.name]
    elif link:
        tables[f"{gpu.name} link"] = link
    if cluster.gpus > cluster.per_node:
        kind = network_kind(command.network)
        tables[kind] = known["network"][kind]
    return {
        f"{table} {name}": str(entry["source"]) for table, entries in tables.items() for name, entry in entries.items()
    }
