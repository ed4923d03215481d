"""`--init-from` starts a run from the weights of a Hugging Face GPT-2, or of another run.

A folder with config.json is a Hugging Face GPT-2, and a folder with config.toml is a run. The source determines the
model's shape and the tokenizer unless flags or files of the user do (`inherited_options`). Before ranks start, the
shapes of its weights are compared with the options (`find_source`), and then each rank reads its own shards
(`load_weights`). The run takes only the weights: it begins at step 0, with a fresh optimizer.

`--model.from` does the same with a model of transformers, which stays one, and whose folder may have no weights.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpfuse.checkpoint.checkpoint import Checkpoint, Shards
from tpfuse.checkpoint.untrusted import Unreadable, check, read_toml
from tpfuse.errors import UserError, instead_of, refusing
from tpfuse.models.gpt import GPTConfig
from tpfuse.models.huggingface import open_pretrained, read_config
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.messages import warn
from tpfuse.train.options import ModelOptions
from tpfuse.train.rank_model import MODELS, ModelConfig
from tpfuse.train.saved_state import fits, open_run, saved_state
from tpfuse.train.tokenizer import Tokenizer

_SHAPE = ("n_layer", "n_head", "n_embd", "n_positions", "bias", "layer_norm_epsilon")  # dropout has no weights
_POSITIONS = "transformer.wpe.weight"


@dataclass(frozen=True)
class Source:
    """The location of the weights, and the model and the tokenizer that they belong to.

    name: the option and the folder that the user gave. folder: the folder to read, which is a Hugging Face folder or a
    checkpoint; None for random weights. tokenizer: the tokenizer of the run; None for a Hugging Face folder.
    """

    name: str
    folder: Path | None
    config: ModelConfig
    tokenizer: Tokenizer | None

    def weights_for(self, tokenizer: Tokenizer) -> Path | None:
        """Return the folder to read. Raise UserError if `tokenizer`, which encoded the text, is not the model's."""
        if not fits(tokenizer, self.config):
            raise UserError(
                f"{self.name}: the model has {self.config.vocab_size} tokens, the text's tokenizer"
                f" {tokenizer.vocab_size}: give the model's --data.tokenizer, or text that was prepared with it"
            )
        if self.tokenizer is not None and tokenizer.as_json() != self.tokenizer.as_json():
            raise UserError(
                f"{self.name}: the text's tokenizer is not the one that the model was trained with: leave"
                " --data.tokenizer out, or prepare the text with the run's tokenizer.json"
            )
        return self.folder


