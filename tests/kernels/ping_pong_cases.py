"""Runs gemm_ping_pong as it is compiled for an H100, on the CPU; test_gemm_ping_pong.py starts it.

It reads a JSON list of works, [name of a function below, arguments …], and prints a line of JSON for each: what is
wrong with it, or "".
"""

import inspect
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpfuse.explore.fresh_modules import fresh
from tpfuse.explore.ptx import PtxError
from tpfuse.kernels import gemm_ping_pong, launch, ping_pong, ping_pong_epilogue, reference
from tpfuse.kernels.activations import GATED
from tpfuse.testing.inputs import normal
from tpfuse.tools.emulated import emulated
from tpfuse.tools.operator import check_rounding, gradients

# Options name what a call has besides x and weight, and what it does: "keep" the pre-activation, take the "gradient"
# of the activation. "columns": a weight whose columns have adjacent elements. "one": all tiles are one program's.
Options = list[str]


def _pre(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Tensor) -> Tensor:
    return reference.linear(x, weight, bias)


def plain(activation: str | None, options: Options, **inputs: Tensor) -> list[Tensor]:
    """Return what a call returns, computed by plain torch in the dtype of the inputs."""
    if "gradient" in options:
        grad = _pre(inputs["x"], inputs["weight"])
        return list(gradients(lambda x: reference.activation(x, activation), {"x": inputs["residual"]}, grad))
    kept = [_pre(**inputs)] if "keep" in options else []
    return [reference.linear(**inputs, activation_name=activation), *kept]


def _call(module: Any, activation: str | None, options: Options, **inputs: Tensor) -> list[Tensor]:
    if "gradient" in options:
        x, weight, beside = inputs["x"], inputs["weight"], inputs["residual"]
        return [module.gemm_ping_pong_gradient(x, weight.t(), beside, activation)]
    out, kept = module.gemm_ping_pong(**inputs, activation=activation, keep_preactivation="keep" in options)
    return [out] if kept is None else [out, kept]


def values(
    m: int,
    n: int,
    k: int,
    activation: str | None,
    dtype: str,
    *options: str,
    module: Any = gemm_ping_pong,
    seed: int | None = None,
    edit: Callable[[str], str] = str,
) -> str:
    """Compare the results of a call with float64. n: columns of the result."""
    kind, rows = getattr(torch, dtype), 2 * n if activation in GATED else n
    inputs = {"x": normal(1, m, k), "weight": normal(2, rows, k) * k**-0.5}
    inputs |= {"bias": normal(3, rows)} if "bias" in options else {}
    inputs |= {"residual": normal(4, m, n)} if {"residual", "gradient"} & {*options} else {}
    inputs = {name: x.to(kind) for name, x in inputs.items()}
    if "columns" in options:
        inputs["weight"] = inputs["weight"].t().contiguous().t()
    rounded = plain(activation, [*options], **inputs)
    exact = plain(activation, [*options], **{name: x.double() for name, x in inputs.items()})
    with emulated("sm_90", edit=edit, seed=seed):
        if "one" in options:
            launch._gpus[torch.device("cpu")] = "sm_90", 1
        try:
            results = _call(module, activation, [*options], **inputs)
            for number, (actual, *both) in enumerate(zip(results, rounded, exact, strict=True)):
                check_rounding(f"output {number}", actual, *both)
        except (AssertionError, PtxError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def planted(old: str, new: str, number: int, work: list[Any]) -> str:
    """Run a work with copies of the modules, in one of which the occurrence `number` of a text is replaced."""
    sources = {module.__name__: inspect.getsource(module) for module in (ping_pong, ping_pong_epilogue)}
    names = [name for name, source in sources.items() if old in source]
    parts = sources[names[0]].split(old) if len(names) == 1 else []
    if len(parts) < number + 2:
        return f"{old!r} is not in one source {number + 1} times"
    changed = old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])
    with fresh([ping_pong, ping_pong_epilogue, gemm_ping_pong], {names[0]: changed}) as copies:
        return values(*work, module=copies[2])


def without(pattern: str, number: int, work: list[Any]) -> str:
    """Run a work without one of the places of its PTX that match a pattern."""

    def edited(text: str) -> str:
        found = list(re.finditer(pattern, text))[number]
        return text[: found.start()] + text[found.end() :]

    return values(*work, edit=edited)


def orders(seeds: int, work: list[Any]) -> str:
    """Run a work with warps in several orders."""
    return "\n".join(filter(None, (values(*work, seed=seed) for seed in range(seeds))))


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for name, *arguments in json.load(sys.stdin):
        print(json.dumps(globals()[name](*arguments)), flush=True)
