"""The model that `tpfuse plan` plans for: its sizes, and how `tpfuse train` is told to train it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpfuse.choices import Recompute
from tpfuse.cost.program import TPFUSE, Program
from tpfuse.cost.sizes import ModelSizes
from tpfuse.nearest import nearest
from tpfuse.train.config import PRESETS, parse_train
from tpfuse.train.decoder import DecoderConfig
from tpfuse.train.errors import UserError
from tpfuse.train.language_model import ModelConfig, blocks_of
from tpfuse.train.memory import vocabulary
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.setup import model_config

_USUAL_TOKENS = 2**20  # of a step: GPT-3's batches begin at half a million tokens (arXiv:2005.14165, table 2.1)
_GPT_LENGTH = 1024  # tokens, GPT-2's
_STATES = {"float32": (4, 8), "bfloat16": (2, 12), "float16": (2, 12)}  # parameter_bytes and state_bytes of a Program


@dataclass(frozen=True)
class PlannedModel:
    """A model and the run that trains it.

    arguments: the options of `tpfuse train` that name the model. options: what they mean; their layout is not planned
    yet. vocabulary: that of a GPT, 0 for a model of transformers.
    """

    arguments: tuple[str, ...]
    options: TrainCommand
    vocabulary: int
    sizes: ModelSizes
    program: Program

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
    _check_counted(options)
    alone = replace(options.parallel, tp=1, cp=1, dp=1, pp=1, pp_layers="", pp_schedule="1f1b", pp_stages_per_rank=0)
    size = vocabulary(options, command.vocab_size)
    config = model_config(replace(options, parallel=replace(alone, cp_ulysses=0, cp_schedule="auto")), size)
    parameters, states = _STATES[options.train.dtype]
    gradients = 4 if options.zero.gradient_dtype == "float32" else parameters
    program = replace(TPFUSE, parameter_bytes=parameters, gradient_bytes=gradients, state_bytes=states)
    return PlannedModel(tuple(arguments), options, size, _sizes(_name(command), config), program)


def _name(command: PlanCommand) -> str:
    if not command.model:
        return f"GPT of {command.layers} x {command.width}"
    return command.model if command.model in PRESETS else (_folder(command.model) or Path(command.model)).name


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
    if command.model in PRESETS:
        return ["--model.preset", command.model]
    folder = _folder(command.model)
    if folder is not None:
        return ["--model.from", str(folder), "--train.dtype", "bfloat16"]
    if Path(command.model).is_file():
        return ["--config", command.model]
    raise UserError(
        f"--model {command.model} is neither a preset ({', '.join(PRESETS)}) nor a TOML file of `tpfuse train` nor a"
        f" config.json of Hugging Face or its folder{nearest(command.model, PRESETS)}"
    )


def _folder(name: str) -> Path | None:
    """Returns the folder of a model of Hugging Face; None if the name is not that of a folder or of a JSON file."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.suffix != ".json" or not path.is_file():
        return None
    if path.name != "config.json":
        raise UserError(f"--model {name}: expected the name config.json, by which `tpfuse train` reads it")
    return path.parent


def _check_counted(options: TrainCommand) -> None:
    """Raises UserError for options that the model of cost does not know."""
    train, zero = options.train, options.zero
    if train.dtype not in _STATES:
        raise UserError(f"train.dtype {train.dtype}: tpfuse plan knows {', '.join(_STATES)}")
    for name, value in (("train.autocast", train.autocast), ("zero.offload", zero.offload)):
        if value != "none":
            raise UserError(f"{name} {value}: tpfuse plan does not know its cost yet: leave it out")


def _sizes(name: str, config: ModelConfig) -> ModelSizes:
    if isinstance(config, DecoderConfig):
        return _sizes_of_decoder(name, config)
    return ModelSizes(
        name, config.n_layer, config.n_embd, config.n_head, config.n_head, config.n_embd // config.n_head,
        4 * config.n_embd, False, config.vocab_size, config.n_positions, positions=config.n_positions,
        biases=config.bias, norm_bias=config.bias, dropout=config.dropout > 0,
    )  # fmt: skip


def _sizes_of_decoder(name: str, config: DecoderConfig) -> ModelSizes:
    """Returns the sizes of a model of transformers. Raises UserError for blocks that are not attention and an MLP.

    What its configuration leaves open is found in the parameters of the model, which is made without memory.
    """
    model = config.empty(torch.float32)
    theirs: Any = model.config
    block = [tuple(parameter.shape) for parameter in blocks_of(model)[0].parameters()]
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()  # type: ignore[operator]
    vectors = sum(shape[0] for shape in block if len(shape) == 1)
    inner = [getattr(theirs, key, None) for key in ("intermediate_size", "n_inner", "ffn_dim")]
    sizes = ModelSizes(
        name, config.n_layer, config.n_embd, config.n_head,
        kv_heads=getattr(theirs, "num_key_value_heads", None) or config.n_head,
        head_size=getattr(theirs, "head_dim", None) or config.n_embd // config.n_head,
        inner=next((size for size in inner if size), 4 * config.n_embd), gated=False, vocabulary=config.vocab_size,
        tokens=config.n_positions, positions=sum(len(table) for table in tables if len(table) != config.vocab_size),
        tied=head is None or any(head.weight is table for table in tables), biases=vectors > 4 * config.n_embd,
        norm_bias=any(isinstance(module, nn.LayerNorm) for module in model.modules()),
    )  # fmt: skip
    found = sum(shape[0] * shape[1] for shape in block if len(shape) == 2)
    for gated in (False, True):
        sizes = replace(sizes, gated=gated)
        if sizes.block_weights == found and all(len(shape) < 3 for shape in block):
            return sizes
    raise UserError(
        f"--model {name}: a block of {theirs.model_type} has {found:,} weights, and attention with an MLP"
        f" would have {sizes.block_weights:,}: tpfuse plan knows no other blocks, such as mixtures of experts"
    )