def inherited_options(source: Path) -> dict[str, dict[str, Any]]:
    """Return the options that the source determines unless the user does, as tables of TOML.

    They are the model's shape and the tokenizer: tokenizer.json of the folder, or gpt2 for a vocabulary of GPT-2's
    size. Raise UserError for a folder that is neither a Hugging Face GPT-2 nor a run.
    """
    tokenizer = source / "tokenizer.json"
    data: dict[str, Any] = {"tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    if _is_huggingface(source):
        with refusing("--init-from ", "; --model.from takes other models of transformers"):
            config = read_config(source)
        if not data and config.vocab_size == GPTConfig().vocab_size:
            data = {"tokenizer": "gpt2"}
        return {"model": {name: getattr(config, name) for name in _SHAPE}, "data": data}
    try:
        model = read_toml(source / "config.toml").get("model", {})
        check(model, dict, "model")
    except OSError:
        raise UserError(
            f"--init-from {source}: expected the folder of a `tpfuse train` run, or of a Hugging Face GPT-2"
            f" (config.json and model.safetensors){instead_of(source)}"
        ) from None
    except Unreadable as error:
        raise UserError(f"--init-from {source / 'config.toml'}: {error}") from None
    return {"model": {name: model[name] for name in _SHAPE if name in model}, "data": data}


def decoder_options(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the options that --model.from determines unless the user does, as tables of TOML.

    They are the length of sequences and the tokenizer: that of the folder, or, if it has no file of one, gpt2 or bytes
    for a vocabulary of their size. Raise UserError for a folder without a model of transformers.
    """
    with refusing("--model.from "):
        config = DecoderConfig.read(folder)
    tokenizer = folder / "tokenizer.json"
    name = str(tokenizer if tokenizer.is_file() else folder)
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        name = {GPTConfig().vocab_size: "gpt2", 256: "bytes"}.get(config.vocab_size, name)
    return {"model": {"n_positions": config.n_positions}, "data": {"tokenizer": name}}


def _is_huggingface(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def find_source(model: ModelOptions, init_from: Path | None, dtype: str, config: ModelConfig) -> Source | None:
    """Check the files of the source that an option names, and return it; None if no option was given.

    Warn of tensors in them that the model does not have. dtype: of parameters. config: the model of the options. Raise
    UserError if it is not the source's, and CheckpointError if all checkpoints are damaged.
    """
    if model.from_ is not None:
        return decoder_source(model.from_, config)
    return None if init_from is None else _initial_source(init_from, model, dtype)


def decoder_source(folder: Path, config: ModelConfig) -> Source:
    """Return the source of --model.from, as `find_source` does."""
    weighted = any((*folder.glob("*.safetensors*"), *folder.glob("pytorch_model*.bin")))
    if weighted:
        with refusing("--model.from "):
            files = MODELS[type(config)].files(config, folder)
        if files.left_out:
            warn(files.left_out)
    return Source(f"--model.from {folder}", folder if weighted else None, config, None)


def _initial_source(folder: Path, model: ModelOptions, dtype: str) -> Source:
    """Return the source of --init-from, a run or a GPT-2 of Hugging Face, as `find_source` does."""
    if _is_huggingface(folder):
        with refusing("--init-from "):
            pretrained = open_pretrained(folder)
        if pretrained.left_out:
            warn(pretrained.left_out)
        source = Source(f"--init-from {folder}", folder, pretrained.config, None)
    else:
        saved, state, theirs, tokenizer = open_run(folder)
        source = Source(f"--init-from {folder}", saved.folder, theirs, tokenizer)
        if (state["dtype"] == "float64") != (dtype == "float64"):
            raise UserError(f"--init-from {folder} with --train.dtype {dtype}: the run was trained in {state['dtype']}")
    _check_shape(source, model)
    return source


def differences(theirs: dict[str, Any], ours: dict[str, Any], place: str) -> str:
    """Return in words the values of a model in the options that are not those in another place; "" without any."""
    names = (name for name in theirs if theirs[name] != ours.get(name))
    return ", ".join(f"{name} is {theirs[name]} in the {place} and {ours.get(name)} in the options" for name in names)


def _check_shape(source: Source, model: ModelOptions) -> None:
    if source.config.family:
        raise UserError(
            f"{source.name}: the run's model is a {source.config.family} of transformers: write it with"
            " `tpfuse export RUN FOLDER`, and give --model.from FOLDER"
        )
    theirs, ours = ({name: getattr(each, name) for name in _SHAPE} for each in (source.config, model))
    if model.n_positions < source.config.n_positions:
        del theirs["n_positions"]  # the first rows of a position table are a valid position table
    if changes := differences(theirs, ours, "source"):
        raise UserError(
            f"{source.name} with a different model: {changes}; leave these options out (--model.dropout and"
            " a smaller --model.n-positions may differ)"
        )


def load_weights(folder: Path, config: ModelConfig, shards: Shards) -> None:
    """Fill the shards "model.NAME" of this rank from a source's folder, and no others.

    A shorter position table takes the first rows of the source's table. Raise UserError or CheckpointError if the
    folder has changed since `find_source` checked it.
    """
    held = {name: shards[name] for name in shards if name.startswith("model.")}
    if config.family or _is_huggingface(folder):
        with refusing("--model.from " if config.family else "--init-from "):
            files = MODELS[type(config)].files(config, folder)
            for name, each in held.items():
                for shard in each:
                    files.read(name.removeprefix("model."), shard)
        return
    saved = Checkpoint(folder)
    theirs = saved_state(saved)[1]
    positions = f"model.{_POSITIONS}"
    whole = (theirs.n_positions, theirs.n_embd)
    saved.load(held | {positions: [replace(shard, shape=whole) for shard in held.get(positions, [])]})
