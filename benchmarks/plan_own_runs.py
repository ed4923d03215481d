"""Compare the step times that `tpfuse plan` predicts with those of runs on this machine's CPU, over all layouts.

    python -m benchmarks.plan_own_runs measure [--model tiny] [--ranks 4] [--rounds 2]
    python -m benchmarks.plan_own_runs compare [FILE.toml]

measure times training steps of GPT tiny and of a GPT of 6 layers x 768 features with a small vocabulary and short
sequences. It covers every way to share them among 1, 2 and 4 ranks of one thread each: tp, cp, dp and pp, the stages 0
and 2 of ZeRO, the pipeline's schedules, and two sizes of the micro-batch. A round measures every layout once, with new
processes, and keeps a row for each in benchmarks/results/plan_own_runs.jsonl. Four ranks on two cores take turns. Steps
count during which other programs took at most 5 % of the cores; each layout has 5 seconds to make enough of them.

compare predicts each of them from the file that `tpfuse plan --calibrate` has written on the same machine. It prints
each layout, and for each model and number of ranks how well the predictions order the layouts (Spearman's rank
correlation), and at which place the prediction has the layout that was measured to be the fastest. MACHINE is the file
that was written beside the rows.
"""

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import RESULTS, cores, write_row
from tpfuse.comm.mesh import build_mesh
from tpfuse.cost.hardware import Cluster, load_gpu, load_link
from tpfuse.cost.layout import Layout
from tpfuse.cost.program import TPFUSE
from tpfuse.cost.step import Times, step_times
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.ranks import PRELOADED, RankPool
from tpfuse.train.batches import Windows
from tpfuse.train.config import parse_train
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.train.predicted import sizes_of
from tpfuse.train.trainer import Trainer

VOCABULARY = 256
RANKS = (1, 2, 4)
MACHINE = RESULTS / "plan_own_runs.toml"
QUIET = 0.05  # the share of the cores that other programs may take
LIMIT = 5.0  # seconds for the steps of a layout
PROGRAM = replace(TPFUSE, parameter_bytes=4, gradient_bytes=4, state_bytes=8)  # float32
_IMPORTS = ("tpfuse.train.trainer", "tpfuse.train.config", "benchmarks.harness")  # what takes ranks long to import


@dataclass(frozen=True)
class Subject:
    """A GPT, the sequences of a step, and the steps that a round times."""

    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    steps: int

    @property
    def config(self) -> GPTConfig:
        """Return the GPT."""
        return GPTConfig(VOCABULARY, self.tokens, self.width, self.layers, self.heads)


SUBJECTS = {"tiny": Subject(4, 128, 4, 128, 16, 5), "6 x 768": Subject(6, 768, 12, 32, 8, 2)}


