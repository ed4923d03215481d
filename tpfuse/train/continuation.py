"""Changes between a run and its continuation, which says them, or refuses those that would be wrong."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpfuse.errors import UserError
from tpfuse.train.config import overlaid, read_toml, resolved
from tpfuse.train.option_marks import described as described_options
from tpfuse.train.option_marks import marks, needs, value_of
from tpfuse.train.options import Effect, TrainCommand
from tpfuse.train.schedule import lowest, units

Options = dict[str, Any]  # of a run, as `tpfuse.train.config.resolved` returns them


class Change(NamedTuple):
    """The values of an option in the checkpoint and in the run that resumes from it."""

    effect: Effect
    before: object
    now: object


def effects(kind: type = TrainCommand) -> dict[tuple[str, ...], Effect]:
    """Return the effect of each option, by its place in `resolved`. Raise TypeError for an option without one."""
    found: dict[tuple[str, ...], Effect] = {}
    for place, own in marks(kind).items():
        effect = [mark for mark in own if isinstance(mark, Effect)]
        if len(effect) != 1:
            raise TypeError(f"{kind.__name__}.{'.'.join(place)}: expected Alters, Rounds, Orders, Keeps or Begins")
        found[place] = effect[0]
    return found


def changes(before: Options, options: TrainCommand) -> dict[str, Change]:
    """Return the options that have changed, by name. One that the checkpoint lacks had its default.

    before: the options in the checkpoint.
    """
    now, default = _with_end(resolved(options)), resolved(TrainCommand())
    before = _with_end(before)
    found: dict[str, Change] = {}
    for place, effect in effects().items():
        old, new = (_value(each, place, _value(default, place)) for each in (before, now))
        if old != new:
            found[".".join(place).replace("_", "-")] = Change(effect, old, new)
    return found


def _value(options: Options, place: tuple[str, ...], otherwise: object = None) -> object:
    for key in place[:-1]:
        options = options.get(key, {})
    return options.get(place[-1], otherwise)


def _with_end(options: Options) -> Options:
    """Return the options with the step at which the schedule ends, if it is not given; a constant one has no end."""
    optim = options["optim"]
    ends = optim.get("schedule") != "constant"
    end = (optim.get("decay_steps") or options["train"]["steps"]) if ends else None
    return {**options, "optim": {**optim, "decay_steps": end}}


def _listed(found: dict[str, Change], effect: Effect) -> str:
    return ", ".join(f"--{name} {x.now} (was {x.before})" for name, x in found.items() if x.effect is effect)


def check_start(file: Path, options: TrainCommand) -> list[str]:
    """Return lines on the options of the run that mean nothing in the resumed one, which has dropped them.

    file: the run's config.toml. Raise UserError for options that only the start of a run reads, if they are not those
    of the run.
    """
    before = overlaid(TrainCommand(), read_toml(file), str(file))
    if given := _listed(changes(resolved(before), options), Effect.REFUSED):
        raise UserError(f"--resume with {given}: only a new run reads this: leave it out, or choose another --out")
    lost = [
        place
        for place, need in needs().items()
        if value_of(before, place) != value_of(options, place) and not need.met(options)
    ]
    return [f"resuming without {described_options(before, lost)}"] if lost else []


def described(before: Options, options: TrainCommand) -> list[str]:
    """Return lines on what makes the next step compute other numbers, and on the end of the schedule."""
    found = changes(before, options)
    given = _listed(found, Effect.NUMBERS)
    lines = [f"resuming with {given}"] if given else []
    end, optim = _with_end(before)["optim"]["decay_steps"], options.optim
    if "train.steps" in found and "optim.decay-steps" not in found and optim.schedule != "constant":
        at = f"after {end}" if isinstance(end, str) else f"at step {end}"
        lines.append(
            f"schedule --train.steps {options.train.steps} (was {before['train']['steps']}): the learning rate reaches"
            f" {lowest(optim):g} {at} as before, and stays there; --optim.decay-steps moves the end"
        )
    return lines


def check_schedule(state: dict[str, Any], options: TrainCommand) -> None:
    """Raise UserError if the learning rate would jump, because lengths of its schedule in tokens move against others.

    state: the checkpoint's. Lengths move if a step has another number of tokens than before.
    """
    step, tokens = state["step"], state["data"]["tokens"]
    in_tokens = units(options.optim)
    if tokens == step * options.train.batch * options.model.n_positions or len(set(in_tokens.values())) < 2:
        return
    names = {unit: ", ".join(f"--optim.{n}" for n in in_tokens if in_tokens[n] is unit) for unit in (False, True)}
    lengths = {"warmup": options.optim.warmup, "decay-steps": options.optim.decay_steps or options.train.steps}
    lengths["decay"] = options.optim.decay or 0
    same = " ".join(f"--optim.{n} {int(lengths[n]) * tokens // step}tokens" for n in in_tokens if not in_tokens[n])
    raise UserError(
        f"--resume with --train.batch {options.train.batch} would change the learning rate: {names[True]} counts"
        f" tokens and {names[False]} steps; count both in tokens ({same}), or keep the batch"
    )


def check_loss(saved: dict[str, Any], now: dict[str, Any], options: TrainCommand, before: Options, layers: int) -> str:
    """Return how the next batch and its loss differ from what they were when the checkpoint was saved; "" if they fit.

    saved, now: the proof in the checkpoint and of this run (`tpfuse.train.loop`): the digest of the next batch's
    tokens, the loss on it without dropout, and the machine. before: the options in the checkpoint. layers: their
    number. The losses are equal to the bit on the same machine with the same options, on CPUs or with
    --train.deterministic, and under --train.virtual-ranks with another number of data-parallel ranks, pipeline or ZeRO
    stage too; else they differ by rounding. They cannot be compared if the batch, or what its tokens see,
    is another on purpose.
    """
    found = changes(before, options)
    if saved["tokens"] != now["tokens"]:
        numbers = [name for name, change in found.items() if change.effect is Effect.NUMBERS]
        chosen = [name for name in numbers if name.startswith("data.") or name in ("train.batch", "train.seed")]
        return "" if chosen else "the next batch has other tokens than before"
    if "data.documents" in found:
        return ""  # other tokens see each other, so the loss is another on purpose
    harmless = {Effect.NOTHING, Effect.ORDER} if options.train.virtual_ranks else {Effect.NOTHING}
    same = saved["machine"] == now["machine"] and all(change.effect in harmless for change in found.values())
    allowed = 0.0 if same and now["exact"] else _rounding(before, options, layers) * max(1.0, abs(saved["loss"]))
    if abs(now["loss"] - saved["loss"]) <= allowed:
        return ""
    within = f" within {allowed:.1g}" if allowed else ""
    return f"the loss on the next batch is {now['loss']!r}: expected {saved['loss']!r}{within}"


def _rounding(before: Options, options: TrainCommand, layers: int) -> float:
    """Return by how much the losses of two computations may differ, relative to a loss of at least 1.

    On the way to a logit about 8 operations in each layer, and 4 around the layers, each round by at most half of the
    dtype's epsilon, with random signs. A token's loss is the difference of two values as large as logits, and each of
    the two computations has its own errors: together 4 times the root of the operations' number.
    """
    train, now = before["train"], options.train
    dtypes = {train["dtype"], train.get("autocast", "none"), now.dtype, now.autocast} - {"none"}
    epsilon = max(torch.finfo(getattr(torch, dtype)).eps for dtype in dtypes)
    return 4 * float((8 * layers + 4) ** 0.5) * epsilon / 2
