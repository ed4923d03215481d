"""Every layout trains from one seed to the same losses and weights.

The same holds for torch's kernels and Triton's, and for all implementations of communication, in tensor-parallel
products and in attention over context-parallel ranks.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tpfuse.backend import Implementation, Kernels, implementation, kernels
from tpfuse.comm.mesh import build_mesh
from tpfuse.models.gpt import GPTConfig
from tpfuse.parallel.context import Balance, Schedule
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.train.batches import Windows
from tpfuse.train.options import OptimOptions, ParallelOptions, TrainCommand, TrainOptions, ZeroOptions
from tpfuse.train.setup import ulysses_ranks
from tpfuse.train.trainer import Trainer

# No tp divides the vocabulary of 61 tokens. 36 sequences suit dp 1, 2, 3 with 1, 2, 3 micro-batches. With 7 positions,
# the tokens of a micro-batch are not always a multiple of tp, and no cp divides a sequence.
CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=16, n_layer=2, n_head=4, dropout=0.2)
STEPS, BATCH = 20, 36


def options_for(
    tp: int, dp: int, accumulation: int, parallel: ParallelOptions | None = None, **train: Any
) -> TrainCommand:
    return TrainCommand(
        train=TrainOptions(
            steps=STEPS, batch=BATCH, micro_batch=BATCH // dp // accumulation, seed=5, **{"dtype": "float64", **train}
        ),
        optim=OptimOptions(lr=1e-2, warmup=4, clip=0.5),
        parallel=replace(parallel or ParallelOptions(), tp=tp, dp=dp),
    )


def trainer_for(options: TrainCommand, config: GPTConfig = CONFIG) -> tuple[Trainer, Windows]:
    """Returns a trainer in the group of all running ranks, and batches of a sequence that can be learned."""
    mesh = None
    if dist.get_world_size() > 1:
        parallel = options.parallel
        ulysses = ulysses_ranks(parallel, config.n_head // parallel.tp)
        mesh = build_mesh("cpu", dp=parallel.dp, cp=parallel.cp, tp=parallel.tp, ulysses=ulysses)
    count = np.arange(1000)
    tokens = ((count * 7 + count // 5) % config.vocab_size).astype(np.uint16)
    windows = Windows(tokens, config.n_positions, options.train.seed, "train", options.train.batch)
    return Trainer(options, config, mesh, torch.device("cpu")), windows


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }


def train(
    tp: int, dp: int, accumulation: int, name: Implementation = "auto", parallel: ParallelOptions | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    trainer, windows = trainer_for(options_for(tp, dp, accumulation, parallel))
    with implementation(name):
        results = [trainer.train_step(windows, lambda: False) for _ in range(STEPS)]
    return [r.loss for r in results], [r.grad_norm for r in results], whole_weights(trainer)


@functools.cache
def on_one_rank() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    result: tuple[list[float], list[float], dict[str, torch.Tensor]] = pool(1).run(train, 1, 1, 1)[0]
    return result


@pytest.mark.parametrize(
    ("tp", "dp", "accumulation"),
    [
        (2, 1, 3),
        (1, 3, 2),
        (2, 2, 1),
        *exhaustive((1, 1, 2), (1, 1, 3), (2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 1, 3)),
        *exhaustive((1, 2, 1), (1, 2, 3), (2, 2, 2), (2, 2, 3), (1, 3, 1), (1, 3, 3)),
    ],
)
def test_every_layout_gives_the_same_losses_and_weights(tp: int, dp: int, accumulation: int) -> None:
    check_layout(tp, dp, accumulation, "auto")


@pytest.mark.parametrize(("tp", "name"), [(2, "collective"), *exhaustive((4, "direct"), (4, "collective"))])
def test_every_implementation_gives_the_same_losses_and_weights(tp: int, name: Implementation) -> None:
    check_layout(tp, 1, 2, name)


@pytest.mark.parametrize(
    ("tp", "dp", "cp", "accumulation"), [(2, 1, 2, 3), *exhaustive((1, 1, 2, 1), (1, 1, 4, 3), (1, 2, 2, 2))]
)
def test_every_context_parallel_layout_gives_the_same_losses_and_weights(
    tp: int, dp: int, cp: int, accumulation: int
) -> None:
    check_layout(tp, dp, accumulation, "auto", ParallelOptions(cp=cp))


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("ring", "direct"),
        ("ulysses_ring", "collective"),
        *exhaustive(("ring", "collective"), ("all_gather", "direct"), ("all_gather", "collective")),
        *exhaustive(("ulysses", "direct"), ("ulysses", "collective"), ("ulysses_ring", "direct")),
    ],
)
def test_every_schedule_gives_the_same_losses_and_weights(schedule: Schedule, name: Implementation) -> None:
    check_layout(1, 1, 2, name, ParallelOptions(cp=4, cp_schedule=schedule))


@pytest.mark.parametrize(
    ("schedule", "balance"), exhaustive(("ring", "contiguous"), ("ulysses", "striped"), ("ulysses_ring", "striped"))
)
def test_every_balance_gives_the_same_losses_and_weights(schedule: Schedule, balance: Balance) -> None:
    check_layout(1, 1, 2, "auto", ParallelOptions(cp=4, cp_schedule=schedule, cp_balance=balance))


def check_layout(
    tp: int, dp: int, accumulation: int, name: Implementation, parallel: ParallelOptions | None = None
) -> None:
    losses, norms, weights = on_one_rank()
    assert losses[-1] < losses[0] - 0.1
    ranks = pool(tp * dp * (1 if parallel is None else parallel.cp))
    for other_losses, other_norms, other_weights in ranks.run(train, tp, dp, accumulation, name, parallel):
        np.testing.assert_allclose(other_losses, losses, rtol=1e-9)
        np.testing.assert_allclose(other_norms, norms, rtol=1e-9)
        for name, weight in weights.items():
            error = (other_weights[name] - weight).abs().max() / weight.abs().max()
            assert error < 1e-9, (name, error)


def clipped_norms(tp: int, clip: float) -> list[float]:
    options = options_for(tp, 1, 1)
    trainer, windows = trainer_for(replace(options, optim=replace(options.optim, clip=clip)))
    return [trainer.train_step(windows, lambda: False).grad_norm for _ in range(3)]


def test_clipping_changes_training_and_counts_every_parameter_once() -> None:
    clipped, free = pool(1).run(clipped_norms, 1, 1e-3)[0], pool(1).run(clipped_norms, 1, 0.0)[0]
    assert clipped[0] == free[0]
    for sharded in pool(4).run(clipped_norms, 4, 0.0):
        np.testing.assert_allclose(sharded, free, rtol=1e-9)


def trained_twice(tp: int, dtype: str, name: Implementation) -> tuple[bool, float, float]:
    runs = []
    for _ in range(2):
        trainer, windows = trainer_for(options_for(tp, 1, 2, dtype=dtype))
        with implementation(name):
            losses = [trainer.train_step(windows, lambda: False).loss for _ in range(STEPS)]
        runs.append((losses, whole_weights(trainer)))
    same = runs[0][0] == runs[1][0] and all(torch.equal(runs[0][1][k], runs[1][1][k]) for k in runs[0][1])
    return same, runs[0][0][0], runs[0][0][-1]


@pytest.mark.parametrize(
    ("tp", "dtype", "name"),
    [
        (2, "bfloat16", "auto"),
        *exhaustive((2, "float32", "auto"), (2, "float16", "auto")),
        *exhaustive((4, "float32", "direct"), (4, "float32", "collective")),
    ],
)
def test_runs_are_bitwise_reproducible_and_learn_in_every_dtype(tp: int, dtype: str, name: Implementation) -> None:
    for same, first, last in pool(tp).run(trained_twice, tp, dtype, name):
        assert same
        assert last < first - 0.1


class ProductDtypes(TorchDispatchMode):
    """Records the dtypes of the first operands of all matrix products, including those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.__name__ for name in ("mm.", "linear.", "scaled_dot_product")):
            self.found |= {x.dtype for x in args[:2] if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def trained_in(tp: int, stage: int, train: dict[str, str]) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Returns losses, the dtypes of products in steps and in an evaluation, and the dtypes in a checkpoint."""
    options = options_for(tp, dist.get_world_size() // tp, 1, **train)
    trainer, windows = trainer_for(replace(options, zero=ZeroOptions(stage=stage)))
    with ProductDtypes() as products:
        losses = [trainer.train_step(windows, lambda: False).loss for _ in range(STEPS)]
        losses.append(trainer.evaluate(windows, 1))
    return losses, products.found, {shard.tensor.dtype for shards in trainer.shards().values() for shard in shards}


@pytest.mark.parametrize(
    ("world", "tp", "stage", "half"),
    [
        (1, 1, 0, "bfloat16"),
        (2, 2, 0, "bfloat16"),
        *exhaustive((1, 1, 0, "float16"), (2, 1, 2, "bfloat16"), (2, 1, 3, "bfloat16"), (4, 2, 3, "float16")),
    ],
)
def test_autocast_computes_products_in_16_bits_and_keeps_the_rest(world: int, tp: int, stage: int, half: str) -> None:
    """The error of a loss of about 4 nats in bfloat16 is at most its rounding, 2^-8 of it."""
    plain, in_plain, _ = pool(world).run(trained_in, tp, stage, {"dtype": "float32"})[0]
    losses, in_products, kept = pool(world).run(trained_in, tp, stage, {"dtype": "float32", "autocast": half})[0]
    assert in_plain == {torch.float32} and in_products == {getattr(torch, half)}
    assert kept == {torch.float32}, "checkpoints are those of float32"
    errors = np.abs(np.array(losses) - plain)
    assert 0 < errors.max() < 2**-8 * max(plain)
    assert losses[-1] < losses[0] - 0.1


def trained_by(
    name: Kernels,
    tp: int,
    dtype: str,
    dropout: float,
    layers: int,
    steps: int = 10,
    products: Implementation = "auto",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the losses and weights after some steps of 63 tokens, which tp does not divide."""
    config = GPTConfig(vocab_size=61, n_positions=7, n_embd=64, n_layer=layers, n_head=4, dropout=dropout)
    options = options_for(tp, 1, 1, dtype=dtype)
    small = replace(options, train=replace(options.train, batch=9, micro_batch=9))
    trainer, windows = trainer_for(small, config)
    with kernels(name), implementation(products):
        losses = [trainer.train_step(windows, lambda: False).loss for _ in range(steps)]
    return torch.tensor(losses, dtype=torch.float64), whole_weights(trainer)


def distance(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Returns the distance between all weights except the biases of the keys.

    Softmax makes the gradients of these biases 0, and AdamW scales the rounding errors that remain to the size of any
    other update, so that these biases show nothing but rounding errors.
    """
    differences = {name: found[name].double() - truth[name] for name in truth}
    for name, difference in differences.items():
        if name.endswith("c_attn.bias"):
            difference[1] = 0.0  # of q, k, v
    return torch.cat([difference.flatten() for difference in differences.values()]).norm().item()


@pytest.mark.parametrize(
    ("tp", "dtype", "dropout", "layers", "steps"),
    [
        (2, "float32", 0.0, 1, 2),
        *exhaustive((1, "float32", 0.2, 1, 5), (2, "float32", 0.0, 2, 4), (1, "bfloat16", 0.0, 1, 5)),
    ],
)
def test_triton_kernels_train_as_torchs_do(tp: int, dtype: str, dropout: float, layers: int, steps: int) -> None:
    found = pool(tp).run(trained_by, "triton", tp, dtype, dropout, layers, steps)[0]
    check_noise(found, dtype, dropout, layers, steps)


@pytest.mark.parametrize(("tp", "steps", "layers"), exhaustive((2, 3, 2), (4, 3, 1)))
def test_fused_products_train_as_torchs_do(tp: int, steps: int, layers: int) -> None:
    """Here only these kernels are interpreted, and torch's operators compute the rest."""
    found = pool(tp).run(trained_by, "torch", tp, "float32", 0.0, layers, steps, "fused")
    check_noise(found[0], "float32", 0.0, layers, steps)


def check_noise(
    found: tuple[torch.Tensor, dict[str, torch.Tensor]], dtype: str, dropout: float, layers: int, steps: int
) -> None:
    """Raises AssertionError if training is more than twice as far from float64's as torch's in this dtype."""
    truth, weights = pool(1).run(trained_by, "torch", 1, "float64", dropout, layers, steps)[0]
    plain, plain_weights = pool(1).run(trained_by, "torch", 1, dtype, dropout, layers, steps)[0]
    losses, own_weights = found
    assert truth[-1] < truth[0] - 0.01 * steps
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert (losses - truth).abs().max() <= 2 * (plain - truth).abs().max() + eps * truth.max()
    assert distance(own_weights, weights) <= 2 * distance(plain_weights, weights)
