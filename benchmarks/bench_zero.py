"""Time ZeRO on CPU ranks: training steps by tpfuse, by torch over Gloo, and alone, alternately.

    python -m benchmarks.bench_zero [--worlds 2 4] [--rounds 9] [training accumulation]

training: a step of a GPT of 6 layers x 768 (12 heads, 43M parameters, float32) on bytes, 4 sequences of 64 tokens on
every rank, one thread each, AdamW, gradients clipped (`benchmarks.zero_training`):

    alone          tpfuse's engine with no group: each rank trains on its own batch and updates all parameters. It has
                   the same products as with a group, no communication, and an optimizer that is not sharded
    stage 0, 1, 2  tpfuse's buckets
    stage 3        torch's fully_shard with tpfuse's collectives and optimizer; blocks are gathered again for backward
    DDP            DistributedDataParallel and AdamW
    DDP + ZeRO     DistributedDataParallel and ZeroRedundancyOptimizer of AdamW
    fully_shard    by blocks, with reshard_after_forward=False, and AdamW

accumulation: such a step in four micro-batches of one sequence, at stages 2 and 3, with whole gradients and with shards
of them between micro-batches.

Every candidate's result is checked first, with plain AdamW on the whole batch. `benchmarks.cpu_ranks` says how
candidates alternate.
"""

import torch

from benchmarks.cpu_ranks import alternate, calls, report
from benchmarks.harness import Parser, write_row
from benchmarks.zero_training import Training
from tpfuse.testing.ranks import RankPool
from tpfuse.train.hardware import keep_freed_memory

SUBJECTS = {"training": Training(), "accumulation": Training(micro_batches=4)}


def prepare(subject: Training) -> list[str]:
    """Fill `calls` and return the names of the candidates. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    keep_freed_memory()
    calls.clear()
    calls.update(subject.calls())
    return list(calls)


def measure(
    subject: Training, ranks: RankPool, rounds: int, seconds: float = 1.0
) -> tuple[dict[str, list[float]], float]:
    """Return what `alternate` does, for all candidates of the subject."""
    return alternate(dict.fromkeys(ranks.run(prepare, subject)[0], ranks), rounds, seconds)


def main() -> None:
    """Print tables, and keep them."""
    parser = Parser(__doc__)
    parser.add_argument(
        "subjects",
        nargs="*",
        choices=[*SUBJECTS, []],
        metavar="|".join(SUBJECTS),
        help="what to measure (default: both)",
    )
    parser.option("--worlds", [2, 4], "numbers of ranks to measure")
    parser.option("--rounds", 9, "number of rounds")
    arguments = parser.parse_args()
    for world in arguments.worlds:
        for name in arguments.subjects or SUBJECTS:
            ranks, subject = RankPool(world, timeout=1200.0), SUBJECTS[name]
            times, others = measure(subject, ranks, arguments.rounds)
            ranks.close()  # this frees the memory of its candidates
            row = {"subject": name, "ranks": world, **vars(subject)}
            row |= report(f"{name}, {world} ranks", times, others, next(iter(times)))
            write_row("zero", row, arguments.keep)


if __name__ == "__main__":
    main()
