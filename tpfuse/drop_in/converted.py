"""Layers of torch.nn and of transformers on a mesh: the classes that `tpfuse.drop_in.conversion.convert` gives them."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook

from tpfuse.comm.layout import gather_whole, local_tensor
from tpfuse.comm.mesh import rank_and_size
from tpfuse.drop_in.conversion import Original
from tpfuse.drop_in.shards import as_dtensor, as_local, check_divided, pad_sequence, shard_as_dtensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.explain import LayerPlan
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.local_parameter import local
from tpfuse.layers.on_mesh import OnMesh
from tpfuse.layers.partial_gradients import mark_partial_gradients
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.sequence import gather_features, packed_bias, sequence_back, sequence_first
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.ops.collectives import all_gather, gather_last, replicate, split_last
from tpfuse.ops.dropout import drawn_keys, dropout
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter

_STATE = "state_dict of packed projections, which all ranks of the model call"
Ranges = tuple[tuple[int, int], ...]


def selected(x: Tensor, ranges: Ranges, dim: int = 0) -> Tensor:
    """Return these entries [start, stop) of x along a dimension, one after another; a view of x if it is one range."""
    before = (slice(None),) * (dim % x.ndim)
    parts = [x[*before, start:stop] for start, stop in ranges]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


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
    ranges: Ranges | None  # the rows of the whole weight that this rank uses; None for those that it has
    transposed: bool  # whether the weight is [in, out]
    use_local_output: bool  # return a plain tensor, not a DTensor
    sum_input: bool  # whether the gradient of a whole input is summed over the ranks
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
        """Return this rank's ranges of a parameter, whose gradients are summed. x: all of it, or the rank's share."""
        x = replicate(x, self.group) if len(x) == self.out_features else all_gather(x, self.group)
        return selected(x, self.ranges or ())

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
            out = gemm(x if partial or not self.sum_input else replicate(x, group), weight, bias)
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
        return as_dtensor(out, self.device_mesh, dim, (*out.shape[:-1], self.out_features))


class ConvertedRowLinear(Converted, RowParallelLinear):
    """An nn.Linear (or transformers' Conv1D) whose input features are sharded."""

    output_dim: int | None  # along which the output is this rank's shard, padded to equal lengths; None for a whole one
    transposed: bool
    use_local_output: bool
    pads: bool

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
            return out if self.use_local_output else as_dtensor(out, self.device_mesh, dim, out.shape)
        length = x.shape[self.output_dim]
        if self.use_local_output and not self.pads:
            check_divided(self.called, length, ranks)
        rows = pad_sequence(sequence_first(x, self.output_dim), 0, ranks)
        if residual is not None:
            residual = sequence_first(residual, self.output_dim)
        out = sequence_back(linear_reduce_scatter(rows, weight, bias, group, residual=residual), self.output_dim)
        if self.use_local_output:
            return out
        return shard_as_dtensor(out, self.device_mesh, self.output_dim, length)


class ConvertedEmbedding(Converted, VocabParallelEmbedding):
    """An nn.Embedding whose rows are sharded. use_local_output, pads: as in `ConvertedRowLinear`."""

    use_local_output: bool
    pads: bool

    def explained(self, name: str) -> LayerPlan:
        shapes = tuple(self.weight.shape), tuple(local_tensor(self.weight).shape)
        return LayerPlan(name, type(self).__name__, *shapes, "embedding", "collective", "rows of the table are sharded")

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of `input` [...], whole or (sequence_parallel) this rank's padded shard."""
        input, _ = as_local(input, None, self.device_mesh)
        if not self.sequence_parallel:
            out = super().forward(input)
            return out if self.use_local_output else as_dtensor(out, self.device_mesh, None, out.shape)
        if not -input.ndim - 1 <= self.sequence_dim < input.ndim:
            raise ValueError(
                f"{self.called}: ids of shape {tuple(input.shape)} have no dimension {self.sequence_dim}, along which"
                f" output_layouts Shard({self.sequence_dim}) shards the tokens: expected [B, T], or another layout"
            )
        length, ranks = input.shape[self.sequence_dim], rank_and_size(self.group)[1]
        if self.use_local_output and not self.pads:
            check_divided(self.called, length, ranks)
        out = super().forward(pad_sequence(input, self.sequence_dim, ranks))
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


class LocalConfig:
    """A model's configuration as a module of one rank reads it: with other numbers of heads, for instance."""

    def __init__(self, config: Any, **values: Any) -> None:
        self.__dict__.update(config=config, values=values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "values" not in self.__dict__:
            raise AttributeError(name)
        return self.values[name] if name in self.values else getattr(self.config, name)
