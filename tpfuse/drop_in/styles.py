"""Parallel styles with fused layers, for torch's `parallelize_module` and for `tpfuse.parallelize`.

| style                   | converts                                        | communicates                         |
|-------------------------|-------------------------------------------------|--------------------------------------|
| FusedColwiseParallel    | nn.Linear, transformers' Conv1D                 | a gather inside the product          |
| FusedRowwiseParallel    | nn.Linear, Conv1D, nn.Embedding (by rows)       | a sum inside the product             |
| FusedSequenceParallel   | nn.LayerNorm, nn.RMSNorm, other norms, Dropout  | the parameters' gradients            |
| FusedPrepareModuleInput | nothing: it prepares a module's input           | one gather for several products      |
| ReplicatedParallel      | any module                                      | nothing, or its gradients            |
| WholeSequences          | nothing: it gathers the input, splits the output| whole sequences                      |

Each of the first four takes the arguments of torch's style whose name it extends, and means the same by them; torch's
own implementation serves where there is nothing to fuse (column-parallel embeddings, other layouts). The styles mix
with torch's in one plan.

Plain tensors pass between fused modules. Where one is this rank's shard of a sequence that the ranks do not divide, it
is padded with zeros at the end, so that all ranks hold equally many rows; DTensors are never padded.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
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
    stand_in,
)
from tpfuse.drop_in.replicated import ReplicatedModule, ReplicatedRMSNorm, rms_norm_terms, run_with_plain_parameters
from tpfuse.drop_in.shards import as_local, gather_sequence, shard_as_dtensor, split_sequence
from tpfuse.layers.on_mesh import check_embedding, check_parameters
from tpfuse.layers.partial_gradients import mark_partial_gradients
from tpfuse.layers.sequence import sequence_back, sequence_first, splits
from tpfuse.ops.collectives import replicate
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear

Apply = Callable[[Any, nn.Module, DeviceMesh], nn.Module]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def is_conv1d(module: nn.Module) -> bool:
    """Return whether `module` is transformers' Conv1D: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def features(module: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of an nn.Linear or Conv1D. Raise ValueError for any other module.

    One with other parameters than weight and bias, from which hooks compute these, is another module too.
    """
    if type(module) is nn.Linear or is_conv1d(module):
        check_parameters("it", module)
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if is_conv1d(module):
        rows, columns = cast(Tensor, module.weight).shape
        return int(rows), int(columns)
    kind = f"{type(module).__module__}.{type(module).__name__}"
    raise ValueError(f"it is a {kind}: expected an nn.Linear or transformers' Conv1D")


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


def called(module: nn.Module) -> str:
    return str(module.__dict__.get("module_name", type(module).__name__))


def first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Tensor]:
    """Return (name, value) of a module's first input: of keyword arguments `hidden_states`, or else the first tensor.

    The name is None for a positional argument. Raise ValueError, with the name of the module, if it is no tensor.
    """
    names: list[str | None] = [None] if args else ["hidden_states", *kwargs]
    for name in names:
        value = args[0] if name is None else kwargs.get(name)
        if isinstance(value, Tensor):
            return name, value
    raise ValueError(f"{called(module)}: its input is no tensor: expected one as its first argument, or by keyword")


def with_first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, new: Tensor) -> Arguments:
    """Return the arguments of a module with `new` in the place of `first_argument`, which has this name."""
    return ((new, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: new})


class FusedColwiseParallel(ColwiseParallel):
    """torch's ColwiseParallel with the gather of the input fused into the product.

    input_layouts: Replicate() (default), or Shard(d): the input is this rank's shard along dimension d. output_layouts:
    Shard(-1) (default) or Replicate(). use_local_output: return a plain tensor. parts: the number of matrices of equal
    height that are packed in the weight one after another, each of which is sharded by itself. ranges: of the rows
    [start, stop) that each rank uses, if the weight must stay whole on every rank; one entry for each rank.

    With output_layouts=Replicate() the ranks need not divide the features, unless the weight is packed: the last ranks
    have fewer. A rank's own features, Shard(-1), must be equally many on all ranks, as what follows takes them to be.
    """

    def __init__(
        self, *, parts: int = 1, ranges: Sequence[Ranges] | None = None, **torchs: Placement | bool | None
    ) -> None:
        super().__init__(**cast(Any, torchs))
        self.parts, self.ranges = parts, ranges

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
            raise ValueError(
                f"its {height // self.parts} output features cannot be split among {ranks} ranks: expected a multiple,"
                f" or tp {splits(height // self.parts, max(ranks, 8))}"
            )

    def _is_torchs(self, module: nn.Module) -> bool:
        """Return whether torch's own style serves: for embeddings, and for layouts that tpfuse has no product for."""
        layouts = self.input_layouts[0], self.output_layouts[0]
        fused = isinstance(layouts[0], Replicate | Shard) and layouts[1] in (Replicate(), Shard(-1))
        plain = type(module) is nn.Linear and self.parts == 1 and self.ranges is None
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
        if self.ranges is not None:
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
            transposed=transposed, use_local_output=self.use_local_output, offered=None,
        )  # fmt: skip
        return module


