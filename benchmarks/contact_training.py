"""The step speed_124m of `benchmarks.first_contact`: GPT-2 124M trained by tpfuse and by compiled torch, on one GPU.

Each row trains some steps of 192 sequences with one micro-batch: tpfuse's passes as one CUDA graph, the same launched
one by one, and the model in plain torch (`benchmarks.torch_gpt`) under torch.compile. That peer has nanoGPT's recipe:
float32 weights, bfloat16 autocast, fused AdamW, clipping, and a vocabulary padded to 50,304. All have the same initial
weights and the same batches. The loss of the first batch, computed in float32 by the peer without the compiler, is
what each row's first loss must agree with.

Before the first row stands the backend that torch's scaled_dot_product_attention chooses. The last rows are the best
micro-batch of each candidate, and a profile of the best graph: the time of each kernel, and the sum for each part of
the model.
"""

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from benchmarks.apart import Row, Rows, read
from benchmarks.contact_steps import TINY_GPT, Plan
from benchmarks.harness import OURS, conditions, percentiles
from benchmarks.torch_gpt import TorchGPT
from tpfuse.models.gpt_config import GPTConfig
from tpfuse.train.batches import Windows
from tpfuse.train.options import OptimOptions, ParallelOptions, TrainCommand, TrainOptions
from tpfuse.train.trainer import Trainer

STEP, LAUNCHED, PEER, BEST = "speed_124m", "launched", "nanoGPT compiled", "best micro-batches"
CANDIDATES = (OURS, LAUNCHED, PEER)
MICRO_BATCHES = (12, 24, 48, 64)
BATCH = 192  # sequences of a step: a multiple of each micro-batch
WARM_UP, STEPS = 6, 15  # steps that do not count, in which the graph is captured; and those that do
PADDED = 50304
_CLOSE = 0.02  # nats by which the first loss may differ: 47 more tokens have logits of 0, and bfloat16 rounds
_PROFILED = 2  # steps
_BUDGETED = 12 * 1024  # tokens: the profile's sums are given for a micro-batch of these
# The parts of the model, by names of kernels; the first that fits counts.
PARTS = {
    "attention": r"sdpa|fmha|flash|attention",
    "loss": r"cross_entropy|softmax|nll_loss",
    "norms": r"_norm_|layer_norm",
    "activation": r"gelu|activation_backward",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|addmm|::mm|splitK",
    "update": r"adamw|multi_tensor",
    "sums of rows": r"reduce|sum",
    "copies and additions": r"elementwise|vectorized|copy|add|fill|memcpy|memset|cat",
}


def cases() -> list[str]:
    """Return the names of the cases of the rows, for `benchmarks.figures`."""
    return [*(f"micro-batch {size}" for size in MICRO_BATCHES), BEST]


def _run(plan: Plan, micro_batch: int, graph: bool) -> tuple[TrainCommand, GPTConfig, Windows]:
    """Return the options, the model and the batches of a run; those of a rehearsal are tiny, in float32."""
    tiny = plan.rehearse
    config = TINY_GPT if tiny else GPTConfig()
    train = TrainOptions(
        steps=1000, batch=2 if tiny else BATCH, micro_batch=micro_batch, dtype="float32" if tiny else "bfloat16",
        cuda_graph="yes" if graph and not tiny else "no",
    )  # fmt: skip
    optim = OptimOptions(lr=6e-4, warmup=0, beta2=0.95, schedule="constant")
    options = TrainCommand(train=train, optim=optim, parallel=ParallelOptions(dp=1))
    count = np.arange(64 * config.n_positions * train.batch)
    tokens = ((count * 7 + count // 5) % config.vocab_size).astype(np.uint16)
    return options, config, Windows(tokens, config.n_positions, train.seed, "train", train.batch)


def _peer(trainer: Trainer, config: GPTConfig, tiny: bool) -> TorchGPT:
    """Return the model in plain torch with the weights of a trainer, in float32, its vocabulary padded by zeros."""
    padded = TINY_GPT.vocab_size + 1 if tiny else PADDED
    weights = {name: weight.detach().float() for name, weight in trainer.model.named_parameters()}
    table = weights["transformer.wte.weight"]
    weights["transformer.wte.weight"] = F.pad(table, (0, 0, 0, padded - len(table)))
    with trainer.device:
        model = TorchGPT(replace(config, vocab_size=padded))
    model.load(weights)
    return model


def _peer_step(trainer: Trainer, config: GPTConfig, windows: Windows, tiny: bool) -> Callable[[], float]:
    """Return a step of the compiled peer, which returns the loss. The trainer gives it the weights and the options."""
    options, device = trainer.options, trainer.device
    model = _peer(trainer, config, tiny)
    compiled = torch.compile(model, dynamic=False, backend="aot_eager" if tiny else "inductor")
    optimizer, done = model.optimizer(options.optim), 0
    size, batch = options.train.micro_batch or 1, options.train.batch

    def step() -> float:
        nonlocal done
        total = torch.zeros((), device=device)
        for cut in range(0, batch, size):
            ids, targets = windows.sequences(done, cut, cut + size, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=not tiny):
                loss = compiled(ids, targets) * (size / batch)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), options.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        return total.item()

    return step


def _step(plan: Plan, micro_batch: int, candidate: str) -> tuple[Callable[[], float], int, Callable[[], None]]:
    """Return a candidate's step, which returns the loss, the tokens of a step, and what frees its graph.

    The memory of the candidate before is freed first: nothing refers to it any more.
    """
    torch.compiler.reset()
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(plan.device)
    options, config, windows = _run(plan, micro_batch, graph=candidate == OURS)
    trainer = Trainer(options, config, None, plan.device)
    release = trainer.graph.release if trainer.graph is not None else lambda: None
    if candidate == PEER:
        return _peer_step(trainer, config, windows, plan.rehearse), trainer.tokens_per_step, release
    return lambda: trainer.train_step(windows, lambda: False).loss, trainer.tokens_per_step, release


def reference(plan: Plan) -> Row:
    """Return the loss of the first batch, computed in float32 without the compiler."""
    options, config, windows = _run(plan, 1, graph=False)
    model = _peer(Trainer(options, config, None, plan.device), config, plan.rehearse)
    batch, size = options.train.batch, 1 if plan.rehearse else 8
    with torch.no_grad():
        parts = [model(*windows.sequences(0, cut, cut + size, plan.device)) for cut in range(0, batch, size)]
    return {"loss": torch.stack(parts).mean().item()}


def sdp_backend(plan: Plan) -> Row:
    """Return the backend that torch chooses for the model's attention, as the note of a row."""
    q = torch.empty(1, 12, 1024, 64, dtype=torch.bfloat16, device=plan.device)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True))
    return {"note": f"scaled_dot_product_attention chooses {chosen.name}"}


