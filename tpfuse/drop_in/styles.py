"""Parallel styles with fused layers, for torch's `parallelize_module` and for `tpfuse.parallelize`.

| style                   | converts                                        | communicates                         |
|-------------------------|-------------------------------------------------|--------------------------------------|
| FusedColwiseParallel    | nn.Linear, transformers' Conv1D                 | a gather inside the product          |
| FusedRowwiseParallel    | nn.Linear, Conv1D, nn.Embedding (by rows)       | a sum inside the product             |
| FusedSequenceParallel   | nn.LayerNorm, nn.RMSNorm, other norms, Dropout  | the parameters' gradients            |
| FusedPrepareModuleInput | nothing: it prepares a module's input           | one gather for several products      |
| ReplicatedParallel      | any module                                      | nothing, its gradients, or squares   |
| ShardedExpertsParallel  | experts whose weights are stacked               | the sum of the outputs               |
| WholeSequences          | nothing: it gathers the input, splits the output| whole sequences                      |

Each of the first four takes the arguments of torch's style whose name it extends, and means the same by them; torch's
own implementation serves where there is nothing to fuse (column-parallel embeddings, other layouts). The styles mix
with torch's in one plan.

Plain tensors pass between fused modules. In the plans of `tpfuse.parallelize`, which knows the length of the sequences,
one that is this rank's shard of a sequence that the ranks do not divide is padded with zeros at the end, so that all
ranks hold equally many rows. In other plans such a sequence is refused, unless DTensors pass, which are never padded.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from tpfuse.drop_in.conversion import convert
from tpfuse.drop_in.converted import (
    ConvertedColumnLinear,
    ConvertedDropout,
    ConvertedEmbedding,
    ConvertedLayerNorm,
    ConvertedRMSNorm,
    ConvertedRowLinear,
    Ranges,
    combined_class,
)
from tpfuse.drop_in.experts import ExpertShards, ShardedExperts
from tpfuse.drop_in.outline import outline
from tpfuse.drop_in.replicated import replicate_
from tpfuse.drop_in.sequence_hooks import PreparedInput, SequenceLength, SequenceShards, SplitOutput, hooked
from tpfuse.layers.on_mesh import check_embedding, check_parameters
from tpfuse.layers.sequence import splits

Apply = Callable[[Any, nn.Module, DeviceMesh], nn.Module]


def is_conv1d(module: nn.Module) -> bool:
    """Return whether `module` is transformers' Conv1D: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


@torch.no_grad()
def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is an nn.Linear, or of a class of its own whose forward computes the same.

    Such a forward is tried with a small weight, in training and in evaluation.
    """
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    trial: Any = outline(module, {})
    weight, x = (
        torch.linspace(-300, 200, 6, dtype=torch.float64, device="cpu").view(shape) for shape in ((2, 3), (1, 2, 3))
    )
    bias = None if module.bias is None else x[0, :, 0]
    trial._parameters.update(weight=nn.Parameter(weight), bias=None if bias is None else nn.Parameter(bias))
    try:
        found = [type(module).forward(trial.train(mode), x) for mode in (True, False)]
        return all(torch.allclose(each, F.linear(x, weight, bias), rtol=1e-12) for each in found)
    except Exception:  # a forward with other arguments, or one that needs more than these attributes
        return False


def features(module: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of a linear layer or Conv1D. Raise ValueError for any other module.

    One with other parameters than weight and bias, from which hooks compute these, is another module too.
    """
    linear = is_linear(module)
    if linear or is_conv1d(module):
        check_parameters("it", module)
    if linear:
        return cast(nn.Linear, module).in_features, cast(nn.Linear, module).out_features
    if is_conv1d(module):
        rows, columns = cast(Tensor, module.weight).shape
        return int(rows), int(columns)
    kind = f"{type(module).__module__}.{type(module).__name__}"
    raise ValueError(f"it is a {kind}: expected an nn.Linear or transformers' Conv1D")


def cannot_split(size: int, which: str, ranks: int) -> str:
    """Return the error for features that the ranks do not divide."""
    return (
        f"its {size} {which} features cannot be split among {ranks} ranks: expected a multiple, or tp"
        f" {splits(size, max(ranks, 8))}"
    )


