"""The learning rate of each step, for every schedule."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tpfuse.errors import UserError
from tpfuse.train.options import LearningRateSchedule, OptimOptions
from tpfuse.train.schedule import learning_rate, long_warmup, steps_of

TOKENS = 2048  # tokens of a step


def rates(options: OptimOptions, steps: int) -> list[float]:
    return [learning_rate(options, step, steps, TOKENS) for step in range(steps + 1)]


def test_the_default_schedule_is_the_first_one_to_the_bit() -> None:
    """The rates are those of the time when cosine was the only schedule, so that resumed runs are unchanged."""
    options = OptimOptions(lr=2e-3, min_lr=2e-4, warmup=50)
    for step, rate in enumerate(rates(options, 900)):
        expected = options.lr * (step + 1) / 51
        if step >= 50:
            expected = 2e-4 + 0.5 * (1.0 + math.cos(math.pi * ((step - 50) / 850))) * (2e-3 - 2e-4)
        assert rate == (2e-4 if step == 900 else expected)


def test_the_linear_constant_and_wsd_schedules() -> None:
    options = OptimOptions(lr=1.0, min_lr=0.1, warmup=10)
    found = {name: rates(replace(options, schedule=name), 110) for name in ("cosine", "linear", "constant", "wsd")}
    for name in found:
        assert found[name][:11] == found["cosine"][:11], "the same warm-up"
    linear, constant, wsd = (found[name] for name in ("linear", "constant", "wsd"))
    assert linear[60] == pytest.approx(0.55) and linear[35] == pytest.approx(0.775) and linear[110] == 0.1
    assert set(constant[10:]) == {1.0}
    assert set(wsd[10:100]) == {1.0}, "a tenth of 110 steps is left for the decay"
    assert wsd[99:] == pytest.approx([1.0 - 0.9 * step / 11 for step in range(12)])


def test_wsd_decays_at_the_end() -> None:
    options = OptimOptions(schedule="wsd", lr=1.0, min_lr=0.0, warmup=10, decay=20, decay_steps=60)
    assert rates(options, 100)[39:62] == pytest.approx([1.0, *(1 - step / 20 for step in range(21)), 0.0])
    long = rates(replace(options, decay=1000), 100)
    assert long[9] == pytest.approx(10 / 11) and long[35] == pytest.approx(0.5), (
        "it does not begin before the end of warm-up"
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_schedule_ends_within_a_longer_warmup(schedule: LearningRateSchedule) -> None:
    options = OptimOptions(schedule=schedule, lr=1.0, min_lr=0.1, warmup=49, decay_steps=40)
    assert rates(options, 50) == [*((step + 1) / 50 for step in range(40)), *[0.1] * 11]
    line = "schedule the warm-up of 49 steps does not end before step 40: the learning rate rises to 0.8, not to 1;"
    assert long_warmup(options, 100, TOKENS).startswith(line)
    assert long_warmup(replace(options, warmup=40), 100, TOKENS)
    assert long_warmup(replace(options, warmup="79872tokens"), 100, TOKENS) == "", "39 steps"


def test_lengths_in_tokens_are_converted_to_steps() -> None:
    in_steps = OptimOptions(schedule="wsd", warmup=10, decay=20, decay_steps=60)
    in_tokens = replace(in_steps, warmup="20480tokens", decay="4.0e4 tokens", decay_steps="122880tokens")
    assert rates(in_tokens, 100) == rates(in_steps, 100)
    assert [steps_of(length, 1000) for length in (7, "1tokens", "1000tokens", "1.001e3tokens")] == [7, 1, 1, 2]
    for length in ("7", "tokens", "-5tokens", "1e6 tokens or so", "1e400tokens"):
        with pytest.raises(UserError, match=r"--optim.warmup '.*': expected"):
            steps_of(length, 1000, "warmup")


@pytest.mark.parametrize(
    "lengths",
    [
        {"schedule": "cosine", "warmup": "20480tokens", "decay_steps": "204800tokens"},
        {"schedule": "wsd", "warmup": "20480tokens", "decay_steps": "204800tokens", "decay": "81920tokens"},
        {"schedule": "wsd", "warmup": "20480tokens", "decay_steps": "204800tokens"},
        {"schedule": "linear", "warmup": 10, "decay_steps": 100},
    ],
    ids=str,
)
def test_the_rate_continues_after_another_batch(lengths: dict[str, Any]) -> None:
    """Lengths in tokens count from the first token: from some step on, steps have twice as many tokens, or half."""
    options = OptimOptions(lr=1.0, min_lr=0.1, **lengths)
    straight = rates(options, 100)
    for step, factor in itertools.product((4, 20, 50, 80, 98), (2, 0.5)):
        tokens = int(TOKENS * factor)
        ahead = step * TOKENS - step * tokens
        found = [learning_rate(options, step + index, 100, tokens, ahead) for index in range(3)]
        if isinstance(options.warmup, int):
            assert found == straight[step : step + 3]
        else:
            expected = np.interp([step + index * factor for index in range(3)], range(101), straight)
            assert found == pytest.approx(expected, abs=0.06 if step == 4 else 0.002), (step, factor)
