"""Time pipelines on CPU ranks: the idle shares of all schedules, and the step of a GPT with and without shared memory.

    python -m benchmarks.bench_pipeline [--rounds 15] [bubbles step]

bubbles: stages that sleep for a known time, so that noise does not matter: 40 ms for a forward pass and as much for
each half of a backward pass. The measured idle share of each rank is compared with the formula of the schedule's
source, where p is the number of ranks, v that of the stages of each, and m that of the micro-batches. The most
micro-batches in flight are compared with the formulas for 1f1b and interleaved_1f1b.

step: a training step of the preset that `make train` runs, on two pipeline ranks, over shared memory and over Gloo
(--parallel.impl collective) alternately: 1f1b with the usual 8 micro-batches and with 16, and interleaved_1f1b, which
sends three times as many messages, with 16. Losses of the first steps must be equal. The limit of the ratio is the time
over Gloo in relation to a step in which no rank waits for a message that was sent: the order is simulated with the
durations of its passes, as measured over shared memory with their sends, and the time outside of the pipeline is added.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.bench_tensor_parallel import preset
from benchmarks.cpu_ranks import milliseconds
from benchmarks.harness import Parser, Row, write_row
from benchmarks.timing import seconds_per_call
from tpfuse.choices import Implementation
from tpfuse.comm.mesh import build_mesh
from tpfuse.ops.autograd import apply, wanted_gradients
from tpfuse.parallel.pipeline.order import Action, Order, PipelineSchedule, order, usual_stages
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.parallel.pipeline.timeline import Interval, timeline
from tpfuse.switches import use
from tpfuse.testing.ranks import RankPool
from tpfuse.train.batches import Windows
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.train.trainer import Trainer

UNIT = 0.04  # seconds of a forward pass
CASES: tuple[tuple[PipelineSchedule, int], ...] = (
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zbv", 2),
)  # fmt: skip
_MICRO_BATCHES = (4, 8)
_CALLS = 3  # steps of a turn

STEPS: tuple[tuple[PipelineSchedule, int], ...] = (("1f1b", 2), ("1f1b", 1), ("interleaved_1f1b", 1))

_trainers: dict[str, tuple[Trainer, Windows]] = {}

Turn = tuple[float, float, dict[Action, float]]  # what `turn` returns


def formula(schedule: PipelineSchedule, ranks: int, stages: int, micro_batches: int) -> float | None:
    """Return the idle share of each rank. stages: those of each rank. None where the source has no formula.

    Each rank adds a forward and a backward pass to the bubble, or what remains of them if weight gradients fill it. The
    source of zbv needs 2 p micro-batches. Its bubble is then empty but for p - 1 units in torch's order, in which the
    first ranks begin and end alone.
    """
    if schedule == "zbv" and micro_batches < 2 * ranks:
        return None
    bubble = (1 if schedule in ("zero_bubble", "zbv") else 3) * (ranks - 1)
    return bubble / (3 * stages * micro_batches + bubble)


def flight(schedule: PipelineSchedule, ranks: int, stages: int, micro_batches: int) -> int | None:
    """Return the most micro-batches of a stage that the first rank keeps; None where the source has no formula."""
    if schedule == "1f1b":
        return min(ranks, micro_batches)
    if schedule == "interleaved_1f1b" and micro_batches > ranks:  # p (1 + (p - 1) / (p v)), for v stages
        return ranks * stages + ranks - 1
    return None


class _Sleep(Function):
    """x * weight, which takes a unit forward, and a unit for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        time.sleep(UNIT)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants = wanted_gradients(ctx)
        time.sleep(UNIT * sum(wants))
        return grad * weight if wants[0] else None, grad * x if wants[1] else None


def idle_shares(schedule: PipelineSchedule, stages: int, micro_batches: int) -> tuple[float, float, int]:
    """Return (seconds of computing, end of the last action in seconds, most micro-batches in flight) of this rank."""
    group, simulated = dist.group.WORLD, order(schedule, dist.get_world_size(), stages, micro_batches)
    layers = nn.ParameterList([torch.ones(8) for _ in range(simulated.stages)])

    def compute(stage: int, x: Tensor | None, batch: Tensor) -> Tensor:
        y = apply(_Sleep, batch.clone().requires_grad_() if x is None else x, layers[stage])
        return y.sum() if stage == simulated.stages - 1 else y

    modules = {stage: [nn.ParameterList([layers[stage]])] for stage in range(simulated.stages)}
    runner = Runner(simulated, compute, modules, group, torch.device("cpu"))
    batches = [torch.ones(8) for _ in range(micro_batches)]
    for _ in range(2):  # the first step opens the routes
        dist.barrier()
        runner.train(batches)
    busy = sum(interval.end - interval.start for interval in runner.intervals)
    return busy, runner.intervals[-1].end, runner.most_in_flight


