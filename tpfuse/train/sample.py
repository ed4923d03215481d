"""`tpfuse sample`: text from the newest good checkpoint of a run, on one rank."""

from pathlib import Path

import torch

from tpfuse.comm.layout import local_slices
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT
from tpfuse.train.checkpoint import Part, newest_good
from tpfuse.train.errors import UserError
from tpfuse.train.messages import warn
from tpfuse.train.options import SampleCommand
from tpfuse.train.saved_state import saved_state
from tpfuse.train.tokenizer import Tokenizer, from_json
from tpfuse.train.untrusted import Unreadable, read_json


def load_run(folder: Path, device: torch.device) -> tuple[GPT, Tokenizer]:
    """The model of a run's newest good checkpoint, in float32 (float64 if trained so), and its tokenizer.

    Raises UserError where there is no checkpoint and CheckpointError where all are damaged.
    """
    saved = newest_good(folder, warn=warn) if folder.is_dir() else None
    if saved is None:
        raise UserError(f"{folder} holds no checkpoint: expected the folder of a `tpfuse train` run")
    state, config = saved_state(saved)
    dtype = torch.float64 if state["dtype"] == "float64" else torch.float32
    model = GPT(config, device=device, dtype=dtype)
    saved.load(
        {
            f"model.{name}": [Part(tuple(parameter.shape), local_slices(parameter), parameter.detach(), False)]
            for name, parameter in model.named_parameters()
        }
    )
    description = folder / "tokenizer.json"
    try:
        tokenizer = from_json(read_json(description, {"kind": str}))
    except (OSError, Unreadable, UserError) as error:
        raise UserError(f"cannot read {description}: {error}") from None
    if tokenizer.vocab_size != model.config.vocab_size:
        expected = f"the {model.config.vocab_size} of the model"
        raise UserError(f"{description} has a vocabulary of {tokenizer.vocab_size} tokens: expected {expected}")
    return model.eval(), tokenizer


def sample(folder: Path, options: SampleCommand) -> str:
    """The prompt and what the model adds to it. Raises UserError for bad options."""
    for name, value, least in (("tokens", options.tokens, 1), ("top-k", options.top_k, 0)):
        if value < least:
            raise UserError(f"--{name} {value}: expected at least {least}")
    if not options.temperature >= 0:
        raise UserError(f"--temperature {options.temperature}: expected at least 0")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_run(folder, device)
    prompt = tokenizer.encode(options.prompt).astype("int64")
    if not len(prompt):
        raise UserError("--prompt is empty: give at least one token to continue")
    ids = torch.from_numpy(prompt).unsqueeze(0).to(device)
    top_k = options.top_k or None
    out = generate(model, ids, options.tokens, temperature=options.temperature, top_k=top_k, seed=options.seed)
    return tokenizer.decode(out[0].tolist())
