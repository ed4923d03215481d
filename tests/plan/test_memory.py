"""The formula of memory counts what autograd saves and what the engines of ZeRO hold, on CPU ranks."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tpfuse
from tests.support.copy_stand_in import CopyStandIn
from tests.support.decoders import decoder
from tests.support.meshes import mesh_of
from tests.support.saved_bytes import SavedBytes
from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, new_trainer, options_of, ranks_of
from tpfuse.choices import PipelineSchedule, Recompute
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.messages.symmetric import SymmetricMessages
from tpfuse.comm.sum_order import HALF
from tpfuse.errors import UserError
from tpfuse.models.gpt_config import GPTConfig
from tpfuse.parallel import offloaded_inputs
from tpfuse.parallel import recompute as recomputing
from tpfuse.parallel.pipeline.order import Action, Kind
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.parallel.pipeline.timeline import most_in_flight
from tpfuse.plan.memory import RankMemory, memories, rank_memory, uncounted
from tpfuse.plan.muon import owned, sent_bytes, update_bytes
from tpfuse.plan.sizes import TPFUSE, ModelSizes, RankLayout
from tpfuse.switches import use
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import MicroBatch
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.options import TrainCommand
from tpfuse.train.predicted import check_timed_model, layout_of, program_of, sizes_of, stage_blocks
from tpfuse.train.trainer import StepResult
from tpfuse.zero import muon
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.collectives_with_traffic import Counted
from tpfuse.zero.fsdp_internals import whole_gradients
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.muon import MuonOptions, cost, orthogonalised

DEEP = dataclasses.replace(CONFIG, n_layer=9, dropout=0.0)
WIDE = GPTConfig(vocab_size=61, n_positions=12, n_embd=32, n_layer=2, n_head=2)


def _formula(options: TrainCommand, config: GPTConfig) -> dict[int, RankMemory]:
    program = program_of(options, config.n_head)
    sizes, blocks = sizes_of("toy", config, options.train.dtype), stage_blocks(options, config)
    return memories(sizes, layout_of(options), program, blocks)


class Bytes(NamedTuple):
    """The bytes that a rank holds: gradients are those that exist all the time, at stage 2 the sums of shards."""

    parameters: int
    gradients: int
    optimizer: int
    slots: int  # of messages
    activations: int  # the most


@contextmanager
def _counting_recomputed(counters: list[SavedBytes]) -> Iterator[None]:
    """Count by the last counter what recomputation leaves: its hooks hide it from the hooks of counters."""

    def seen(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda x: counters[-1].pack(y) if isinstance(y := pack(x), Tensor) else y, unpack)

    with mock.patch.object(recomputing, "saved_tensors_hooks", seen):
        yield


def _tensors_of(runner: Runner) -> Iterator[Tensor]:
    """Yield the tensors that a rank holds of micro-batches in flight, beside those that autograd has saved."""
    yield from runner._handed.values()
    for flight in runner._flights.values():
        inputs = [] if flight.x is None else [flight.x, flight.x.grad]
        kept = [gradient for group in flight.groups or [] for of_node in group["grads"] for gradient in of_node]
        for x in (*inputs, flight.output, flight.gradient, *kept):
            if isinstance(x, Tensor) and x.ndim:  # not the loss
                yield x


def _watch(runner: Runner, counters: list[SavedBytes]) -> list[dict[int, int]]:
    """Return a list to which each action of a pipeline adds the bytes of storages in flight, by address."""
    held, run = [], runner._run
    saved: dict[tuple[int, int], dict[int, int]] = {}

    def counted(action: Action, batch: MicroBatch, taken: Any) -> list[Tensor]:
        counters.append(SavedBytes([]))
        with counters[-1].hooks if action.kind is Kind.FORWARD else nullcontext():
            losses = run(action, batch, taken)
        if action.kind is Kind.FORWARD:
            saved[action.stage, action.micro_batch] = counters[-1].sizes
        now = {address: size for at in runner._flights for address, size in saved[at].items()}
        held.append(now | {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors_of(runner)})
        return losses

    runner._run = counted  # type: ignore[method-assign]
    return held


def _held(options: TrainCommand, config: GPTConfig) -> tuple[int, ...]:
    """Train a step, and return the fields of `Bytes`."""
    counters: list[SavedBytes] = []
    with (
        use(implementation="direct"),
        mock.patch.object(offloaded_inputs, "CopyStream", CopyStandIn),
        _counting_recomputed(counters),
    ):
        trainer, windows = new_trainer(options, config)
        runner, engine, optimizer = trainer.runner, trainer.engine, trainer.optimizer
        assert isinstance(engine, GradientBuckets) and isinstance(optimizer, BucketUpdater)
        own = [local_tensor(parameter) for parameter in trainer.model.parameters()]
        alone = SavedBytes(own)
        counters.append(alone)
        held = [] if runner is None else _watch(runner, counters)
        with alone.hooks if runner is None else nullcontext():
            trainer.train_step(windows, lambda: False)
    slots, most = 0, alone.total
    if runner is not None:
        assert most_in_flight(runner.order, runner.rank) == runner.most_in_flight
        messages = runner._messages
        assert isinstance(messages, SymmetricMessages)
        slots = messages._slots.local.nbytes
        elsewhere = {x.untyped_storage().data_ptr() for x in (messages._slots.local, *own)}
        most = max(sum(size for address, size in now.items() if address not in elsewhere) for now in held)
    subtrees = [views for bucket in engine.buckets for sums in bucket._sums for views in sums._views]
    gradients = sum(_whole_bytes(views) for views in subtrees)
    if engine.stage == 2:
        gradients += sum(bucket.reduced_shard.nbytes for bucket in engine.buckets)
    state = [optimizer.state(bucket) for bucket in engine.buckets]
    masters = engine.buckets[0].values.dtype in HALF
    kept = sum(tensor.nbytes for x in state for kind, tensor in x.items() if kind != "model" or masters)
    parameters = sum(bucket.values.nbytes for bucket in engine.buckets)
    return parameters, gradients, kept, slots, most


def _whole_bytes(views: Sequence[Tensor]) -> int:
    """Return the bytes of the tensor, with its padding, of which these are parts."""
    base = views[0]._base
    assert base is not None
    return base.nbytes


def _named(value: object) -> str:
    """Return the id of a configuration, or of the options that differ from the usual ones."""
    if isinstance(value, GPTConfig):
        names = {DEEP: "deep", WIDE: "wide"}
        return names.get(value, f"dropout {value.dropout}" if value.dropout else "no biases")
    return str(value)


LAYOUTS: list[tuple[GPTConfig, dict[str, Any]]] = [
    (WIDE, {"dtype": "bfloat16", "dp": 2, "tp": 2, "stage": 1, "optim": {"name": "muon"}}),
    (WIDE, {"dtype": "float32", "cp": 2, "cp_schedule": "ulysses", "recompute": "selective", "stage": 0}),
    (WIDE, {"autocast": "bfloat16", "dtype": "float32", "dp": 2, "stage": 1}),
    (DEEP, {"pp": 2, "accumulation": 4, "batch": 24, "stage": 1, "dp": 2}),
    (DEEP, {"pp": 2, "accumulation": 4, "batch": 24, "pp_schedule": "zbv"}),
    (WIDE, {"dtype": "bfloat16", "tp": 2, "recompute": "full", "offload_activations": True, "state_dtype": "bfloat16"}),
    *exhaustive(
        (WIDE, {"dtype": "bfloat16", "dp": 2, "stage": 2, "accumulation": 2, "recompute": "full"}),
        (WIDE, {"dtype": "bfloat16", "dp": 2, "stage": 2, "accumulation": 2, "accumulate": "whole"}),
        (WIDE, {"dtype": "bfloat16", "recompute": "full", "dp": 2, "stage": 2, "optim": {"name": "muon"}}),
        (WIDE, {"dtype": "float64", "tp": 2, "cp": 2, "cp_schedule": "ring"}),
        (DEEP, {"dtype": "float32", "pp": 2, "batch": 24, "micro_batch": 3, "virtual_ranks": 8, "stage": 1}),
        (dataclasses.replace(WIDE, dropout=0.2), {"dtype": "float32"}),
        (dataclasses.replace(WIDE, bias=False), {"dtype": "float32", "cp": 2, "cp_schedule": "all_gather"}),
        *(
            (DEEP, {"pp": pp, "accumulation": 2 * pp, "batch": 12 * pp, "pp_schedule": schedule})
            for pp, schedule in ((4, "1f1b"), (4, "gpipe"), (2, "interleaved_1f1b"), (4, "zero_bubble"), (4, "zbv"))
        ),
        *(
            (DEEP, {"pp": 2, "accumulation": 4, "batch": 24, "pp_schedule": schedule, **more})
            for schedule, more in (
                ("zbv", {"tp": 2}), ("1f1b", {"cp": 2, "cp_schedule": "ring"}), ("zbv", {"recompute": "selective"}),
                ("1f1b", {"recompute": "full"}), ("zbv", {"dp": 2, "stage": 2}), ("1f1b", {"dp": 2, "stage": 0}),
                ("zbv", {"recompute": "full", "offload_activations": True}),
            )
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "more"), LAYOUTS, ids=_named)
def test_ranks_hold_what_the_formula_counts(config: GPTConfig, more: dict[str, Any]) -> None:
    options = dataclasses.replace(options_of(**more), kernels="torch")
    formula = _formula(options, config)
    found = pool(ranks_of(options)).run(_held, options, config)
    size, zero, tp = ranks_of(options) // options.parallel.pp, options.zero.stage, options.parallel.tp
    for index, held in enumerate(Bytes(*each) for each in found):
        rank = index // size
        if index % tp:
            continue  # the first tensor-parallel rank is counted, which holds the most
        counted = formula[rank]
        assert (counted.parameters, counted.optimizer) == (held.parameters, held.optimizer)
        if zero < 2:
            assert (counted.gradients, counted.buffers) == (held.gradients, held.slots)
        elif layout_of(options).micro_batches > 1 and options.zero.accumulate == "whole":
            elements = held.parameters // getattr(torch, options.train.dtype).itemsize
            whole = elements * program_of(options, 1).gradient_bytes
            assert counted.gradients - held.gradients == whole, "several micro-batches accumulate"
        else:
            unsent = counted.gradients - held.gradients
            assert 0 < unsent <= held.parameters, "one bucket of gradients is not sent yet"
        if zero == 2 and options.parallel.pp == 1 and layout_of(options).micro_batches > 1:
            continue  # the activations are the tensors of both micro-batches, one after the other
        if not (config.dropout and options.train.recompute == "none"):
            assert counted.activations == held.activations
        else:
            assert counted.activations == pytest.approx(held.activations, rel=0.02)


@pytest.mark.parametrize(
    ("recompute", "dropout", "dtype", "autocast"),
    exhaustive(
        ("none", 0.2, "bfloat16", "none"), ("none", 0.0, "float32", "bfloat16"),
        ("selective", 0.0, "float32", "bfloat16"), ("full", 0.2, "float32", "none"),
    ),
)  # fmt: skip
def test_kernels_of_triton_save_what_the_formula_counts(
    recompute: Recompute, dropout: float, dtype: str, autocast: str
) -> None:
    config = dataclasses.replace(WIDE, dropout=dropout)
    options = options_of(recompute=recompute, dtype=dtype, autocast=autocast, batch=3)
    [found] = pool(1).run(_saved_by_triton, options, config)
    assert _formula(options, config)[0].activations == found


def _saved_by_triton(options: TrainCommand, config: GPTConfig) -> int:
    with use(kernels="triton"):
        return Bytes(*_held(options, config)).activations


class BytesAtStage3(NamedTuple):
    """The most that a rank has held at the same time after an action of a pipeline."""

    shards: int
    moments: int
    gathered: int  # parameters
    whole: int  # gradients
    sums: int  # of gradients
    sent: int  # a unit


def _held_at_stage_3(options: TrainCommand) -> tuple[int, ...]:
    """Train a step, and return the fields of `BytesAtStage3`."""
    trainer, windows = new_trainer(options, DEEP)
    engine, runner = trainer.engine, trainer.runner
    assert isinstance(engine, FullySharded) and runner is not None
    reduce = Counted.__call__
    gathered, whole, sent = [0], [0], [0]

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, which begins after an action has ended."""

        def counted(*arguments: Any) -> Any:
            present = [x for unit in engine._units for x in unit.gathered.values()]
            gathered.append(sum(local_tensor(x).untyped_storage().nbytes() for x in present))
            gradients = [x for unit in engine._units for x in whole_gradients(unit.module).values()]
            gradients += [x.grad for x in present]
            whole.append(sum(local_tensor(x).nbytes for x in gradients if x is not None))
            return call(*arguments)

        return counted

    def sending(self: Counted, **arguments: Any) -> Any:
        if self._operation == "reduce_scatter":
            sent.append(arguments["input_tensor"].nbytes)
        return reduce(self, **arguments)

    for name in ("_take", "_finish"):
        setattr(runner, name, counting(getattr(runner, name)))
    with mock.patch.object(Counted, "__call__", sending):
        trainer.train_step(windows, lambda: False)
    shards = sum(local_tensor(member.sharded).nbytes for member in engine.members)
    sums = sum(member.gradient.nbytes for member in engine.members)
    moments = sum(piece.tensor.nbytes for piece in trainer.optimizer.rectangles() if piece.kind != "model")
    return shards, moments, max(gathered), max(whole), sums, max(sent)


