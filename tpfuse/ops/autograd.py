"""torch.autograd.Function with types, under autocast, and in backward passes that compute only some gradients.

torch's `apply` has no annotations. Its `once_differentiable` returns gradients without a graph, and so without an
error, if the upstream gradient requires none (after a sum or a loss). Inside a Function, autocast would give forward
other dtypes than backward has.

An operator of torch.library takes 40 µs of the host with a registered backward, and a Function with the same backward
takes 10 (benchmarks/results/gpu.md). A `RegisteredFunction` is both: an operator for what traces or compiles, a
Function for calls that nothing observes.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.graph import Node
from torch.library import custom_op
from torch.nn import Parameter

_Called = TypeVar("_Called", bound=Callable[..., Any])


def apply(function: type[Function], *args: object) -> Tensor:
    """Return `function.apply(*args)` of a Function that returns one tensor."""
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


def no_view(x: Tensor) -> Tensor:
    """Return x, whose memory nothing else refers to, as a tensor that is no view of another one.

    The result of a Function may be changed in place only then. (torch.compile cannot ask whether a tensor is a view.)
    """
    return cast(Tensor, torch.ops.aten._unsafe_view(x, x.shape))


def refuse_tangents(operator: str, *inputs: object) -> None:
    """Raise RuntimeError if an input has a tangent, of which the operator's result would have none.

    torch refuses tangents where a Function is applied, but not where a function is called, or an operator of
    torch.library.
    """
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs):  # type: ignore[no-untyped-call]
        raise RuntimeError(f"{operator} has no derivative in forward mode: use reverse mode, or torch's own function")


class RegisteredFunction:
    """A function that is an operator of torch.library, and that is called as itself where nothing observes the call.

    Modes of torch's dispatcher observe a call, and so do functorch and torch.compile; tensors of subclasses and of the
    meta device need the dispatcher too.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None = None) -> None:
        """name: as in torch.ops, such as tpfuse::gemm_forward. function: mutates nothing, and returns new tensors."""
        self._name, self._function = name.removeprefix("tpfuse::"), function
        self._registered = custom_op(name, function, mutates_args=(), schema=schema)
        self._differentiable: type[Function] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register what the operator returns for tensors without values, as torch.library does."""
        self._registered.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Register the backward pass, as torch.library does."""
        function = self._function

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._differentiable = type(f"GeneratedBackwardFor_tpfuse_{self._name}_default", (Function,), methods)
        self._registered.register_autograd(backward, setup_context=setup_context)

    def __call__(self, *inputs: Any) -> Any:
        refuse_tangents(self._name.removesuffix("_forward"), *inputs)
        if torch.compiler.is_compiling() or _observed(inputs):
            return self._registered(*inputs)
        if not torch.is_grad_enabled() or not _needs_gradients(inputs):
            return self._function(*inputs)
        if self._differentiable is None:  # the dispatcher makes a backward pass through it an error
            return self._registered(*inputs)
        return self._differentiable.apply(*inputs)  # type: ignore[no-untyped-call]


def registered(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], RegisteredFunction]:
    """Make a `RegisteredFunction` of a function."""
    return lambda function: RegisteredFunction(name, function, schema)


def _observed(inputs: tuple[Any, ...]) -> bool:
    """Return whether a call with these arguments must reach torch's dispatcher."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    return any(isinstance(x, Tensor) and (type(x) not in (Tensor, Parameter) or x.is_meta) for x in inputs)


def _needs_gradients(inputs: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


class _FirstDerivative(Function):
    """The identity of gradients, whose own gradients are an error."""

    @staticmethod
    def forward(ctx: Any, operator: str, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator
        return tuple(gradient.clone() for gradient in gradients)  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            f"{ctx.operator} has no second derivative: create_graph=True gives gradients that cannot be differentiated"
        )


def once_differentiable(backward: _Called) -> _Called:
    """Return `backward`, computed without a graph, such that a second derivative is an error.

    backward: the backward of a Function, or of an operator of torch.library.
    """

    @functools.wraps(backward)
    def first_derivative(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # no create_graph; compiled code has none
            return results
        gradients = [results] if isinstance(results, Tensor) else list(results)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        name = type(ctx).__name__.removeprefix("_").removeprefix("GeneratedBackwardFor_tpfuse_")
        operator = name.removesuffix("Backward").removesuffix("_forward_default")
        anchor = torch.ones((), requires_grad=True)
        marked = _FirstDerivative.apply(operator, anchor, *(gradients[index] for index in present))  # type: ignore[no-untyped-call]
        for index, gradient in zip(present, marked, strict=True):
            gradients[index] = gradient
        return gradients[0] if isinstance(results, Tensor) else tuple(gradients)

    return cast(_Called, first_derivative)


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return for each input of forward whether the backward pass that is running uses the gradient of that input.

    ctx: the context of a Function, or of an operator of torch.library without lists of tensors, in its backward.
    `ctx.needs_input_grad` only says which inputs required gradients in forward. A pipeline that computes the gradients
    of its input first and those of its weights later runs backward twice, and each time uses only some of them. In code
    that is compiled there is one backward pass, and the result is `ctx.needs_input_grad`.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needed
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # one for each needed gradient, in order
    return tuple(need and _runs(next(nodes)) for need in needed)


def _runs(node: Node) -> bool:
    """Return whether the backward pass that is running gives `node` a gradient."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises it for a leaf whose gradient torch.autograd.grad returns
        return True


def is_autocast(device: torch.device) -> bool:
    """Return whether torch.autocast is on for tensors on `device`; the meta device has no autocast."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors, converted under torch.autocast to its dtype as F.linear does; float64 and None stay."""
    tensors = x, *others
    if not is_autocast(x.device):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(function: _Called) -> _Called:
    """Return `function`, whose first argument is a tensor, computed in the dtypes of its tensors under autocast too."""

    @functools.wraps(function)
    def in_own_dtypes(x: Tensor, *args: Any, **options: Any) -> Any:
        if not is_autocast(x.device):
            return function(x, *args, **options)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **options)

    return cast(_Called, in_own_dtypes)
