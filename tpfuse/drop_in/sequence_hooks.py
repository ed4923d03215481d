"""Hooks with which the styles prepare the inputs of modules, and split or gather their outputs, in forward passes."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpfuse.drop_in.converted import ConvertedColumnLinear, stand_in
from tpfuse.drop_in.shards import (
    as_local,
    check_divided,
    gather_sequence,
    shard_as_dtensor,
    split_sequence,
    with_summed_gradients,
)
from tpfuse.layers.partial_gradients import mark_partial_gradients
from tpfuse.layers.sequence import sequence_back, sequence_first
from tpfuse.ops.collectives import replicate
from tpfuse.ops.gemm import gemm
from tpfuse.ops.linear.all_gather_linear import all_gather_linear

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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


def hooked(module: nn.Module, own: Any = None) -> bool:
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
    sum_gradients: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with the prepared input."""
        name, x = first_argument(module, args, kwargs)
        given = (kwargs.get(each) for each in self.length_arguments)
        length = next((each.shape[-1] for each in given if isinstance(each, Tensor)), None)
        prepared = self._prepared(module, x, length)
        if self.projections and self.mesh.size() > 1:
            of_heads = {each: kwargs[each] for each in _OF_HEADS if each in kwargs}
            kwargs = kwargs | with_summed_gradients(of_heads, self.mesh.get_group())
        return with_first_argument(args, kwargs, name, prepared)

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
            if self.length is None:
                check_divided(called(module), x.shape[self.wanted], group.size())
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
        fits = all(isinstance(linear, ConvertedColumnLinear) and not hooked(linear) for linear in linears)
        if not linears or not fits or hooked(module, self):  # hooks would see the stand-in
            if self.held is not None:
                shard = as_local(x, self.held, self.mesh)[0]
                return gather_sequence(shard, self.held, group, length, sum_gradients=self.sum_gradients)
            x = x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x
            return replicate(x, group) if self.sum_gradients else x
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