@pytest.mark.parametrize(
    ("schedule", "dp", "tp", "cp"), [("1f1b", 2, 1, 1), *exhaustive(("zbv", 1, 1, 2), ("zbv", 2, 2, 1))]
)
def test_ranks_at_stage_3_hold_what_the_formula_counts(schedule: PipelineSchedule, dp: int, tp: int, cp: int) -> None:
    optim = {"name": "muon" if dp == 2 else "adamw"}
    layout = {"stage": 3, "pp": 2, "pp_schedule": schedule, "dp": dp, "tp": tp, "cp": cp}
    options = options_of(accumulation=4, batch=24, optim=optim, **layout)
    found = pool(ranks_of(options)).run(_held_at_stage_3, options)
    at_0 = _formula(dataclasses.replace(options, zero=dataclasses.replace(options.zero, stage=0)), DEEP)
    for rank, counted in _formula(options, DEEP).items():
        held = BytesAtStage3(*found[rank * dp * tp * cp])
        assert (counted.parameters, counted.optimizer) == (held.shards, held.moments)
        assert (held.moments == 2 * held.shards) == (dp == 1), "Muon has one moment of its matrices"
        assert counted.buffers - at_0[rank].buffers == held.gathered + held.sent
        arriving = counted.gradients - held.whole - held.sums
        assert 0 < arriving < held.sent + held.gathered, "gradients of a unit arrive beside their sums"