def layouts(subject: Subject, ranks: int) -> Iterator[Layout]:
    """Yield the layouts to measure.

    Each (tp, cp, dp, pp) is measured with two sizes of the micro-batch. Other schedules than 1f1b are measured with the
    smaller one, and stage 2 of ZeRO, where there are replicas, with the larger one.
    """
    sizes = [1 << power for power in range(ranks.bit_length())]
    for tp, cp, dp, pp in ((tp, cp, dp, pp) for tp in sizes for cp in sizes for dp in sizes for pp in sizes):
        if tp * cp * dp * pp != ranks or pp > subject.layers:
            continue
        share = subject.batch // dp
        large, small = (share, max(1, share // 4)) if pp == 1 else (share // pp, max(1, share // (2 * pp)))
        first = Layout(tp, cp, dp, pp, "1f1b", 1, 0, "none", large, subject.batch)
        yield first
        yield replace(first, micro_batch=small)
        if cp * dp > 1:
            yield replace(first, zero=2)
        if pp > 1:
            yield replace(first, micro_batch=small, schedule="zero_bubble")
        if pp > 1 and subject.layers // pp > 1:
            yield replace(first, micro_batch=small, schedule="interleaved_1f1b", stages_per_rank=subject.layers // pp)


def steps(subject: Subject, layout: Layout) -> list[tuple[float, float]]:
    """Return the seconds of steps, and the share of the cores that other programs took. Every rank must call it.

    The first step does not count. Then steps are made until `subject.steps` of them were `QUIET`, or for `LIMIT`
    seconds.
    """
    trainer, windows = prepared(subject, layout)
    trainer.train_step(windows, lambda: False)
    found: list[tuple[float, float]] = []
    deadline = perf_counter() + LIMIT
    while sum(others <= QUIET for _, others in found) < subject.steps:
        dist.barrier()
        started, processor, busy = perf_counter(), process_time(), busy_seconds()
        trainer.train_step(windows, lambda: False)
        passed = perf_counter() - started
        of_ranks: list[Any] = [None] * layout.ranks
        mine = passed, process_time() - processor, busy_seconds() - busy, perf_counter() > deadline
        dist.all_gather_object(of_ranks, mine)
        slowest = max(each[0] for each in of_ranks)
        others = of_ranks[0][2] - sum(each[1] for each in of_ranks)
        found.append((slowest, max(0.0, others / slowest / cores())))
        if of_ranks[0][3]:
            break
    return found


def prepared(subject: Subject, layout: Layout) -> tuple[Trainer, Windows]:
    """Return what trains this rank's share of a model, and its data."""
    keep_freed_memory()
    torch.use_deterministic_algorithms(False)
    options = parse_train(["--model.preset", "tiny"])
    parallel = replace(
        options.parallel, tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, pp_schedule=layout.schedule,
        pp_stages_per_rank=layout.stages_per_rank if layout.pp > 1 else 0,
    )  # fmt: skip
    train = replace(options.train, batch=subject.batch, micro_batch=layout.micro_batch)
    zero = replace(options.zero, stage=layout.zero)
    options = replace(options, parallel=parallel, train=train, zero=zero)
    mesh = build_mesh("cpu", dp=layout.dp, tp=layout.tp, cp=layout.cp, pp=layout.pp) if layout.ranks > 1 else None
    trainer = Trainer(options, subject.config, mesh, torch.device("cpu"), draw=False)
    for parameter in trainer.model.parameters():  # it is faster than drawing them, and times do not depend on them
        torch.nn.init.uniform_(getattr(parameter, "_local_tensor", parameter.data), -0.02, 0.02)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 1 << 14).astype(np.uint16)
    return trainer, Windows(tokens, subject.tokens, 0, "train", subject.batch)


def busy_seconds() -> float:
    """Return the processor time of all programs since the machine started, in seconds."""
    user, nice, system, _, _, *interrupts = (
        int(x) for x in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def measure(name: str, ranks: int, missing: bool) -> None:
    """Measure all layouts of a model on a number of ranks once, print a line for each, and keep a row for each.

    missing: whether to leave out layouts of which earlier rounds have quiet steps.
    """
    subject = SUBJECTS[name]
    pool = RankPool(ranks, timeout=120.0, most_groups=0)  # new processes for each layout
    before = kept()[name] if missing else {}
    for layout in layouts(subject, ranks):
        if typical(before.get(layout, [(0.0, 1.0)]))[1] <= QUIET:
            continue
        found = pool.run(steps, subject, layout)[0]
        seconds, others = typical(found)
        print(f"{name:<9}{described(layout):<48}{seconds * 1e3:>9.1f} ms, {others:.0%} others", flush=True)
        row = {"subject": name, "ranks": ranks, **asdict(layout)}
        row |= {"ms": [round(x * 1e3, 2) for x, _ in found], "others": [round(x, 3) for _, x in found]}
        write_row("plan_own_runs", row, keep=True)
    pool.close()


def typical(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds that a fifth of the quiet steps fall below, and the largest share of others in these.

    Calibration takes the same part: what else the machine does only adds time. If fewer than two were `QUIET`, the two
    with the least share of others count.
    """
    quiet = [each for each in found if each[1] <= QUIET]
    chosen = quiet if len(quiet) > 1 else sorted(found, key=lambda each: each[1])[:2]
    return sorted(x for x, _ in chosen)[len(chosen) // 5], max(x for _, x in chosen)


def described(layout: Layout) -> str:
    """Return a layout in words."""
    parts = [f"{key} {getattr(layout, key)}" for key in ("tp", "cp", "dp", "pp") if getattr(layout, key) > 1]
    parts += [f"ZeRO {layout.zero}"] if layout.zero else []
    parts += [layout.schedule] if layout.pp > 1 else []
    return ", ".join([*(parts or ["1 rank"]), f"{layout.micro_batches} x {layout.micro_batch}"])


def kept() -> dict[str, dict[Layout, list[tuple[float, float]]]]:
    """Return what `steps` has returned for each layout, by model, over all rounds."""
    found: dict[str, dict[Layout, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    path = RESULTS / "plan_own_runs.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        row = json.loads(line)
        layout = Layout(**{item.name: row[item.name] for item in fields(Layout)})
        found[row["subject"]][layout] += zip((ms / 1e3 for ms in row["ms"]), row["others"], strict=True)
    return found


def predicted(subject: Subject, layout: Layout, machine: str) -> Times:
    """Return the times that the model of cost predicts. machine: the file of `tpfuse plan --calibrate`."""
    sizes = sizes_of("GPT", subject.config)
    link = load_link(machine)
    return step_times(sizes, layout, Cluster(load_gpu(machine), layout.ranks, layout.ranks, link, link), PROGRAM)


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    places = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def agreement(found: Sequence[float], predictions: Sequence[float]) -> tuple[float, int, float]:
    """Return the rank correlation of times with predictions, the predicted place of the smallest time, and the regret.

    The regret is the share by which the time of the smallest prediction is longer than the smallest time.
    """
    numbers = range(len(found))
    best, chosen = min(numbers, key=found.__getitem__), min(numbers, key=predictions.__getitem__)
    place = sorted(predictions).index(predictions[best]) + 1
    return correlation(found, predictions), place, found[chosen] / found[best] - 1


def measured(name: str) -> dict[Layout, float]:
    """Return the seconds of a model's step in each layout, but for layouts without quiet steps."""
    found = {layout: typical(each) for layout, each in kept()[name].items()}
    return {layout: seconds for layout, (seconds, others) in found.items() if others <= QUIET}


def compare(machine: str) -> None:
    """Print each layout as it was measured and as it is predicted, and how well the predictions order them."""
    table = [
        ("model", "ranks", "layouts", "rank correlation", "predicted place of the fastest", "regret", "mean error")
    ]
    for name, subject in SUBJECTS.items():
        times = measured(name)
        predictions = {layout: predicted(subject, layout, machine) for layout in times}
        for layout, seconds in sorted(times.items(), key=lambda item: (item[0].ranks, item[1])):
            kinds = {kind.name: getattr(predictions[layout], kind.name) * 1e3 for kind in fields(Times)}
            text = ", ".join(f"{kind} {ms:.0f}" for kind, ms in kinds.items() if ms >= 0.5)
            total = predictions[layout].total
            print(f"{name:<9}{described(layout):<48}{seconds * 1e3:>8.1f}{total * 1e3:>8.1f} ms: {text}")
        for ranks in (RANKS, *((count,) for count in RANKS)):
            own = [layout for layout in times if layout.ranks in ranks]
            seconds, expected = [times[x] for x in own], [predictions[x].total for x in own]
            agrees, place, regret = agreement(seconds, expected)
            error = statistics.fmean(abs(a / b - 1) for a, b in zip(expected, seconds, strict=True))
            some = ", ".join(map(str, ranks))
            table.append((name, some, str(len(own)), f"{agrees:.2f}", str(place), f"{regret:.1%}", f"{error:.1%}"))
    table.insert(1, ("---",) * len(table[0]))
    print("", *(f"| {' | '.join(row)} |" for row in table), sep="\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", choices=tuple(SUBJECTS), help="measure this model (default: both)")
    measuring.add_argument("--ranks", type=int, choices=RANKS, help="measure this number of ranks (default: all)")
    measuring.add_argument("--rounds", type=int, default=2)
    measuring.add_argument("--missing", action="store_true", help="leave out layouts that have quiet steps already")
    commands.add_parser("compare").add_argument("machine", metavar="FILE.toml", nargs="?", default=str(MACHINE))
    arguments = parser.parse_args()
    if arguments.command == "compare":
        compare(arguments.machine)
        return
    PRELOADED.extend(_IMPORTS)
    for _ in range(arguments.rounds):
        for name in [arguments.model] if arguments.model else SUBJECTS:
            for ranks in [arguments.ranks] if arguments.ranks else RANKS:
                measure(name, ranks, arguments.missing)


if __name__ == "__main__":
    main()
