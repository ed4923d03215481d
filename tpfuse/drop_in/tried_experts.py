"""Experts with stacked weights, as they are and as the ranks would run their parts (`tpfuse.drop_in.proof`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from tpfuse.drop_in.experts import ExpertShards
from tpfuse.drop_in.sketch import agree, apart, first_input, largest_value, line_of
from tpfuse.drop_in.tried_block import ModuleCall

_FEATURES = 5  # of a token, in the place of the true number: stacked weights have no stand-ins


def try_experts(module: nn.Module, shards: ExpertShards, calls: Sequence[ModuleCall], ranks: int) -> None:
    """Raise NotImplementedError unless the outputs of the ranks' parts, and their gradients, add up to those of all.

    calls: those of the module when the model ran; the first one says how many tokens there are, and their experts. The
    weights are random, with two inner features for each rank.
    """
    generator = torch.Generator().manual_seed(2)
    call, entering = calls[0], dict[str, Tensor]()
    given = first_input(call.args, call.kwargs)

    def enter(name: str, x: Tensor) -> Tensor:
        entering[name] = x.detach().clone().requires_grad_()
        return entering[name]

    def input_of(x: Tensor) -> Tensor:
        x = torch.randn((*x.shape[:-1], _FEATURES), generator=generator, dtype=x.dtype) if x is given else x
        return enter(f"input {len(entering)}", x) if x.is_floating_point() else x

    with apart():
        inputs = tree_map_only(Tensor, input_of, (call.args, call.kwargs))
        whole = {name: enter(name, torch.randn(shape, generator=generator, dtype=given.dtype))
                 for name, shape in shards.small(module, _FEATURES, 2 * ranks).items()}  # fmt: skip
        expected = _run(module, shards, whole, inputs)
        total = torch.zeros_like(expected)
        for rank in range(ranks):
            total = total + _run(module, shards, _of_rank(shards, whole, rank, ranks), inputs)
        agree("its output", total, expected, largest_value(expected))
        seed, leaves = torch.randn(expected.shape, generator=generator, dtype=expected.dtype), list(entering.values())
        both = [torch.autograd.grad(out, leaves, seed, materialize_grads=True) for out in (expected, total)]
    for name, gradient, found in zip(entering, *both, strict=True):
        agree(f"the gradient of {name}", found, gradient, largest_value(gradient))


def _of_rank(shards: ExpertShards, whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the parameters as the forward of a rank reads them."""
    parts = {name: x if dim is None else x.view(shape).chunk(ranks, dim)[rank]
             for name, x in whole.items() for dim, shape in (shards.layout(name, x.shape),)}  # fmt: skip
    return shards.used(parts, rank)


def _run(module: nn.Module, shards: ExpertShards, parameters: dict[str, Tensor], inputs: Any) -> Tensor:
    """Return the output of the experts with other parameters. Raise NotImplementedError if it is no tensor."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, inputs)  # foreign code may change them in place
    sizes = {name: x for name, x in vars(module).items() if type(x) is int and x == shards.features}
    try:
        vars(module).update(dict.fromkeys(sizes, _FEATURES))
        out: Any = functional_call(module, parameters, args, kwargs)
    except Exception as error:  # any code may raise anything
        raise NotImplementedError(f"its experts cannot be tried: {line_of(error)}") from None
    finally:
        vars(module).update(sizes)
    if not isinstance(out, Tensor):
        raise NotImplementedError(f"its experts return a {type(out).__name__}: expected a tensor")
    return out