class _Alive(TorchDispatchMode):
    """Counts the most bytes of the tensors that are made in the block and exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._others = 0, set[int]()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((arguments, keywords)) if isinstance(x, Tensor)}
        self._others |= given - self._made.keys()
        result = function(*arguments, **(keywords or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)):
            if storage._cdata not in self._others:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return result


def _updated(options: TrainCommand, name: str) -> tuple[StepResult, int, list[torch.Size]]:
    """Train a step by an optimizer. Return its result, the most bytes of its update, and what it orthogonalises."""
    options = dataclasses.replace(options, optim=dataclasses.replace(options.optim, name=name))  # type: ignore[arg-type]
    trainer, windows = new_trainer(options, DEEP)
    update, alive, shapes = trainer.optimizer._update_matrices, _Alive(), list[torch.Size]()

    def counted(x: Tensor, options: MuonOptions) -> Tensor:
        shapes.extend([x.shape[1:]] * len(x))
        return orthogonalised(x, options)

    def watched(*arguments: Any) -> None:
        with alive:
            update(*arguments)

    trainer.optimizer._update_matrices = watched  # type: ignore[method-assign]
    with mock.patch.object(muon, "orthogonalised", counted):
        result = trainer.train_step(windows, lambda: False)
    return result, alive.most, shapes


def _with_and_without_muon(options: TrainCommand) -> Any:
    return [_updated(options, name) for name in ("muon", "adamw")]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "stage": 3, "dtype": "float32"},
        *exhaustive(
            {"dp": 2, "tp": 2, "stage": 0}, {"cp": 2, "tp": 2, "stage": 3}, {"dp": 3, "stage": 1},
            {"dp": 4, "stage": 3, "replicas": 2, "dtype": "float32"},
        ),
    ],
)  # fmt: skip
def test_ranks_send_and_hold_for_muon_what_the_formula_counts(layout: dict[str, Any]) -> None:
    options = dataclasses.replace(options_of(**layout, optim={"name": "muon"}), kernels="torch")
    found = pool(ranks_of(options)).run(_with_and_without_muon, options)
    sizes, program, planned = (
        sizes_of("toy", DEEP, options.train.dtype),
        program_of(options, DEEP.n_head),
        layout_of(options),
    )
    counts = [(ours[0].sent - adamw[0].sent, ours[0].received - adamw[0].received) for ours, adamw in found]
    sent, received = map(sum, zip(*counts, strict=True))
    expected = len(found) * sum(sent_bytes(sizes, DEEP.n_layer, planned, program))
    cuts_buckets = options.zero.stage in (1, 2)  # into unequal parts of matrices
    assert sent == received == pytest.approx(expected, rel=0.04 if cuts_buckets else 1e-12)
    assert max(ours[1] for ours, _ in found) == pytest.approx(
        update_bytes(sizes, DEEP.n_layer, planned, program), rel=0.02
    )
    most = max((ours[2] for ours, _ in found), key=lambda shapes: sum(cost(*shape) for shape in shapes))
    assert sorted(map(sorted, most)) == sorted(map(sorted, owned(sizes, DEEP.n_layer, len(found))))


def _saved(model: Any) -> int:
    """Return the bytes that autograd saves of a model of transformers, for two sequences of 20 tokens."""
    ids = torch.arange(40).view(2, -1) % model.config.vocab_size
    counted = SavedBytes([local_tensor(parameter) for parameter in model.parameters()])
    with counted.hooks:
        model(ids, labels=ids, use_cache=False)
    return counted.total


def _saved_by_llama(sizes: ModelSizes) -> int:
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.tokens, tie_word_embeddings=sizes.tied,
    )  # fmt: skip
    with use(kernels="triton"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return _saved(tpfuse.parallelize(model, mesh_of(1, 1)["tp"]))


def test_the_formula_counts_a_llama() -> None:
    sizes = ModelSizes("a", 1, 96, 6, 3, 16, 256, True, 256, 20, tied=False, biases=False, norm_bias=False)
    layout = RankLayout(1, 1, 1, 1, "1f1b", 1, 0, "none", 2, 2)
    [expected] = pool(1).run(_saved_by_llama, sizes)
    assert rank_memory(sizes, layout, TPFUSE).activations == pytest.approx(expected, rel=0.01)


def _saved_by(family: str, tp: int) -> int:
    with use(kernels="triton"):
        model = decoder(family, torch.bfloat16)
        return _saved(model if tp == 1 else tpfuse.parallelize(model, mesh_of(1, tp)["tp"]))


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("llama", 1),
        ("gpt2", 2),
        *exhaustive(
            ("gpt2", 1), ("llama", 2), ("qwen3", 1), ("qwen3", 2), ("gemma", 2), ("gemma2", 1), ("stablelm_norms", 1),
            ("olmo2", 2), ("apertus", 2),
        ),
    ],
)  # fmt: skip
def test_models_of_transformers_are_counted_without_memory(family: str, tp: int) -> None:
    """In such small models the last norm, which is counted as tpfuse's, and copies that some families avoid are 6 %."""
    config = DecoderConfig.of(decoder(family).config.to_dict(), n_positions=20)
    sizes, layout = sizes_of(family, config, "bfloat16"), RankLayout(tp, 1, 1, 1, "1f1b", 1, 0, "none", 2, 2)
    found = max(pool(tp).run(_saved_by, family, tp))
    assert rank_memory(sizes, layout, TPFUSE).activations == pytest.approx(found, rel=0.06)


def test_models_that_need_values_are_neither_counted_nor_planned() -> None:
    config = DecoderConfig.of(decoder("falcon").config.to_dict(), n_positions=20)
    sizes = dataclasses.replace(sizes_of("falcon", config, "bfloat16"), other_matrices=())
    assert sizes.kept == (0, 0) and uncounted(sizes, TPFUSE) == "models whose forward pass depends on values"
    with pytest.raises(UserError, match="falcon: its forward pass depends on values: tpfuse plan does not know"):
        check_timed_model(sizes)
