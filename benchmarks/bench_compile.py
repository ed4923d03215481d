"""Time a training step of GPT tiny: plain, by torch.compile, and under autocast, by turns in one process.

python -m benchmarks.bench_compile [--rounds 30]
"""

import argparse

import numpy as np
import torch

from benchmarks.harness import keep, percentiles
from benchmarks.timing import Candidate, HostClock, alternate
from tpfuse.models.gpt import GPTConfig
from tpfuse.train.batches import Windows
from tpfuse.train.config import parse_train
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.train.setup import with_layout
from tpfuse.train.trainer import Trainer

CANDIDATES = {
    "plain": [],
    "compiled": ["--train.compile"],
    "autocast": ["--train.autocast", "bfloat16"],
    "autocast, compiled": ["--train.autocast", "bfloat16", "--train.compile"],
}


def candidate(name: str, flags: list[str]) -> Candidate:
    """Return a candidate that takes a training step of the preset, each on a new batch."""
    options = with_layout(parse_train(flags), 1)
    model = options.model
    config = GPTConfig(256, model.n_positions, model.n_embd, model.n_layer, model.n_head)
    trainer = Trainer(options, config, None, torch.device("cpu"))
    tokens = np.random.default_rng(1).integers(0, 256, 100_000).astype(np.uint16)
    windows = Windows(tokens, model.n_positions, 1, "train", options.train.batch)
    return Candidate(name, lambda _: trainer.train_step(windows, lambda: False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="number of rounds")
    rounds = parser.parse_args().rounds
    keep_freed_memory()
    candidates = [candidate(name, flags) for name, flags in CANDIDATES.items()]
    timings = alternate(candidates, HostClock(), 0.0, least=rounds, most=rounds)
    figures: dict[str, object] = {"threads": torch.get_num_threads()}
    plain = None
    for name, timing in timings.items():
        assert not isinstance(timing, str), timing
        times = {key: round(value * 1e3, 2) for key, value in percentiles(timing.seconds).items()}
        plain = plain or times["median"]
        figures[name] = times
        print(f"{name:<20} {times} ms, {times['median'] / plain:.2f} of plain")
    print(f"kept in {keep('compile', figures)}")


if __name__ == "__main__":
    main()
