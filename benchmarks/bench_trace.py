"""Time what the marks of `tpfuse.comm.trace` cost in a training step, on CPU ranks.

    python -m benchmarks.bench_trace [--ranks 2] [--rounds 40]

The subject is a step of the preset that `make train` runs, tensor-parallel, by turns: "off" (as always: the marks are
in the code, and nobody observes), "removed" (every function of the module does nothing), and "recorded" (a trace of
operators and layers is recorded). The share of the marks is the median, over the rounds, of the time of "off" divided
by the mean of the times of "removed" before and after it.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.bench_tensor_parallel import preset
from benchmarks.harness import keep, percentiles
from benchmarks.timing import seconds_per_call
from tpfuse.comm import trace
from tpfuse.comm.mesh import build_mesh
from tpfuse.parallel.tracing import layer_spans
from tpfuse.testing.ranks import RankPool
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.train.trainer import Trainer

CANDIDATES = ("removed", "off", "recorded")
_CALLS = 4  # steps of a turn

_steps: list[tuple[Trainer, Callable[[], object]]] = []


def prepare(world: int) -> None:
    """Make the trainer of this rank. Every rank must call it."""
    keep_freed_memory()
    options, config, windows = preset(world)
    trainer = Trainer(options, config, build_mesh("cpu", dp=1, tp=world), torch.device("cpu"))
    _steps.append((trainer, lambda: trainer.train_step(windows, lambda: False)))


@contextlib.contextmanager
def _removed() -> Iterator[None]:
    """Let all functions of the module do nothing."""
    nothing = contextlib.nullcontext()

    def no_context(*arguments: object, **options: object) -> contextlib.nullcontext[None]:
        return nothing

    def no_mark(*arguments: object, **options: object) -> None:
        return None

    span = trace.span
    users = [module for module in list(sys.modules.values()) if getattr(module, "span", None) is span]
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "span", no_context))
        stack.enter_context(mock.patch.object(trace, "waiting", no_context))
        for name in ("begin", "end", "is_observed"):
            stack.enter_context(mock.patch.object(trace, name, no_mark))
        yield


@contextlib.contextmanager
def _recorded(model: torch.nn.Module) -> Iterator[None]:
    with trace.observed(trace.Recorder(torch.device("cpu"))), layer_spans(model):
        yield


def turn(name: str) -> float:
    """Return the seconds of a step. Every rank must call it."""
    trainer, step = _steps[0]
    contexts = {"removed": _removed(), "off": contextlib.nullcontext(), "recorded": _recorded(trainer.model)}
    with contexts[name]:
        return seconds_per_call(step, _CALLS)


def main() -> None:
    """Measure, print a line for each candidate, and keep a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--rounds", type=int, default=40, help="number of rounds")
    arguments = parser.parse_args()
    ranks = RankPool(arguments.ranks, timeout=600.0)
    ranks.run(prepare, arguments.ranks)
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    ranks.run(turn, "off")
    for _ in range(arguments.rounds):
        for name in CANDIDATES:
            times[name].append(max(ranks.run(turn, name)))
    ranks.close()
    around = [(a + b) / 2 for a, b in zip(times["removed"], times["removed"][1:], strict=False)]
    share = statistics.median(x / y for x, y in zip(times["off"], around, strict=False)) - 1
    figures = {name: {k: round(v * 1e3, 3) for k, v in percentiles(x).items()} for name, x in times.items()}
    for name, figure in figures.items():
        print(f"{name:<10}{figure['median']:>10.2f} ms")
    print(f"the marks take {share:.2%} of a step; asked: less than 1 %")
    row = {"subject": "gpt tiny", "ranks": arguments.ranks, "rounds": arguments.rounds, "asked": 0.01}
    keep("trace", row | {"share": round(share, 5)} | {f"{name}_ms": figures[name] for name in figures})


if __name__ == "__main__":
    main()
