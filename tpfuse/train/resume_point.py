"""The checkpoint from which a run continues, and whether these options may continue it."""

from pathlib import Path

from tpfuse.checkpoint.checkpoint import Checkpoint, newest_good
from tpfuse.errors import UserError
from tpfuse.train.continuation import check_schedule
from tpfuse.train.data import RunData
from tpfuse.train.initial_weights import differences
from tpfuse.train.messages import warn
from tpfuse.train.options import TrainCommand
from tpfuse.train.rank_model import ModelConfig
from tpfuse.train.saved_state import saved_state


def resume_point(folder: Path, options: TrainCommand, config: ModelConfig, data: RunData) -> Checkpoint:
    """Return the newest good checkpoint of a run that has one. Raise UserError if it belongs to another run."""
    checkpoint = newest_good(folder, warn=warn)
    assert checkpoint is not None
    state, model = saved_state(checkpoint)
    before = model.compared()
    before.pop("dropout", None)  # dropout has no weights, so a user may change it on purpose
    if changes := differences(before, config.compared(), "checkpoint"):
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
    before = state["config"]["optim"]["name"]
    if options.optim.name != before:
        way = "go on with it, or begin a run with its weights by --init-from"
        raise UserError(f"--resume with --optim.name {options.optim.name}: the run was trained by {before}: {way}")
    kept, asked = state["config"]["optim"]["state_dtype"], options.optim.state_dtype
    if kept != asked:
        raise UserError(f"--resume with --optim.state-dtype {asked}: the run has moments in {kept}, which stay so")
    check_schedule(state, options)
    return checkpoint