def check_unconverted(module: nn.Module) -> None:
    """Raise ValueError if one of the module's own parameters is a DTensor, or has hooks, which would be lost."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(f"its {name} is a DTensor: expected a module that is not parallelized yet")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"its {name} has hooks, which would be lost: register them once it is parallelized")


def check_floats(module: nn.Module) -> None:
    """Raise ValueError as `check_unconverted` does, and unless all own parameters are of a float dtype."""
    check_unconverted(module)
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.dtype.is_floating_point or parameter.element_size() < 2:
            raise ValueError(f"its {name} is {parameter.dtype}: expected a float dtype of 16 bits or more")


def _named(apply: Apply) -> Apply:
    """Return a style's `_apply` whose errors name the style and the module: torch's parallelize_module adds no name."""

    @functools.wraps(apply)
    def named(style: ParallelStyle, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        try:
            return apply(style, module, device_mesh)
        except ValueError as error:
            described = str(module).partition("\n")[0].removesuffix("(")
            raise ValueError(f"{type(style).__name__} of {described}: {error}") from error

    return named


class FusedColwiseParallel(ColwiseParallel):
    """torch's ColwiseParallel with the gather of the input fused into the product.

    input_layouts: Replicate() (default), or Shard(d): the input is this rank's shard along dimension d. output_layouts:
    Shard(-1) (default) or Replicate(). use_local_output: return a plain tensor. parts: the number of matrices of equal
    height that are packed in the weight one after another, each of which is sharded by itself. ranges: of the rows
    [start, stop) that each rank uses, where these are no equal parts; one entry for each rank. The weight is then whole
    on every rank; with gather_weight each has an equal share of the rows, and gathers all for each product. sum_input:
    sum the ranks' parts of the gradient of a whole input; without it what computed the input sums those of its own.

    With output_layouts=Replicate() the ranks need not divide the features, unless the weight is packed: the last ranks
    have fewer. A rank's own features, Shard(-1), must be equally many on all ranks, as what follows takes them to be.
    """

    def __init__(
        self,
        *,
        parts: int = 1,
        ranges: Sequence[Ranges] | None = None,
        gather_weight: bool = False,
        sum_input: bool = True,
        **torchs: Placement | bool | None,
    ) -> None:
        super().__init__(**cast(Any, torchs))
        self.parts, self.ranges, self.gather_weight, self.sum_input = parts, ranges, gather_weight, sum_input

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _, height = features(module)
        check_floats(module)
        input_layout, output_layout = self.input_layouts[0], self.output_layouts[0]
        if not isinstance(input_layout, Replicate | Shard):
            raise ValueError(f"input_layouts {input_layout}: expected Replicate() or Shard(dimension of the sequence)")
        if not isinstance(output_layout, Replicate) and output_layout != Shard(-1):
            raise ValueError(f"output_layouts {output_layout}: expected Shard(-1) or Replicate()")
        ranks = device_mesh.size()
        if height % self.parts:
            raise ValueError(f"its {height} output features cannot be {self.parts} matrices of equal height")
        if self.ranges is None and (height // self.parts) % ranks and not isinstance(output_layout, Replicate):
            raise ValueError(cannot_split(height // self.parts, "output", ranks))

    def _is_torchs(self, module: nn.Module) -> bool:
        """Return whether torch's own style serves: for embeddings, and for layouts that tpfuse has no product for."""
        layouts = self.input_layouts[0], self.output_layouts[0]
        fused = isinstance(layouts[0], Replicate | Shard) and layouts[1] in (Replicate(), Shard(-1))
        plain = is_linear(module) and self.parts == 1 and self.ranges is None
        return isinstance(module, nn.Embedding) or (plain and not fused)

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._is_torchs(module):
            return super()._apply(module, device_mesh)
        self._check(module, device_mesh)
        (inner, outer), transposed = features(module), is_conv1d(module)
        input_layout = self.input_layouts[0]
        shape: tuple[int, ...] | None = None
        dim: int | None = 1 if transposed else 0
        bias_dim: int | None = 0
        if self.ranges is not None and not (self.gather_weight and outer % device_mesh.size() == 0):
            dim = bias_dim = None
        elif self.parts > 1:
            packed = (self.parts, outer // self.parts)
            shape = (inner, *packed) if transposed else (*packed, inner)
            dim, bias_dim = 2 if transposed else 1, None
        input_dim = input_layout.dim if isinstance(input_layout, Shard) else None
        convert(
            module, ConvertedColumnLinear, device_mesh, {"weight": (dim, shape), "bias": (bias_dim, None)},
            self.src_data_rank, in_features=inner, out_features=outer, parts=self.parts, activation=None,
            sum_gradients=self.parts > 1 and module.bias is not None and device_mesh.size() > 1,
            gather_output=isinstance(self.output_layouts[0], Replicate),
            sequence_parallel=input_dim is not None, input_dim=input_dim,
            ranges=None if self.ranges is None else tuple(self.ranges[device_mesh.get_local_rank()]),
            transposed=transposed, use_local_output=self.use_local_output, sum_input=self.sum_input, offered=None,
        )  # fmt: skip
        return module


class FusedRowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel with the sum over the ranks fused into the product.

    input_layouts: Shard(-1) (default), or Replicate(): the module takes this rank's slice of the features.
    output_layouts: Replicate() (default), or Shard(d): the output is this rank's shard along dimension d.
    use_local_output: return a plain tensor. pads: whether that may be padded, since what follows knows the length of
    the sequence; otherwise a sequence that the ranks do not divide is refused. An nn.Embedding, or a subclass whose
    forward calls that of nn.Embedding, is sharded by rows; its input is whole.
    """

    def __init__(self, *, pads: bool = False, **torchs: Placement | bool | None) -> None:
        super().__init__(**cast(Any, torchs))
        self.pads = pads

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_floats(module)
        input_layout, output_layout = self.input_layouts[0], self.output_layouts[0]
        if not isinstance(output_layout, Replicate | Shard) or output_layout == Shard(-1):
            raise ValueError(
                f"output_layouts {output_layout}: expected Replicate() or Shard(dimension of the sequence)"
            )
        if isinstance(module, nn.Embedding):
            check_embedding("it", module)
            check_parameters("it", module)
            return
        inner, _ = features(module)
        if not isinstance(input_layout, Replicate) and input_layout != Shard(-1):
            raise ValueError(f"input_layouts {input_layout}: expected Shard(-1) or Replicate()")
        ranks = device_mesh.size()
        if inner % ranks:
            raise ValueError(cannot_split(inner, "input", ranks))

    def _is_torchs(self, module: nn.Module) -> bool:
        """Return whether torch's own style serves: for layouts that tpfuse has no product for."""
        whole = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        source, target = self.input_layouts[0], self.output_layouts[0]
        fused = source in (Replicate(), whole) and isinstance(target, Replicate | Shard) and target != Shard(-1)
        return isinstance(module, nn.Embedding | nn.Linear) and not fused

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._is_torchs(module):
            return super()._apply(module, device_mesh)
        self._check(module, device_mesh)
        output_layout = self.output_layouts[0]
        output_dim = output_layout.dim if isinstance(output_layout, Shard) else None
        if isinstance(module, nn.Embedding):
            # The forward of a subclass runs, and finds the sharded table where it calls nn.Embedding's forward.
            own = type(module)
            kind = ConvertedEmbedding if own is nn.Embedding else combined_class(own, ConvertedEmbedding)
            convert(
                module, kind, device_mesh, {"weight": (0, None)}, self.src_data_rank,
                sequence_parallel=output_dim is not None, sequence_dim=-2 if output_dim is None else output_dim,
                use_local_output=self.use_local_output, pads=self.pads,
            )  # fmt: skip
            return module
        (inner, outer), transposed = features(module), is_conv1d(module)
        convert(
            module, ConvertedRowLinear, device_mesh, {"weight": (0 if transposed else 1, None), "bias": (None, None)},
            self.src_data_rank, in_features=inner, out_features=outer,
            input_is_parallel=not isinstance(self.input_layouts[0], Replicate),
            sequence_parallel=output_dim is not None, output_dim=output_dim, transposed=transposed,
            use_local_output=self.use_local_output, pads=self.pads,
        )  # fmt: skip
        return module


class FusedSequenceParallel(SequenceParallel):
    """torch's SequenceParallel without DTensor's dispatch: for nn.LayerNorm, nn.RMSNorm and nn.Dropout.

    sequence_dim, use_local_output: as in torch's style. gather_output: return whole sequences, of the length in this
    object, on every rank; their gradients are equal on all ranks. Root-mean-square norms of a model's own class run as
    nn.RMSNorm. A module of any other class runs its own forward on this rank's shard, with its own parameters as plain
    tensors; their gradients are summed over the ranks.
    """

    def __init__(
        self, *, sequence_dim: int = 1, use_local_output: bool = False, gather_output: SequenceLength | None = None
    ) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.sequence_dim, self.gather_output = sequence_dim, gather_output

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_floats(module)
        for name, child in module.named_children():
            if any(True for _ in child.parameters()):
                raise ValueError(f"its child {name} has parameters: expected a module without such children")
        known: dict[type[nn.Module], type[nn.Module]] = {nn.Dropout: ConvertedDropout}
        if len(getattr(module, "normalized_shape", ())) == 1:
            known |= {nn.LayerNorm: ConvertedLayerNorm, nn.RMSNorm: ConvertedRMSNorm}
        replicate_(module, device_mesh, True, self.src_data_rank, known.get(type(module)))
        hook = SequenceShards(device_mesh, self.sequence_dim, self.use_local_output, self.gather_output)
        module.__dict__["sequence_dim"] = self.sequence_dim
        module.register_forward_pre_hook(hook.before, with_kwargs=True)
        module.register_forward_hook(hook.after)
        return module


class ReplicatedParallel(ParallelStyle):
    """A module that runs its own forward, with parameters that every rank holds whole.

    sum_gradients: each rank computes a part of the parameters' gradients (for its heads, for instance), and the parts
    are summed; otherwise all ranks compute the same gradients. sharded: the names of its own parameters that have an
    entry for each head, or feature, of which a rank holds and computes with those of its heads. A root-mean-square norm
    whose weight is sharded sums the squares of its input's features over the ranks. ranges: for each of its own
    parameters and buffers of which a rank holds all and computes with a part, (dimension, the entries [start, stop) of
    each rank along it). evaluates: its own forward runs as in evaluation.
    """

    def __init__(
        self,
        *,
        sum_gradients: bool = False,
        sharded: Sequence[str] = (),
        ranges: Mapping[str, tuple[int, Sequence[Ranges]]] | None = None,
        evaluates: bool = False,
    ) -> None:
        self.sum_gradients, self.sharded, self.evaluates = sum_gradients, tuple(sharded), evaluates
        self.ranges = dict(ranges or {})

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_floats(module)
        for name in self.sharded:
            parameter = module._parameters.get(name)
            if parameter is not None and (not parameter.ndim or len(parameter) % device_mesh.size()):
                raise ValueError(
                    f"its {name} {list(parameter.shape)} cannot be split among {device_mesh.size()} ranks: expected a"
                    " multiple of them"
                )
        rank = device_mesh.get_local_rank()
        rows = {name: (dim, ranges[rank]) for name, (dim, ranges) in self.ranges.items()}
        source = self.src_data_rank
        replicate_(module, device_mesh, self.sum_gradients, source, None, self.sharded, rows, self.evaluates)
        return module


class ShardedExpertsParallel(ParallelStyle):
    """Experts with stacked weights, of which every rank has a part of the inner features (`ShardedExperts`).

    shards: how the weights are divided. The inputs and the output are whole on every rank.
    """

    def __init__(self, shards: ExpertShards) -> None:
        self.shards = shards

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_floats(module)
        layouts = {name: self.shards.layout(name, x.shape) for name, x in module.named_parameters()}
        kind = combined_class(ShardedExperts, type(module))
        of_rank = self.shards.attributes(module, device_mesh)
        convert(module, kind, device_mesh, layouts, self.src_data_rank, shards=self.shards, **of_rank)
        return module


class FusedPrepareModuleInput(PrepareModuleInput):
    """torch's PrepareModuleInput that shares one gather, or one sum of gradients, among several products.

    projections: the names of the column-parallel children that read the module's first input (`first_argument`); the
    module uses that input for nothing else but its shape. They share one gather, fused into their products, and their
    parts of the input's gradient are summed once. sum_gradients: the module's own code reads the whole input too, so
    that its gather is fused with nothing, and the ranks' parts of its gradient are summed. attributes: values that the
    module's attributes take, for a module that computes with sizes that are smaller on a rank. length_arguments: the
    names of keyword arguments of the module; the last dimension of the first that is a tensor is the length of the
    whole sequence without padding. length: where that length is kept. A module whose input is split here, or that gets
    such an argument, sets it; another one reads it.

    With projections or attributes the layouts are those of the first input: Shard(d) or Replicate() to Replicate(), or
    Replicate() to Shard(d). Without them this is torch's style.
    """

    def __init__(
        self,
        *,
        projections: Sequence[str] = (),
        length_arguments: Sequence[str] = (),
        attributes: dict[str, Any] | None = None,
        length: SequenceLength | None = None,
        sum_gradients: bool = False,
        **torchs: Any,
    ) -> None:
        super().__init__(**torchs)
        self.projections, self.length_arguments = tuple(projections), tuple(length_arguments)
        self.attributes, self.length, self.sum_gradients = attributes or {}, length, sum_gradients

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not (self.projections or self.attributes or self.length is not None or self.sum_gradients):
            return super()._apply(module, device_mesh)
        inside = {name for name, _ in module.named_modules()}
        for name in self.projections:
            if name not in inside:
                children = ", ".join(child for child, _ in module.named_children())
                raise ValueError(f"projection {name!r}: it has no such child, but {children}")
        others = (*(self.input_layouts or ())[1:], *self.input_kwarg_layouts.values())
        if self.input_layouts is None or any(layout is not None for layout in others):
            raise ValueError("projections: expected the layouts of the first input alone, as input_layouts")
        assert self.desired_input_layouts is not None
        source, target = self.input_layouts[0], self.desired_input_layouts[0]
        held, wanted = (each.dim if isinstance(each, Shard) else None for each in (source, target))
        hook = PreparedInput(
            device_mesh, held, wanted, self.projections, self.length_arguments, self.length, self.sum_gradients
        )
        module.__dict__.update(self.attributes)
        for name in () if hooked(module) else self.projections:
            module.get_submodule(name).__dict__["shares_gather"] = isinstance(source, Shard)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


class WholeSequences(ParallelStyle):
    """A module that every rank runs on whole sequences, between modules that pass shards of them.

    sequence_dim: the dimension of the sequence in its first input (`first_argument`), and in its output or the first
    entry of it. length_arguments, length: as in `FusedPrepareModuleInput`.
    """

    def __init__(
        self, *, sequence_dim: int = 1, length_arguments: Sequence[str] = (), length: SequenceLength | None = None
    ) -> None:
        self.sequence_dim, self.length_arguments, self.length = sequence_dim, tuple(length_arguments), length

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before = PreparedInput(device_mesh, self.sequence_dim, None, (), self.length_arguments, self.length, False)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(SplitOutput(device_mesh, self.sequence_dim), with_kwargs=True)
        return module


class _PlanStyle:
    """A style of transformers' `tp_plan`, which loads the shards that DTensors describe.

    Packed projections keep transformers' styles: its loader knows only weights of the shapes in the file.
    """

    def __init__(self, style: FusedColwiseParallel | FusedRowwiseParallel) -> None:
        self.install_forward = style._apply  # (module, mesh); it checks the module and shards its parameters too

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Do nothing: transformers calls this for each parameter, and `install_forward` for their module."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Do nothing."""


PLAN_STYLES = {
    "tpfuse_colwise": _PlanStyle(FusedColwiseParallel()),
    "tpfuse_colwise_gather_output": _PlanStyle(FusedColwiseParallel(output_layouts=Replicate())),
    "tpfuse_rowwise": _PlanStyle(FusedRowwiseParallel()),
    "tpfuse_embedding_rowwise": _PlanStyle(FusedRowwiseParallel(input_layouts=Replicate())),
}
