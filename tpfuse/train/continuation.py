"""What a resumed run does otherwise than before, which it says, or refuses if it would be wrong."""

from typing import Any

from tpfuse.train.errors import UserError
from tpfuse.train.options import TrainCommand
from tpfuse.train.schedule import units


def check_schedule(state: dict[str, Any], options: TrainCommand) -> None:
    """Raises UserError if the learning rate would jump, because lengths of its schedule in tokens move against others.

    state: of the checkpoint. They move if a step has another number of tokens than before.
    """
    step, tokens = state["step"], state["data"]["tokens"]
    in_tokens = units(options.optim)
    if tokens == step * options.train.batch * options.model.n_positions or len(set(in_tokens.values())) < 2:
        return
    names = {unit: ", ".join(f"--optim.{n}" for n in in_tokens if in_tokens[n] is unit) for unit in (False, True)}
    lengths = {"warmup": options.optim.warmup, "decay-steps": options.optim.decay_steps or options.train.steps}
    lengths["decay"] = options.optim.decay
    same = " ".join(f"--optim.{n} {int(lengths[n]) * tokens // step}tokens" for n in in_tokens if not in_tokens[n])
    raise UserError(
        f"--resume with --train.batch {options.train.batch} would change the learning rate: {names[True]} counts"
        f" tokens and {names[False]} steps; count both in tokens ({same}), or keep the batch"
    )


def schedule_line(before: dict[str, Any], options: TrainCommand) -> str:
    """Returns that the schedule of the learning rate ends where it did, if the number of steps has changed; else "".

    before: the options in the checkpoint, as `tpfuse.train.config.resolved` returns them.
    """
    steps, optim = before["train"]["steps"], options.optim
    end = before["optim"]["decay_steps"] or steps
    if steps == options.train.steps or optim.schedule == "constant" or optim.decay_steps != end:
        return ""
    at = f"after {end}" if isinstance(end, str) else f"at step {end}"
    return (
        f"schedule --train.steps {options.train.steps} (was {steps}): the learning rate reaches {optim.min_lr:g} {at}"
        " as before, and stays there; --optim.decay-steps moves the end"
    )
