"""The part of a checkpoint that is no tensor: what a run says of itself, and what others may take from it."""

from typing import Any, get_type_hints

from tpfuse.models.gpt import GPTConfig
from tpfuse.train.checkpoint import Checkpoint, CheckpointError
from tpfuse.train.manifest import MANIFEST
from tpfuse.train.untrusted import Unreadable, check, quoted

_SCHEMA = {
    "step": int,
    "updates": int,
    "loss_scale": float,
    "steps_since_overflow": int,
    "dtype": str,
    "model": dict,
    "data": {"sha256": str},
}


def saved_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], GPTConfig]:
    """The state of a checkpoint of `tpfuse train`, and its model. Raises CheckpointError for another state."""
    try:
        check(checkpoint.state, _SCHEMA, "state")
        hints = get_type_hints(GPTConfig)
        model = {name: hints[name] for name in checkpoint.state["model"] if name in hints}
        check(checkpoint.state["model"], model, "the model")
        return checkpoint.state, GPTConfig(**checkpoint.state["model"])
    except (Unreadable, TypeError, ValueError) as error:
        found = str(error) if isinstance(error, Unreadable) else quoted(error)
        raise CheckpointError(checkpoint.folder / MANIFEST, "the state of a run of tpfuse train", found) from None
