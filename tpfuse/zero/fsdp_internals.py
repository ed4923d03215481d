"""All that stage 3 uses of torch's `fully_shard` and that is not public.

Each function says what torch has no public way for. `tests/zero/test_fsdp_internals.py` has a test for each, which says
what a newer torch has changed. `FROM_2_13` tells older torches, down to 2.11, which lack public methods.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from tpfuse.comm.layout import local_tensor

FROM_2_13 = hasattr(FSDPModule, "reset_iter_state")  # and set_reduce_scatter_unused_params


def _group(unit: FSDPModule) -> Any:
    """Return the object that gathers and reduces the parameters of a unit; None if the unit has none of its own."""
    return fully_shard.state(unit)._fsdp_param_group  # type: ignore[attr-defined]


def _parameters(unit: FSDPModule) -> dict[Parameter, Any]:
    """Return the objects that `fully_shard` has for the parameters of a unit, by their shards."""
    group = _group(unit)
    return {} if group is None else {parameter.sharded_param: parameter for parameter in group.fsdp_params}


def around_gather(unit: FSDPModule, call: Callable[..., None]) -> None:
    """Let `fully_shard` call `call(gather, async_op)` where it calls `gather(async_op)`, which does nothing if it may.

    Module hooks do not run before a backward pass, in which a unit is gathered again, and before units that are
    gathered ahead; a custom all-gather is called after the shards were read.
    """
    if (group := _group(unit)) is not None:
        group.unshard = partial(call, partial(type(group).unshard, group))


def around_reduce(unit: FSDPModule, call: Callable[..., None]) -> None:
    """Let `fully_shard` call `call(reduce)` where it calls `reduce()`, when a backward pass is done with a unit.

    Hooks of the shards that run after a gradient is accumulated would make copies to the host block, and autograd runs
    them too.
    """
    if (group := _group(unit)) is not None:
        group.post_backward = partial(call, partial(type(group).post_backward, group))


def free(unit: FSDPModule) -> None:
    """Free the gathered parameters of a unit, also those that were gathered ahead and those that its forward pass uses.

    `FSDPModule.reshard` does nothing in both cases.
    """
    if (group := _group(unit)) is not None:
        group.wait_for_unshard()
        group._to_sharded()


def end_backward(root: FSDPModule) -> None:
    """Do what `fully_shard` does at the end of a backward pass; torch's pipelines call this too."""
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def padded_shards(unit: FSDPModule) -> dict[Parameter, Tensor]:
    """Return what this rank sends when a unit is gathered: each shard with its padding, flat."""
    return {shard: parameter._sharded_param_data for shard, parameter in _parameters(unit).items()}


def move_shard(unit: FSDPModule, shard: Parameter, padded: Tensor) -> None:
    """Let `padded`, flat, be the memory of a shard with its padding; `module.to()` would copy it elsewhere."""
    local = local_tensor(shard)
    _parameters(unit)[shard]._sharded_param_data = padded
    cast(DTensor, shard)._local_tensor = from_dlpack(padded[: local.numel()].view(local.shape))  # as `move_` does


def whole_gradients(unit: FSDPModule) -> dict[Parameter, Tensor | None]:
    """Return the gradients of passes that were not reduced, by shards: those of half types that wait in float32."""
    return {shard: parameter.unsharded_accumulated_grad for shard, parameter in _parameters(unit).items()}


def set_whole_gradients(unit: FSDPModule, gradients: Mapping[Parameter, Tensor | None]) -> None:
    """Replace what `whole_gradients` returns. `reset_iter_state` leaves it."""
    for shard, parameter in _parameters(unit).items():
        parameter.unsharded_accumulated_grad = gradients[shard]


def complete_gradients(unit: FSDPModule, gathered: Mapping[Parameter, Parameter]) -> None:
    """Let parameters of a unit whose gradients wait in float32 have zeros there if they took no part.

    `fully_shard` reduces gradients of one dtype, and those of the next pass are in that of the parameters. gathered: by
    shards.
    """
    found = whole_gradients(unit)
    dtype = next((gradient.dtype for gradient in found.values() if gradient is not None), None)
    if dtype is not None:
        for shard, gradient in found.items():
            if gradient is None and shard.requires_grad:
                found[shard] = torch.zeros_like(gathered[shard], dtype=dtype)
        set_whole_gradients(unit, found)
