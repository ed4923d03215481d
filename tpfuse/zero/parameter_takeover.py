"""Parameters that an engine takes over: they stay the same objects, with new storage and without their own gradient.

A list, an optimizer or a hook that holds a parameter still holds it. The gradient of each parameter is replaced by a
`TakenGradient`, which raises an error when code computes with it, so that no code mistakes it for a missing gradient
or for one that is zero.
"""

import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.dlpack import from_dlpack

from tpfuse.comm.layout import from_local, is_sharded, local_tensor
from tpfuse.layers.local_parameter import Borrowed

_CONTEXTS = ("sum_over_context", "mean_over_context")  # attributes of modules (`take_context_sums`)


def partial_gradients(model: nn.Module) -> set[str]:
    """Return the names of parameters whose gradients the model's modules sum over tensor-parallel ranks.

    Every rank holds these parameters whole.
    """
    return {
        name
        for prefix, module in model.named_modules()
        if _sums_gradients(module)
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if not is_sharded(parameter)
    }


def take_partial_gradients(model: nn.Module) -> set[str]:
    """Stop the modules' own sums of gradients over tensor-parallel ranks; return `partial_gradients`."""
    names = partial_gradients(model)
    for module in filter(_sums_gradients, model.modules()):
        setattr(module, "sum_gradients", Borrowed(False, own=True))  # noqa: B010 (attributes have modules' type)
    return names


def check_own_sums(model: nn.Module) -> None:
    """Raise ValueError if an engine sums gradients over tensor-parallel ranks that the modules should sum."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "sum_gradients", None), Borrowed):
            raise ValueError(
                f"another engine sums the gradients of {name} over tensor-parallel ranks: shard a copy of the model"
                " (copy.deepcopy) or a new model"
            )


def _sums_gradients(module: nn.Module) -> bool:
    """Return whether the module sums gradients, or did so before another engine took the model."""
    sums = getattr(module, "sum_gradients", False)
    return bool(sums.own if isinstance(sums, Borrowed) else sums)


def take_context_sums(model: nn.Module, data_group: dist.ProcessGroup | None) -> int:
    """Stop a model's own reductions of gradients over the ranks of a context; return how many ranks share a gradient.

    The module with a context has it as `sum_over_context` if its gradients on these ranks are parts of a sum
    (`tpfuse.models.gpt`), which they share, or as `mean_over_context` if their mean is the gradient
    (`tpfuse.drop_in.parallel_forward`), which counts the ranks as data-parallel ones. data_group: the ranks over which
    the engine sums instead. Raise ValueError, before it changes the model, if some rank of the context is not among
    them: its part would be lost.
    """
    size = 1
    for module, name in ((module, name) for module in model.modules() for name in _CONTEXTS):
        context = getattr(module, name, None)
        context = context.own if isinstance(context, Borrowed) else context
        if context is None:
            continue
        ranks = {dist.get_rank()} if data_group is None else set(dist.get_process_group_ranks(data_group))
        shared = {rank for group in context.groups for rank in dist.get_process_group_ranks(group)}
        if not shared <= ranks:
            raise ValueError(
                f"the data-parallel ranks are {sorted(ranks)}: expected the ranks {sorted(shared)} of the model's"
                ' context too: pass a mesh with the axis "cp"'
            )
        setattr(module, name, Borrowed(None, own=context))
        size = context.size if name == "sum_over_context" else 1
    return size


def _local(parameter: Tensor) -> Tensor:
    """Return the tensor that has the parameter's memory: for a DTensor its own local tensor, not a view of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def move_(parameter: Parameter, storage: Tensor) -> None:
    """Copy the parameter's local values to `storage` and make this the parameter's memory.

    storage: of the parameter's dtype and local shape. The parameter keeps its version, hooks and attributes. The
    neighbouring elements of the bucket are not in its storage, so copies and files of the parameter are not larger than
    it; also, torch copies and pickles DTensors only at offset 0.
    """
    storage = from_dlpack(storage)
    storage.copy_(_local(parameter).detach())
    if not isinstance(parameter, DTensor):
        parameter.data = storage
        return
    dim = next((placement.dim for placement in parameter.placements if isinstance(placement, Shard)), None)
    moved = from_local(storage, parameter.device_mesh, dim, parameter.shape)
    assert isinstance(moved, DTensor)
    parameter.data = moved  # torch.compile requires that the outer tensor's offset and strides equal the local one's
    parameter._local_tensor, parameter._spec = moved._local_tensor, moved._spec


class EngineHook:
    """The base class of hooks by which engines take gradients."""


def share_hooks(parameter: Parameter, other: Parameter) -> None:
    """Let the hooks of another parameter (register_hook) see this one's gradient, also those that come or go later."""
    if other._backward_hooks and parameter._backward_hooks is not other._backward_hooks:
        parameter._backward_hooks = other._backward_hooks


