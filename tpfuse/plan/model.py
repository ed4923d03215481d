"""The model that `tpfuse plan` plans for: its sizes, and how `tpfuse train` is told to train it."""

from dataclasses import dataclass, replace
from pathlib import Path

from tpfuse.choices import Recompute
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.train.config import parse_train
from tpfuse.train.errors import UserError
from tpfuse.train.language_model import parameter_count
from tpfuse.train.memory import model_arguments, vocabulary
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.predicted import program_of, sizes_of
from tpfuse.train.setup import model_config

_USUAL_TOKENS = 2**20  # of a step: GPT-3's batches begin at half a million tokens (arXiv:2005.14165, table 2.1)
_GPT_LENGTH = 1024  # tokens, GPT-2's


@dataclass(frozen=True)
class PlannedModel:
    """A model and the run that trains it.

    arguments: the options of `tpfuse train` that name the model. options: what they mean; their layout is not planned
    yet. vocabulary: that of a GPT, 0 for a model of transformers. parameters: their number, counted in the model.
    """

    arguments: tuple[str, ...]
    options: TrainCommand
    vocabulary: int
    sizes: ModelSizes
    program: Program
    parameters: int

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Return what the backward pass can compute again, the least first. Only the GPT has a selection."""
        return ("none", "selective", "full") if self.options.model.from_ is None else ("none", "full")


def planned_model(command: PlanCommand) -> PlannedModel:
    """Returns the model that the command names. Raises UserError."""
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
    program = program_of(options)
    alone = replace(options.parallel, tp=1, cp=1, dp=1, pp=1, pp_layers="", pp_schedule="1f1b", pp_stages_per_rank=0)
    size = vocabulary(options, command.vocab_size)
    config = model_config(replace(options, parallel=replace(alone, cp_ulysses=0, cp_schedule="auto")), size)
    sizes = sizes_of(_name(command), config)
    return PlannedModel(tuple(arguments), options, size, sizes, program, parameter_count(config))


def _name(command: PlanCommand) -> str:
    if not command.model:
        return f"GPT of {command.layers} x {command.width}"
    path = Path(command.model)
    return path.absolute().parent.name if path.name == "config.json" else path.name


def _source(command: PlanCommand) -> list[str]:
    """Returns the options of `tpfuse train` that name the model, without the length of its sequences."""
    sizes = {"layers": command.layers, "width": command.width, "heads": command.heads}
    numbers = sizes | {"vocab-size": command.vocab_size, "tokens": command.tokens, "batch": command.batch}
    for flag, value in numbers.items():
        if value < 0:
            raise UserError(f"--{flag} {value}: expected at least 0")
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
