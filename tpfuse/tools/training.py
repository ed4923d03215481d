"""A comparison of two training steps of the tiny GPT with each implementation of tensor parallelism.

From one seed and the same batches, all implementations and one rank alone compute the same numbers but for rounding.
The distance from float64 shows whether a difference is rounding: the weights may be twice as far from float64 as those
of one rank with torch's kernels in float32, plus their own rounding. The distance is the 2-norm over all weights except
the biases of the keys. Softmax makes the gradients of these biases 0 but for rounding, and AdamW then makes their
updates as large as any others.

Options are imported where they are used, because they need tyro, and comparisons of kernels must run without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.choices import Implementation, Kernels
from tpfuse.comm.layout import Slices, local_slices, local_tensor
from tpfuse.comm.mesh import build_mesh
from tpfuse.layers.explain import plans
from tpfuse.models.gpt import GPTConfig
from tpfuse.switches import use
from tpfuse.testing.ranks import GpuRankPool, RankError, RankPool

if TYPE_CHECKING:
    from tpfuse.train.options import TrainCommand

STEPS, SEQUENCES, RANKS = 2, 1, 2
SIZES = GPTConfig(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4)  # the sizes in models/tiny.toml
_ALONE = "one rank, torch"
_Part = tuple[torch.Size, Slices, Tensor]  # the shape of a weight, what a rank has of it, and that
_Trained = tuple[list[float], dict[str, _Part], float, str]


@dataclass(frozen=True)
class TrainingRun:
    """The result of training with one implementation.

    difference: the largest difference of a weight from the weight of one rank in float64. distance: the 2-norm of the
    differences of all weights. allowed: the largest `distance` that passes. seconds: the duration of a step. failure:
    the exception, on one line.
    """

    name: str
    losses: tuple[float, ...] = ()
    difference: float = 0.0
    distance: float = 0.0
    allowed: float = 0.0
    seconds: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the weights are within the allowed distance."""
        return not self.failure and self.distance <= self.allowed


def _failed(name: str, error: RankError) -> TrainingRun:
    return TrainingRun(name, failure=str(error).strip().splitlines()[-1][:300])


def _options(dtype: str) -> "TrainCommand":
    from tpfuse.train.options import ParallelOptions, TrainCommand, TrainOptions

    train = TrainOptions(steps=STEPS, batch=SEQUENCES, seed=1)
    return TrainCommand(train=replace(train, dtype=dtype), parallel=ParallelOptions(tp=RANKS, dp=1))  # type: ignore[arg-type]


def _text() -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return a sequence of tokens that a model can learn."""
    count = np.arange(2000)
    return ((count * 7 + count // 5) % SIZES.vocab_size).astype(np.uint16)


def _train(name: Implementation, kind: Kernels, dtype: str, tp: int, sizes: GPTConfig) -> _Trained:
    """Train, and return the losses, this rank's parts of the weights, the seconds of a step and what layers really use.

    No rank gathers weights: torch's functional collectives crash in a Gloo group of GPU ranks (seen with torch 2.11).
    """
    from tpfuse.train.batches import Windows
    from tpfuse.train.trainer import Trainer

    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if _gpu() else torch.device("cpu")
    if _gpu():
        torch.cuda.set_device(device)
    with use(implementation=name, kernels=kind):
        mesh = build_mesh(device.type, dp=1, tp=tp) if tp > 1 else None
        trainer = Trainer(_options(dtype), sizes, mesh, device)
        windows = Windows(_text() % sizes.vocab_size, sizes.n_positions, 1, "train", SEQUENCES)
        started = perf_counter()
        losses = [trainer.train_step(windows, lambda: False).loss for _ in range(STEPS)]
        seconds = (perf_counter() - started) / STEPS
        taken = ", ".join(sorted({plan.implementation for plan in plans(trainer.model)}))
        parts = {
            key: (parameter.shape, local_slices(parameter), local_tensor(parameter).detach().double().cpu())
            for key, parameter in trainer.model.named_parameters()
        }
    return losses, parts, seconds, taken


def _whole(results: Sequence[_Trained]) -> dict[str, Tensor]:
    """Return the weights, whole, from the parts of all ranks."""
    weights = {key: torch.empty(shape, dtype=torch.float64) for key, (shape, _, _) in results[0][1].items()}
    for _, parts, _, _ in results:
        for key, (_, slices, part) in parts.items():
            weights[key][tuple(slice(*bounds) for bounds in slices)] = part
    return weights


def _gpu() -> bool:
    return torch.cuda.is_available()


def _distances(weights: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest difference and the 2-norm of all differences, without the biases of the keys."""
    differences = {name: weights[name] - truth[name] for name in truth}
    for name, difference in differences.items():
        if name.endswith("c_attn.bias"):
            difference.view(3, -1)[1] = 0.0  # the rows are the biases of q, k and v
    every = torch.cat([difference.flatten() for difference in differences.values()])
    return every.abs().max().item(), every.norm().item()


def train_each(sizes: GPTConfig = SIZES) -> list[TrainingRun]:
    """Train one rank with torch's kernels, then RANKS ranks with each of the implementations but auto, at these sizes.

    The ranks run on the GPUs of this machine (several ranks may share one), or on its CPU if it has none; this process
    must then interpret kernels. If the one rank fails, there is nothing to compare the others with, and the result is
    its failed run alone.
    """
    kind = GpuRankPool if _gpu() else RankPool
    alone, ranks = kind(1, timeout=300.0), kind(RANKS, timeout=300.0)
    try:
        try:
            truth = _whole(alone.run(_train, "auto", "torch", "float64", 1, sizes))
            plain: list[_Trained] = alone.run(_train, "auto", "torch", "float32", 1, sizes)
        except RankError as error:
            return [_failed(_ALONE, error)]
        largest, distance = _distances(_whole(plain), truth)
        scale = torch.cat([weight.flatten() for weight in truth.values()]).norm().item()
        allowed = 2 * distance + torch.finfo(torch.float32).eps * scale
        runs = [TrainingRun(_ALONE, tuple(plain[0][0]), largest, distance, allowed, plain[0][2])]
        for name in get_args(Implementation)[1:]:
            try:
                trained: list[_Trained] = ranks.run(_train, name, "auto", "float32", RANKS, sizes)
            except RankError as error:
                runs.append(_failed(name, error))
                continue
            losses, _, seconds, taken = trained[0]
            shown = name if taken == name else f"{name} (is {taken} here)"
            runs.append(TrainingRun(shown, tuple(losses), *_distances(_whole(trained), truth), allowed, seconds))
        return runs
    finally:
        alone.close()
        ranks.close()
