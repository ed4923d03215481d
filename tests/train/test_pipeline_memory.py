"""The memory that is counted for the ranks of a pipeline is what they hold in a step."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from benchmarks.long_context import SavedBytes
from tpfuse.backend import implementation
from tpfuse.choices import PipelineSchedule
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.messages.symmetric import SymmetricMessages
from tpfuse.models.gpt import TIED
from tpfuse.parallel.pipeline.order import Action, Kind
from tpfuse.parallel.pipeline.timeline import most_in_flight
from tpfuse.testing.command import Commands
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.testing.training import CONFIG, new_trainer, options_of
from tpfuse.train.batches import MicroBatch
from tpfuse.train.memory import _account, _part
from tpfuse.train.options import TrainCommand
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.memory import MemoryAccount, account
from tpfuse.zero.taken_parameters import take_partial_gradients

DEEP = replace(CONFIG, n_layer=9, dropout=0.0)


def _held(options: TrainCommand) -> tuple[int, int, int, int, MemoryAccount, dict[str, tuple[int, ...]]]:
    """Train a step. Return what this rank of a pipeline has held of micro-batches, slots and parameters.

    They are: the most micro-batches in flight, as the order says and as the step has counted them; the most bytes that
    autograd has saved, without received inputs; the bytes of slots; the buckets; and the shapes of the parameters.
    """
    with implementation("direct"):
        trainer, windows = new_trainer(options, DEEP)
        runner = trainer.runner
        assert runner is not None
        compute, order, rank = runner._compute, runner.order, runner.rank
        saved: dict[int, int] = {}

        def counted(stage: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
            without = [local_tensor(parameter) for parameter in trainer.model.parameters()]
            if x is not None and order.rank_of[stage - 1] != rank:
                without.append(x)  # it is in a slot
            found = SavedBytes(without)
            with found.hooks:
                y = compute(stage, x, batch)
            assert saved.setdefault(stage, found.total) == found.total
            return y

        runner._compute = counted
        trainer.train_step(windows, lambda: False)
    now = most = 0
    for action in [interval.action for interval in runner.intervals]:
        now += saved[action.stage] * (action.kind is Kind.FORWARD)
        most = max(most, now)
        now -= saved[action.stage] * _ends(action)
    messages, engine = runner._messages, trainer.engine
    assert isinstance(messages, SymmetricMessages)
    assert isinstance(engine, GradientBuckets)
    buckets = account([bucket.layout for bucket in engine.buckets], engine.stage, accumulating=True)
    shapes = {name: tuple(local_tensor(parameter).shape) for name, parameter in trainer.model.named_parameters()}
    in_flight = most_in_flight(order, rank), runner.most_in_flight
    return *in_flight, most, messages._slots.local.nbytes, buckets, shapes


def _ends(action: Action) -> bool:
    return action.kind in (Kind.BACKWARD, Kind.WEIGHT)


def _check(pp: int, **more: Any) -> None:
    options = options_of(accumulation=2 * pp, batch=12 * pp, pp=pp, **more)
    for index, found in enumerate(pool(pp * options.parallel.dp).run(_held, options)):
        planned, in_flight, most, slots, buckets, shapes = found
        rank = index // options.parallel.dp
        part, activations, buffers = _part(None, options, DEEP, rank)
        assert in_flight == planned
        assert activations == most
        assert buffers == slots
        assert {name: tuple(parameter.shape) for name, parameter in part.named_parameters()} == shapes
        partial = take_partial_gradients(part)
        assert _account(part, partial, [TIED], options.zero.stage, options, True, 0) == buckets


@pytest.mark.parametrize("pp", [2, *exhaustive(4)])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", *exhaustive("gpipe", "interleaved_1f1b", "zero_bubble")])
def test_ranks_hold_what_is_counted(pp: int, schedule: PipelineSchedule) -> None:
    _check(pp, pp_schedule=schedule)


@pytest.mark.parametrize("recompute", exhaustive("selective", "full"))
def test_ranks_that_recompute_hold_what_is_counted(recompute: str) -> None:
    _check(2, recompute=recompute)


@pytest.mark.parametrize("stage", [1, *exhaustive(0, 2)])
def test_the_tied_embedding_is_shared_by_the_replicas_of_both_ends(stage: int) -> None:
    _check(2, dp=2, stage=stage)


def test_the_command_counts_a_pipeline(commands: Commands) -> None:
    flags = ["gpt2-124m", "--ranks", "8", "--stage", "1", "--micro-batch", "2"]
    whole, cut = (commands.do("memory", *flags, "--pp", pp) for pp in ("1", "4"))
    assert "124,439,808 parameters, bfloat16; ranks 8: tp 1 x cp 1 x dp 2 x pp 4\n" in cut
    assert "pp" not in whole and "the first rank, which holds the most" in whole
    assert "of pipeline rank 1, which holds the most" in cut, "rank 0 has fewer layers beside the embeddings"
    assert "of the most micro-batches in flight" in cut

    def row(text: str, kind: str) -> int:
        line = next(line for line in text.splitlines() if line.startswith(kind))
        return int(line.split()[-1].replace(",", ""))

    assert row(cut, "parameters") < row(whole, "parameters") / 2
    assert row(cut, "buffers") > 0 == row(whole, "buffers")
    assert "--pp -1: expected at least 0" in commands.fail("memory", "gpt2-124m", "--pp", "-1")
