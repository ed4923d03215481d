"""Experts whose weights are stacked in tensors [experts, rows, columns], with their inner features divided over ranks.

Every rank has a part of each expert and computes it for all tokens, so no token is sent to another rank. The forward of
the experts' own class runs on this rank's part of the weights, with any of transformers' implementations that reads the
sizes of the weights. Its outputs are parts of a sum over the ranks, and so are the gradients of what it is given: of
the tokens and of the routing weights. A bias that is added behind the inner features counts on the first rank alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import rank_and_size
from tpfuse.drop_in.converted import Converted, LocalConfig
from tpfuse.drop_in.shards import with_summed_gradients
from tpfuse.layers.explain import LayerPlan
from tpfuse.layers.local_parameter import local
from tpfuse.ops.collectives import all_reduce, replicate

# (the weights in, the weight out); a bias has the name of its weight and "_bias"
_STACKED = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
)
# (the dimension of the inner features in weights in, that in the weight out, the matrices packed in a weight in)
_WAYS = ((1, 2, 2), (2, 1, 2), (1, 2, 1), (2, 1, 1))
# transformers' implementations that compute with weights of any size; None: a class has one of its own
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", None)


@dataclass(frozen=True)
class ExpertShards:
    """How the stacked parameters of experts are divided.

    sharded: (name, dimension, parts) of those with inner features; parts: the number of matrices that lie one after
    another in the dimension, each of which is divided. once: the names of those that the sum over the ranks has once.
    experts, features, inner: the sizes of the whole.
    """

    sharded: tuple[tuple[str, int, int], ...]
    once: tuple[str, ...]
    experts: int
    features: int
    inner: int

    def layout(self, name: str, shape: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Return (the dimension to shard, None for none; the shape to view it in first) of a parameter of `shape`."""
        for each, dim, parts in self.sharded:
            if each == name:
                packed = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
                return (dim + 1, packed) if parts > 1 else (dim, tuple(shape))
        return None, tuple(shape)

    def attributes(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        """Return the attributes that the experts need on a rank: they loop where grouped products refuse its features.

        These need rows of multiples of 16 bytes, and autocast may convert weights to two bytes an element.
        """
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) != "grouped_mm" or self.inner // mesh.size() % 8 == 0:
            return {}
        return {"config": LocalConfig(config, _experts_implementation="eager")}

    def small(self, module: nn.Module, features: int, inner: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the parameters would have with other numbers of features."""
        dims = {name: dim for name, dim, _ in self.sharded}
        return {
            name: (
                x.shape[0],
                *(x.shape[i] * inner // self.inner if dims.get(name) == i else features for i in range(1, x.ndim)),
            )
            for name, x in module.named_parameters()
        }

    def used(self, shards: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return the parameters as the forward of a rank reads them. shards: in the shapes of `layout`."""
        used = {name: shards[name] * (rank == 0) for name in self.once}
        for name, dim, parts in self.sharded:
            used[name] = shards[name].flatten(dim, dim + 1) if parts > 1 else shards[name]
        return used


def expert_shards(module: nn.Module) -> Iterator[ExpertShards]:
    """Yield the ways in which the names and sizes of a module's parameters let them be divided: of no experts, none."""
    own = {name: tuple(x.shape) for name, x in module.named_parameters()}
    for weights, out in _STACKED:
        if any(len(own.get(name, ())) != 3 for name in (*weights, out)):
            continue
        for dim, out_dim, parts in _WAYS:
            experts, inner, features = own[out][0], own[out][out_dim], own[out][3 - out_dim]
            rows = own[weights[0]][dim]
            shape = (experts, rows, features) if dim == 1 else (experts, features, rows)
            expected = {**dict.fromkeys(weights, shape), out: own[out]}
            biases = [name for name in weights if f"{name}_bias" in own]
            expected |= {f"{name}_bias": (experts, rows) for name in biases}
            once = (f"{out}_bias",) if f"{out}_bias" in own else ()
            expected |= dict.fromkeys(once, (experts, features))
            if own == expected and rows in (inner, 2 * inner) and rows % (parts * inner) == 0:
                divided = [(name, dim, parts) for name in weights]
                divided += [(f"{name}_bias", 1, parts) for name in biases]
                yield ExpertShards((*divided, (out, out_dim, 1)), once, experts, features, inner)


class ShardedExperts(Converted):
    """Experts that compute with this rank's part of their inner features. `combined_class` makes an instance's class.

    Their inputs and their output are whole on every rank, and so are the gradients of both.
    """

    shards: ExpertShards

    def explained(self, name: str) -> LayerPlan:
        out, *_ = self.shards.sharded[-1]
        part = tuple(local_tensor(self._parameters[out]).shape)  # type: ignore[attr-defined]
        reason = f"every rank has a part of each of {self.shards.experts} experts"
        if isinstance(self.__dict__.get("config"), LocalConfig):
            inner = part[self.shards.sharded[-1][1]]
            reason += f", one after another: grouped_mm takes multiples of 8 features, and a rank has {inner}"
        return LayerPlan(
            name, self.unconverted.kind.__name__, tuple(self.unconverted.shapes[out]), part, "its own forward",
            "sharded", reason,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of what the ranks' parts compute of the inputs, of which all ranks have the same."""
        held: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        group, own = self.group, dict(held)
        shards = {name: local(x) for name, x in own.items()}
        shards |= {name: replicate(shards[name], group) for name in self.shards.once}
        args, kwargs = with_summed_gradients((args, kwargs), group)
        held.update(self.shards.used(shards, rank_and_size(group)[0]))
        try:
            out: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            held.update(own)
        return all_reduce(out, group)
