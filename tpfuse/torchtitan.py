"""tpfuse's products in models of torchtitan 0.3: `--override.imports tpfuse.torchtitan.linear`.

torchtitan gathers a sequence before the column-parallel layers of attention and feed-forward, and scatters the sum
after the row-parallel ones. `linear` replaces the configurations of these layers, so that both run inside of the
products. Parameters, their shards, initial values, checkpoints and FSDP stay torchtitan's.

| torchtitan's                                              | tpfuse's product      |
|-----------------------------------------------------------|-----------------------|
| `wqkv`, or `wq`, `wk` and `wv`, of a GQAttention          | all_gather_linear     |
| `w1` and `w3` of a FeedForward                            | all_gather_linear     |
| row-parallel Linear without a bias, such as `wo` and `w2` | linear_reduce_scatter |
| the same without sequence parallelism                     | linear_all_reduce     |

A class derived from these, as those of LoRA and quantization are, stays torchtitan's, and so does every other layer.
"""

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchtitan import __version__
from torchtitan.config import derive, override
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
from torchtitan.models.common.decoder_sharding import (
    TP,
    colwise_config,
    dense_activation_placement,
    dense_sequence_parallel_placement,
    rowwise_config,
)
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.logging import logger

from tpfuse.layers.sequence import sequence_back, sequence_first
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter


@functools.cache
def _warn_of_one_rank() -> None:
    logger.warning("tpfuse.torchtitan.linear: tensor_parallel_degree is 1: the layers have nothing to fuse")


