"""`--train.cuda-graph`: replayed steps compute the bits of launched ones.

`graph_stand_in` repeats what a capture has recorded, so that whatever the host decided at the capture shows. Faults
that a replay could have are planted, and each must change the run. One test needs a GPU, and replays a real graph.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.command import Commands
from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, Result, new_trainer, options_of, train
from tests.train.graph_stand_in import GraphStandIn
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.host_coordinated_memory import HostCoordinatedMemory
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import build_mesh
from tpfuse.comm.sum_order import TreeSums
from tpfuse.errors import RunError
from tpfuse.models.gpt import GPTConfig
from tpfuse.switches import use
from tpfuse.testing.ranks import GpuRankPool, on_ranks
from tpfuse.train import check_options, step_graph
from tpfuse.train import trainer as trainer_module
from tpfuse.train.metrics import read_metrics
from tpfuse.train.step_graph import LAUNCHED, GraphCalls, StepGraph
from tpfuse.train.trainer import Trainer
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.reducer.collective import CollectiveReducer

STEPS = 6
WIDE = GPTConfig(61, 64, 128, 2, 4, dropout=0.1)  # for GPUs
ONCE = (LAUNCHED, 1, STEPS - LAUNCHED)  # launches, captures and replays of a run whose graph serves to its end
Plant = Callable[[Trainer, int, ExitStack], None]


def stepped(
    layout: dict[str, Any], graph: bool, plant: Plant | None = None, device: str = "cpu"
) -> tuple[Result, tuple[int, ...]]:
    """Train with an evaluation after step 5. Return the result, and the numbers of launches, captures and replays.

    plant: called before each step with the trainer, the step's number, and a stack of patches that lasts for the run.
    """
    options = options_of(**{"accumulation": 2, **layout}, cuda_graph="yes" if graph else "no")
    config, mesh = CONFIG, None
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(mock.patch.object(step_graph, "GraphCalls", GraphStandIn))
        else:
            config, mesh = WIDE, build_mesh(device, dp=1, tp=options.parallel.tp)
        stack.enter_context(use(implementation="collective" if device == "cpu" else "fused"))
        trainer, windows = new_trainer(options, config, device, mesh)
        if trainer.graph is not None:
            stack.callback(trainer.graph.release)
        losses, norms = [], []
        for step in range(STEPS):
            if plant is not None:
                plant(trainer, step, stack)
            result = trainer.train_step(windows, lambda: False)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            if step == 4:
                losses.append(trainer.evaluate(windows, 1, 50))
        calls: Any = None if trainer.graph is None else trainer.graph._calls
        counts = (calls.launches, calls.captures, calls.replays) if isinstance(calls, GraphStandIn) else ()
        assert trainer.graph is None or trainer.graph._baked, "a step was captured"
        parts = {name: local_tensor(p).detach().cpu() for name, p in trainer.model.named_parameters()}
        return (losses, norms, parts), counts


def same(found: Result, expected: Result) -> bool:
    return found[:2] == expected[:2] and all(torch.equal(x, expected[2][name]) for name, x in found[2].items())


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, {"dp": 2, "tp": 2, "stage": 1, "recompute": "full"}),
        *exhaustive(
            (1, {"accumulation": 3}),
            (1, {"recompute": "selective", "dtype": "float32", "autocast": "bfloat16"}),
            (3, {"dp": 3, "offload": "host", "reduce_dtype": "parameter", "dtype": "bfloat16"}),
        ),
    ],
)
@on_ranks("world")
def test_replayed_steps_compute_the_bits_of_launched_ones(layout: dict[str, Any]) -> None:
    (expected, _), (found, counts) = (stepped(layout, graph) for graph in (False, True))
    assert same(found, expected) and counts == ONCE


def test_a_new_loss_scale_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_FIRST_SCALE", 2.0**8)
    monkeypatch.setattr(trainer_module, "_SCALE_INTERVAL", 5)
    layout = {"dtype": "float32", "autocast": "float16"}
    (expected, _), (found, counts) = (stepped(layout, graph) for graph in (False, True))
    assert same(found, expected) and counts == (LAUNCHED, 2, STEPS - LAUNCHED)  # 2 captures


def test_a_run_that_begins_to_scale_its_loss_begins_as_a_new_one() -> None:
    trainer, _ = new_trainer(options_of(dtype="float32", autocast="float16"))
    trainer.restore(trainer.state() | {"loss_scale": 1.0})
    assert trainer.loss_scale == trainer_module._FIRST_SCALE


def test_a_replayed_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "GraphCalls", GraphStandIn)
    options = options_of(cuda_graph="yes")
    train(options, 5, "auto", tmp_path)
    expected, found = train(options_of(), 10), train(options, 5, "auto", None, tmp_path)
    assert same(found, (expected[0][5:], expected[1][5:], expected[2]))


@pytest.mark.parametrize(
    ("chosen", "device", "world", "compiled", "replayed"),
    [
        ("auto", "cuda", 1, False, True),
        ("auto", "cuda", 1, True, False),
        ("auto", "cuda", 2, False, False),
        ("auto", "cpu", 1, False, False),
        ("no", "cuda", 1, False, False),
        ("yes", "cuda", 2, False, True),
    ],
)
def test_one_gpu_replays_by_itself(chosen: str, device: str, world: int, compiled: bool, replayed: bool) -> None:
    options = options_of(cuda_graph=chosen, compile=compiled)
    assert step_graph.replays(options, torch.device(device), world) == replayed


def test_the_engine_begins_a_step_before_the_graph() -> None:
    """It may wait for other ranks, until gradients can be written."""
    order: list[str] = []

    def noted(owner: type, name: str) -> Any:
        function = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *arguments: (order.append(name), function(*arguments))[1])

    with noted(CollectiveReducer, "begin"), noted(GraphStandIn, "capture"), noted(GraphStandIn, "replay"):
        stepped({}, True)
    assert order == ["begin"] * LAUNCHED + ["begin", "capture", "replay"] + ["begin", "replay"] * (STEPS - LAUNCHED - 1)


def baked_seed(trainer: Trainer, step: int, stack: ExitStack) -> None:
    if step == 0:
        stack.enter_context(mock.patch.object(Trainer, "_with_keys", lambda _, batches: batches))
        stack.enter_context(mock.patch.object(step_graph, "_baked", lambda _: None))


def baked_tokens(trainer: Trainer, step: int, stack: ExitStack) -> None:
    if step == LAUNCHED + 1:
        assert trainer.graph is not None
        copies = [batch._replace(ids=batch.ids.clone()) for batch in trainer.graph._batches]
        stack.enter_context(mock.patch.object(trainer.graph, "_batches", copies))


def old_gradients(trainer: Trainer, step: int, stack: ExitStack) -> None:
    if step == LAUNCHED:
        stack.enter_context(mock.patch.object(TreeSums, "begin", TreeSums.take_all))  # sums go on from the last step's


def lost_gradients(trainer: Trainer, step: int, stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(GradientBuckets, "take_all"))


@functools.cache
def launched() -> Result:
    return stepped({}, False)[0]


def test_a_run_without_a_fault_has_the_bits_of_a_launched_one() -> None:
    found, counts = stepped({}, True)
    assert same(found, launched()) and counts == ONCE


@pytest.mark.parametrize("plant", [baked_seed, baked_tokens, old_gradients, lost_gradients])
def test_planted_faults_show(plant: Plant) -> None:
    found, counts = stepped({}, True, plant)
    assert not same(found, launched()) and counts == ONCE


def test_a_step_that_waits_for_the_device_cannot_be_captured() -> None:
    def waits(trainer: Trainer, step: int, stack: ExitStack) -> None:
        if step == LAUNCHED:
            loss = trainer.language_model.loss
            waiting = mock.patch.object(trainer.language_model, "loss", lambda x: loss(x) * float(x.ids[0, 0]))
            stack.enter_context(waiting)

    with pytest.raises(RunError, match=r"^step 3: its passes cannot be captured: .*_local_scalar_dense.*--train.cuda"):
        stepped({}, True, waits)


@on_ranks(2)
def test_a_replay_is_watched_as_an_operation_of_its_group() -> None:
    group, seen = dist.group.WORLD, list[bool]()
    assert group is not None
    memory = symmetric_memory(group, torch.device("cpu"))
    assert isinstance(memory, HostCoordinatedMemory)
    with mock.patch.object(torch.cuda, "Stream"):
        calls = GraphCalls(torch.device("cpu"), group)
    calls._graph = mock.Mock(replay=lambda: seen.append(memory._busy.locked()))
    calls.replay()
    assert seen == [True]


def test_a_run_says_that_it_replays_steps(commands: Commands, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_options, "device_count", lambda: 1)
    monkeypatch.setattr(step_graph, "GraphCalls", GraphStandIn)
    with mock.patch.object(StepGraph, "release", autospec=True, side_effect=StepGraph.release) as release:
        said = commands.train("--train.cuda-graph", "--data.tokenizer", "chars")
    assert f"steps replayed as a CUDA graph after {LAUNCHED} launched ones" in said
    assert release.call_count == 2, "before the capture, and before the process groups end"
    keys = ("step", "loss", "val_loss", "grad_norm")
    found, expected = (
        [{key: row[key] for key in keys} for row in read_metrics(run / "metrics.jsonl")]
        for run in (commands.out, trained)
    )
    assert found == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_gpu_replays_the_bits_of_launched_steps(tp: int) -> None:
    layout = {"tp": tp, "dtype": "float32", "autocast": "bfloat16"}
    ranks = GpuRankPool(tp)
    try:
        both = (ranks.run(stepped, layout, graph, None, "cuda") for graph in (False, True))
        for (expected, _), (found, _) in zip(*both, strict=True):
            assert same(found, expected)
    finally:
        ranks.close()
