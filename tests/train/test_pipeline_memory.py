"""The memory that is counted for the ranks of a pipeline is what they hold in a step."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from benchmarks.long_context import SavedBytes
from tests.support.command import Commands
from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, new_trainer, options_of, ranks_of
from tpfuse.backend import implementation
from tpfuse.choices import PipelineSchedule
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.messages.symmetric import SymmetricMessages
from tpfuse.models.gpt import TIED
from tpfuse.parallel.pipeline.order import Action, Kind
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.parallel.pipeline.timeline import most_in_flight
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import MicroBatch
from tpfuse.train.language_model import blocks_of
from tpfuse.train.memory import _account, _part
from tpfuse.train.options import TrainCommand
from tpfuse.train.shape_mesh import shape_mesh
from tpfuse.zero.collectives_with_traffic import CountedReduceScatter
from tpfuse.zero.fully_sharded import FullySharded, _gathered, _parameter_groups
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.memory import MemoryAccount, account
from tpfuse.zero.parameter_takeover import take_partial_gradients

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
        run, order, rank = runner._run, runner.order, runner.rank
        saved: dict[tuple[int, int], dict[int, int]] = {}
        held: list[dict[int, int]] = []  # after each action, the bytes of storages by address

        def counted(action: Action, batch: MicroBatch, taken: Any) -> list[Tensor]:
            found = SavedBytes([])
            with found.hooks if action.kind is Kind.FORWARD else nullcontext():
                losses = run(action, batch, taken)
            if action.kind is Kind.FORWARD:
                saved[action.stage, action.micro_batch] = found.sizes
            held.append({address: size for at in runner._flights for address, size in saved[at].items()})
            held[-1] |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors_of(runner)}
            return losses

        runner._run = counted  # type: ignore[method-assign]
        trainer.train_step(windows, lambda: False)
    slots = runner._messages._slots.local  # type: ignore[attr-defined]
    elsewhere = [slots, *(local_tensor(parameter) for parameter in trainer.model.parameters())]
    for address in {x.untyped_storage().data_ptr() for x in elsewhere}:
        for each in held:
            each.pop(address, None)
    most = max(sum(each.values()) for each in held)
    messages, engine = runner._messages, trainer.engine
    assert isinstance(messages, SymmetricMessages)
    assert isinstance(engine, GradientBuckets)
    buckets = account([bucket.layout for bucket in engine.buckets], engine.stage, accumulating=True)
    shapes = {name: tuple(local_tensor(parameter).shape) for name, parameter in trainer.model.named_parameters()}
    in_flight = most_in_flight(order, rank), runner.most_in_flight
    return *in_flight, most, messages._slots.local.nbytes, buckets, shapes


def _tensors_of(runner: Runner) -> Iterator[Tensor]:
    """Yield the tensors that a rank holds of micro-batches in flight besides those that autograd has saved."""
    yield from runner._handed.values()
    for flight in runner._flights.values():
        inputs = [] if flight.x is None else [flight.x, flight.x.grad]
        kept = [gradient for group in flight.groups or [] for of_node in group["grads"] for gradient in of_node]
        for x in (*inputs, flight.output, flight.gradient, *kept):
            if isinstance(x, Tensor) and x.ndim:  # not the loss
                yield x


def _check(pp: int, **more: Any) -> None:
    options = options_of(accumulation=2 * pp, batch=12 * pp, pp=pp, **more)
    each = ranks_of(options) // pp
    for index, found in enumerate(pool(ranks_of(options)).run(_held, options)):
        planned, in_flight, most, slots, buckets, shapes = found
        assert in_flight == planned
        if index % options.parallel.tp:
            continue  # the first tensor-parallel rank is counted, which holds the most
        with shape_mesh(options.parallel.tp) as mesh:
            part, activations, buffers = _part(mesh, options, DEEP, index // each)
            assert {name: tuple(local_tensor(p).shape) for name, p in part.named_parameters()} == shapes
            partial = take_partial_gradients(part)
            assert _account(part, partial, [TIED], options.zero.stage, options, True, 0) == buckets
        assert activations == most
        assert buffers == slots


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


@pytest.mark.parametrize("schedule", ["zbv", *exhaustive("1f1b", "zero_bubble")])
@pytest.mark.parametrize(("tp", "cp"), exhaustive((2, 1), (1, 2)))
def test_ranks_of_other_dimensions_hold_what_is_counted(schedule: PipelineSchedule, tp: int, cp: int) -> None:
    _check(2, tp=tp, cp=cp, cp_schedule="ring", pp_schedule=schedule)


def _held_at_stage_3(options: TrainCommand) -> tuple[int, int, int, int, int]:
    """Train a step. Return the bytes of shards, gathered parameters, whole gradients, sums, and of a unit that is sent.

    Each is the most that this rank has held at the same time after an action of the pipeline.
    """
    trainer, windows = new_trainer(options, DEEP)
    engine, runner = trainer.engine, trainer.runner
    assert isinstance(engine, FullySharded) and runner is not None
    parameters = [p for group in _parameter_groups(*engine._units) for p in group.fsdp_params]
    run, reduce = runner._run, CountedReduceScatter.__call__
    gathered, whole, sent = [0], [0], [0]

    def counted(*arguments: Any) -> list[Tensor]:
        losses = run(*arguments)
        present = [_gathered(p) for p in parameters]
        gathered.append(sum(local_tensor(x).untyped_storage().nbytes() for x in present if x is not None))
        gradients = [
            p.unsharded_accumulated_grad if x is None or x.grad is None else x.grad
            for p, x in zip(parameters, present, strict=True)
        ]
        whole.append(sum(local_tensor(x).nbytes for x in gradients if x is not None))
        return losses

    def sending(self: CountedReduceScatter, **arguments: Any) -> Any:
        sent.append(arguments["input_tensor"].nbytes)
        return reduce(self, **arguments)

    runner._run = counted  # type: ignore[method-assign, assignment]
    with mock.patch.object(CountedReduceScatter, "__call__", sending):
        trainer.train_step(windows, lambda: False)
    shards = sum(local_tensor(member.sharded).nbytes for member in engine.members)
    sums = sum(member.gradient.nbytes for member in engine.members)
    return shards, max(gathered), max(whole), sums, max(sent)


@pytest.mark.parametrize(("dp", "tp", "cp"), [(2, 1, 1), *exhaustive((1, 1, 2), (2, 2, 1))])
@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive("zbv")])
def test_ranks_at_stage_3_hold_what_is_counted(schedule: PipelineSchedule, dp: int, tp: int, cp: int) -> None:
    options = options_of(accumulation=4, batch=24, stage=3, pp=2, pp_schedule=schedule, dp=dp, tp=tp, cp=cp)
    found = pool(ranks_of(options)).run(_held_at_stage_3, options)
    for rank in range(2):
        with shape_mesh(tp) as mesh:
            part, _, _ = _part(mesh, options, DEEP, rank)
            account = _account(part, take_partial_gradients(part), [TIED], 3, options, True, 0)
            blocks = [sum(local_tensor(p).nbytes for p in block.parameters()) for block in blocks_of(part)]
            rest = sum(local_tensor(p).nbytes for p in part.parameters()) - sum(blocks)
        shards, gathered, whole, sums, sent = found[rank * dp * tp * cp]
        assert account.parameters == shards
        assert account.buffers == gathered + sent
        assert account.gradients == whole + sums + max(*blocks, rest), "gradients of a unit arrive beside their sums"


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
