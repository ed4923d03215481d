"""What a run that resumes does otherwise than before is said, or refused."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tpfuse.testing.command import Commands
from tpfuse.train.config import parse_train, resolved
from tpfuse.train.continuation import changes, described, effects
from tpfuse.train.options import Effect, Keeps, TrainCommand


def test_every_option_says_what_a_change_of_it_does() -> None:
    found = effects()
    sections = {place[0] for place in found if len(place) > 1}
    assert sections == {item.name for item in fields(TrainCommand) if "Options" in str(item.type)}
    assert (found["train", "batch"], found["parallel", "tp"]) == (Effect.NUMBERS, Effect.ROUNDING)
    assert found["model", "from"] is found["out",] is Effect.NOTHING

    @dataclass
    class Unmarked:
        marked: Keeps[int] = 0
        new: int = 0

    with pytest.raises(TypeError, match=r"Unmarked\.new: expected Alters, Rounds or Keeps"):
        effects(Unmarked)


def _other(value: Any) -> Any:
    """Returns another value of an option."""
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else f"{value}x"


@pytest.mark.parametrize("effect", Effect)
def test_only_options_that_change_what_a_step_computes_are_listed(effect: Effect) -> None:
    """All options of one effect change at once."""
    before = resolved(TrainCommand())
    options = TrainCommand()
    places = [place for place, its in effects().items() if its is effect and place != ("train", "steps")]
    for place in places:
        section = getattr(options, place[0]) if len(place) > 1 else options
        if place[0] not in ("out", "resume", "config", "profile") and place[-1] != "from":
            section = replace(section, **{place[-1]: _other(getattr(section, place[-1]))})
            options = replace(options, **{place[0]: section}) if len(place) > 1 else section
    lines = described(before, options)
    assert len(changes(before, options)) > 3
    if effect is not Effect.NUMBERS:
        assert lines == []
        return
    assert len(lines) == 1 and lines[0].startswith("resuming with --")
    for place in places:
        assert f"--{'.'.join(place).replace('_', '-')} " in lines[0]


def test_options_of_older_checkpoints_have_their_defaults() -> None:
    options = TrainCommand()
    before = resolved(options)
    del before["zero"], before["optim"]["clip"]
    assert changes(before, options) == {}
    options = replace(options, optim=replace(options.optim, clip=2.0))
    assert described(before, options) == ["resuming with --optim.clip 2.0 (was 1.0)"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train.steps 200", ["at step 100 as before"]),
        ("--train.steps 200 --optim.decay-steps 200", ["resuming with --optim.decay-steps 200 (was 100)"]),
        ("--optim.schedule constant", ["--optim.schedule constant (was cosine), --optim.decay-steps 0 (was 100)"]),
        ("--train.steps 200 --optim.schedule constant", ["--optim.schedule constant (was cosine)"]),
    ],
)
def test_the_end_of_the_schedule_is_said_once(words: str, said: list[str]) -> None:
    before = parse_train(["--train.steps", "100"])
    continued = parse_train(words.split())
    if "decay-steps" not in words and continued.optim.schedule != "constant":
        continued = replace(continued, optim=replace(continued.optim, decay_steps=100))
    lines = described(resolved(before), continued)
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))


def test_a_resumed_run_lists_its_changes(copied: Path, commands: Commands) -> None:
    commands.out = copied
    changed = ("--optim.lr", "1e-3", "--train.log-every", "1", "--train.recompute", "full")
    assert "\nresuming with --optim.lr 0.001 (was 0.002)\n" in commands.resume("--train.steps", "13", *changed)
    assert "resuming" not in commands.resume(), "the checkpoint of step 13 has it"
