"""This rank's part of a parameter, for forward, and for engines that keep gradients in buffers of their own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpfuse.comm.layout import local_tensor
from tpfuse.ops.autograd import apply


class Borrowed:
    """A value that an engine sets instead of a model's own attribute while it has the model's parameters.

    A copy of the model, and the model that pickle writes, belong to no engine: they have `own` instead.
    """

    def __init__(self, value: Any, own: Any) -> None:
        self.value, self.own = value, own

    def __bool__(self) -> bool:
        return bool(self.value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged, (self.own,)


def _unchanged(own: Any) -> Any:
    return own


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, differentiably."""
    if not isinstance(parameter, DTensor):
        return parameter
    leaf: Borrowed | None = getattr(parameter, "local_leaf", None)
    if leaf is not None:
        return leaf.value  # type: ignore[no-any-return]
    return parameter.to_local() if torch.compiler.is_compiling() else apply(_ToLocal, parameter)


class _ToLocal(Function):
    """DTensor.to_local with a backward that takes 60 µs less on a CPU: the gradient has the parameter's placements.

    Writes to a DTensor do not count as writes to its local tensor, which the products keep. So backward checks that
    there were none, and raises RuntimeError as autograd does.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec, ctx.parameter = parameter._spec, parameter
        ctx.version = None if parameter.is_inference() else parameter._version
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.parameter._version != ctx.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(ctx.parameter.shape)}, needed for gradient computation, has been modified"
                " by an inplace operation, such as an optimizer's step, since its forward pass: run that again"
            )
        if torch.is_grad_enabled():  # create_graph=True
            return apply(_FromLocal, grad, ctx.spec)
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]


class _FromLocal(Function):
    """The DTensor of a local gradient, differentiably."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, spec: Any) -> Tensor:
        ctx.spec = spec
        return DTensor(grad.contiguous(), spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return local(grad.redistribute(placements=ctx.spec.placements)), None


def local_of(layer: Any, name: str, dim: int | None = None) -> Any:
    """Return this rank's shard along `dim` (None: the whole) of a layer's parameter; other tensors, and None, as it is.

    layer: a `tpfuse.layers.on_mesh.OnMesh`. The call is a collective of its mesh if the parameter has other placements,
    as one that torch.nn.utils.parametrize computes may have. Raise ValueError for a parameter on another mesh.
    """
    parameter: Tensor | None = getattr(layer, name)
    if not isinstance(parameter, DTensor):
        return parameter
    mesh, device_mesh = parameter.device_mesh, layer.device_mesh
    if mesh is not device_mesh and mesh != device_mesh:
        raise ValueError(
            f"{name} is on {mesh}: expected {device_mesh}, the mesh of its layer; fully_shard gathers it for forward"
            " alone, and for methods that torch.distributed.fsdp.register_fsdp_forward_method names"
        )
    held = parameter.placements[0]
    if not (held.is_replicate() if dim is None else held.is_shard(dim)):
        parameter = parameter.redistribute(placements=[Replicate() if dim is None else Shard(dim)])
    return local(parameter)


def offer_leaf(parameter: DTensor) -> Tensor:
    """Make `local(parameter)` a leaf of its own, on the same memory, and return it; the caller collects its gradient.

    An engine that keeps gradients in buffers of its own (`tpfuse.zero.gradient_buckets`) needs this: the path through
    DTensor costs about 0.1 ms for each parameter and pass on a CPU, which is a tenth of a small step.
    """
    leaf = local_tensor(parameter).requires_grad_()
    parameter.local_leaf = Borrowed(leaf, None)  # type: ignore[attr-defined]
    return leaf


def offer_head(parameter: Tensor, take: Callable[[Tensor], None]) -> None:
    """Make `head_of` of a layer with the parameter a leaf of its own, whose gradient a backward pass gives to `take`.

    An engine that sums the gradients of the two uses of a tied embedding apart (`tpfuse.comm.sum_order`) needs this.
    """

    def given(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        take(gradient)

    leaf = local_tensor(parameter).detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(given)  # type: ignore[no-untyped-call]
    parameter.head_leaf = Borrowed(leaf, None)  # type: ignore[attr-defined]


def head_of(layer: Any) -> Any:
    """Return this rank's shard of the weight of an embedding, for its use as the head."""
    leaf: Borrowed | None = getattr(layer.weight, "head_leaf", None)
    return local_of(layer, "weight", 0) if leaf is None else leaf.value


def withdraw_leaf(parameter: DTensor) -> None:
    """Undo `offer_leaf`: gradients pass through the DTensor again, and its hooks run."""
    parameter.local_leaf = None  # type: ignore[attr-defined]
