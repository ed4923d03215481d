"""`tpfuse sample` generates texts with a run's newest good checkpoint, or a Hugging Face folder, on one rank."""

from pathlib import Path

import torch

from tpfuse.comm.layout import local_slices
from tpfuse.train.checkpoint import Shard, Shards
from tpfuse.train.config import parse_train
from tpfuse.train.decoder import DecoderConfig
from tpfuse.train.errors import UserError, check_at_least
from tpfuse.train.initial_weights import find_source, load_weights
from tpfuse.train.language_model import language_model
from tpfuse.train.options import SampleCommand, TrainCommand
from tpfuse.train.rank_model import Drawing, LanguageModel
from tpfuse.train.saved_state import open_run
from tpfuse.train.setup import model_config
from tpfuse.train.tokenizer import Tokenizer, build_tokenizer
from tpfuse.train.untrusted import read_text, reading

BETWEEN = "\n------\n"  # separates two samples


def load_run(folder: Path, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """Return the model of a run's newest good checkpoint, and its tokenizer.

    The model is float32, or float64 if it was trained in float64. Raise UserError if there is no checkpoint, and
    CheckpointError if all are damaged.
    """
    saved, state, config, tokenizer = open_run(folder)
    dtype = torch.float64 if state["dtype"] == "float64" else torch.float32
    model = language_model(config, TrainCommand(), None, device, dtype)
    saved.load(_shards(model))
    model.module.eval()
    return model, tokenizer


def load_model(folder: Path, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """Return the model of a run (`load_run`), or of the Hugging Face folder, and its tokenizer.

    The model of a Hugging Face folder is float32. Raise UserError, and CheckpointError for a damaged run.
    """
    if not (folder / "config.json").is_file():
        return load_run(folder, device)
    options = parse_train(["--model.from", str(folder)])
    config = model_config(options, 0)
    source = find_source(options, config)
    if source is None or source.folder is None:
        raise UserError(f"{folder} has a config.json and no weights: expected model.safetensors beside it")
    tokenizer = build_tokenizer(options.data.tokenizer)
    source.weights_for(tokenizer)
    model = language_model(config, options, None, device, torch.float32)
    load_weights(source.folder, config, _shards(model))
    model.module.eval()
    return model, tokenizer


def _shards(model: LanguageModel) -> Shards:
    return {
        f"model.{name}": [Shard(tuple(parameter.shape), local_slices(parameter), parameter.detach(), False)]
        for name, parameter in model.module.named_parameters()
    }


def sample(folder: Path, options: SampleCommand) -> str:
    """Return the prompt and its continuation up to the token that ends a text; `BETWEEN` separates several samples.

    Raise UserError for bad options.
    """
    check_at_least({"tokens": (options.tokens, 1), "top-k": (options.top_k, 1), "samples": (options.samples, 1)})
    check_at_least({"temperature": (options.temperature, 0)})
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: expected more than 0 and at most 1")
    text = _prompt(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(folder, device)
    prompt = tokenizer.encode(text).astype("int64")
    if not len(prompt):
        raise UserError("the prompt is empty: give at least one token to continue")
    config = model.config
    ends: tuple[int, ...] = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    if isinstance(config, DecoderConfig):
        ends = config.ends or ends
        if len(prompt) >= config.longest:
            raise UserError(f"the prompt has {len(prompt)} tokens: expected fewer than the model's {config.longest}")
    ids = torch.from_numpy(prompt).to(device).expand(options.samples, -1)
    drawing = Drawing(options.temperature, options.top_k, options.top_p, options.seed)
    out = model.generate(ids, options.tokens, drawing, ends)
    texts = []
    for tokens in out.tolist():  # up to the token that ends a text, which is left out
        ending = (place for place in range(len(prompt), len(tokens)) if tokens[place] in ends)
        texts.append(tokenizer.decode(tokens[: next(ending, len(tokens))]))
    return BETWEEN.join(texts)


def _prompt(options: SampleCommand) -> str:
    if options.prompt_file is None:
        return options.prompt
    if options.prompt != SampleCommand.prompt:
        raise UserError("--prompt and --prompt-file were both given: expected one of them")
    with reading(f"--prompt-file {options.prompt_file}"):
        return read_text(options.prompt_file)
