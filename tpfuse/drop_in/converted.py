"""Modules that were converted in place: the same object, with a parallel class and with DTensor parameters.

A module is converted by changing its class, as `fully_shard` does. So its hooks, its names, its place in the model and
all references to it stay as they are, and `restore_module` can undo it. A converted nn.Linear is still an nn.Linear.

Parameters become DTensors on the mesh under their names, in their order, and with their Python attributes. A parameter
that two modules share is converted once and shared again. Weights that pack matrices one after another are kept as
[parts, rows, ...], so that each matrix is sharded by itself; `state_dict` and `load_state_dict` speak of the whole
tensor in its original shape.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tpfuse.comm.layout import from_local, gather_whole, has_values, is_sharded, local_tensor
from tpfuse.comm.mesh import check_order, rank_and_size
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.explain import LayerPlan
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.local_parameter import Borrowed, local
from tpfuse.layers.on_mesh import OnMesh
from tpfuse.layers.partial_gradients import mark_partial_gradients
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.sequence import gather_features, packed_bias, sequence_back, sequence_first
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.ops.collectives import gather_last, replicate, split_last
from tpfuse.ops.dropout import drawn_keys, dropout
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.ops.rms_norm import rms_norm

_STATE = "state_dict of packed projections, which all ranks of the model call"
Ranges = tuple[tuple[int, int], ...]


@dataclass
class Original:
    """A module as it was before its conversion, for `restore_module`."""

    kind: type[nn.Module]
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # the whole shapes of its parameters
    replaced: dict[str, Any] = field(default_factory=dict)  # the attributes that were replaced, with their values
    added: set[str] = field(default_factory=set)
    # (the module's dictionary, the key) of each hook that was registered, and of the hook's options
    hooks: list[tuple[str, int]] = field(default_factory=list)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In another process torch would give these keys to other hooks of the module.
        RemovableHandle.next_id = max([RemovableHandle.next_id, *(key + 1 for _, key in self.hooks)])


# Converted parameter -> (its DTensor, write counts of both at that time), since modules may share parameters.
# What `parallelize` adds is forgotten at its end, since a caller may still hold the old parameters and use them again.
# With torch's `parallelize_module`, whose end we do not see, a write to one of the two ends what they have in common.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def shard_parameter(
    parameter: Parameter, mesh: DeviceMesh, dim: int | None, shape: Sequence[int] | None, source: int | None
) -> Parameter:
    """Return `parameter` as a DTensor, sharded along dimension `dim` of `shape` or (None) replicated over `mesh`.

    shape: the shape to view the parameter in first, None for its own. source: the rank of the mesh whose values count;
    None for each rank's own. If the parameter was converted before, its DTensor is returned again.

    Raise ValueError if it was converted to another layout.
    """
    placement = Replicate() if dim is None else Shard(dim)
    shape = parameter.shape if shape is None else torch.Size(shape)
    known, written = _replaced.get(parameter, (None, ()))  # type: ignore[no-untyped-call]
    if known is not None and known.device_mesh == mesh and written == _writes(parameter, known):
        if known.shape != shape or known.placements != (placement,):
            raise ValueError(
                f"it shares a parameter that is {tuple(known.shape)} with {known.placements}: expected"
                f" {tuple(shape)} with {(placement,)}"
            )
        return cast(Parameter, known)
    whole = parameter.detach().reshape(shape)
    tensor: Tensor = distribute_tensor(whole, mesh, [placement], src_data_rank=source if has_values(whole) else None)
    if local_tensor(tensor).untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
        tensor = tensor.clone()  # otherwise the shard would keep the whole parameter in memory
    new = Parameter(tensor, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    _replaced[parameter] = new, _writes(parameter, new)
    return new


def _writes(*tensors: Tensor) -> list[int]:
    """Return autograd's counts of writes to tensors, of which a DTensor and its local tensor count apart."""
    counted = [x for tensor in tensors for x in (tensor, local_tensor(tensor))]
    return [0 if x.is_inference() else x._version for x in counted]


