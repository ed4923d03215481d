"""A pipeline evaluates, generates, scales its loss and names what is not finite as one rank does."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, new_trainer, options_of, ranks_of
from tpfuse.comm.layout import local_tensor
from tpfuse.errors import RunError
from tpfuse.models.gpt import GPTConfig
from tpfuse.models.gpt_block import Block
from tpfuse.testing.ranks import pool
from tpfuse.train.trainer import Trainer

Layout = dict[str, Any]
FOUR = replace(CONFIG, n_layer=4)


def evaluated_and_generated(layout: Layout) -> tuple[float, list[list[list[int]]]]:
    """Return the loss of an evaluation, and two texts after prompts of one token and of a whole context.

    They are longer than the context, so that they are computed with a cache and then without one.
    """
    trainer, windows = new_trainer(options_of(**layout), FOUR)
    for _ in range(2):
        trainer.train_step(windows, lambda: False)
    for name, parameter in trainer.model.named_parameters():
        if name in GPTConfig().tied:  # small logits would give the same tokens as equal ones
            local_tensor(parameter.detach()).mul_(50.0)
    loss = trainer.evaluate(windows, 2)
    prompts = [torch.tensor([[3], [40]]), torch.arange(14).view(2, 7)]
    texts = [trainer.generate(prompt, 12).tolist() for prompt in prompts]
    assert trainer.evaluate(windows, 2) == loss, "generation leaves nothing behind"
    trainer.train_step(windows, lambda: False)
    return loss, texts


@functools.cache
def on_one_rank() -> tuple[float, list[list[list[int]]]]:
    return pool(1).run(evaluated_and_generated, {})[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "tp": 2, "pp_schedule": "zbv", "accumulation": 4},
        *exhaustive({"pp": 2, "dp": 2, "stage": 3, "accumulation": 3}),
        *exhaustive({"pp": 2, "cp": 2, "pp_schedule": "interleaved_1f1b", "accumulation": 4}),
    ],
    ids=str,
)
def test_an_evaluation_and_a_text_are_those_of_one_rank(layout: Layout) -> None:
    loss, texts = on_one_rank()
    for found, continued in pool(ranks_of(options_of(**layout))).run(evaluated_and_generated, layout):
        assert found == pytest.approx(loss, rel=1e-9)
        assert continued == texts


@contextmanager
def broken(trainer: Trainer, kind: str, layer: int) -> Iterator[None]:
    """Break a layer of the model on the ranks that have it."""
    block = trainer.model.transformer.h[layer]
    if not isinstance(block, Block):
        yield
        return
    if kind == "parameter":
        local_tensor(block.mlp.c_fc.weight).fill_(inf)
        yield
    elif kind == "output":
        with block.ln_2.register_forward_hook(lambda _module, _inputs, output: (output[0] * inf, output[1])):
            yield
    else:

        def times_infinity(_module: object, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
            if output[0].requires_grad:
                output[0].register_hook(lambda gradient: gradient * inf)

        with block.ln_2.register_forward_hook(times_infinity):
            yield


def stopped_by(layout: Layout, kind: str, layer: int) -> str:
    """Return the error of a step with a broken layer."""
    trainer, windows = new_trainer(options_of(**layout), FOUR)
    trainer.train_step(windows, lambda: False)
    with torch.no_grad(), broken(trainer, kind, layer), torch.enable_grad():
        try:
            trainer.train_step(windows, lambda: False)
        except RunError as error:
            return str(error)
    return "no error"


MESSAGES = {
    "parameter": r"the parameter transformer\.h\.LAYER\.mlp\.c_fc\.weight is not finite",
    "output": r"the first output that is not finite is that of transformer\.h\.LAYER\.ln_2",
    "gradient": r"backward: the first gradient that is not finite is that of transformer\.h\.LAYER\.ln_2\.",
}


@pytest.mark.parametrize(
    ("layout", "kind", "layer"),
    [
        ({"pp": 2, "dp": 2, "accumulation": 3}, "output", 3),
        ({"pp": 2, "pp_schedule": "zero_bubble", "accumulation": 4}, "gradient", 2),
        *exhaustive(
            ({"pp": 2, "pp_schedule": "zbv", "accumulation": 4}, "parameter", 1),
            *(({"pp": 2, "dp": 2, "stage": 3, "accumulation": 3}, kind, 2) for kind in MESSAGES),
            ({"pp": 2, "pp_schedule": "zbv", "tp": 2, "accumulation": 3}, "output", 2),
        ),
    ],
    ids=str,
)
def test_what_is_not_finite_is_named_by_all_ranks(layout: Layout, kind: str, layer: int) -> None:
    expected = rf"step 1: loss .*: {MESSAGES[kind].replace('LAYER', str(layer))}.*; stopped before the update.*"
    said = pool(ranks_of(options_of(**layout))).run(stopped_by, layout, kind, layer)
    assert len(set(said)) == 1 and re.fullmatch(expected, said[0]), said


def overflowed(layout: Layout) -> list[tuple[bool, bool, float, float, int]]:
    """Return (skipped, stop, loss, loss scale, steps so far) of steps of which the first overflows; rank 1 wants to
    stop then.
    """
    trainer, windows = new_trainer(options_of(dtype="float16", **layout), FOUR)
    trainer.loss_scale, found = 2.0**34, []
    while trainer.loss_scale > 2.0**17:
        result = trainer.train_step(windows, lambda: trainer.rank == 1 and trainer.step == 0)
        found.append((result.skipped, result.stop, result.loss, trainer.loss_scale, trainer.step))
        if not result.skipped:
            break
    return found


@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive("zbv")])
def test_an_overflow_halves_the_loss_scale_of_all_ranks(schedule: str) -> None:
    first, second = pool(2).run(overflowed, {"pp": 2, "pp_schedule": schedule, "accumulation": 4})
    assert first == second
    *skipped, last = first
    assert skipped and not last[0] and all(each[0] for each in skipped)
    assert [each[3] for each in first[:-1]] == [2.0 ** (33 - step) for step in range(len(skipped))]
    assert [each[1] for each in first] == [True, *[False] * len(skipped)], "all ranks know that one has to stop"
    assert [each[4] for each in first] == list(range(1, len(first) + 1)), "a skipped step counts"
