"""Changes of a run that resumes are said, or refused."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.command import Commands
from tpfuse.checkpoint.checkpoint import Checkpoint
from tpfuse.errors import UserError
from tpfuse.train.batches import Mixture
from tpfuse.train.config import parse_train, resolved
from tpfuse.train.continuation import changes, check_loss, check_start, described, effects
from tpfuse.train.data import RunData
from tpfuse.train.metrics import read_metrics
from tpfuse.train.option_marks import check_needs, meaningless, needs, value_of
from tpfuse.train.options import Effect, Keeps, TrainCommand
from tpfuse.train.trainer import Trainer


def test_every_option_says_what_a_change_of_it_does() -> None:
    found = effects()
    sections = {place[0] for place in found if len(place) > 1}
    assert sections == {item.name for item in fields(TrainCommand) if "Options" in str(item.type)}
    assert (found["train", "batch"], found["parallel", "tp"]) == (Effect.NUMBERS, Effect.ROUNDING)
    assert (found["out",], found["model", "from"]) == (Effect.NOTHING, Effect.REFUSED)

    @dataclass
    class Unmarked:
        marked: Keeps[int] = 0
        new: int = 0

    with pytest.raises(TypeError, match=r"Unmarked\.new: expected Alters, Rounds, Orders, Keeps or Begins"):
        effects(Unmarked)


def _other(value: Any) -> Any:
    """Return another value of an option."""
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


def test_options_that_a_checkpoint_lacks_had_their_defaults() -> None:
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
        ("--optim.schedule constant", ["--optim.schedule constant (was cosine), --optim.decay-steps None (was 100)"]),
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


def test_a_longer_run_lists_its_changes_and_keeps_the_end_of_its_schedule(copied: Path, commands: Commands) -> None:
    commands.out = copied
    (copied / ".stack-4000000").write_text("of a rank that was killed")
    more = "--train.steps 13 --optim.lr 1e-3 --optim.warmup 2 --train.log-every 1 --train.recompute full"
    said = commands.resume(*more.split())
    assert "\nresuming with --optim.lr 0.001 (was 0.002), --optim.warmup 2 (was 50)\n" in said
    assert "--train.steps 13 (was 12): the learning rate reaches 0.0002 at step 12 as before, and stays there" in said
    assert read_metrics(copied / "metrics.jsonl")[-1]["lr"] == 2e-4
    assert not [*copied.glob(".stack-*")]
    said = commands.resume("--train.steps", "14", "--optim.decay-steps", "None")
    assert "\nresuming with --optim.decay-steps 14 (was 12)\n" in said, "the checkpoint of step 13 has the rest"
    assert read_metrics(copied / "metrics.jsonl")[-1]["lr"] > 2e-4, "the schedule ends at step 14 now"
    said = commands.fail("train", "--resume", "--out", copied, "--optim.name", "muon")
    assert "--resume with --optim.name muon: the run was trained by adamw: go on with it, or begin a run with" in said
    kept = (copied / "config.toml").read_bytes()
    said = commands.fail_to_resume("--data.field", "body", "--data.tokenizer", "bytes", "--init-from", copied)
    given = f"--data.field body (was text), --data.tokenizer bytes (was chars), --init-from {copied} (was None)"
    assert f"--resume with {given}: only a new run reads this: leave it out, or choose another --out" in said
    said = commands.fail_to_resume("--model.preset", "gpt2-124m")
    assert "--model.preset gpt2-124m (was tiny): only" in said and (copied / "config.toml").read_bytes() == kept


LOST = {
    "--parallel.pp of at least 2": ("--parallel.pp 2", "--parallel.pp 1"),
    "--parallel.cp of at least 2": ("--parallel.cp 2", "--parallel.cp 1"),
    "--parallel.cp of at least 2 with --parallel.cp-schedule ulysses_ring": (
        "--parallel.cp 4 --parallel.cp-schedule ulysses_ring",
        "--parallel.cp-schedule ring",
    ),
    "--zero.stage 3 on several data-parallel ranks": ("--zero.stage 3 --parallel.dp 4", "--parallel.dp 1"),
    "--zero.stage 2 and 3": ("--zero.stage 2", "--zero.stage 1"),
    "--zero.stage 0, 1 and 2": ("", "--zero.stage 3"),
    "--optim.name muon": ("--optim.name muon", "--optim.name adamw"),
    "--optim.schedule wsd": ("--optim.schedule wsd", "--optim.schedule linear"),
    "--optim.schedule cosine, linear and wsd": ("", "--optim.schedule constant"),
    "--train.recompute full, which keeps the inputs of blocks alone": (
        "--train.recompute full",
        "--train.recompute none",
    ),
}
"""The needs of options: flags by which a run has that, and flags by which the resumed run has not."""
VALUES = {
    "pp_schedule": "zbv", "pp_layers": "1,3", "cp_schedule": "ring", "cp_balance": "striped", "accumulate": "whole",
    "gradient_dtype": "parameter", "compression": "bf16", "muon_adjust": "original", "muon_coefficients": "3,-4,2",
}  # fmt: skip


@pytest.mark.parametrize("place", needs(), ids=".".join)
def test_an_option_without_its_dimension_is_dropped_with_a_word(place: tuple[str, ...], tmp_path: Path) -> None:
    """If it is given again, it is refused as in a new run."""
    name = ".".join(place).replace("_", "-")
    flag = [f"--{name}", VALUES.get(place[-1], "3")]
    flag = {"muon_nesterov": ["--optim.no-muon-nesterov"], "offload_activations": flag[:1]}.get(place[-1], flag)
    has, lost = LOST[needs()[place].said]
    begun, usual, file = parse_train([*has.split(), *flag]), TrainCommand(), tmp_path / "config.toml"
    assert meaningless(begun) == [] and value_of(begun, place) != value_of(usual, place)
    file.write_text(tomli_w.dumps(resolved(begun)))
    resume = ["--resume", "--out", str(tmp_path), *lost.split()]
    options = parse_train(resume)
    assert value_of(options, place) == value_of(usual, place) and meaningless(options) == []
    (said,) = check_start(file, options)
    assert said.startswith("resuming without --") and f"--{name}" in said and needs()[place].said in said
    with pytest.raises(UserError, match=f"--{name}.*: only for "):
        check_needs(parse_train([*resume, *flag]))
    kept = parse_train(resume[:3])
    assert value_of(kept, place) == value_of(begun, place) and check_start(file, kept) == []


def test_a_run_of_a_pipeline_resumes_without_one(copied: Path, commands: Commands) -> None:
    """Its layers were cut by hand; an empty value, and one that a file gives, are what they are in a new run."""
    commands.out, file = copied, copied / "config.toml"
    text = file.read_text().replace("pp = 1\n", 'pp = 2\npp_layers = "1,1"\n')
    file.write_text(text)
    said = "--parallel.pp-layers 1,1: only for --parallel.pp of at least 2"
    assert said in commands.fail_to_resume("--parallel.pp", "1", "--parallel.pp-layers", "1,1")
    (more := copied.parent / "more.toml").write_text('[parallel]\npp_layers = "1,1"\n')
    assert said in commands.fail_to_resume("--parallel.pp", "1", "--config", more)
    assert file.read_text() == text
    assert f"\nresuming without {said}\n" in commands.resume("--parallel.pp", "1", "--train.steps", "13")
    assert "pp_layers" not in file.read_text()
    file.write_text(text)
    empty = ("--parallel.pp", "1", "--parallel.pp-layers=", "--train.steps", "14")
    assert f"\nresuming without {said}\n" in commands.resume(*empty)
    assert "resuming without" not in commands.resume("--train.steps", "15")


Wrong = Callable[[pytest.MonkeyPatch], None]


def _moment(patch: pytest.MonkeyPatch) -> None:
    """The last element of a first moment is loaded wrong."""
    load = Trainer.load

    def wrong(trainer: Trainer, saved: Checkpoint) -> bool:
        done = load(trainer, saved)
        trainer.shards()["exp_avg.transformer.h.0.ln_1.weight"][0].tensor[-1] += 1e-6
        return done

    patch.setattr(Trainer, "load", wrong)


def _loss(patch: pytest.MonkeyPatch) -> None:
    evaluate = Trainer.evaluate
    patch.setattr(Trainer, "evaluate", lambda *given: evaluate(*given) + 1e-6)


def _tokens(patch: pytest.MonkeyPatch) -> None:
    opened = RunData.open

    def wrong(data: RunData, fraction: float) -> tuple[Mixture, Mixture]:
        train, val = opened(data, fraction)
        return Mixture((train.sources[0][1 : len(train.sources[0])],)), val

    patch.setattr(RunData, "open", wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_moment, "exp_avg.transformer.h.0.ln_1.weight differ from what was saved"),
        (_loss, r"the loss on the next batch is [\d.]+: expected [\d.]+$"),
        (_tokens, "the next batch has other tokens than before"),
    ],
)
def test_a_resume_that_is_not_what_was_saved_ends(
    copied: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch, wrong: Wrong, said: str
) -> None:
    commands.out = copied
    wrong(monkeypatch)
    error = commands.fail_to_resume("--train.steps", "13", status=3)
    assert re.search(f"step-12 was not loaded as it was saved: {said}", error)
    assert not (copied / "step-13").exists()


def test_losses_of_another_layout_or_batch_are_compared_as_far_as_they_can_be() -> None:
    options = TrainCommand()
    before, proof = resolved(options), {"tokens": "a", "loss": 2.0, "machine": "here", "exact": True}

    def said(options: TrainCommand, **now: Any) -> str:
        return check_loss(proof, proof | now, options, before, 4)

    tensors = replace(options, parallel=replace(options.parallel, tp=2))
    half = replace(options, train=replace(options.train, dtype="bfloat16"))
    assert said(options) == said(tensors, loss=2.0 + 1e-6) == said(half, loss=2.01) == ""
    assert said(options, loss=2.0 + 1e-6) == "the loss on the next batch is 2.000001: expected 2.0"
    assert said(options, loss=2.0 + 1e-6, machine="there") == said(options, loss=2.0 + 1e-6, exact=False) == ""
    assert said(tensors, loss=2.0001).endswith("is 2.0001: expected 2.0 within 3e-06")
    assert "within" in said(half, loss=2.2) and "nan" in said(options, loss=float("nan"))
    pipelined = replace(options, parallel=replace(options.parallel, dp=2, pp=2), zero=replace(options.zero, stage=3))
    assert said(pipelined, loss=2.0 + 1e-6) == "", "the sums of these layouts have another order"
    ordered = replace(options, train=replace(options.train, virtual_ranks=4))
    before = resolved(ordered)
    assert said(replace(pipelined, train=ordered.train), loss=2.0 + 1e-6).endswith(": expected 2.0")
    assert said(replace(tensors, train=ordered.train), loss=2.0 + 1e-6) == said(options, loss=2.0 + 1e-6) == ""
    before = resolved(options)
    other = replace(options, train=replace(options.train, batch=8))
    assert said(other, tokens="b", loss=3.0) == ""
    masked = replace(options, data=replace(options.data, documents="mask"))
    assert said(masked, loss=3.0) == ""
    assert said(tensors, tokens="b") == "the next batch has other tokens than before"
