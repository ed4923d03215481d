"""Train with a context that context-parallel ranks share: a GPT at 32768 tokens on one process and on four, in turn.

    python -m benchmarks.long_context [--tokens 32768] [--cp 4] [--steps 2]

Both take training steps of one sequence, from one seed: losses must be the same. The tensors that a rank keeps from its
forward pass for the backward pass are counted by autograd's own hooks: the bytes of all saved storages, each counted
once, without parameters. With n ranks this must be 1 / n of the single process's bytes, within 10 %. The single process
has two threads and the ranks one each, so on two cores both have the same computing power; seconds are those of the
last step.
"""

import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness import Parser
from tests.support.saved_bytes import SavedBytes
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import build_mesh
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.ranks import RankPool
from tpfuse.train.batches import Windows
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.train.options import ParallelOptions, TrainCommand, TrainOptions
from tpfuse.train.trainer import Trainer

THREADS = 2  # of the single process
TOLERANCE = 0.1  # relative, of the share of the activations that a rank should hold
SAME_LOSS = 1e-5  # nats per token: float32 sums have another order
_LINE = "{:<6}{:<22}{:<24}{:>18}{:>18}"


@dataclass(frozen=True)
class Steps:
    """The result of a run. losses: in nats per token, of each step; saved: bytes for backward; seconds: of the last
    step.
    """

    losses: tuple[float, ...]
    saved: int
    seconds: float


def train(tokens: int, cp: int, steps: int, threads: int) -> tuple[tuple[float, ...], int, float]:
    """Return the fields of `Steps`, on every rank of a pool of `cp`. Saved tensors are counted in the first step."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    config = GPTConfig(vocab_size=256, n_positions=tokens, n_embd=64, n_layer=2, n_head=2)
    options = TrainCommand(train=TrainOptions(steps=100, batch=1, seed=1), parallel=ParallelOptions(dp=1, cp=cp))
    mesh = build_mesh("cpu", dp=1, cp=cp, tp=1) if cp > 1 else None
    trainer = Trainer(options, config, mesh, torch.device("cpu"))
    count = np.arange(2 * tokens)
    windows = Windows(((count * 7 + count // 5) % 256).astype(np.uint16), tokens, 1, "train", 1)
    saved = SavedBytes([local_tensor(parameter) for parameter in trainer.model.parameters()])
    with saved.hooks:
        losses = [trainer.train_step(windows, lambda: False).loss]
    seconds = float("nan")
    for _ in range(steps - 1):
        started = time.perf_counter()
        losses.append(trainer.train_step(windows, lambda: False).loss)
        seconds = time.perf_counter() - started
    return tuple(losses), saved.total, seconds


def on_ranks(tokens: int, cp: int, steps: int) -> list[Steps]:
    """Return the `Steps` of each rank, which run in processes of their own."""
    ranks = RankPool(cp, timeout=1800.0)
    try:
        return [Steps(*found) for found in ranks.run(train, tokens, cp, steps, THREADS if cp == 1 else 1)]
    finally:
        ranks.close()


def verdict(alone: Steps, shared: list[Steps]) -> tuple[bool, str]:
    """Return whether the goal is met, and one line that reports it.

    The losses must be the same, and every rank must hold its share of the activations.
    """
    part = 1 / len(shared)
    held = max(steps.saved for steps in shared) / alone.saved
    apart = max(abs(a - b) for steps in shared for a, b in zip(steps.losses, alone.losses, strict=True))
    goals = {
        f"losses differ by {apart:.1e} (goal: at most {SAME_LOSS:.0e})": apart <= SAME_LOSS,
        f"a rank holds {held:.4f} of the activations, {held / part - 1:+.1%} of 1/{len(shared)}"
        f" (goal: within {TOLERANCE:.0%})": abs(held / part - 1) <= TOLERANCE,
    }
    met = all(goals.values())
    return met, f"goal {'met' if met else 'MISSED'}: {'; '.join(goals)}"


def _row(name: str, threads: str, steps: Steps) -> str:
    losses = "  ".join(f"{loss:.4f}" for loss in steps.losses)
    return _LINE.format(name, threads, losses, f"{steps.saved / 2**20:.2f} MiB", f"{steps.seconds:.1f}")


def main() -> int:
    """Print the table, and return 1 where the goal is missed."""
    parser = Parser(__doc__, keep=False)
    parser.option("--tokens", 32768, "length of the context in tokens")
    parser.option("--cp", 4, "number of ranks that share the context")
    parser.option("--steps", 2, "number of training steps of each run")
    arguments = parser.parse_args()
    tokens, cp, steps = arguments.tokens, arguments.cp, arguments.steps
    if cp < 2 or steps < 1 or tokens < cp:
        parser.error(f"--tokens {tokens} --cp {cp} --steps {steps}: expected 2 ranks, 1 step and a token for each rank")
    print(f"GPT of 2 layers x 64, one sequence of {tokens} tokens, float32")
    print(_LINE.format("", "processes x threads", "loss of each step", "saved by a rank", "seconds a step"), flush=True)
    (alone,) = on_ranks(tokens, 1, steps)
    print(_row("cp 1", f"1 x {THREADS}", alone), flush=True)
    shared = on_ranks(tokens, cp, steps)
    print(_row(f"cp {cp}", f"{cp} x 1", max(shared, key=lambda found: found.saved)), flush=True)
    met, line = verdict(alone, shared)
    print(line)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
