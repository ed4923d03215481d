"""The learning rate of each step."""

import math
import re

from tpfuse.train.errors import UserError
from tpfuse.train.options import OptimOptions

_TOKENS = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?) *tokens")


def steps_of(length: int | str, tokens_per_step: int, name: str = "length") -> int:
    """Returns a length in steps. length: a number of steps, or a text such as "375e6tokens", which is rounded up.

    Raises UserError, which names the option --optim.`name`, for any other text.
    """
    if isinstance(length, int):
        return length
    match = _TOKENS.fullmatch(length)
    if match is None:
        raise UserError(f"--optim.{name} {length!r}: expected a number of steps, or of tokens such as 375e6tokens")
    tokens = float(match[1])
    if tokens > 1e18:
        raise UserError(f"--optim.{name} {length!r}: expected at most 1e18 tokens")
    return math.ceil(tokens / tokens_per_step)


def learning_rate(options: OptimOptions, step: int, steps: int, tokens_per_step: int) -> float:
    """Returns the learning rate of optimizer step `step` (from 0) of `steps`.

    It rises linearly from 0 to lr in the warm-up and then follows the schedule: cosine and linear fall to min_lr at
    decay_steps; wsd (MiniCPM, arXiv:2404.06395, section 4) stays at lr and falls linearly over the last `decay` steps
    before decay_steps, by default a tenth of all steps, which the paper found sufficient; constant stays at lr.
    """
    warmup = steps_of(options.warmup, tokens_per_step)
    end = steps_of(options.decay_steps, tokens_per_step) or steps
    if step < warmup:
        return options.lr * (step + 1) / (warmup + 1)
    if options.schedule == "constant":
        return options.lr
    if step >= end:
        return options.min_lr
    begin = warmup
    if options.schedule == "wsd":
        begin = max(warmup, end - (steps_of(options.decay, tokens_per_step) or math.ceil(end / 10)))
        if step < begin:
            return options.lr
    progress = (step - begin) / max(1, end - begin)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if options.schedule == "cosine" else 1.0 - progress
    return options.min_lr + left * (options.lr - options.min_lr)
