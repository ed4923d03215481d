"""Time ZeRO on CPU ranks: training steps and updates by tpfuse, by torch over Gloo, and alone, alternately.

    python -m benchmarks.bench_zero [--worlds 2 4] [--rounds 9] [--quick] [training update]

training: a step of a GPT of 6 layers x 768 (12 heads, 43M parameters, float32) on bytes, 4 sequences of 64 tokens on
every rank, one thread each, AdamW, gradients clipped (`benchmarks.zero_training`):

    alone          tpfuse's engine with no group: each rank trains on its own batch and updates all parameters. It has
                   the same products as with a group, no communication, and an optimizer that is not sharded
    stage 0, 1, 2  tpfuse's buckets
    stage 3        torch's fully_shard with tpfuse's collectives and optimizer; blocks are gathered again for backward
    DDP            DistributedDataParallel and AdamW
    DDP + ZeRO     DistributedDataParallel and ZeroRedundancyOptimizer of AdamW
    fully_shard    by blocks, with reshard_after_forward=False, and AdamW

update: an update of 50M float32 parameters, from whole gradients on every rank to new parameters on every rank
(`benchmarks.zero_update`).

Every candidate's result is checked first: with plain AdamW on the whole batch, and with the sum of all gradients.
Candidates alternate, and each round begins with another one; a turn is as long as its slowest rank.
`bench_tensor_parallel` describes how the processes without a turn sleep, and how the share of the cores that other
programs took is measured.
"""

import os
import time
from collections.abc import Iterator

import torch

from benchmarks.bench_tensor_parallel import of_others
from benchmarks.figures import Target, cost, figures_table, speedup
from benchmarks.harness import OURS, Parser, Row, aligned, percentiles, write_row
from benchmarks.timing import seconds_per_call
from benchmarks.zero_training import ALONE, SHARD, STAGES, ZERO, Call, Training
from benchmarks.zero_update import NORM_FIRST, PIECES, SWEEP, WHOLE, Update
from tpfuse.testing.ranks import RankPool
from tpfuse.train.hardware import keep_freed_memory

SUBJECTS: dict[str, tuple[Training | Update, Training | Update]] = {  # (the full subject, the subject of --quick)
    "training": (Training(), Training(2, 48, 4, 16, 2)),
    "update": (Update(), Update(2, 48)),
}

_calls: dict[str, Call] = {}  # the calls of this rank that alternate


def prepare(subject: Training | Update) -> list[str]:
    """Fill `_calls` and return the names of the candidates. Every rank must call it."""
    torch.use_deterministic_algorithms(False)
    keep_freed_memory()
    _calls.clear()
    _calls.update(subject.calls())
    return list(_calls)


def turn(name: str, repeats: int) -> float:
    """Return the seconds of a call. Every rank must call it."""
    return seconds_per_call(_calls[name], repeats)


def measure(
    subject: Training | Update, ranks: RankPool, rounds: int, seconds: float = 1.0
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of a call in each round, by candidate, and the share of the cores that other programs took.

    seconds: the approximate duration of a turn.
    """
    names = ranks.run(prepare, subject)[0]
    repeats = {name: max(1, min(200, int(seconds / max(ranks.run(turn, name, 1))))) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    before, started = of_others(ranks), time.monotonic()
    for i in range(rounds):
        first = i % len(names)
        for name in [*names[first:], *names[:first]]:
            times[name].append(max(ranks.run(turn, name, repeats[name])))
    capacity = (time.monotonic() - started) * (os.cpu_count() or 1)
    return times, (of_others(ranks) - before) / capacity


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
    figures = {name: {k: round(v * 1e3, 3) for k, v in percentiles(x).items()} for name, x in times.items()}
    baseline = next(iter(figures))
    ratios = {name: round(x["median"] / figures[baseline]["median"], 3) for name, x in figures.items()}
    lines: list[tuple[str, ...]] = [(f"{mode}, {ranks} ranks", "median ms", "p20", "p80", f"x {baseline}")]
    for name, x in figures.items():
        lines.append((name, *(f"{x[k]:.1f}" for k in ("median", "p20", "p80")), f"{ratios[name]:.3f}"))
    print(aligned(lines))
    print(f"other programs took {others:.0%} of the cores\n", flush=True)
    row = {"subject": mode, "ranks": ranks, **vars(subject), "others": round(others, 3), "baseline": baseline}
    return row | {"ratios": ratios, "ms": figures}


def main() -> None:
    """Print tables, keep them unless they are quick ones, and print the figures."""
    parser = Parser(__doc__)
    parser.add_argument(
        "subjects", nargs="*", metavar="training|update", help="measure only these subjects (default: both)"
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks to measure")
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds")
    parser.add_argument(
        "--quick", action="store_true", help="run tiny sizes, to check that the benchmark works, and store nothing"
    )
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