class FusedRowwiseParallel(RowwiseParallel):
    """torch's RowwiseParallel with the sum over the ranks fused into the product.

    input_layouts: Shard(-1) (default), or Replicate(): the module takes this rank's slice of the features.
    output_layouts: Replicate() (default), or Shard(d): the output is this rank's shard along dimension d.
    use_local_output: return a plain tensor. An nn.Embedding, or a subclass whose forward calls that of nn.Embedding, is
    sharded by rows; its input is whole.
    """

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
            raise ValueError(
                f"its {inner} input features cannot be split among {ranks} ranks: expected a multiple,"
                f" or tp {splits(inner, max(ranks, 8))}"
            )

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
                use_local_output=self.use_local_output,
            )  # fmt: skip
            return module
        (inner, outer), transposed = features(module), is_conv1d(module)
        convert(
            module, ConvertedRowLinear, device_mesh, {"weight": (0 if transposed else 1, None), "bias": (None, None)},
            self.src_data_rank, in_features=inner, out_features=outer,
            input_is_parallel=not isinstance(self.input_layouts[0], Replicate),
            sequence_parallel=output_dim is not None, output_dim=output_dim, transposed=transposed,
            use_local_output=self.use_local_output,
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
        self, *, sequence_dim: int = 1, use_local_output: bool = False, gather_output: "SequenceLength | None" = None
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


def _recomputes() -> bool:
    """Return whether a backward pass runs, in which a layer computes again what it did not keep."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@dataclass
class SequenceLength:
    """The length of the sequences of a forward pass, without padding, from where they are split to where they end.

    waiting: those of the passes that the next backward pass may recompute layers of.
    """

    value: int | None = None
    waiting: set[int] = field(default_factory=set)

    def wait(self, x: Tensor) -> None:
        """Let the length wait for a backward pass if x, a tensor of the forward pass, will have one."""
        if not torch.compiler.is_compiling() and self.value is not None and x.requires_grad and not _recomputes():
            self.waiting.add(self.value)

    def of_recomputed(self, called: str, share: int, ranks: int) -> int | None:
        """Return the length of a pass of which a layer is recomputed, from a rank's share of the tokens.

        Raise ValueError, with the name of the module, if it may be any of several.
        """
        fitting = [length for length in self.waiting or {self.value or 0} if -(-length // ranks) == share]
        Variable._execution_engine.queue_callback(self.waiting.clear)
        if self.value is not None and len(fitting) != 1:
            self.waiting.clear()
            raise ValueError(
                f"{called}: it is recomputed after forward passes of several lengths, and not told of which: give the"
                " layer position_ids by keyword, or call backward before a forward pass of another length"
            )
        return fitting[0] if fitting else None

    def of_pass(self, called: str, tokens: int, ranks: int) -> int | None:
        """Return the length of the pass that runs, or is recomputed, from the tokens of a tensor: a share or all.

        Raise ValueError, with the name of the module, if it may be any of several.
        """
        if not _recomputes() or len(self.waiting) < 2:
            return self.value if not _recomputes() or not self.waiting else next(iter(self.waiting))
        fitting = [length for length in self.waiting if tokens in (length, -(-length // ranks))]
        if len(fitting) != 1:
            raise ValueError(
                f"{called}: its hooks run again after forward passes of several lengths: call backward before a forward"
                " pass of another length, or remove them"
            )
        return fitting[0]


@dataclass(eq=False)
class SequenceShards:
    """Hooks of a module that maps this rank's shard of the sequence to one of equal length."""

    mesh: DeviceMesh
    dim: int
    use_local_output: bool
    gather_output: SequenceLength | None
    length: int | None = None  # the sequence's length in the last forward pass, if the input was a DTensor

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with this rank's plain shard for a DTensor, whose length is kept for the output.

        It is contiguous, as the whole model's activations are: a norm of the model's own may view it in another shape.
        """
        name, x = first_argument(module, args, kwargs)
        self.length = x.shape[self.dim] if isinstance(x, DTensor) else None
        return with_first_argument(args, kwargs, name, as_local(x, self.dim, self.mesh)[0].contiguous())

    def after(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Return the output in the layout that the style promises."""
        if self.gather_output is not None:
            if self.mesh.size() == 1:
                return out
            self.gather_output.wait(out)
            return gather_sequence(out, self.dim, self.mesh.get_group(), self.gather_output.value)
        if self.use_local_output:
            return out
        length = out.shape[self.dim] * self.mesh.size() if self.length is None else self.length
        return shard_as_dtensor(out, self.mesh, self.dim, length)


def replicate_(
    module: nn.Module,
    mesh: DeviceMesh,
    sum_gradients: bool,
    source: int | None,
    kind: type[nn.Module] | None = None,
    sharded: Sequence[str] = (),
) -> None:
    """Make the module's own parameters DTensors that every rank holds whole. kind: its class, by default its own.

    sharded: those whose first dimension is sharded instead.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]
    layouts = {name: (0 if name in sharded else None, None) for name in names}
    attributes: dict[str, Any] = {"sum_gradients": sum_gradients and mesh.size() > 1}
    own = module.__dict__.get("forward")
    if own is not None:
        kind = combined_class(ReplicatedModule, type(module))
        attributes["forward"] = functools.partial(run_with_plain_parameters, module, own)
    if kind is None:
        terms = rms_norm_terms(module)
        attributes |= {} if terms is None else {"terms": terms}
        kind = combined_class(ReplicatedModule if terms is None else ReplicatedRMSNorm, type(module))
    convert(module, kind, mesh, layouts, source, **attributes)


class ReplicatedParallel(ParallelStyle):
    """A module that runs its own forward, with parameters that every rank holds whole.

    sum_gradients: each rank computes a part of the parameters' gradients (for its heads, for instance), and the parts
    are summed; otherwise all ranks compute the same gradients. sharded: the names of its own parameters that have an
    entry for each head, of which a rank holds and computes with those of its heads.
    """

    def __init__(self, *, sum_gradients: bool = False, sharded: Sequence[str] = ()) -> None:
        self.sum_gradients, self.sharded = sum_gradients, tuple(sharded)

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
        replicate_(module, device_mesh, self.sum_gradients, self.src_data_rank, sharded=self.sharded)
        return module


class FusedPrepareModuleInput(PrepareModuleInput):
    """torch's PrepareModuleInput that shares one gather, or one sum of gradients, among several products.

    projections: the names of the column-parallel children that read the module's first input (`first_argument`); the
    module uses that input for nothing else but its shape. They share one gather, fused into their products, and their
    parts of the input's gradient are summed once. attributes: values that the module's attributes
    take, for a module that computes with sizes that are smaller on a rank. length_arguments: the names of keyword
    arguments of the module; the last dimension of the first that is a tensor is the length of the whole sequence
    without padding. length: where that length is kept. A module whose input is split here, or that gets such an
    argument, sets it; another one reads it.

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
        **torchs: Any,
    ) -> None:
        super().__init__(**torchs)
        self.projections, self.length_arguments = tuple(projections), tuple(length_arguments)
        self.attributes, self.length = attributes or {}, length

    @_named
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not (self.projections or self.attributes or self.length is not None):
            return super()._apply(module, device_mesh)
        children = dict(module.named_children())
        for name in self.projections:
            if name not in children:
                raise ValueError(f"projection {name!r}: it has no such child, but {', '.join(children)}")
        others = (*(self.input_layouts or ())[1:], *self.input_kwarg_layouts.values())
        if self.input_layouts is None or any(layout is not None for layout in others):
            raise ValueError("projections: expected the layouts of the first input alone, as input_layouts")
        assert self.desired_input_layouts is not None
        source, target = self.input_layouts[0], self.desired_input_layouts[0]
        held, wanted = (each.dim if isinstance(each, Shard) else None for each in (source, target))
        hook = PreparedInput(device_mesh, held, wanted, self.projections, self.length_arguments, self.length)
        module.__dict__.update(self.attributes)
        for name in () if _hooked(module) else self.projections:
            module.get_submodule(name).__dict__["shares_gather"] = isinstance(source, Shard)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