class OnTensorParallelRanks(Module):
    """A module of torchtitan that knows the group of its tensor-parallel ranks; None for one rank."""

    group: dist.ProcessGroup | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Take the group, and shard as torchtitan does."""
        mesh = parallel_dims.get_optional_mesh("tp")
        self.group = None if mesh is None else mesh.get_group()
        if mesh is None:
            _warn_of_one_rank()
        super().parallelize(parallel_dims)

    def gathered(self, x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
        """Return the outputs [B, T, this rank's features] of layers that read the same shard x [B, T / ranks, K]."""
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        with spmd.no_typecheck():
            gathered = all_gather_linear(sequence_first(x, 1), weights, biases, self.group)
            outs = tuple(sequence_back(out, 1) for out in gathered)
        if spmd.is_type_checking():
            for out in outs:
                spmd.assert_type(out, dense_activation_placement(tp=spmd.S(-1)).axis_types)
        return outs


class GatheringFusedQKVLinear(OnTensorParallelRanks, FusedQKVLinear):
    """torchtitan's packed projection of queries, keys and values, with the gather in the product."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        """That of the class that it extends."""

    @spmd.no_typecheck(out_types=(dense_activation_placement(tp=spmd.S(2)).axis_types,) * 3)
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [B, T, this rank's heads, head_dim] for x [B, T / ranks, dim]."""
        (out,) = self.gathered(x, self.wqkv)
        heads = out.view(*out.shape[:-1], -1, self.r_dim, self.head_dim)
        parts = torch.split(heads, [self.heads_per_kv, 1, 1], dim=-2)
        return tuple(part.flatten(2, 3).contiguous() for part in parts)


class GatheringQKVLinear(OnTensorParallelRanks, QKVLinear):
    """torchtitan's three projections of queries, keys and values, which share one gather in their products."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """That of the class that it extends."""

    @spmd.no_typecheck(out_types=(dense_activation_placement(tp=spmd.S(2)).axis_types,) * 3)
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [B, T, this rank's heads, head_dim] for x [B, T / ranks, dim]."""
        return tuple(
            out.view(*out.shape[:-1], -1, self.head_dim) for out in self.gathered(x, self.wq, self.wk, self.wv)
        )


class GatheringFeedForward(OnTensorParallelRanks, FeedForward):
    """torchtitan's SwiGLU, whose first two layers share one gather in their products."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """That of the class that it extends."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of `w2` for x [B, T / ranks, dim]."""
        gate, up = self.gathered(x, self.w1, self.w3)
        return cast(Tensor, self.w2(F.silu(gate) * up))


class SummingLinear(OnTensorParallelRanks, Linear):
    """torchtitan's row-parallel Linear with the sum over the ranks in the product."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """scatter: whether the output is this rank's shard of the sequence, [B, T / ranks, out_features]."""

        scatter: bool

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scatter = config.scatter

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of the products of all ranks' features [B, T, in_features / ranks]."""
        with spmd.no_typecheck():
            if not self.scatter:
                return linear_all_reduce(input, self.weight, None, self.group)
            return sequence_back(linear_reduce_scatter(sequence_first(input, 1), self.weight, None, self.group), 1)


# The module whose input torchtitan gathers: (the input, the field with its layers, or "" for itself).
_GATHERED = {GQAttention.Config: ("x_BLD", "qkv_linear"), FeedForward.Config: ("x", "")}
# Modules that hold the column-parallel layers: (the class in their place, the fields of the layers).
_GATHERING = {
    FusedQKVLinear.Config: (GatheringFusedQKVLinear.Config, ("wqkv",)),
    QKVLinear.Config: (GatheringQKVLinear.Config, ("wq", "wkv")),
    FeedForward.Config: (GatheringFeedForward.Config, ("w1", "w3")),
}


def _put(parent: Any, field: Any, config: Any) -> None:
    """Set a field of a configuration, or an entry of a list."""
    if isinstance(parent, list):
        parent[field] = config
    else:
        setattr(parent, field, config)


def _take_rows(name: str, config: Any, parent: Any, field: Any) -> dict[str, str]:
    """Replace a row-parallel layer. Return {its name: the operator}, or nothing if it is left as it is."""
    for scatter, operator in ((True, "linear_reduce_scatter"), (False, "linear_all_reduce")):
        if config.sharding_config == rowwise_config(output_sp=scatter) and not config.bias:
            out = config.sharding_config.out_dst_shardings
            sharding = ShardingConfig(state_shardings=config.sharding_config.state_shardings, out_src_shardings=out)
            _put(parent, field, derive(config, SummingLinear.Config, scatter=scatter, sharding_config=sharding))
            return {name: operator}
    return {}


def _take_columns(name: str, config: Any, parent: Any, field: Any) -> dict[str, str]:
    """Replace the column-parallel layers that read the gathered input of a module, as `_take_rows` does."""
    argument, inner = _GATHERED[type(config)]
    shard = {argument: dense_sequence_parallel_placement()}
    gather = ShardingConfig(in_src_shardings=shard, in_dst_shardings={argument: dense_activation_placement(tp=spmd.R)})
    holder = getattr(config, inner) if inner else config
    gathering, fields = _GATHERING.get(type(holder), (None, ()))
    layers = [getattr(holder, each) for each in fields]
    fits = all(type(each) is Linear.Config and each.sharding_config == colwise_config() for each in layers)
    if gathering is None or not fits or config.sharding_config != gather:
        return {}
    config.sharding_config = ShardingConfig(in_src_shardings=shard)
    where, at = (config, inner) if inner else (parent, field)
    _put(where, at, derive(holder, gathering))
    return {".".join(filter(None, (name, inner, each))): "all_gather_linear" for each in fields}


def _reason(config: Any) -> str:
    """Return why a layer is left as it is."""
    if type(config) is not Linear.Config:
        return f"a {type(config)._owner.__name__}"
    weight = getattr(config.sharding_config, "state_shardings", {}).get("weight")
    held = None if weight is None else weight.axis_types.get(TP)
    if held == spmd.S(0):
        return "column-parallel on a whole input, or in a class that tpfuse does not know"
    return "row-parallel with a bias or another output" if held == spmd.S(1) else "not divided among ranks"


@override(target=BaseModel.Config, description="products of tpfuse that gather and scatter the sequence")
def linear(config: Any) -> Any:
    """Replace the column- and row-parallel layers of a model's configuration, and log a line for each kind of layer.

    A line has the names of layers with * for their numbers, how many there are, and what communicates for them or why
    they are torchtitan's own. torchtitan calls this before it builds the model. Return the configuration itself, as the
    trainer builds the object that it had before. Raise ValueError for another release of torchtitan, whose layers may
    compute otherwise, and for a backend other than "spmd_types", whose parameters are no plain tensors.
    """
    backend = get_spmd_backend()
    if not __version__.startswith("0.3.") or backend != "spmd_types":
        found = f"torchtitan {__version__} with parallelism.spmd_backend {backend!r}"
        raise ValueError(f"tpfuse.torchtitan.linear: {found}: expected torchtitan 0.3 with 'spmd_types'")
    taken: dict[str, str] = {}
    for kind in _GATHERED:
        for node in [*config.traverse(kind)]:
            if type(node[1]) is kind:
                taken |= _take_columns(*node)
    layers = [*config.traverse(Linear.Config)]
    for node in layers:
        if type(node[1]) is Linear.Config:
            taken |= _take_rows(*node)
    said = {name: taken.get(name) or f"torchtitan's own: {_reason(layer)}" for name, layer, _, _ in layers}
    kinds = Counter((re.sub(r"\.\d+\.", ".*.", name), what) for name, what in said.items())
    logger.info(f"tpfuse.torchtitan.linear took {len(taken)} of {len(said)} linear layers:")
    for (name, what), count in kinds.items():
        logger.info(f"  {name} ({count}): {what}")
    return config