def _speed(plan: Plan, micro_batch: int, candidate: str) -> Row:
    """Train, and return a row with one measurement. Its check is the first loss, and that the loss falls."""
    warm_up, steps = (1, 2) if plan.rehearse else (WARM_UP, STEPS)
    expected = [row["loss"] for row in read(plan.out) if row["step"] == STEP and "loss" in row]
    if not expected:
        return {"error": "there is no loss to compare with: the row reference has failed"}
    losses, seconds, on_gpu = [], [], plan.device.type == "cuda"
    step, tokens, release = _step(plan, micro_batch, candidate)
    try:
        for _ in range(warm_up + steps):
            started = perf_counter()
            losses.append(step())
            if on_gpu:
                torch.cuda.synchronize(plan.device)
            seconds.append(perf_counter() - started)
    finally:
        release()
    memory = torch.cuda.max_memory_allocated(plan.device) if on_gpu else None
    passed = abs(losses[0] - expected[-1]) < _CLOSE and losses[-1] < losses[0]
    times = percentiles([x * 1e6 for x in seconds[warm_up:]])
    measured = {"operator": STEP, "case": f"micro-batch {micro_batch}", "asked": True, "mode": "step"}
    measured |= {"candidate": candidate, "tokens": tokens, "peak_bytes": memory}
    measured |= {f"{key}_us": value for key, value in times.items()} if passed else {"error": f"losses {losses}"}
    return {"passed": passed, "losses": losses, "measurements": [measured | conditions()]}


def fastest(rows: Sequence[Row]) -> dict[str, Row]:
    """Return each candidate's measurement of its fastest micro-batch."""
    best: dict[str, Row] = {}
    for row in rows:
        for each in row.get("measurements", ()) if row["step"] == STEP else ():
            if "median_us" in each and each["case"] != BEST:
                name = each["candidate"]
                best[name] = min(each, best.get(name, each), key=lambda x: x["median_us"])
    return best


def _best(plan: Plan) -> Row:
    """Return the measurements of the fastest micro-batches once more, as one case."""
    found = [each | {"case": BEST, "of": each["case"]} for each in fastest(read(plan.out)).values()]
    rates = (f"{x['candidate']}, {x['of']}: {x['tokens'] / x['median_us'] * 1e6:,.0f} tokens/s" for x in found)
    return {"note": "; ".join(rates), "measurements": found}


def part_of(kernel: str) -> str:
    """Return the part of the model to which a kernel belongs."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel, re.I)), "other")


def parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part, from those of each kernel."""
    found: dict[str, float] = {}
    for kernel, each in seconds.items():
        found[part_of(kernel)] = found.get(part_of(kernel), 0.0) + each
    return found


def _profile(plan: Plan) -> Row:
    """Return the milliseconds of kernels and parts in a micro-batch of 12 x 1024 tokens, of the fastest graph."""
    best = fastest(read(plan.out))
    if OURS not in best:
        return {"error": "no graph has been timed"}
    size, on_gpu = int(best[OURS]["case"].split()[-1]), plan.device.type == "cuda"
    step, tokens, release = _step(plan, size, OURS)
    try:
        for _ in range(1 if plan.rehearse else WARM_UP):
            step()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            for _ in range(_PROFILED):
                step()
    finally:
        release()
    averages: Any = profiler.key_averages()
    took = {x.key: x.self_device_time_total if on_gpu else x.self_cpu_time_total for x in averages}
    scale = 1e-3 * _BUDGETED / tokens / _PROFILED
    took = {kernel: us * scale for kernel, us in sorted(took.items(), key=lambda x: -x[1])}
    sums = {part: round(ms, 3) for part, ms in sorted(parts(took).items(), key=lambda x: -x[1])}
    note = f"ms for 12 x 1024 tokens, {best[OURS]['case']}: {sum(sums.values()):.2f}: {sums}"
    return {"note": note, "parts": sums, "kernels": {name[:120]: round(ms, 4) for name, ms in list(took.items())[:60]}}


def speed_124m(plan: Plan, rows: Rows) -> None:
    """Make the rows of the step."""
    rows.each("attention", partial(sdp_backend, plan))
    rows.each("reference", partial(reference, plan))
    for size in (2,) if plan.rehearse else MICRO_BATCHES:
        for candidate in CANDIDATES:
            rows.each(f"micro-batch {size}, {candidate}", partial(_speed, plan, size, candidate))
    rows.each("best", partial(_best, plan))
    rows.each("profile", partial(_profile, plan))