def hand_over_hooks(replaced: Parameter, parameter: Parameter) -> None:
    """Give the hooks of a parameter that another one replaces to that one, but for those of earlier engines."""
    share_hooks(parameter, replaced)
    hooks = replaced._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, EngineHook)]:
        del hooks[key]
    if hooks:
        parameter._post_accumulate_grad_hooks = hooks


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, placed as its parameter is (torch's SequenceParallel leaves sums)."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)


def location(parameter: Tensor) -> tuple[torch.dtype, int]:
    """Return the parameter's dtype and the address of its memory; they change if it gets other storage (model.to)."""
    return parameter.dtype, _local(parameter).data_ptr()


def count_write(parameters: list[Parameter]) -> None:
    """Tell autograd that the parameters were written, so that backward passes of earlier forward passes are errors."""
    torch.autograd.graph.increment_version([_local(parameter) for parameter in parameters])


def writes(parameter: Tensor) -> int:
    """Return autograd's count of writes to a tensor on this rank; a DTensor and its local tensor count apart."""
    return parameter._version + (parameter._local_tensor._version if isinstance(parameter, DTensor) else 0)


def in_backward() -> bool:
    """Return whether a backward pass of autograd is running on this thread."""
    return torch._C._current_graph_task_id() >= 0


def in_nested_backward() -> bool:
    """Return whether the backward pass that runs is one that a function's own backward, such as a checkpoint's, runs.

    It looks for that in the stack of Python, which takes long: for errors alone.
    """
    return any(frame.f_code is BackwardCFunction.apply.__code__ for frame, _ in traceback.walk_stack(None))


class TakenGradient(Tensor):
    """A placeholder for a gradient of this size, dtype and device, which takes no memory.

    It raises ValueError with `message` when code computes with it (an optimizer's step, clip_grad_norm_, the next
    backward pass). Setting it to zero only notes that, in `zeroed`. accumulates: whether a backward pass may add to it.
    What the pass adds is then `arrived`, for which the placeholder stands until a hook takes it. copies: whether it is
    copied first, because other hooks may write to it, and autograd may give it to several parameters.
    """

    message: str
    accumulates: bool
    copies: bool
    arrived: Tensor | None
    zeroed: bool

    @staticmethod
    def __new__(
        cls, message: str, size: torch.Size, dtype: torch.dtype, device: torch.device, accumulates: bool = False
    ) -> "TakenGradient":
        gradient: TakenGradient = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        gradient.message, gradient.accumulates = message, accumulates
        gradient.copies, gradient.arrived, gradient.zeroed = False, None, False
        return gradient

    def __init__(self, *arguments: object) -> None:
        """Do nothing: `__new__` has set everything."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TakenGradient({self.message!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], (self.message, self.dtype, self.device)  # torch.compile rebuilds the gradient from this

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: torch.Size, stride: Any) -> "TakenGradient":
        message, dtype, device = context
        return TakenGradient(message, size, dtype, device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first, kwargs = args[0], kwargs or {}
        if func is torch.ops.aten.add_.Tensor and isinstance(first, cls) and first.accumulates and in_backward():
            first.arrived = args[1].clone() if first.copies else args[1]
            return first
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        if all(x.arrived is not None for x in taken):
            return func(*tree_map_only(cls, _arrived, args), **tree_map_only(cls, _arrived, kwargs))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return first
        if func is torch.ops.aten.zero_.default:
            first.zeroed = True
            return first
        if func is torch.ops.aten._to_copy.default:  # model.to(): the next start() raises an error that explains it
            like = torch.empty(0, dtype=kwargs.get("dtype") or first.dtype, device=kwargs.get("device"))
            return TakenGradient(first.message, first.shape, like.dtype, like.device)
        raise ValueError(taken[0].message)


def _arrived(taken: TakenGradient) -> Tensor | None:
    return taken.arrived


class GradientPlace:
    """A parameter's `.grad`, in which an engine leaves nothing, or a `TakenGradient` with this message.

    accumulates: as for `TakenGradient`.
    """

    advice = ""  # what else to do about a changed `.grad`

    def __init__(self, parameter: Parameter, message: str, *, accumulates: bool = False) -> None:
        local = _local(parameter)
        self.parameter = parameter
        self.taken = TakenGradient(message, local.shape, local.dtype, local.device, accumulates)
        self.taken.copies = bool(parameter._post_accumulate_grad_hooks)  # made before the engine's hook is registered
        self.placeholder: Tensor = self.taken  # for a DTensor, one that has it
        self.left: Tensor | None = None
        if isinstance(parameter, DTensor):
            self.placeholder = DTensor(self.taken, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            self.placeholder.__deepcopy__ = _no_gradient  # type: ignore[method-assign]

    def leave(self, *, taken: bool) -> None:
        """Set `.grad` to the placeholder if the engine has taken a gradient, and to None if one is to arrive."""
        self.left = self.parameter.grad = self.placeholder if taken else None
        self.taken.arrived, self.taken.zeroed = None, False

    @property
    def intact(self) -> bool:
        """Return whether no other code has set, cleared or zeroed `.grad` since `leave`."""
        return self.parameter.grad is self.left and not self.taken.zeroed

    def check(self, name: str) -> None:
        """Raise ValueError unless `intact`. name: of the parameter."""
        if not self.intact:
            raise ValueError(
                f"{name}.grad was set, cleared or zeroed by other code, but the update takes the sums over ranks of"
                " what backward passes gave: change gradients in hooks (register_hook), clip by"
                f" optimizer.clip_grad_norm_(), and discard those of a step by optimizer.zero_grad(){self.advice}"
            )


def _no_gradient(memo: dict[int, Any]) -> None:
    """Return no gradient for the copy of a taken DTensor; torch copies DTensors' gradients, but not plain tensors'."""
