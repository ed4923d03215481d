"""The learning rate of each step."""

import math
import re

from tpfuse.errors import UserError
from tpfuse.train.options import OptimOptions

_TOKENS = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?) *tokens")


def steps_of(length: int | str, tokens_per_step: int, name: str = "length", ahead: int = 0) -> int:
    """Return a length in steps. length: a number of steps, or a text such as "375e6tokens", which is rounded up.

    ahead: see `learning_rate`; with it the result is the number of the step by which these tokens have been trained
    on, which may be negative. Raise UserError, which names the option --optim.`name`, for any other text.
    """
    if isinstance(length, int):
        return length
    match = _TOKENS.fullmatch(length)
    if match is None:
        raise UserError(f"--optim.{name} {length!r}: expected a number of steps, or of tokens such as 375e6tokens")
    tokens = float(match[1])
    if tokens > 1e18:
        raise UserError(f"--optim.{name} {length!r}: expected at most 1e18 tokens")
    return math.ceil((tokens - ahead) / tokens_per_step)


def units(options: OptimOptions) -> dict[str, bool]:
    """Return whether each length that the schedule uses is in tokens, by its option's name in --optim."""
    used: dict[str, int | str | None] = {"warmup": options.warmup}
    if options.schedule != "constant":
        used["decay-steps"] = options.decay_steps
    if options.decay:
        used["decay"] = options.decay
    return {name: isinstance(length, str) for name, length in used.items() if length or name == "decay-steps"}


def lowest(options: OptimOptions) -> float:
    """Return the learning rate from decay_steps on."""
    return options.lr / 10 if options.min_lr is None else options.min_lr


def learning_rate(options: OptimOptions, step: int, steps: int, tokens_per_step: int, ahead: int = 0) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `steps`.

    ahead: how many tokens more than step x tokens_per_step have been trained on, because a run has resumed with another
    batch. Lengths in tokens count from the first token, so the rate continues where it was; then all lengths must have
    the same unit (`units`).

    It rises linearly from 0 to lr in the warm-up and then follows the schedule: cosine and linear fall to min_lr at
    decay_steps; wsd (MiniCPM, arXiv:2404.06395, section 4) stays at lr and falls linearly over the last `decay` steps
    before decay_steps, by default a tenth of all steps, which the paper found sufficient; constant stays at lr. All
    but constant stay at min_lr from decay_steps on, even if the warm-up is longer.
    """
    warmup = steps_of(options.warmup, tokens_per_step, ahead=ahead)
    length = steps if options.decay_steps is None else options.decay_steps
    whole, end = steps_of(length, tokens_per_step), steps_of(length, tokens_per_step, ahead=ahead)
    least = lowest(options)
    if options.schedule != "constant" and step >= end:
        return least
    if step < warmup:
        first = -ahead / tokens_per_step if isinstance(options.warmup, str) else 0
        return options.lr * (step - first + 1) / (warmup - first + 1)
    if options.schedule == "constant":
        return options.lr
    begin = warmup
    if options.schedule == "wsd":
        decay = math.ceil(whole / 10) if options.decay is None else steps_of(options.decay, tokens_per_step)
        begin = max(warmup, end - decay)
        if step < begin:
            return options.lr
    progress = (step - begin) / max(1, end - begin)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if options.schedule == "cosine" else 1.0 - progress
    return least + left * (options.lr - least)


def long_warmup(options: OptimOptions, steps: int, tokens_per_step: int) -> str:
    """Return a line that says that the warm-up of a new run does not end before its schedule; "" if it does."""
    warmup = steps_of(options.warmup, tokens_per_step)
    end = steps_of(steps if options.decay_steps is None else options.decay_steps, tokens_per_step)
    if warmup < end:
        return ""
    highest = learning_rate(options, end - 1, steps, tokens_per_step)
    return (
        f"schedule the warm-up of {warmup} steps does not end before step {end}: the learning rate rises to"
        f" {highest:.3g}, not to {options.lr:g}; --optim.warmup shortens it"
    )
