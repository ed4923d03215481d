"""The state of a run in a checkpoint, without its tensors, and how other commands read it."""

from pathlib import Path
from typing import Any

from tpfuse.checkpoint.checkpoint import Checkpoint, CheckpointError, newest_good
from tpfuse.checkpoint.manifest import MANIFEST
from tpfuse.checkpoint.untrusted import Unreadable, check, quoted, read_json
from tpfuse.errors import UserError, instead_of
from tpfuse.train.messages import warn
from tpfuse.train.rank_model import ModelConfig, config_from_json
from tpfuse.train.tokenizer import Tokenizer, from_json

_SCHEMA = {
    "step": int,
    "updates": int,
    "loss_scale": float,
    "steps_since_overflow": int,
    "dtype": str,
    "model": dict,
    "data": {"sha256": str, "tokens": int},
    "config": {"train": {"steps": int}, "optim": {"name": str, "state_dtype": str}},
    "proof": dict,
}


def saved_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], ModelConfig]:
    """Return the state and the model of a checkpoint of `tpfuse train`. Raise CheckpointError for another state."""
    try:
        check(checkpoint.state, _SCHEMA, "state")
        return checkpoint.state, config_from_json(checkpoint.state["model"])
    except (Unreadable, TypeError, ValueError) as error:
        found = str(error) if isinstance(error, Unreadable) else quoted(error)
        raise CheckpointError(checkpoint.folder / MANIFEST, "the state of a run of tpfuse train", found) from None


def fits(tokenizer: Tokenizer, config: ModelConfig) -> bool:
    """Return whether the model has exactly the tokenizer's tokens. Models of transformers may have unused ones too."""
    spare = config.vocab_size - tokenizer.vocab_size
    return spare == 0 or (spare > 0 and config.family != "")


def open_run(folder: Path) -> tuple[Checkpoint, dict[str, Any], ModelConfig, Tokenizer]:
    """Return a run's newest good checkpoint, its state and model, and the run's tokenizer.

    Raise UserError if there is no checkpoint, or no tokenizer that fits it, and CheckpointError if all checkpoints are
    damaged.
    """
    saved = newest_good(folder, warn=warn) if folder.is_dir() else None
    if saved is None:
        expected = "expected the folder of a `tpfuse train` run"
        raise UserError(f"{folder} holds no checkpoint: {expected}{instead_of(folder)}")
    state, config = saved_state(saved)
    description = folder / "tokenizer.json"
    try:
        tokenizer = from_json(read_json(description, {"kind": str}))
    except (OSError, Unreadable, UserError) as error:
        raise UserError(f"cannot read {description}: {error}") from None
    if not fits(tokenizer, config):
        expected = f"the {config.vocab_size} of the model"
        raise UserError(f"{description} has a vocabulary of {tokenizer.vocab_size} tokens: expected {expected}")
    return saved, state, config, tokenizer
