"""Modules that run their own forward on a mesh, with parameters that every rank holds whole, or a part of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.comm.sum_order import summed_dtype
from tpfuse.drop_in.conversion import convert
from tpfuse.drop_in.converted import Converted, Ranges, combined_class, selected
from tpfuse.drop_in.outline import outline
from tpfuse.drop_in.sharded_norm import sharded_rms_norm
from tpfuse.layers.explain import LayerPlan
from tpfuse.layers.local_parameter import local
from tpfuse.ops.collectives import replicate
from tpfuse.ops.rms_norm import rms_norm


class ReplicatedModule(Converted):
    """A module with any forward, whose own parameters are DTensors that every rank holds whole, or a part of them.

    During forward the module has plain tensors instead, and so have its children of this class, whose parameters it may
    read without calling them. sum_gradients: each rank computes a part of the gradients, for its tokens or its heads,
    and they are summed. `combined_class` makes an instance's class, from this one and the module's own.
    """

    sum_gradients: bool
    rows: Mapping[str, tuple[int, Ranges]]  # those of `ReplicatedParallel.ranges` that this rank has
    evaluates: bool
    has_part = "has those of its heads"  # for `explained`

    def explained(self, name: str) -> LayerPlan:
        shape = next((tuple(shape) for shape in self.unconverted.shapes.values()), ())
        own = next((x for x in self._parameters.values() if isinstance(x, DTensor)), None)  # type: ignore[attr-defined]
        part = shape if own is None or not is_sharded(own) else tuple(local_tensor(own).shape)
        summed = self.sum_gradients or bool(self.rows)
        computes = "computes a part, and gradients are summed" if summed else "computes the same"
        reason = self.__dict__.get("reason") or f"every rank {computes if part == shape else self.has_part}"
        kind, held = self.unconverted.kind.__name__, "replicated" if part == shape else "sharded"
        return LayerPlan(name, kind, shape, part, "its own forward", held, reason)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain_parameters():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _plain_parameters(self) -> Iterator[None]:
        held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        plain: list[tuple[Any, Iterable[str]]] = []

        def replace(attributes: dict[str, Any], new: dict[str, Any]) -> None:
            held.append((attributes, {name: attributes[name] for name in new}))
            attributes.update(new)

        for module in self.modules():  # type: ignore[attr-defined]
            if not isinstance(module, ReplicatedModule) or (module.sum_gradients and module is not self):
                continue
            parameters: dict[str, Any] = module._parameters  # type: ignore[attr-defined]
            own = {name: module._plain(name, x) for name, x in parameters.items() if isinstance(x, DTensor)}
            plain.append((module, own.keys()))
            replace(parameters, own)
        buffers: dict[str, Any] = self._buffers  # type: ignore[attr-defined]
        replace(buffers, {name: self._plain(name, x) for name, x in buffers.items() if name in self.rows})
        if self.evaluates:
            replace(self.__dict__, {"training": False})
        try:
            yield
        finally:
            for attributes, before in held:
                attributes.update(before)
            for module, names in plain:  # PEFT's adapters of a parameter leave the plain tensor elsewhere too
                for name in names:
                    module.__dict__.pop(name, None)
                    module._buffers.pop(name, None)

    def _plain(self, name: str, x: Tensor) -> Tensor:
        """Return what the forward reads in the place of one of the module's own tensors."""
        x = replicate(local(x), self.group if self.sum_gradients or name in self.rows else None)
        if name not in self.rows:
            return x
        dim, ranges = self.rows[name]
        return selected(x, ranges, dim)


