"""Every layout, pipeline, implementation and stage of ZeRO trains from one seed to the same losses and weights.

The same holds for torch's kernels and Triton's, and for products in 16 bits up to their rounding.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import exhaustive
from tests.support.training import (
    CONFIG,
    Result,
    check_same,
    new_trainer,
    options_of,
    ranks_of,
    train,
    trained,
    whole_weights,
)
from tpfuse.choices import Implementation, Kernels
from tpfuse.errors import RunError
from tpfuse.models.gpt import GPTConfig
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import Windows
from tpfuse.train.options import TrainCommand
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.reducer import shard_update
from tpfuse.zero.reducer.shard_update import Staging

STEPS = 10


@functools.cache
def on_one_rank(layers: int = CONFIG.n_layer, steps: int = STEPS) -> Result:
    return trained(options_of(), steps, "auto", None, None, replace(CONFIG, n_layer=layers))[0]


FIRST: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2, "accumulation": 3},
    {"cp": 4, "accumulation": 2, "cp_schedule": "ulysses_ring", "name": "collective"},
    {"dp": 2, "stage": 2, "offload": "a folder", "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "tp": 2, "accumulation": 6},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "dp": 2, "stage": 3, "accumulation": 6},
    {"pp": 3, "pp_schedule": "gpipe", "accumulation": 4, "recompute": "selective", "offload": "host"},
]
MORE: list[dict[str, Any]] = [
    *({"tp": tp, "accumulation": 2, "name": name} for tp, name in ((2, "collective"), (4, "direct"))),
    {"dp": 3, "accumulation": 2},
    *(
        {"cp": 4, "accumulation": 2, "cp_schedule": schedule, "cp_balance": balance, "name": name}
        for schedule, balance, name in (
            ("ring", "zigzag", "direct"),
            ("ring", "contiguous", "collective"),
            ("all_gather", "striped", "collective"),
            ("ulysses", "striped", "direct"),
        )
    ),
    {"offload": "a folder", "accumulation": 3},
    {"dp": 3, "stage": 1, "offload": "host", "accumulation": 3},
    {"cp": 2, "stage": 2, "accumulation": 3},
    {"cp": 3, "stage": 3},
    {"dp": 2, "tp": 2, "stage": 3, "accumulation": 3},
    {"dp": 4, "stage": 3, "replicas": 2, "accumulation": 3},
]
PIPELINES: list[dict[str, Any]] = [
    {"pp": 2, "pp_schedule": "zero_bubble", "cp": 2, "stage": 1, "accumulation": 6, "recompute": "full"},
    *({"pp": pp, "accumulation": count} for pp, count in ((2, 1), (4, 9))),
    *(
        {"pp": pp, "pp_schedule": schedule, "pp_stages_per_rank": each, "layers": pp * each, "accumulation": 12}
        for pp, schedule, each in (
            (2, "interleaved_1f1b", 3),
            (2, "zero_bubble", 2),
            (4, "zbv", 2),
        )
    ),
    {"pp": 2, "pp_layers": "1,3", "dp": 2, "stage": 2, "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "pp_layers": "2,1,3,1", "layers": 7, "accumulation": 6},
    *(
        {"pp": 2, "pp_schedule": schedule, "accumulation": 6, **beside}
        for schedule, beside in (
            ("gpipe", {"tp": 2, "cp": 2}),
            ("1f1b", {"dp": 2, "tp": 2, "stage": 3}),
            ("interleaved_1f1b", {"dp": 2, "cp": 2, "stage": 2}),
            ("zero_bubble", {"dp": 2, "stage": 1, "recompute": "selective"}),
            ("zbv", {"dp": 2, "stage": 3, "recompute": "full"}),
        )
    ),
    {"pp": 2, "pp_schedule": "zbv", "dp": 2, "stage": 3, "replicas": 2, "offload": "host", "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "dp": 2, "stage": 2, "offload": "a folder", "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "tp": 2, "accumulation": 6, "name": "collective"},
]


@pytest.mark.parametrize("layout", [*FIRST, *exhaustive(*MORE, *PIPELINES)], ids=str)
def test_every_layout_gives_the_same_losses_and_weights(tmp_path: Path, layout: dict[str, Any]) -> None:
    layout, piped = dict(layout), "pp" in layout
    name: Implementation = layout.pop("name", "auto")
    layers, steps = layout.pop("layers", 4 if piped else CONFIG.n_layer), 4 if piped else STEPS
    if layout.get("offload") == "a folder":
        layout["offload"] = str(tmp_path)
    expected = on_one_rank(layers, steps)
    assert piped or expected[0][-1] < expected[0][0] - 0.1
    for found in trained(options_of(**layout), steps, name, None, None, replace(CONFIG, n_layer=layers)):
        check_same(found, expected, 1e-9 if piped else 1e-10)


@pytest.mark.parametrize(
    ("dtype", "others"),
    [
        ("float32", [{"stage": 1, "offload": "a folder"}, {"stage": 3}]),
        *exhaustive(("bfloat16", [{"stage": 1}, {"stage": 2, "offload": "host"}]), ("float32", [{"stage": 2}])),
    ],
)
def test_half_moments_are_equal_to_the_bit_at_every_stage(tmp_path: Path, dtype: str, others: list[Any]) -> None:
    """They are rounded by what an element has, not by its place; a run resumes in another stage with these bits."""

    def options(**more: Any) -> TrainCommand:
        more |= {"offload": str(tmp_path)} if more.get("offload") == "a folder" else {}
        return options_of(clip=0.0, dtype=dtype, dp=2, state_dtype="bfloat16", **more)

    [expected, _] = trained(options(), 4, "direct")
    for more in others:
        [found, _] = trained(options(**more), 4, "direct")
        _check_equal((found[0], [], found[2]), (expected[0], [], expected[2]))
    trained(options(), 2, "direct", tmp_path / "run")
    [resumed, _] = trained(options(**others[-1]), 2, "direct", None, tmp_path / "run")
    _check_equal((resumed[0], [], resumed[2]), (expected[0][2:], [], expected[2]))


@pytest.mark.parametrize(
    "layout",
    [
        {"dtype": "bfloat16", "dp": 2, "accumulation": 2},
        *exhaustive(
            {"dtype": "float64", "dp": 2, "tp": 2},
            {"dtype": "float32", "dp": 4, "replicas": 2, "state_dtype": "bfloat16"},
            {"dtype": "float32", "dp": 3, "state_dtype": "bfloat16", "optim": {"name": "muon"}},
            {"dtype": "float32", "dp": 2, "pp": 2, "pp_schedule": "zero_bubble", "accumulation": 3},
        ),
    ],
    ids=str,
)
def test_offload_at_stage_3_changes_no_bit(tmp_path: Path, layout: dict[str, Any]) -> None:
    """The same holds where a run resumes with its shards in another place."""
    expected = trained(options_of(stage=3, **layout), 3)
    folder = options_of(stage=3, **layout, offload=str(tmp_path))
    for options in (options_of(stage=3, **layout, offload="host"), folder):
        for found, wanted in zip(trained(options, 3), expected, strict=True):
            _check_equal(found, wanted)
    trained(folder, 2, "auto", tmp_path / "run")
    [found, *_] = trained(options_of(stage=3, **layout), 1, "auto", None, tmp_path / "run")
    _check_equal(found, (expected[0][0][2:], expected[0][1][2:], expected[0][2]))
    if "pp" not in layout:  # from one rank to another layout
        alone = {name: layout[name] for name in layout.keys() & {"dtype", "state_dtype", "optim"}}
        trained(options_of(**alone), 2, "auto", tmp_path / "alone")
        runs = (
            trained(options, 1, "auto", None, tmp_path / "alone")[0]
            for options in (options_of(stage=3, **layout), folder)
        )
        _check_equal(*runs)


def _check_equal(found: Result, expected: Result) -> None:
    """Raise AssertionError unless losses, norms and weights have the same bits."""
    assert found[:2] == expected[:2] and all(torch.equal(x, expected[2][name]) for name, x in found[2].items())


def _staged(staged: bool) -> Result:
    """Train at stage 1 with moments on the host as if parameters were on a device, whose copies are made at once."""
    trainer, windows = new_trainer(options_of(dtype="float32", dp=2, stage=1, offload="host"))
    optimizer = trainer.optimizer
    assert isinstance(optimizer, BucketUpdater) and optimizer._staging is None
    with (
        mock.patch.object(shard_update, "_on_host", lambda _: not staged),
        mock.patch.object(torch.cuda, "current_stream"),
    ):
        optimizer._staging = Staging() if staged else None
        with mock.patch.object(shard_update, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)):
            results = [trainer.train_step(windows, lambda: False) for _ in range(2)]
    return [r.loss for r in results], [r.grad_norm for r in results], whole_weights(trainer)


def test_parameters_on_a_device_pass_through_pinned_memory() -> None:
    for found, expected in zip(pool(2).run(_staged, True), pool(2).run(_staged, False), strict=True):
        _check_equal(found, expected)


class MaskedWindows(Windows):
    """Windows whose sequences have from all to none of their labels, at random, those of one half of a batch few."""

    def sequences(self, number: int, start: int, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids, targets = super().sequences(number, start, stop, device)
        noise = normal(300 + number, self.batch, self.length)[start:stop]
        few = torch.arange(start, stop).unsqueeze(1) < self.batch // 2
        return ids, targets.masked_fill(noise > torch.where(few, -1.5, 1.5), -100)


def masked(layout: dict[str, Any]) -> Result:
    trainer, plain = new_trainer(options_of(**layout))
    windows = MaskedWindows(plain.tokens, plain.length, plain.seed, plain.stream, plain.batch)
    results = [trainer.train_step(windows, lambda: False) for _ in range(4)]
    losses = [*(result.loss for result in results), trainer.evaluate(windows, 2)]
    windows.sequences = lambda *given: (plain.sequences(*given)[0], torch.full_like(plain.sequences(*given)[1], -1))
    for wrong in (lambda: trainer.evaluate(windows, 2), lambda: trainer.train_step(windows, lambda: False)):
        with pytest.raises(RunError, match=r"^(step 4: )?no target of the batch"):
            wrong()
    return losses, [result.grad_norm for result in results], whole_weights(trainer)


@functools.cache
def masked_on_one_rank() -> Result:
    return pool(1).run(masked, {})[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "accumulation": 3, "stage": 1},
        *exhaustive({"tp": 2, "cp": 2}, {"dp": 2, "cp": 2, "stage": 3}, {"dp": 2, "pp": 2, "accumulation": 6}),
    ],
    ids=str,
)
def test_each_label_has_the_same_weight_in_every_layout(layout: dict[str, Any]) -> None:
    """Ranks and micro-batches have different numbers of labels, some few and some none."""
    for found in pool(ranks_of(options_of(**layout))).run(masked, layout):
        check_same(found, masked_on_one_rank())


def test_loss_and_gradient_are_those_of_the_mean_over_the_labels() -> None:
    trainer, plain = new_trainer(options_of(clip=0.5))
    windows = MaskedWindows(plain.tokens, plain.length, plain.seed, plain.stream, plain.batch)
    ids, targets = windows.sequences(0, 0, plain.batch, torch.device("cpu"))
    model, rows = trainer.model, torch.arange(plain.batch)
    logits = model(ids, dropout_at=(trainer.options.train.seed, 0), sequences_B=rows)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    with mock.patch.object(trainer.optimizer, "step") as update:
        result = trainer.train_step(windows, lambda: False)
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.grad_norm == pytest.approx(norm, rel=1e-10) and norm > 0.5
    _, factor, _ = update.call_args.args
    assert trainer.engine.norm() * factor == pytest.approx(0.5 * norm / (norm + 1e-6), rel=1e-10)


@pytest.mark.parametrize(
    ("tp", "dtype", "name"),
    [
        (2, "bfloat16", "auto"),
        *exhaustive((2, "float16", "auto"), (4, "float32", "direct"), (4, "float32", "collective")),
    ],
)
def test_runs_are_bitwise_reproducible_and_learn_in_every_dtype(tp: int, dtype: str, name: Implementation) -> None:
    first, second = (trained(options_of(2, tp=tp, dtype=dtype), STEPS, name) for _ in range(2))
    for (losses, _, weights), (losses_again, _, weights_again) in zip(first, second, strict=True):
        assert losses == losses_again and losses[-1] < losses[0] - 0.1
        assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items())


class ProductDtypes(TorchDispatchMode):
    """Record the dtypes of the first operands of matrix products, but for those of dense attention, always float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = any(name in func.__name__ for name in ("mm.", "linear.", "scaled_dot_product"))
        if named and not func.__name__.startswith("bmm."):
            self.found |= {x.dtype for x in args[:2] if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def trained_in(options: dict[str, Any]) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Return losses, the dtypes of products in steps and in an evaluation, and the dtypes in a checkpoint."""
    trainer, windows = new_trainer(options_of(**options))
    with ProductDtypes() as products:
        losses = [trainer.train_step(windows, lambda: False).loss for _ in range(STEPS)]
        losses.append(trainer.evaluate(windows, 1))
    return losses, products.found, {shard.tensor.dtype for shards in trainer.shards().values() for shard in shards}


@pytest.mark.parametrize(
    ("layout", "half"),
    [
        ({}, "bfloat16"),
        *exhaustive(({"dp": 2, "stage": 2}, "bfloat16"), ({"dp": 2, "tp": 2, "stage": 3}, "float16")),
    ],
    ids=str,
)
def test_autocast_computes_products_in_16_bits_and_keeps_the_rest(layout: dict[str, Any], half: str) -> None:
    """The error of a loss of about 4 nats in bfloat16 is at most its rounding, 2^-8 of it."""
    layout = {**layout, "dtype": "float32"}
    ranks = pool(ranks_of(options_of(**layout)))
    plain, in_plain, _ = ranks.run(trained_in, layout)[0]
    losses, in_products, kept = ranks.run(trained_in, {**layout, "autocast": half})[0]
    assert in_plain == {torch.float32} and in_products == {getattr(torch, half)}
    assert kept == {torch.float32}, "checkpoints are those of float32"
    errors = np.abs(np.array(losses) - plain)
    assert 0 < errors.max() < 2**-8 * max(plain)
    assert losses[-1] < losses[0] - 0.1


def trained_by(name: Kernels, dtype: str, dropout: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the losses and weights after three steps of 63 tokens."""
    config = GPTConfig(vocab_size=61, n_positions=7, n_embd=64, n_layer=1, n_head=4, dropout=dropout)
    with use(kernels=name):
        losses, _, weights = train(options_of(dtype=dtype, batch=9, order="random"), 3, "auto", None, None, config)
    return torch.tensor(losses, dtype=torch.float64), weights


def distance(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Return the distance between all weights except the biases of the keys.

    Softmax makes the gradients of these biases 0, and AdamW scales the rounding errors that remain to the size of any
    other update, so that these biases show nothing but rounding errors.
    """
    differences = {name: found[name].double() - truth[name] for name in truth}
    for name, difference in differences.items():
        if name.endswith("c_attn.bias"):
            difference.view(3, -1)[1] = 0.0  # of q, k, v
    return torch.cat([difference.flatten() for difference in differences.values()]).norm().item()


@pytest.mark.parametrize(("dtype", "dropout"), exhaustive(("float32", 0.2), ("bfloat16", 0.0)))
def test_triton_kernels_train_as_torchs_do(dtype: str, dropout: float) -> None:
    """Training is at most twice as far from float64's as torch's in the same dtype."""
    runs = [("triton", dtype), ("torch", "float64"), ("torch", dtype)]
    (losses, own), (truth, weights), (plain, plain_weights) = (
        pool(1).run(trained_by, *run, dropout)[0] for run in runs
    )
    assert truth[-1] < truth[0] - 0.03
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert (losses - truth).abs().max() <= 2 * (plain - truth).abs().max() + eps * truth.max()
    assert distance(own, weights) <= 2 * distance(plain_weights, weights)
