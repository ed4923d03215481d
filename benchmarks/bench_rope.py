"""rope of queries and keys beside plain torch, eager and compiled, forward and backward.

    python -m benchmarks.bench_rope --quick

One call rotates both; plain torch multiplies by float32 tables and rounds once, as ours does.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.contenders import Operator, compiled, fresh_compiler
from benchmarks.harness import OURS, Case, Scale, Stage, Work, command
from benchmarks.timing import Contender
from tpfuse.kernels import reference
from tpfuse.ops.rope import rope

EAGER, COMPILED = "plain torch", "torch.compile"
Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _tables(positions: int, size: int, stage: Stage) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, size / 2] of Llama's angles."""
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=stage.device) / size)
    angles = torch.arange(positions, device=stage.device).unsqueeze(1) * rates
    return angles.cos(), angles.sin()


def _contenders(pair: Pair, name: str, q: Tensor, k: Tensor, grads: tuple[Tensor, Tensor]) -> list[Contender]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]

    def forward(_: object) -> tuple[Tensor, Tensor]:
        return pair(leaves[0], leaves[1])

    def backward(out: tuple[Tensor, Tensor]) -> object:
        return torch.autograd.grad(out, leaves, grads)

    return [Contender(name, forward), Contender(name, backward, prepare=lambda: forward(None))]


def _build(b: int, t: int, h: int, hk: int, d: int, stage: Stage) -> tuple[Callable[[], dict[str, str]], list[Work]]:
    tables, positions = _tables(t, d, stage), torch.arange(t, device=stage.device)

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, *tables, positions)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rope(q, *tables, positions), reference.rope(k, *tables, positions)

    fresh_compiler()
    pairs: dict[str, Pair] = {OURS: ours, EAGER: plain, COMPILED: compiled(plain, stage)}
    q, k = stage.normal(b, t, h, d), stage.normal(b, t, hk, d)
    grads = stage.normal(b, t, h, d), stage.normal(b, t, hk, d)
    check = Operator(
        inputs={"q": q, "k": k},
        grad=torch.cat(grads, dim=2),
        reference=_joined(plain),
        functions={name: _joined(pair) for name, pair in pairs.items()},
        costs={},
    ).check
    made = [_contenders(pair, name, q, k, grads) for name, pair in pairs.items()]
    moved = 2 * (q.nbytes + k.nbytes) + tables[0].nbytes + tables[1].nbytes
    modes = zip(("forward", "backward"), zip(*made, strict=True), strict=True)
    return check, [Work(mode, 0.0, moved, contenders) for mode, contenders in modes]


def _joined(pair: Pair) -> Callable[..., Tensor]:
    """Both results as one tensor, for the check."""

    def run(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(pair(q, k), dim=2)

    return run


def cases(scale: Scale) -> list[Case]:
    """The models that have it."""
    if scale == "tiny":
        return [Case("rope", "tiny", partial(_build, 1, 12, 2, 1, 16), True)]
    sizes = {"7b tp1": (2, 4096, 32, 32, 128)}
    if scale == "all":
        sizes |= {"7b tp4": (2, 4096, 8, 8, 128), "70b tp1": (2, 4096, 64, 8, 128), "70b tp8": (2, 4096, 8, 1, 128)}
    names = {name: "B {}, T {}, H {}/{}, D {}".format(*size) for name, size in sizes.items()}
    return [Case("rope", f"{name}, {names[name]}", partial(_build, *size)) for name, size in sizes.items()]


if __name__ == "__main__":
    sys.exit(command("rope", cases))
