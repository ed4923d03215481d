"""`--init-from` starts a run from the weights of a Hugging Face GPT-2, or of another run.

A folder with config.json is a Hugging Face GPT-2, and a folder with config.toml is a run. The source determines the
model's shape and the tokenizer unless flags or files of the user do (`inherited_options`). Before ranks start, the
shapes of its weights are compared with the options (`find_source`), and then each rank reads its own shards
(`load_weights`). The run takes only the weights: it begins at step 0, with a fresh optimizer.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpfuse.models.gpt import GPTConfig
from tpfuse.models.huggingface import open_pretrained, read_config
from tpfuse.train.checkpoint import Shards, open_checkpoint
from tpfuse.train.errors import UserError
from tpfuse.train.options import ModelOptions, TrainCommand
from tpfuse.train.saved_state import open_run, saved_state
from tpfuse.train.tokenizer import Tokenizer
from tpfuse.train.untrusted import Unreadable, check, read_toml

_SHAPE = ("n_layer", "n_head", "n_embd", "n_positions", "bias", "layer_norm_epsilon")  # dropout has no weights
_POSITIONS = "transformer.wpe.weight"


@dataclass(frozen=True)
class Source:
    """The location of the weights, and the model and the tokenizer that they belong to.

    name: the folder that the user named. folder: the folder to read, which is a Hugging Face folder or a checkpoint.
    tokenizer: the tokenizer of the run; None for a Hugging Face folder.
    """

    name: Path
    folder: Path
    config: GPTConfig
    tokenizer: Tokenizer | None

    def weights_for(self, tokenizer: Tokenizer) -> Path:
        """Returns the folder to read. Raises UserError if `tokenizer`, which encoded the text, is not the model's."""
        if tokenizer.vocab_size != self.config.vocab_size:
            raise UserError(
                f"--init-from {self.name}: the model has {self.config.vocab_size} tokens, the text's tokenizer"
                f" {tokenizer.vocab_size}: give the model's --data.tokenizer, or text that was prepared with it"
            )
        if self.tokenizer is not None and tokenizer.as_json() != self.tokenizer.as_json():
            raise UserError(
                f"--init-from {self.name}: the text's tokenizer is not the one that the model was trained with:"
                f" leave --data.tokenizer out, or prepare the text with {self.name / 'tokenizer.json'}"
            )
        return self.folder


def inherited_options(source: Path) -> dict[str, dict[str, Any]]:
    """Returns the options that the source determines unless the user does, as tables of TOML.

    They are the model's shape and the tokenizer: tokenizer.json of the folder, or gpt2 for a vocabulary of GPT-2's
    size. Raises UserError for a folder that is neither a Hugging Face GPT-2 nor a run.
    """
    tokenizer = source / "tokenizer.json"
    data: dict[str, Any] = {"tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    if _is_huggingface(source):
        try:
            config = read_config(source)
        except ValueError as error:
            raise UserError(f"--init-from {error}") from None
        if not data and config.vocab_size == GPTConfig().vocab_size:
            data = {"tokenizer": "gpt2"}
        return {"model": {name: getattr(config, name) for name in _SHAPE}, "data": data}
    try:
        model = read_toml(source / "config.toml").get("model", {})
        check(model, dict, "model")
    except OSError:
        raise UserError(
            f"--init-from {source}: expected the folder of a `tpfuse train` run, or of a Hugging Face GPT-2"
            " (config.json and model.safetensors)"
        ) from None
    except Unreadable as error:
        raise UserError(f"--init-from {source / 'config.toml'}: {error}") from None
    return {"model": {name: model[name] for name in _SHAPE if name in model}, "data": data}


def _is_huggingface(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def find_source(options: TrainCommand) -> Source | None:
    """Checks the files of the source that `--init-from` names, and returns it; None if the option was not given.

    Raises UserError if its model is not that of the options, and CheckpointError if all checkpoints are damaged.
    """
    name = options.init_from
    if name is None:
        return None
    if _is_huggingface(name):
        try:
            source = Source(name, name, open_pretrained(name).config, None)
        except ValueError as error:
            raise UserError(f"--init-from {error}") from None
    else:
        saved, state, config, tokenizer = open_run(name)
        source = Source(name, saved.folder, config, tokenizer)
        if (state["dtype"] == "float64") != (options.train.dtype == "float64"):
            raise UserError(
                f"--init-from {name} with --train.dtype {options.train.dtype}: the run was trained in {state['dtype']}"
            )
    _check_shape(source, options.model)
    return source


def _check_shape(source: Source, model: ModelOptions) -> None:
    pairs = {name: (getattr(source.config, name), getattr(model, name)) for name in _SHAPE}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if model.n_positions < source.config.n_positions:
        differing.pop("n_positions", None)  # the first rows of a position table are a valid position table
    if differing:
        changes = ", ".join(
            f"{name} is {theirs} in the source and {ours} in the options" for name, (theirs, ours) in differing.items()
        )
        raise UserError(
            f"--init-from {source.name} with a different model: {changes}; leave these options out (--model.dropout and"
            " a smaller --model.n-positions may differ)"
        )


def load_weights(folder: Path, shards: Shards) -> None:
    """Fills the shards "model.NAME" of this rank from a source's folder, and no others.

    A shorter position table takes the first rows of the source's table. Raises UserError or CheckpointError if the
    folder has changed since `find_source` checked it.
    """
    held = {name: shards[name] for name in shards if name.startswith("model.")}
    if _is_huggingface(folder):
        try:
            pretrained = open_pretrained(folder)
            for name, each in held.items():
                for shard in (shard for shard in each if shard.tensor.numel()):
                    shard.tensor.detach().copy_(pretrained.read(name.removeprefix("model."), shard.slices))
        except ValueError as error:
            raise UserError(f"--init-from {error}") from None
        return
    saved = open_checkpoint(folder)
    config = saved_state(saved)[1]
    positions = f"model.{_POSITIONS}"
    whole = (config.n_positions, config.n_embd)
    saved.load(held | {positions: [replace(shard, shape=whole) for shard in held.get(positions, [])]})
