"""The learning rate of each step."""

import math

from tpfuse.train.options import OptimOptions


def learning_rate(options: OptimOptions, step: int, steps: int) -> float:
    """Of optimizer step `step` (from 0): linear warm-up, then a cosine from lr to min_lr at decay_steps."""
    end = options.decay_steps or steps
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    if step >= end:
        return options.min_lr
    progress = (step - options.warmup) / max(1, end - options.warmup)
    return options.min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (options.lr - options.min_lr)
