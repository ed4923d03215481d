"""Parameters that an engine takes over: they stay the same objects, on other storage, without a gradient of their own.

Whoever holds a parameter (a list, an optimizer, a hook) holds it still. So that nobody takes a missing gradient for one
that is zero, each has a `TakenGradient` instead of its gradient, which raises an error when it is computed with.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from tpfuse.comm.layout import from_local
from tpfuse.layers.parameter import Borrowed


def take_partial_gradients(model: nn.Module) -> set[str]:
    """Names of the parameters whose gradients their modules sum over tensor-parallel ranks, which they do no more."""
    names = set()
    for prefix, module in model.named_modules():
        sums = getattr(module, "sum_gradients", False)
        if sums or (isinstance(sums, Borrowed) and sums.own):  # or they did before other buckets had the model
            setattr(module, "sum_gradients", Borrowed(False, own=True))  # noqa: B010 (its type is of modules)
            names |= {name for name, _ in module.named_parameters(prefix, recurse=False)}
    return names


def _local(parameter: Tensor) -> Tensor:
    """The tensor whose memory the parameter has: a DTensor's own local one, not a view of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def move_(parameter: Parameter, storage: Tensor) -> None:
    """Copies the parameter's (local) values to `storage`, of its dtype and local shape, which it lies in from then on.

    It keeps its version, hooks and attributes. What is behind and in front of it in the bucket is not in its storage:
    copies and files of the parameter are as large as it, and torch copies and pickles DTensors at offset 0 alone.
    """
    storage = from_dlpack(storage)
    storage.copy_(_local(parameter).detach())
    if not isinstance(parameter, DTensor):
        parameter.data = storage
        return
    dim = next((placement.dim for placement in parameter.placements if isinstance(placement, Shard)), None)
    moved = from_local(storage, parameter.device_mesh, dim, parameter.shape)
    assert isinstance(moved, DTensor)
    parameter.data = moved  # torch.compile wants the outer tensor's offset and strides to be the local one's
    parameter._local_tensor, parameter._spec = moved._local_tensor, moved._spec


def location(parameter: Tensor) -> tuple[torch.dtype, int]:
    """What changes when the parameter gets other storage (model.to): its dtype, and the address of its memory."""
    return parameter.dtype, _local(parameter).data_ptr()


def count_write(parameters: list[Parameter]) -> None:
    """Tells autograd that the parameters were written: backward passes of earlier forward passes are then errors."""
    torch.autograd.graph.increment_version([_local(parameter) for parameter in parameters])


_PERMITTED = (torch.ops.aten.zero_.default, torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class TakenGradient(Tensor):
    """Stands where a gradient of this size, dtype and device would be, and takes no memory.

    Raises ValueError with `message` when something computes with it (an optimizer's step, clip_grad_norm_, the next
    backward pass). Setting it to zero does nothing.
    """

    message: str

    @staticmethod
    def __new__(cls, message: str, size: torch.Size, dtype: torch.dtype, device: torch.device) -> "TakenGradient":
        gradient: TakenGradient = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        gradient.message = message
        return gradient

    def __init__(self, *arguments: object) -> None:
        """Nothing is left to do after `__new__`."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TakenGradient({self.message!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], (self.message, self.dtype, self.device)  # torch.compile makes its own of that

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: torch.Size, stride: Any) -> "TakenGradient":
        message, dtype, device = context
        return TakenGradient(message, size, dtype, device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _PERMITTED:
            return args[0]
        if func is torch.ops.aten._to_copy.default:  # model.to(): the next start() says what is wrong with that
            like = torch.empty(0, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs.get("device"))
            return TakenGradient(args[0].message, args[0].shape, like.dtype, like.device)
        flat = [*args, *(kwargs or {}).values()]
        arguments = [x for each in flat for x in (each if isinstance(each, (list, tuple)) else [each])]
        raise ValueError(next(x.message for x in arguments if isinstance(x, cls)))


def taken_gradient(parameter: Tensor, message: str) -> Tensor:
    """A `TakenGradient` that may be set as `parameter.grad`, also a DTensor's."""
    local = _local(parameter)
    taken = TakenGradient(message, local.shape, local.dtype, local.device)
    if not isinstance(parameter, DTensor):
        return taken
    spread: Tensor = DTensor(taken, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    spread.__deepcopy__ = _no_gradient  # type: ignore[method-assign]
    return spread


def _no_gradient(memo: dict[int, Any]) -> None:
    """A copy of a taken parameter has no gradient; torch would copy that of a DTensor, as it does not of plain ones."""