def bubbles(keep: bool) -> None:
    """Measure the idle shares, print a line for each case, and write a row for each."""
    line = "{:<18}{:>3}{:>3}{:>3}{:>10}{:>10}{:>9}{:>11}"
    print(line.format("schedule", "p", "v", "m", "formula", "measured", "off by", "in flight"))
    for ranks in (2, 4):
        pool = RankPool(ranks, timeout=120.0)
        for schedule, stages in CASES:
            for micro_batches in _MICRO_BATCHES:
                found = pool.run(idle_shares, schedule, stages, micro_batches)
                length = max(end for _, end, _ in found)
                measured = statistics.fmean(1 - busy / length for busy, _, _ in found)
                expected = formula(schedule, ranks, stages, micro_batches)
                if expected is None:
                    continue
                most, known = found[0][2], flight(schedule, ranks, stages, micro_batches)
                cells = f"{expected:.1%}", f"{measured:.1%}", f"{measured / expected - 1:+.1%}"
                flying = f"{most}" if known is None else f"{most} of {known}"
                print(line.format(schedule, ranks, stages, micro_batches, *cells, flying))
                row: Row = {"subject": "bubbles", "schedule": schedule, "ranks": ranks, "stages": stages}
                row |= {"micro_batches": micro_batches, "formula": round(expected, 4), "measured": round(measured, 4)}
                write_row("pipeline", row | {"in_flight": most, "in_flight_formula": known}, keep)
        pool.close()


def prepare(schedule: PipelineSchedule, micro_batch: int) -> list[list[float]]:
    """Make the steps of this rank, and return the first losses of each. Every rank must call it.

    micro_batch: the sequences of a micro-batch.
    """
    keep_freed_memory()
    options, config, windows = preset(1)
    train = replace(options.train, micro_batch=micro_batch)
    options = replace(options, parallel=replace(options.parallel, pp=2, pp_schedule=schedule), train=train)
    losses = []
    for name in ("direct", "collective"):
        with use(implementation=name):
            trainer = Trainer(options, config, build_mesh("cpu", dp=1, tp=1, pp=2), torch.device("cpu"))
            losses.append([trainer.train_step(windows, lambda: False).loss for _ in range(3)])
        _trainers[name] = trainer, windows
    return losses


def turn(name: Implementation) -> Turn:
    """Return means of some steps: their seconds, those outside of the pipeline, and those of each pass of this rank.

    Every rank must call it.
    """
    trainer, windows = _trainers[name]
    steps: list[list[Interval]] = []
    assert trainer.runner is not None
    runner = trainer.runner

    def train() -> None:
        trainer.train_step(windows, lambda: False)
        steps.append(runner.intervals)

    with use(implementation=name):
        seconds = seconds_per_call(train, _CALLS)
    passes = {
        same[0].action: statistics.fmean(interval.end - interval.start for interval in same)
        for same in zip(*steps, strict=True)
    }
    return seconds, seconds - statistics.fmean(intervals[-1].end for intervals in steps), passes


def without_messages(simulated: Order, turns: list[Turn]) -> float:
    """Return the seconds of a step whose messages arrive as they are sent. turns: of all ranks in one round."""
    passes = {action: seconds for _, _, of_rank in turns for action, seconds in of_rank.items()}
    return timeline(simulated, passes.__getitem__).length + min(outside for _, outside, _ in turns)


def step(rounds: int, schedule: PipelineSchedule, micro_batch: int, keep: bool) -> None:
    """Measure both ways of sending, print a line for each, and write a row."""
    pool = RankPool(2, timeout=600.0)
    direct, collective = pool.run(prepare, schedule, micro_batch)[0]
    assert direct == collective, (direct, collective)
    times: dict[str, list[float]] = {"direct": [], "collective": [], "without_messages": []}
    for _ in range(rounds):
        turns = {name: pool.run(turn, name) for name in ("direct", "collective")}
        for name, of_ranks in turns.items():
            times[name].append(max(seconds for seconds, _, _ in of_ranks))
        simulated = order(schedule, 2, usual_stages(schedule), preset(1)[0].train.batch // micro_batch)
        times["without_messages"].append(without_messages(simulated, turns["direct"]))
    pool.close()
    ratio, limit = (
        statistics.median(b / a for a, b in zip(times[name], times["collective"], strict=True))
        for name in ("direct", "without_messages")
    )
    figures = milliseconds(times)
    for name, figure in figures.items():
        print(f"{name:<18}{figure['median']:>10.2f} ms")
    print(
        f"{schedule}, micro-batches of {micro_batch}: over Gloo the step takes {ratio:.2f} times as long; asked: 1.2;"
        f" limit: {limit:.2f}"
    )
    row: Row = {"subject": "step of gpt tiny, pp 2", "schedule": schedule, "micro_batch": micro_batch, "rounds": rounds}
    row |= {"asked": 1.2, "ratio": round(ratio, 3), "limit": round(limit, 3)}
    write_row("pipeline", row | {f"{name}_ms": figures[name] for name in figures}, keep)


def main() -> None:
    """Run the subjects of the command line."""
    parser = Parser(__doc__)
    parser.add_argument("subjects", nargs="*", choices=("bubbles", "step", []), help="what to time; default: both")
    parser.option("--rounds", 15, "number of rounds of step")
    arguments = parser.parse_args()
    if "bubbles" in (arguments.subjects or ["bubbles"]):
        bubbles(arguments.keep)
    if "step" in (arguments.subjects or ["step"]):
        for schedule, micro_batch in STEPS:
            step(arguments.rounds, schedule, micro_batch, arguments.keep)


if __name__ == "__main__":
    main()