class WholeSequences(ParallelStyle):
    """A module that every rank runs on whole sequences, between modules that pass shards of them.

    sequence_dim: the dimension of the sequence in its first input (`first_argument`), and in its output or the first
    entry of it. length_arguments, length: as in `FusedPrepareModuleInput`.
    """

    def __init__(
        self, *, sequence_dim: int = 1, length_arguments: Sequence[str] = (), length: "SequenceLength | None" = None
    ) -> None:
        self.sequence_dim, self.length_arguments, self.length = sequence_dim, tuple(length_arguments), length

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before = PreparedInput(device_mesh, self.sequence_dim, None, (), self.length_arguments, self.length)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(SplitOutput(device_mesh, self.sequence_dim), with_kwargs=True)
        return module


@dataclass(eq=False)
class SplitOutput:
    """A hook that returns this rank's padded shard of the output, or of its first entry.

    A module may return the tokens of all sequences in one dimension, as mixtures of experts do.
    """

    mesh: DeviceMesh
    dim: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Return the output with this rank's shard. Raise ValueError if it has not the tokens of the input."""
        if self.mesh.size() == 1:
            return out
        tokens = first_argument(module, args, kwargs)[1].shape[:-1]
        if isinstance(out, Tensor):
            return self._split(module, out, tokens)
        return (self._split(module, out[0], tokens), *out[1:])

    def _split(self, module: nn.Module, out: Tensor, tokens: torch.Size) -> Tensor:
        flat = out.shape[:-1] == (tokens.numel(),) and len(tokens) > 1
        if not flat and out.shape[:-1] != tokens:
            raise ValueError(
                f"{called(module)}: it returns {tuple(out.shape)} for tokens {tuple(tokens)}: expected the same"
                " tokens, or sequence_parallel=False"
            )
        out = split_sequence(out.view(*tokens, -1), self.dim, self.mesh.get_group())
        return out.flatten(0, -2) if flat else out


