"""The step host of `benchmarks.first_contact`: the host's time for a layer of GPT-2, launched, beside eager torch.

tpfuse's GPT and the same model in plain torch (`benchmarks.torch_gpt`), both in bfloat16, compute forward and backward
passes of one short sequence, alternately. Nothing is captured or compiled. The clock runs from the first launch to the
last one; the device is waited for between two passes, outside of the clock, so that its queue never fills. The time of
a layer is the difference between models of few and of many layers, divided by the number of layers between them: what
belongs to the embeddings and the loss cancels.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

from benchmarks.apart import Row, Rows
from benchmarks.contact_steps import Plan
from benchmarks.harness import OURS
from benchmarks.torch_gpt import TorchGPT
from tpfuse.models.gpt import GPT, GPTConfig

TORCH = "torch"
WIDTHS = (256, 768)
FEW, MANY = 2, 8  # layers: the launches of a pass of MANY fit the device's queue
TOKENS, VOCABULARY, HEAD = 64, 512, 64
WARM_UP, ROUNDS = 5, 60

Pass = Callable[[], torch.Tensor]


def host(plan: Plan, rows: Rows) -> None:
    """Make a row for each width."""
    for width in (HEAD,) if plan.rehearse else WIDTHS:
        rows.each(f"width {width}", partial(time_width, plan, width))


def time_width(plan: Plan, width: int) -> Row:
    """Return each candidate's microseconds of the host for a layer, and tpfuse's as a share of torch's."""
    passes = {
        (name, layers): _forward(name, _config(width, layers), plan.device)
        for name in (OURS, TORCH)
        for layers in (FEW, MANY)
    }
    times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in passes}
    warm_up, rounds = (1, 2) if plan.rehearse else (WARM_UP, ROUNDS)
    for turn in range(warm_up + rounds):
        for key, forward in passes.items():
            seconds = _timed(forward, plan.device)
            if turn >= warm_up:
                times[key].append(seconds)
    found = {name: _of_a_layer(times[name, FEW], times[name, MANY]) for name in (OURS, TORCH)}
    ours, peer = (sum(found[name].values()) for name in (OURS, TORCH))
    return {"asked": "at most 1.0", "ratio": round(ours / peer, 3), "us_for_a_layer": found, "rounds": rounds}


def _config(width: int, layers: int) -> GPTConfig:
    return GPTConfig(VOCABULARY, TOKENS, width, layers, width // HEAD, dropout=0.0)


def _forward(name: str, config: GPTConfig, device: torch.device) -> Pass:
    """Return the forward pass of a candidate, whose gradients are dropped before each call."""
    half, ids = torch.bfloat16, torch.arange(TOKENS, device=device).view(1, TOKENS)
    model = GPT(config, dtype=half, device=device) if name == OURS else TorchGPT(config).to(device, half)
    loss_weight = {"loss_weight": 1 / TOKENS} if name == OURS else {}
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def forward() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(ids, ids, **loss_weight)
        return loss

    return forward


def _timed(forward: Pass, device: torch.device) -> tuple[float, float]:
    """Return the host's seconds for a forward and for a backward pass."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    loss = forward()
    between = perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    return between - start, perf_counter() - between


def _of_a_layer(few: list[tuple[float, float]], many: list[tuple[float, float]]) -> dict[str, float]:
    """Return the microseconds of one layer, from the medians of models of FEW and MANY layers."""
    pairs = zip(("forward", "backward"), zip(*few, strict=True), zip(*many, strict=True), strict=True)
    return {name: round(1e6 * (median(more) - median(less)) / (MANY - FEW), 1) for name, less, more in pairs}
