"""Train a model whose optimizer state is on disk: a step of GPT-2 1558M in less than 10 GiB of resident memory.

    python -m benchmarks.offload_step [--preset gpt2-1558m] [--folder .] [--tokens 64] [--steps 1]

It is one process. Parameters and gradients are bfloat16, 3.1 GB each; master and moments, float32, are 18.7 GB in a
file that `tpfuse.zero.offload` maps, and that is removed when the process ends. There is one sequence of a few tokens:
the activations are small, and the rest is measured. The peak is the kernel's own count of this process's resident
memory (VmHWM), from the start of Python to the end of the last step; mapped pages of the file count, and pages that
only the kernel's cache holds do not. Freed memory is kept, as `tpfuse train` does on CPUs. A folder without the space
is refused before anything is created.
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.harness import Parser, Row, aligned, write_row
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.train.config import PRESETS, load_preset
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.zero import shard
from tpfuse.zero.bucket_layout import BUCKET_BYTES, KINDS, plan_buckets
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.offload import FileStore, check_space, state_bytes

LIMIT = 10.0  # GiB
_CLIP = 1.0


class Phases:
    """The phases, each added at its end: name -> (seconds, the most bytes that the process has held until its end)."""

    def __init__(self) -> None:
        self.done: dict[str, tuple[float, int]] = {}
        self._started = time.perf_counter()

    def end(self, name: str) -> None:
        """Record the phase that has run since the previous one."""
        now = time.perf_counter()
        self.done[name] = now - self._started, peak_resident()
        self._started = now


def peak_resident() -> int:
    """Return the peak resident memory in bytes, of this program alone, not of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def gpt2(preset: str) -> GPTConfig:
    """Return the model of a preset, with GPT-2's vocabulary."""
    model = load_preset(preset)["model"]
    sizes = {name: model[name] for name in ("n_positions", "n_embd", "n_layer", "n_head")}
    return GPTConfig(**sizes, bias=model.get("bias", True))


def bytes_on_disk(config: GPTConfig) -> int:
    """Return the bytes of master and moments, counted without making the model."""
    named = list(GPT(config, device="meta", dtype=torch.bfloat16).named_parameters())
    return state_bytes(plan_buckets(named[::-1], (), dict.fromkeys(KINDS, 1), BUCKET_BYTES), 0)


def train(config: GPTConfig, folder: Path, tokens: int, steps: int) -> tuple[dict[str, tuple[float, int]], list[float]]:
    """Return the phases, and the loss of each step in nats per token.

    Raise ValueError where the folder has no space for the state.
    """
    nbytes = bytes_on_disk(config)
    check_space(folder, nbytes)
    phases, losses = Phases(), []
    model = GPT(config, dtype=torch.bfloat16)
    initialize(model, 1)
    phases.end("initial weights")
    engine = shard(model, stage=0, gradient_dtype="parameter")
    optimizer = BucketUpdater(engine, weight_decay=0.1, store=FileStore(folder, nbytes))
    phases.end("buckets, masters to disk")
    ids = torch.randint(config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    for number in range(1, steps + 1):
        engine.start(last=True)
        loss = model(ids[:, :-1], ids[:, 1:], loss_weight=1 / tokens)
        loss.backward()
        losses.append(float(loss.detach()))
        del loss
        engine.finish()
        norm = engine.norm()
        phases.end(f"step {number}, gradients")
        optimizer.step(1e-3, min(1.0, _CLIP / (norm + 1e-6)))
        phases.end(f"step {number}, update")
    return phases.done, losses


def report(
    config: GPTConfig, phases: dict[str, tuple[float, int]], losses: list[float], limit: float
) -> tuple[bool, Row]:
    """Print a table and whether the goal is met; return whether it is met, and the row to keep."""
    lines = [(name, f"{seconds:.1f}", f"{peak / 2**30:.2f}") for name, (seconds, peak) in phases.items()]
    print(aligned([("", "seconds", "peak GiB"), *lines]))
    (*_, (_, peak)), on_disk = phases.values(), bytes_on_disk(config)
    met = peak / 2**30 < limit
    print(f"loss of each step: {', '.join(f'{x:.4f}' for x in losses)}; {on_disk / 2**30:.2f} GiB of state on disk")
    print(f"goal {'met' if met else 'MISSED'}: {peak / 2**30:.2f} GiB resident at most (goal: below {limit:g})")
    row: Row = {**vars(config), "losses": losses, "on_disk_bytes": on_disk, "peak_bytes": peak}
    return met, row | {"asked_gib": limit, "seconds": {name: round(x, 2) for name, (x, _) in phases.items()}}


def main() -> int:
    """Run the benchmark; return 1 where the goal is missed, and 2 where it cannot be tried."""
    parser = Parser(__doc__)
    parser.add_argument("--preset", default="gpt2-1558m", choices=PRESETS, help="model to train")
    parser.option("--folder", Path(), "folder on a local disk (default: the working folder)")
    parser.option("--tokens", 64, "number of tokens of the sequence")
    parser.option("--steps", 1, "number of training steps")
    parser.option("--limit", LIMIT, "most memory in GiB that the run may use to pass")
    arguments = parser.parse_args()
    keep_freed_memory()
    config = gpt2(arguments.preset)
    try:
        phases, losses = train(config, arguments.folder, arguments.tokens, arguments.steps)
    except ValueError as error:
        print(f"benchmarks.offload_step: error: {error}", file=sys.stderr)
        return 2
    met, row = report(config, phases, losses, arguments.limit)
    if arguments.preset == parser.get_default("preset"):
        write_row("offload", {"preset": arguments.preset, "tokens": arguments.tokens} | row, arguments.keep)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
