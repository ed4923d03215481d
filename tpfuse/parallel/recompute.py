"""Activation checkpointing: what a backward pass needs is computed again instead of being kept.

| recompute | kept of a block                            | computed again                                              |
|-----------|--------------------------------------------|-------------------------------------------------------------|
| none      | all that its operators save                | nothing                                                     |
| selective | all but what attention and activation made | attention, from q, k, v; the activation, from its input     |
| full      | its input                                  | the block, communication included                           |

`selective` (arXiv:2205.05198, section 5, for attention) drops what costs much memory and little arithmetic: no product
with a weight is done twice. A linear layer behind attention, or behind an activation, saves its input for the weight's
gradient, and would keep alive what is to be dropped; `recomputed` takes that input from the same recomputation.

All of it is torch.utils.checkpoint without reentrance. Random states are not restored: our dropout is a function of
(seed, step, site) and has none. Ranks run the same backward pass in the same order, and so communicate again in the
same order too. Gradients are the same to the bit.

Under torch.compile `recomputed` does nothing: what is kept of pointwise operators and of its own graph is the
compiler's choice, and hooks on saved tensors are not for its graphs.
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
    """Raises ValueError, listing the names there are, for one that is not among them."""
    if name not in RECOMPUTE:
        raise ValueError(f"recompute {name!r}: expected one of {', '.join(RECOMPUTE)}")


def recomputed_whole(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), of which the inputs alone are kept where there will be a backward pass."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return _checkpoint(function, *inputs)


def recomputed(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], use: Callable[[Tensor], Tensor]) -> Tensor:
    """use(function(*inputs)), where neither what `function` saves nor its result is kept, but the inputs are.

    function: of parameters and constants besides, may communicate; runs once more in the backward pass, when `use`
    first asks for its input. use: what it saves of the result's storage is not kept; what it saves of a copy (in
    another dtype, under autocast) is.
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

    with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept()):
        return use(result)


class _Regained:
    """The result once more, from the recomputation that the node of `_Hold` asks for; let go when all have had it."""

    def __init__(self, node: Node) -> None:
        self._node, self._held, self._given = node, torch.empty(0), 0
        self.views = 0  # that will be asked for in a backward pass

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        if not self._given:
            (self._held,) = self._node.saved_tensors  # type: ignore[attr-defined]
        self._given = (self._given + 1) % self.views
        held = self._held.detach()
        if not self._given:
            self._held = torch.empty(0)
        return held.as_strided(shape, stride, offset)


class _Hold(Function):
    """The identity, which saves its input where checkpoint's hooks make that a promise to compute it again."""

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