def _hooked(module: nn.Module, own: Any = None) -> bool:
    """Return whether a hook, but for `own`, would read or change the module's input, or its gradient."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hook is not own for each in hooks for hook in each.values())


# The arguments of attentions that each head uses. Others, such as Bloom's residual, meet the sum over the ranks.
_OF_HEADS = ("attention_mask", "position_embeddings")


@dataclass(eq=False)
class PreparedInput:
    """A hook that prepares the first input of a module (`first_argument`).

    If the module or a projection has hooks of somebody else, all get the true input, and nothing is fused. An attention
    uses masks and embeddings of positions for this rank's heads alone: their gradients are summed.
    """

    mesh: DeviceMesh
    held: int | None  # the dimension along which the input is this rank's shard; None for the whole
    wanted: int | None  # the same for what the module wants
    projections: tuple[str, ...]  # these as in `FusedPrepareModuleInput`
    length_arguments: tuple[str, ...]
    length: SequenceLength | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with the prepared input."""
        name, x = first_argument(module, args, kwargs)
        given = (kwargs.get(each) for each in self.length_arguments)
        length = next((each.shape[-1] for each in given if isinstance(each, Tensor)), None)
        prepared = self._prepared(module, x, length)
        if self.projections and self.mesh.size() > 1:
            kwargs = kwargs | {each: self._shared(kwargs[each]) for each in _OF_HEADS if each in kwargs}
        return with_first_argument(args, kwargs, name, prepared)

    def _shared(self, x: Any) -> Any:
        """Return an input whose gradient, if it is wanted, is the sum over the ranks."""
        if type(x) is tuple:
            return tuple(map(self._shared, x))
        return replicate(x, self.mesh.get_group()) if isinstance(x, Tensor) and x.requires_grad else x

    def _prepared(self, module: nn.Module, x: Tensor, length: int | None) -> Tensor:
        group = self.mesh.get_group() if self.mesh.size() > 1 else None
        if self.held is not None and group is not None:
            mark_partial_gradients(module, x, "sequence")
        if isinstance(x, DTensor) and self.held is not None:
            length = x.shape[self.held] if length is None else length
        elif self.held is not None and length is not None:
            share = -(-length // self.mesh.size())
            if x.shape[self.held] != share:
                whole = f", not all {length}" if x.shape[self.held] == length else ""
                raise ValueError(
                    f"{called(module)}: the input has {x.shape[self.held]} tokens: expected the {share} of this"
                    f" rank{whole}"
                )
        if self.wanted is not None and self.length is not None:
            self.length.value = x.shape[self.wanted]
        if self.wanted is not None and group is not None and self.held is None and not isinstance(x, DTensor):
            return split_sequence(x, self.wanted, group)
        if self.wanted is not None or group is None:
            return as_local(x, self.wanted, self.mesh)[0]
        if self.length is not None and self.held is not None:
            again = _recomputes()
            if length is not None:  # A layer that is recomputed may have had another one than the last forward pass.
                self.length.value = length
                if again:
                    self.length.waiting.clear()  # modules that follow in the layer have this length too
            elif again:
                length = self.length.of_recomputed(called(module), x.shape[self.held], group.size())
            else:
                length = self.length.value
                self.length.wait(x)
        linears = [module.get_submodule(name) for name in self.projections]
        fits = all(isinstance(linear, ConvertedColumnLinear) and not _hooked(linear) for linear in linears)
        if not linears or not fits or _hooked(module, self):  # hooks would see the stand-in
            if self.held is not None:
                return gather_sequence(as_local(x, self.held, self.mesh)[0], self.held, group, length)
            return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x
        x, partial = as_local(x, self.held, self.mesh)
        parameters = [linear.parameters_of_rank() for linear in linears]  # type: ignore[operator]
        weights, biases = [weight for weight, _ in parameters], [bias for _, bias in parameters]
        if self.held is not None:
            rows = all_gather_linear(sequence_first(x, self.held), weights, biases, group)
            outs = [sequence_back(out, self.held) for out in rows]
            shape = list(x.shape)
            shape[self.held] *= group.size()
            if length is not None:
                outs = [out.narrow(self.held, 0, length) for out in outs]
                shape[self.held] = length
        else:
            x = x if partial else replicate(x, group)
            outs, shape = [gemm(x, *pair) for pair in parameters], list(x.shape)
        given = stand_in(x, shape)
        for linear, out in zip(linears, outs, strict=True):
            cast(Any, linear).offered = given, out
        return given