def run_with_plain_parameters(module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `own` does, a forward that was set on the module, which is a ReplicatedModule."""
    with module._plain_parameters():
        return own(*args, **kwargs)


class ReplicatedRMSNorm(ReplicatedModule):
    """A root-mean-square norm of the model's own class, such as LlamaRMSNorm, computed by one operator.

    It is x / sqrt(mean(x²) + eps) * (offset + weight) over the last dimension; terms: those of `rms_norm_terms`. For a
    weight of another dtype than x the module's own forward runs, and decides on the dtype of the result.
    """

    weight: Tensor
    terms: tuple[float, float, str]

    def explained(self, name: str) -> LayerPlan:
        return dataclasses.replace(super().explained(name), operator="rms_norm")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of the input [..., C], its only argument, in its shape and dtype."""
        (x, *others), weight, (offset, eps, _) = (*args, *kwargs.values()), local(self.weight), self.terms
        if others or x.dtype != weight.dtype:
            return super().forward(*args, **kwargs)
        if offset:
            weight = offset + (weight if weight.dtype == torch.float64 else weight.float())
        return rms_norm(x, weight, eps, sum_gradients_over=self.group if self.sum_gradients else None)


class ShardedRMSNorm(ReplicatedModule):
    """A root-mean-square norm as `ReplicatedRMSNorm` is, over features that are sharded, with this rank's weight.

    It may take a gate, of which silu multiplies its input or its output, in float32 at least. For a weight of
    another dtype than x the module's own forward says the dtype of the result.
    """

    weight: Tensor
    terms: tuple[float, float, str]
    has_part = "has its features, and sums their squares"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's features of the norm of its input [..., C / ranks], in its shape. A gate has it too."""
        (x, *gate), weight, (offset, eps, gates) = (*args, *kwargs.values()), local(self.weight), self.terms
        wide = weight if weight.dtype == torch.float64 else weight.float()
        factor = F.silu(gate[0].to(summed_dtype(x.dtype))) if gate else None
        given = x if factor is None or gates != "input" else x * factor
        out = sharded_rms_norm(given, offset + wide if offset else weight, eps, self.group)
        if factor is not None and gates == "output":
            out = out * factor
        return out.to(x.dtype if x.dtype == weight.dtype else self._dtype_for(x))

    @torch.no_grad()
    def _dtype_for(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the module's own forward for x, which it says of a row of all ranks' features."""
        ranks, weight = dist.get_world_size(self.group), local(self.weight)
        row = x.new_zeros(1, ranks * x.shape[-1])
        with self._plain_parameters():
            self._parameters["weight"] = weight.new_zeros(ranks * len(weight))  # type: ignore[attr-defined]
            found: Tensor = super(ReplicatedModule, self).forward(row)  # type: ignore[misc]
        return found.dtype


@torch.no_grad()
def rms_norm_terms(module: nn.Module) -> tuple[float, float, str] | None:
    """Return (offset, eps, gates) if `module` computes x / sqrt(mean(x²) + eps) * (offset + weight), else None.

    gates: "input" or "output" if silu of its second input multiplies x or the result, "" if it has one input. The
    module's own forward is tried with another weight of the same size. Gemma's norms have the offset 1, others 0.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight, gated = module._parameters.get("weight"), type(module).__name__.endswith("RMSNormGated")
    alone = weight is not None and weight.ndim == 1 and len(list(module.parameters())) == 1
    if not alone or not isinstance(eps, float) or not (gated or type(module).__name__.endswith("RMSNorm")):
        return None
    assert weight is not None
    trial, other = outline(module, {}), torch.linspace(0.5, 1.5, len(weight), device="cpu")
    trial._parameters["weight"] = Parameter(other)
    x = torch.linspace(-3, 2, 2 * len(weight), device="cpu").view(1, 2, -1)
    gate = x.flip(-1)
    inputs = {"input": (x, gate), "output": (x, gate)} if gated else {"": (x,)}
    try:
        for gates, given in inputs.items():
            entering = x * F.silu(gate) if gates == "input" else x
            scaled = entering * (entering.square().mean(-1, keepdim=True) + eps).rsqrt()
            scaled = scaled * F.silu(gate) if gates == "output" else scaled
            found = type(module).forward(trial, *given)
            for offset in (0.0, 1.0):
                if torch.allclose(found, scaled * (offset + other)):
                    return offset, eps, gates
    except Exception:  # a forward with other arguments, or one that needs more than these attributes
        pass
    return None


def replicate_(
    module: nn.Module,
    mesh: DeviceMesh,
    sum_gradients: bool,
    source: int | None,
    kind: type[nn.Module] | None = None,
    sharded: Sequence[str] = (),
    rows: Mapping[str, tuple[int, Ranges]] | None = None,
    evaluates: bool = False,
) -> None:
    """Make the module's own parameters DTensors that every rank holds whole. kind: its class, by default its own.

    sharded: those whose first dimension is sharded instead. A root-mean-square norm with a sharded weight is one over
    the features of all ranks. rows, evaluates: attributes of the `ReplicatedModule`.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]
    layouts = {name: (0 if name in sharded else None, None) for name in names}
    summed = sum_gradients and mesh.size() > 1
    attributes: dict[str, Any] = {"sum_gradients": summed, "rows": rows or {}, "evaluates": evaluates}
    own = module.__dict__.get("forward")
    if own is not None:
        kind = combined_class(ReplicatedModule, type(module))
        attributes["forward"] = functools.partial(run_with_plain_parameters, module, own)
    if kind is None:
        terms = rms_norm_terms(module)
        if terms is not None and terms[2] and not sharded:
            terms = None  # the operator takes no gate
        attributes |= {} if terms is None else {"terms": terms}
        norm = ShardedRMSNorm if sharded else ReplicatedRMSNorm
        kind = combined_class(ReplicatedModule if terms is None else norm, type(module))
    convert(module, kind, mesh, layouts, source, **attributes)
