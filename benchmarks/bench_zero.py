"""Time ZeRO on CPU ranks: training steps and updates by tpfuse, by torch over Gloo, and alone, alternately.

    python -m benchmarks.bench_zero [--worlds 2 4] [--rounds 9] [--quick] [training accumulation update]

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

update: an update of 50M float32 parameters, from whole gradients on every rank to new parameters on every rank
(`benchmarks.zero_update`).

Every candidate's result is checked first: with plain AdamW on the whole batch, and with the sum of all gradients.
`benchmarks.cpu_ranks` says how candidates alternate.
"""

from collections.abc import Iterator

import torch

from benchmarks.cpu_ranks import alternate, calls, milliseconds, ratios
from benchmarks.figures import Target, cost, figures_table, speedup
from benchmarks.harness import OURS, Parser, Row, percentiles, write_row
from benchmarks.zero_training import ALONE, SHARD, STAGES, ZERO, Training
from benchmarks.zero_update import NORM_FIRST, PIECES, SWEEP, WHOLE, Update
from tpfuse.testing.ranks import RankPool
from tpfuse.train.hardware import keep_freed_memory

SUBJECTS: dict[str, tuple[Training | Update, Training | Update]] = {  # (the full subject, the subject of --quick)
    "training": (Training(), Training(2, 48, 4, 16, 2)),
    "accumulation": (Training(micro_batches=4), Training(2, 48, 4, 16, 4, 4)),
    "update": (Update(), Update(2, 48)),
}


def prepare(subject: Training | Update) -> list[str]:
    """Fill `calls` and return the names of the candidates. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    keep_freed_memory()
    calls.clear()
    calls.update(subject.calls())
    return list(calls)


def measure(
    subject: Training | Update, ranks: RankPool, rounds: int, seconds: float = 1.0
) -> tuple[dict[str, list[float]], float]:
    """Return what `alternate` does, for all candidates of the subject."""
    return alternate(dict.fromkeys(ranks.run(prepare, subject)[0], ranks), rounds, seconds)


def _figures() -> Iterator[Target]:
    for name in STAGES[1:3]:
        yield Target(f"step, {name} / no communication", name, "training", 1.0, ALONE, cost, at_most=True)
        yield Target(f"step, {name} / {ZERO}", name, "training", 1.2, ZERO, speedup)
        yield Target(f"step, {name} / {SHARD}", name, "training", 1.5, SHARD, speedup)
    for name in (SWEEP, NORM_FIRST):
        for peer in (WHOLE, PIECES):
            yield Target(f"update, {name} / {peer}", name, "update", 2.0, peer, speedup)


FIGURES = tuple(_figures())


def rows(mode: str, ranks: int, times: dict[str, list[float]]) -> list[Row]:
    """Return the rows for the figures: each candidate of tpfuse is an operator, and all peers are beside it."""
    result: list[Row] = []
    for ours in (name for name in times if name.startswith(OURS)):
        row: Row = {"operator": ours, "case": f"{ranks} ranks", "mode": mode, "asked": True}
        for name in (ours, *(name for name in times if not name.startswith(OURS))):
            median = percentiles(times[name])["median"] * 1e6
            result.append(row | {"candidate": OURS if name == ours else name, "median_us": median})
    return result


def report(mode: str, subject: Training | Update, ranks: int, times: dict[str, list[float]], others: float) -> Row:
    """Print a table, and return the row to keep."""
    figures = milliseconds(times)
    baseline = next(iter(figures))
    found = ratios(f"{mode}, {ranks} ranks", figures, baseline)
    print(f"other programs took {others:.0%} of the cores\n", flush=True)
    row = {"subject": mode, "ranks": ranks, **vars(subject), "others": round(others, 3), "baseline": baseline}
    return row | {"ratios": found, "ms": figures}


def main() -> None:
    """Print tables, keep them unless they are quick ones, and print the figures."""
    parser = Parser(__doc__)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="training|accumulation|update",
        help="measure only these subjects (default: both)",
    )
    parser.option("--worlds", [2, 4], "numbers of ranks to measure")
    parser.option("--rounds", 9, "number of rounds")
    parser.option("--quick", False, "run tiny sizes, to check that the benchmark works, and store nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.subjects) - SUBJECTS.keys():
        parser.error(f"there is no {min(unknown)}: expected {' or '.join(SUBJECTS)}")
    rounds, seconds = (2, 0.03) if arguments.quick else (arguments.rounds, 1.0)
    measured: list[Row] = []
    for world in arguments.worlds:
        for mode in arguments.subjects or SUBJECTS:
            ranks, subject = RankPool(world, timeout=1200.0), SUBJECTS[mode][arguments.quick]
            times, others = measure(subject, ranks, rounds, seconds)
            ranks.close()  # this frees the memory of its candidates
            row = report(mode, subject, world, times, others)
            measured += rows(mode, world, times)
            if not arguments.quick:
                write_row("zero", row, arguments.keep)
    print(figures_table([figure.outcome(measured, 0.0) for figure in FIGURES]))


if __name__ == "__main__":
    main()