def convert(
    module: nn.Module,
    kind: type[nn.Module],
    mesh: DeviceMesh,
    layouts: Mapping[str, tuple[int | None, Sequence[int] | None]],
    source: int | None,
    **attributes: Any,
) -> None:
    """Make `module` a `kind` with these attributes. layouts: (dim, shape) of each parameter for `shard_parameter`.

    Raise ValueError as `check_order` and `shard_parameter` do, and for a forward that is set on the module, unless
    `attributes` replace it; the module is then as it was.
    """
    check_order(mesh)
    if "forward" in module.__dict__ and "forward" not in attributes:
        raise ValueError("its forward is set on the module: expected that of its class, or a plan without the module")
    new = {
        name: shard_parameter(parameter, mesh, *layouts[name], source)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    original = _original_of(module)
    original.shapes = {name: module._parameters[name].shape for name in new}  # type: ignore[union-attr]
    module.__dict__.update(attributes, device_mesh=mesh)
    module._parameters.update(new)
    module.__class__ = kind


def _original_of(module: nn.Module) -> Original:
    known: Original = module.__dict__.setdefault("unconverted", Original(type(module)))
    return known


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[None]:
    """Record which attributes and hooks of a model's modules the block replaces and adds, for `restore_module`."""
    before = {module: dict(module.__dict__) for module in model.modules()}
    hooks = {
        module: {name: set(x) for name, x in attributes.items() if "_hooks" in name and isinstance(x, dict)}
        for module, attributes in before.items()
    }
    _replaced.clear()
    try:
        yield
    finally:
        _replaced.clear()
        for module, attributes in before.items():
            now = module.__dict__
            added = now.keys() - attributes.keys() - {"unconverted"}
            replaced = {name: x for name, x in attributes.items() if now[name] is not x}
            new = [(name, key) for name, keys in hooks[module].items() for key in now[name] if key not in keys]
            if added or replaced or new:
                original = _original_of(module)
                original.added, original.replaced, original.hooks = added, replaced, new


@contextlib.contextmanager
def undone_on_error(model: nn.Module, outlined: nn.Module) -> Iterator[None]:
    """Make a model again what it was if the block, which converts and fills it, fails. Until then it stays in memory.

    outlined: its outline after the conversion, or the model itself if nothing is converted. What it shows as plain
    tensors is filled in place, and copied before. Nothing is communicated: ranks may have come to different parameters.
    """
    converted = {name for name, x in outlined.named_parameters(remove_duplicate=False) if isinstance(x, DTensor)}
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    named = [*model.named_parameters(), *model.named_buffers()]
    values = [(x, x.detach().clone()) for name, x in named if name not in converted]
    try:
        yield
    except Exception:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            restore_module(module, {})
        for x, before in values:
            x.detach().copy_(before)
        raise


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module has, or had before its conversion."""
    known: Original | None = module.__dict__.get("unconverted")
    return type(module) if known is None else known.kind


def outline(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module and of its children that has their attributes and hooks, but no values.

    A style can be tried on it: parameters and buffers are on the meta device. memo: the copies made so far, by the id
    of what they copy, so that what is shared stays shared.
    """
    known: nn.Module | None = memo.get(id(module))
    if known is not None:
        return known
    copied = memo[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in module.__dict__.items():
        copied.__dict__[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    for tensors in (copied._parameters, copied._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta") if not isinstance(tensor, DTensor) else tensor
                if isinstance(tensor, Parameter) and not isinstance(tensor, DTensor):
                    empty = Parameter(empty, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = empty
            tensors[name] = memo[id(tensor)]
    for name, child in copied._modules.items():
        copied._modules[name] = None if child is None else outline(child, memo)
    return copied


@torch.no_grad()
def restore_module(module: nn.Module, memo: dict[int, Parameter]) -> None:
    """Make a module again what it was, with whole parameters. The call is a collective of its mesh: its ranks have met.

    A module that a style of torch converted has no `Original` but the hooks in it; its parameters become whole too.

    memo: the parameters restored so far, by the id of their DTensor, so that shared parameters stay shared.
    """
    original: Original = module.__dict__.pop("unconverted", None) or Original(type(module))
    parameters: dict[str, Any] = module._parameters
    for name, parameter in list(parameters.items()):
        if isinstance(parameter, DTensor):
            if id(parameter) not in memo:
                whole = gather_whole(parameter).reshape(original.shapes.get(name, parameter.shape))
                memo[id(parameter)] = Parameter(whole, requires_grad=parameter.requires_grad)
                attributes = {key: x for key, x in parameter.__dict__.items() if not isinstance(x, Borrowed)}
                memo[id(parameter)].__dict__.update(attributes)
            parameters[name] = memo[id(parameter)]
    for parameter in module.parameters(recurse=False):
        parameter.__dict__.pop("seen_part", None)  # what `tpfuse.explain` warns of is over
    for name, buffer in module._buffers.items():
        if isinstance(buffer, DTensor):  # torch's styles replicate buffers
            module._buffers[name] = gather_whole(buffer)
    for name, key in original.hooks:
        module.__dict__[name].pop(key, None)
    for name in (*original.added, "looked_at"):
        module.__dict__.pop(name, None)
    module.__dict__.update(original.replaced)
    module.__class__ = original.kind


class Converted(OnMesh):
    """The base of all converted modules, whose tensors have their original shapes in state dicts.

    A packed parameter is a DTensor there too, but a copy, which a collective of its mesh makes.
    """

    unconverted: Original

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, shape in self.unconverted.shapes.items():
            held = destination.get(prefix + name)
            if isinstance(held, DTensor) and held.shape != shape:
                # No placement that torch.distributed.checkpoint accepts describes this rank's rows of all parts.
                whole = gather_whole(held, _STATE).reshape(shape)
                mesh = held.device_mesh
                shards = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
                destination[prefix + name] = shards.clone()

    def shapes_in_state(self, name: str, parameter: Tensor) -> list[torch.Size]:
        return [self.unconverted.shapes.get(name, parameter.shape)]

    def __reduce__(self) -> tuple[Any, ...]:
        if "made_of" not in type(self).__dict__:
            return super().__reduce__()  # type: ignore[return-value]
        return _empty, type(self).made_of, self.__dict__  # type: ignore[attr-defined]

    @property
    def called(self) -> str:
        name = self.__dict__.get("module_name", "")
        return f"{name} ({type(self).__name__})" if name else type(self).__name__


def stand_in(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return NaN without memory in the place of x, for a module that reads the shape of its input alone.

    A value that it reads all the same makes its result NaN.
    """
    return x.new_full((), torch.nan).expand(shape)


def _is_stand_in(x: Tensor) -> bool:
    """Return whether x is a `stand_in`, or a view of one, which has no mark that a view would keep."""
    return not any(x.stride()) and x.numel() > 1 and bool(x.isnan().any())


class ConvertedColumnLinear(Converted, ColumnParallelLinear):
    """An nn.Linear (or transformers' Conv1D) whose output features are sharded; the last ranks may have fewer."""

    input_dim: int | None  # along which the input is this rank's shard; None for a whole input
    ranges: Ranges | None  # the rows of a replicated weight that this rank uses; None for a sharded one
    transposed: bool  # whether the weight is [in, out]
    use_local_output: bool  # return a plain tensor, not a DTensor
    # (input, output) if the parent has computed the output with those of its other projections (`PreparedInput`)
    offered: tuple[Tensor, Tensor] | None
    shares_gather: bool = False  # whether the parent gathers the input, in one product for all its projections

    @property
    def operator(self) -> str:
        """Return the name of the operator of `tpfuse.ops` that computes the output."""
        gathers = self.group is not None and (self.sequence_parallel or self.shares_gather)
        return "all_gather_linear" if gathers else "gemm"

    def parameters_of_rank(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [this rank's features, in_features] and the bias that the product uses."""
        weight = local(self.weight)
        bias = None if self.bias is None else local(self.bias)
        if self.transposed:
            weight = weight.movedim(0, -1)
        if self.ranges is not None:
            weight, bias = self._selected(weight), None if bias is None else self._selected(bias)
        elif self.parts > 1:
            weight = weight.flatten(0, 1)
            sum_over = self.group if self.sum_gradients else None
            bias = None if bias is None else packed_bias(bias, self.parts, self.group, sum_over)
        return weight, bias

    def _selected(self, x: Tensor) -> Tensor:
        """Return this rank's ranges of a replicated parameter, whose gradients are summed over the ranks."""
        x = replicate(x, self.group)
        return torch.cat([x[start:stop] for start, stop in self.ranges or ()])

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features of the output, or (gather_output) all of them."""
        if self.offered is not None:
            (expected, out), self.offered = self.offered, None
            if x is not expected:
                raise ValueError(
                    f"{self.called}: the input is not the first input of its module, whose style computes this"
                    " projection: expected a plan that does not name it among the projections"
                )
            if out.requires_grad and not torch.is_grad_enabled():
                self._refuse_to_run_again()
            return self.finish(out)
        if _is_stand_in(x):
            self._refuse_to_run_again()
        group, dim = self.group, self.input_dim
        features = dim is not None and dim % x.ndim == x.ndim - 1
        if dim is not None and group is not None:
            mark_partial_gradients(self, x, "features" if features else "sequence")
        if features:
            x, dim = x if isinstance(x, DTensor) else gather_last(x, group), None
        length = x.shape[dim] if isinstance(x, DTensor) and dim is not None else None
        x, partial = as_local(x, dim, self.device_mesh)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{self.called}: the input has {x.shape[-1]} features: expected {self.in_features}")
        weight, bias = self.parameters_of_rank()
        if dim is not None and group is not None:
            out = sequence_back(all_gather_linear(sequence_first(x, dim), weight, bias, group), dim)
            out = out if length is None else out.narrow(dim, 0, length)
        else:
            out = gemm(x if partial else replicate(x, group), weight, bias)
        return self.finish(out)

    def _refuse_to_run_again(self) -> NoReturn:
        raise ValueError(
            f"{self.called}: its module runs it twice or without gradients, as a checkpoint inside of the module does,"
            " but its style computes it once: expected a checkpoint of the whole layer, or a plan that does not name it"
            " among the projections"
        )

    def finish(self, out: Tensor) -> Tensor:
        """Return `out` [..., this rank's features] in the layout that the module promises."""
        group = self.group
        if self.gather_output and group is not None:
            out = gather_features(out, self.out_features, self.parts, group)
        if self.use_local_output:
            return out
        dim = None if self.gather_output else out.ndim - 1
        return _as_dtensor(out, self.device_mesh, dim, (*out.shape[:-1], self.out_features))


class ConvertedRowLinear(Converted, RowParallelLinear):
    """An nn.Linear (or transformers' Conv1D) whose input features are sharded."""

    output_dim: int | None  # along which the output is this rank's shard, padded to equal lengths; None for a whole one
    transposed: bool
    use_local_output: bool

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product, whole or this rank's shard along `output_dim`, of this rank's input features."""
        group, ranks = self.group, rank_and_size(self.group)[1]
        sharded = self.input_is_parallel or isinstance(x, DTensor)
        if sharded and group is not None:
            mark_partial_gradients(self, x, "features")
        x, _ = as_local(x, -1, self.device_mesh)
        width = self.in_features // ranks if sharded else self.in_features
        if x.shape[-1] != width:
            whole = f", not all {self.in_features}" if x.shape[-1] == self.in_features else ""
            raise ValueError(
                f"{self.called}: the input has {x.shape[-1]} features: expected the {width} of this rank{whole}"
            )
        if not sharded:
            x = split_last(x, group)
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        weight = weight.t() if self.transposed else weight
        if self.output_dim is None or group is None:
            out = linear_all_reduce(x, weight, bias, group, residual=residual)
            dim = None if self.output_dim is None else self.output_dim % out.ndim
            return out if self.use_local_output else _as_dtensor(out, self.device_mesh, dim, out.shape)
        length = x.shape[self.output_dim]
        rows = pad_sequence(sequence_first(x, self.output_dim), 0, ranks)
        if residual is not None:
            residual = sequence_first(residual, self.output_dim)
        out = sequence_back(linear_reduce_scatter(rows, weight, bias, group, residual=residual), self.output_dim)
        if self.use_local_output:
            return out
        return shard_as_dtensor(out, self.device_mesh, self.output_dim, length)


class ConvertedEmbedding(Converted, VocabParallelEmbedding):
    """An nn.Embedding whose rows are sharded. use_local_output: as in `ConvertedColumnLinear`."""

    use_local_output: bool

    def explained(self, name: str) -> LayerPlan:
        shapes = tuple(self.weight.shape), tuple(local_tensor(self.weight).shape)
        return LayerPlan(name, type(self).__name__, *shapes, "embedding", "collective", "rows of the table are sharded")

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of `input` [...], whole or (sequence_parallel) this rank's padded shard."""
        input, _ = as_local(input, None, self.device_mesh)
        if not self.sequence_parallel:
            out = super().forward(input)
            return out if self.use_local_output else _as_dtensor(out, self.device_mesh, None, out.shape)
        if not -input.ndim - 1 <= self.sequence_dim < input.ndim:
            raise ValueError(
                f"{self.called}: ids of shape {tuple(input.shape)} have no dimension {self.sequence_dim}, along which"
                f" output_layouts Shard({self.sequence_dim}) shards the tokens: expected [B, T], or another layout"
            )
        length = input.shape[self.sequence_dim]
        out = super().forward(pad_sequence(input, self.sequence_dim, rank_and_size(self.group)[1]))
        return out if self.use_local_output else shard_as_dtensor(out, self.device_mesh, self.sequence_dim, length)


class ConvertedLayerNorm(Converted, LayerNorm):
    """An nn.LayerNorm on shards of the sequence."""


class ConvertedRMSNorm(Converted, RMSNorm):
    """An nn.RMSNorm on shards of the sequence."""


class ConvertedDropout(Converted, nn.Dropout):
    """An nn.Dropout on this rank's shard along `sequence_dim`, whose mask differs from those of the other ranks.

    The mask follows from a key, which the default generator of the device draws, and from the numbers of the tokens
    (`tpfuse.ops.dropout`). So checkpointing, which puts that generator's state back, computes the same mask again. The
    generators must have equal states on the ranks, as `parallelize` leaves them.
    """

    sequence_dim: int

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's shard with elements zeroed, and the others multiplied by 1 / (1 - p)."""
        if not self.training or self.p in (0.0, 1.0):
            return super().forward(input)
        rank, ranks = rank_and_size(self.group)
        dim, shape = self.sequence_dim % input.ndim, list(input.shape[:-1])
        length = shape[dim]
        shape[dim] *= ranks
        rows = torch.arange(math.prod(shape), device=input.device).view(shape).narrow(dim, rank * length, length)
        return dropout(input, self.p, rows.contiguous(), drawn_keys(input, 1)[0])


def _refuse_adapters(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raise ValueError if a sharded module becomes the base of an adapter, which would be made for a shard's sizes."""
    sharded = isinstance(child, ConvertedColumnLinear | ConvertedRowLinear | ConvertedEmbedding)
    if name == "base_layer" and sharded and cast(Converted, child).group is not None:
        raise ValueError(
            f"{cast(Converted, child).called} is sharded and takes no adapters: add them before"
            " tpfuse.parallelize(model, mesh), or after tpfuse.restore(model)"
        )


register_module_module_registration_hook(cast(Any, _refuse_adapters))


class ReplicatedModule(Converted):
    """A module with any forward, whose own parameters are DTensors that every rank holds whole, or those of its heads.

    During forward the module has plain tensors instead, and so have its children of this class, whose parameters it may
    read without calling them. sum_gradients: each rank computes a part of the gradients, for its tokens or its heads,
    and they are summed. The class of an instance is made of this one and of the module's own by `combined_class`.
    """

    sum_gradients: bool

    def explained(self, name: str) -> LayerPlan:
        shape = next((tuple(shape) for shape in self.unconverted.shapes.values()), ())
        own = next((x for x in self._parameters.values() if isinstance(x, DTensor)), None)  # type: ignore[attr-defined]
        part = shape if own is None or not is_sharded(own) else tuple(local_tensor(own).shape)
        computes = "computes a part, and gradients are summed" if self.sum_gradients else "computes the same"
        reason = self.__dict__.get("reason") or f"every rank {computes if part == shape else 'has those of its heads'}"
        kind, held = self.unconverted.kind.__name__, "replicated" if part == shape else "sharded"
        return LayerPlan(name, kind, shape, part, "its own forward", held, reason)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._plain_parameters():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _plain_parameters(self) -> Iterator[None]:
        held: list[tuple[dict[str, Any], dict[str, DTensor]]] = []
        for module in self.modules():  # type: ignore[attr-defined]
            if not isinstance(module, ReplicatedModule) or (module.sum_gradients and module is not self):
                continue
            parameters: dict[str, Any] = module._parameters  # type: ignore[attr-defined]
            sharded = {name: x for name, x in parameters.items() if isinstance(x, DTensor)}
            group = self.group if self.sum_gradients else None
            parameters.update({name: replicate(local(x), group) for name, x in sharded.items()})
            held.append((parameters, sharded))
        try:
            yield
        finally:
            for parameters, sharded in held:
                parameters.update(sharded)


def run_with_plain_parameters(module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `own` does, a forward that was set on the module, which is a ReplicatedModule."""
    with module._plain_parameters():
        return own(*args, **kwargs)


class ReplicatedRMSNorm(ReplicatedModule):
    """A root-mean-square norm of the model's own class, such as LlamaRMSNorm, computed by one operator.

    It is x / sqrt(mean(x²) + eps) * (offset + weight) over the last dimension; terms: (offset, eps). For a weight of
    another dtype than x the module's own forward runs, and decides on the dtype of the result.
    """

    weight: Tensor
    terms: tuple[float, float]

    def explained(self, name: str) -> LayerPlan:
        return dataclasses.replace(super().explained(name), operator="rms_norm")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of the input [..., C], its only argument, in its shape and dtype."""
        (x, *others), weight, (offset, eps) = (*args, *kwargs.values()), local(self.weight), self.terms
        if others or x.dtype != weight.dtype:
            return super().forward(*args, **kwargs)
        if offset:
            weight = offset + (weight if weight.dtype == torch.float64 else weight.float())
        return rms_norm(x, weight, eps, sum_gradients_over=self.group if self.sum_gradients else None)


@torch.no_grad()
def rms_norm_terms(module: nn.Module) -> tuple[float, float] | None:
    """Return (offset, eps) if `module` computes x / sqrt(mean(x²) + eps) * (offset + weight), else None.

    The module's own forward is tried with another weight of the same size. Gemma's norms have the offset 1, others 0.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = module._parameters.get("weight")
    alone = weight is not None and weight.ndim == 1 and len(list(module.parameters())) == 1
    if not alone or not isinstance(eps, float) or not type(module).__name__.endswith("RMSNorm"):
        return None
    assert weight is not None
    trial, other = outline(module, {}), torch.linspace(0.5, 1.5, len(weight), device="cpu")
    trial._parameters["weight"] = Parameter(other)
    x = torch.linspace(-3, 2, 2 * len(weight), device="cpu").view(1, 2, -1)
    scaled = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    try:
        found = type(module).forward(trial, x)
        offsets = [offset for offset in (0.0, 1.0) if torch.allclose(found, scaled * (offset + other))]
    except Exception:  # a forward with other arguments, or one that needs more than these attributes
        return None
    return (offsets[0], eps) if offsets else None


_combined: dict[tuple[type, type], type[nn.Module]] = {}


def combined_class(first: type, second: type) -> type[nn.Module]:
    """Return the class with the bases (first, second), one of which is a converted class.

    Instances can be pickled and copied: `Converted` makes their class again from its two bases.
    """
    made = type(f"{first.__name__}_{second.__name__}", (first, second), {"made_of": (first, second)})
    return _combined.setdefault((first, second), made)


def _empty(first: type[nn.Module], second: type[nn.Module]) -> nn.Module:
    made = combined_class(first, second)
    return made.__new__(made)


def as_local(x: Tensor, dim: int | None, mesh: DeviceMesh | None) -> tuple[Tensor, bool]:
    """Return (this rank's plain tensor of x, whether its gradient may be a part of the sum over the ranks).

    dim: the dimension along which a shard is wanted, None for a whole tensor. A plain x is taken to be that already; a
    DTensor is redistributed. A shard of a length that the ranks do not divide is padded.
    """
    if not isinstance(x, DTensor):
        return x, False
    if dim is None:
        whole = x.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()]), True
    dim %= x.ndim
    ranks = x.device_mesh.size()
    share = -(-x.shape[dim] // ranks)
    part = x.redistribute(placements=[Shard(dim)]).to_local()
    return _padded(part, dim, share - part.shape[dim]), False


def _as_dtensor(x: Tensor, mesh: DeviceMesh | None, dim: int | None, shape: Sequence[int]) -> Tensor:
    return from_local(x.contiguous(), mesh, dim, torch.Size(shape))


def shard_as_dtensor(x: Tensor, mesh: DeviceMesh | None, dim: int, length: int) -> Tensor:
    """Return the DTensor of `length` entries along `dim` of which x is this rank's padded shard."""
    assert mesh is not None
    dim %= x.ndim
    start = mesh.get_local_rank() * x.shape[dim]
    x = x.narrow(dim, 0, max(0, min(x.shape[dim], length - start)))
    return _as_dtensor(x, mesh, dim, (*x.shape[:dim], length, *x.shape[dim + 1 :]))


def pad_sequence(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Return x with zeros appended along `dim`, up to a multiple of the number of ranks."""
    return _padded(x, dim, -x.shape[dim] % ranks)


def _padded(x: Tensor, dim: int, zeros: int) -> Tensor:
    if statically_known_true(zeros == 0):  # of a length that torch.compile does not know, one graph pads none or some
        return x
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, zeros))


def gather_sequence(x: Tensor, dim: int, group: Any, length: int | None) -> Tensor:
    """Return the whole sequences of which x is this rank's padded shard along `dim`; `length`: without the padding.

    All ranks compute the same from the result: in backward each keeps its own part of the gradient. It is contiguous,
    as the whole model's activations are: a module that is left alone may view them in another shape.
    """
    out = gather_last(x.movedim(dim, -1), group).movedim(-1, dim)
    return (out if length is None else out.narrow(dim, 0, length)).contiguous()


def split_sequence(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return this rank's padded shard along `dim` of x, which is equal on all ranks. It is contiguous."""
    padded = pad_sequence(x, dim, rank_and_size(group)[1])
    return split_last(padded.movedim(dim, -1), group).movedim(-1, dim).contiguous()
