"""Activation checkpointing: tensors that a backward pass needs are computed again instead of being kept.

| recompute | kept of a transformer block                 | computed again                                          |
|-----------|---------------------------------------------|---------------------------------------------------------|
| none      | everything that its operators save          | nothing                                                 |
| selective | all but results of attention and activation | attention, from q, k, v; the activation, from its input |
| full      | its input                                   | the block, with its communication                       |

`selective` (arXiv:2205.05198, section 5, for attention) drops tensors that take much memory and little arithmetic: no
product with a weight is computed twice. A linear layer after attention, or after an activation, saves its input for the
weight's gradient; `recomputed` takes that input from the same recomputation.

The module uses torch.utils.checkpoint without reentrance. Random states are not restored: our dropout is a function of
(seed, step, site) and has none. Ranks communicate again in the same order, since they run the same backward pass.
Gradients are the same to the bit. Each pass that computes only some gradients recomputes for itself, except that passes
without an operator in common recompute once in a `torch.utils.checkpoint.GraphExecGroup`.

Under torch.compile `recomputed` does nothing: the compiler chooses what its graph keeps of pointwise operators, and
hooks on saved tensors do not work in its graphs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tpfuse.choices import Recompute as Recompute
from tpfuse.ops.autograd import apply

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


def check_recompute(name: str) -> None:
    """Raise ValueError, which lists the known names, for an unknown name."""
    if name not in RECOMPUTE:
        raise ValueError(f"recompute {name!r}: expected one of {', '.join(RECOMPUTE)}")


def recomputed_whole(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return function(*inputs); only the inputs are kept for a backward pass."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return _checkpoint(function, *inputs)


def recomputed(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], use: Callable[[Tensor], Tensor]) -> Tensor:
    """Return use(function(*inputs)); the inputs are kept, but neither the tensors that `function` saves nor its result.

    function: may also use parameters and constants, and may communicate; it runs once more in the backward pass, when
    `use` first needs its input. use: tensors that it saves are not kept if they share the result's storage; a copy (in
    another dtype, under autocast) is kept.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return use(function(*inputs))
    result = _checkpoint(partial(_held, function), *inputs)
    if result.grad_fn is None:
        return use(result)
    regained, storage = _Regained(result.grad_fn), result.untyped_storage().data_ptr()

    def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
        if not x.numel() or x.untyped_storage().data_ptr() != storage:
            return x
        regained.views += 1
        return partial(regained.view, x.shape, x.stride(), int(x.storage_offset()))

    with saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, Tensor) else packed()):
        return use(result)


class _Regained:
    """The recomputed result. The node of `_Hold` starts the recomputation; the last view to be taken releases it."""

    def __init__(self, node: Node) -> None:
        self._node, self._held, self._given = node, torch.empty(0), 0
        self.views = 0  # the number that a backward pass of all gradients takes; after one of some, the result stays

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        if not self._given:
            (self._held,) = self._node.saved_tensors  # type: ignore[attr-defined]
        self._given = (self._given + 1) % self.views
        held = self._held.detach()
        if not self._given:
            self._held = torch.empty(0)
        return held.as_strided(shape, stride, offset)


class _Hold(Function):
    """The identity, which saves its input: checkpoint's hooks do not keep it but compute it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _held(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return apply(_Hold, function(*inputs))


def _checkpoint(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return cast(Tensor, checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False))
