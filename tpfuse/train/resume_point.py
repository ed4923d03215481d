"""The checkpoint from which a run continues, and whether these options may continue it."""

from pathlib import Path
from typing import Any

from tpfuse.checkpoint.checkpoint import Checkpoint, newest_good
from tpfuse.errors import UserError
from tpfuse.train.config import BEFORE
from tpfuse.train.continuation import check_schedule
from tpfuse.train.data import RunData
from tpfuse.train.decoder import DecoderConfig
from tpfuse.train.initial_weights import differences
from tpfuse.train.language_model import ModelConfig, as_json
from tpfuse.train.messages import warn
from tpfuse.train.options import TrainCommand
from tpfuse.train.saved_state import saved_state


def resume_point(folder: Path, options: TrainCommand, config: ModelConfig, data: RunData) -> Checkpoint | None:
    """Return the newest good checkpoint, None if there is none yet. Raise UserError if it belongs to another run."""
    checkpoint = newest_good(folder, warn=warn)
    if checkpoint is None:
        warn(f"{folder} has no checkpoint yet: starting from step 0")
        return None
    state, model = saved_state(checkpoint)
    before = _described(model)
    before.pop("dropout", None)  # dropout has no weights, so a user may change it on purpose
    if changes := differences(before, _described(config), "checkpoint"):
        raise UserError(f"--resume with a different model: {changes}")
    for name, used in (("sha256", "trained"), ("val_sha256", "validated")):
        before = state["data"].get(name)
        if before != data.digests()[name]:
            tokens = f"tokens with SHA-256 {before}" if before else "the end of its training data"
            raise UserError(f"--resume with different data: {folder} was {used} on {tokens}")
    half = ("bfloat16", "float16")
    wide = {name: "float32" if name in half else name for name in (state["dtype"], options.train.dtype)}
    if wide[state["dtype"]] != wide[options.train.dtype]:
        raise UserError(f"--resume with --train.dtype {options.train.dtype}: the run was trained in {state['dtype']}")
    before = state["config"]["optim"].get("name", BEFORE.optim.name)
    if options.optim.name != before:
        way = "go on with it, or begin a run with its weights by --init-from"
        raise UserError(f"--resume with --optim.name {options.optim.name}: the run was trained by {before}: {way}")
    kept, asked = state["config"]["optim"].get("state_dtype", "float32"), options.optim.state_dtype
    if kept != asked:
        raise UserError(f"--resume with --optim.state-dtype {asked}: the run has moments in {kept}, which stay so")
    check_schedule(state, options)
    return checkpoint


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return the values that two models must have in common if one is to have the other's weights."""
    if not isinstance(config, DecoderConfig):
        return as_json(config)
    settings = {name: value for name, value in config.settings.items() if name != "transformers_version"}
    return settings | {"n_positions": config.n_positions}
