"""Compare nanoGPT's CPU recipe in nanoGPT and in tpfuse, also with Muon: the validation loss, and the time of a step.

The recipe (nanoGPT's README, "I only have a macbook"): 4 layers, 4 heads, width 128, context 64, batch 12, 2000 steps,
learning rate 1e-3 to 1e-4 with 100 steps of warm-up, beta2 0.99, decay 0.1, clip 1, no dropout, no bias, characters,
90/10 split. nanoGPT itself runs, unchanged, from a checkout; neither program compiles.

    python -m benchmarks.bench_nanogpt --nanogpt PATH_TO_CHECKOUT --text input.txt

Speed: both programs train alternately for some hundred steps, several times; the figure is the ratio of the medians of
all step times. Each program's own clock measures them, with everything in the loop included and a line of log for every
step. Loss: both programs train 2000 steps and evaluate 200 batches.

    python -m benchmarks.bench_nanogpt ... --rates 1e-3,2e-3,4e-3

also trains by AdamW and by Muon at each of these learning rates, which fall to a tenth, and keeps all losses.
"""

import json
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_ranks import milliseconds
from benchmarks.harness import Parser, percentiles, write_row

TOKENS = 12 * 64
PEER = (
    "--dataset=text --device=cpu --compile=False --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4"
    " --n_head=4 --n_embd=128 --dropout=0.0 --eval_iters=200"
).split()
OURS = (
    "--data.tokenizer chars --data.val-fraction 0.1 --model.n-positions 64 --model.n-layer 4 --model.n-head 4"
    " --model.n-embd 128 --model.no-bias --model.dropout 0.0 --train.batch 12"
    " --optim.lr 1e-3 --optim.min-lr 1e-4 --optim.warmup 100 --optim.beta2 0.99 --optim.weight-decay 0.1"
    " --optim.clip 1.0 --train.eval-batches 200 --train.log-every 1 --train.save-every 0"
).split()
WARM_UP = 20  # steps at the start of each turn that are not counted


def lay_out_peer(checkout: Path, text: Path, folder: Path) -> None:
    """Create a working folder for nanoGPT: links to its files, and the text in its data format."""
    for name in ("model.py", "train.py", "configurator.py", "config"):
        (folder / name).symlink_to((checkout / name).resolve())
    data = folder / "data" / "text"
    data.mkdir(parents=True)
    characters = text.read_text(encoding="utf-8")
    vocabulary = sorted(set(characters))
    numbers = {c: i for i, c in enumerate(vocabulary)}
    tokens = np.array([numbers[c] for c in characters], dtype=np.uint16)
    border = int(len(characters) * 0.9)
    tokens[:border].tofile(data / "train.bin")
    tokens[border:].tofile(data / "val.bin")
    meta = {"vocab_size": len(vocabulary), "stoi": numbers, "itos": dict(enumerate(vocabulary))}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


def run_peer(folder: Path, steps: int, evaluate: bool) -> tuple[list[float], float]:
    """Run nanoGPT, and return the seconds of each step and the last validation loss."""
    flags = [*PEER, f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
    flags.append(f"--eval_interval={steps if evaluate else 10**9}")
    if not evaluate:
        flags.append("--eval_iters=1")
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *flags]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    times = [float(t) / 1e3 for t in re.findall(r"^iter \d+: .*time ([\d.]+)ms", out, re.M)]
    losses = [float(x) for x in re.findall(r"val loss ([\d.]+)", out)]
    return times, losses[-1] if losses else float("nan")


def run_ours(text: Path, out: Path, steps: int, evaluate: bool, *more: str) -> tuple[list[float], float]:
    """Run tpfuse, with more options, and return the seconds of each step and the last validation loss."""
    flags = [*OURS, *more, "--train.steps", str(steps), "--train.eval-every", str(steps if evaluate else 0)]
    command = [sys.executable, "-m", "tpfuse", "train", "--data.path", str(text), "--out", str(out), *flags]
    subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = [TOKENS / row["tokens_per_second"] for row in rows if row["tokens_per_second"]]
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    return times, losses[-1] if losses else float("nan")


def main() -> None:
    parser = Parser(__doc__)
    parser.option("--nanogpt", Path, "folder with a checkout of nanoGPT")
    parser.option("--text", Path, "file with tiny Shakespeare or another text")
    parser.option("--rounds", 4, "number of turns of each program for the speed")
    parser.option("--turn", 220, "number of steps of a turn")
    parser.option("--steps", 2000, "number of steps for the loss; 0: do not compare losses")
    parser.option("--rates", "", "learning rates at which AdamW and Muon train, as in 1e-3,2e-3; none by default")
    arguments = parser.parse_args()
    peer: list[float] = []
    ours: list[float] = []
    by_muon: list[float] = []
    figures: dict[str, Any] = {"text": arguments.text.name}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "peer").mkdir()
        lay_out_peer(arguments.nanogpt, arguments.text, folder / "peer")
        for turn in range(arguments.rounds):
            peer += run_peer(folder / "peer", arguments.turn, evaluate=False)[0][WARM_UP:]
            ours += run_ours(arguments.text, folder / f"turn-{turn}", arguments.turn, evaluate=False)[0][WARM_UP:]
            out = folder / f"muon-{turn}"
            by_muon += run_ours(arguments.text, out, arguments.turn, False, "--optim.name", "muon")[0][WARM_UP:]
        figures |= milliseconds({"nanogpt_ms": peer, "tpfuse_ms": ours, "tpfuse_muon_ms": by_muon})
        speedup = percentiles(peer)["median"] / percentiles(ours)["median"]
        figures["speedup"] = round(speedup, 3)
        print(
            f"step of {TOKENS} tokens: nanoGPT {figures['nanogpt_ms']}, tpfuse {figures['tpfuse_ms']}: {speedup:.2f}x;"
            f" with Muon {figures['tpfuse_muon_ms']}"
        )
        if arguments.steps:
            figures["steps"] = arguments.steps
            figures["nanogpt_val_loss"] = run_peer(folder / "peer", arguments.steps, evaluate=True)[1]
            ours_loss = run_ours(arguments.text, folder / "whole", arguments.steps, evaluate=True)[1]
            figures["tpfuse_val_loss"] = round(ours_loss, 4)
            print(f"validation loss: nanoGPT {figures['nanogpt_val_loss']}, tpfuse {figures['tpfuse_val_loss']}")
        for optimizer in ("adamw", "muon") if arguments.rates else ():
            losses = figures[f"{optimizer}_val_losses"] = {}
            for rate in arguments.rates.split(","):
                flags = "--optim.name", optimizer, "--optim.lr", rate, "--optim.min-lr", str(float(rate) / 10)
                out = folder / f"{optimizer}-{rate}"
                losses[rate] = round(run_ours(arguments.text, out, arguments.steps, True, *flags)[1], 4)
                print(f"{optimizer} at {rate}: validation loss {losses[rate]}", flush=True)
    print(f"kept in {write_row('nanogpt', figures, arguments.keep)}")


if __name__ == "__main__":
    main()
