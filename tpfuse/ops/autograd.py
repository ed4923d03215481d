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
from torch.library import custom_op
from torch.nn import Parameter

_Called = TypeVar("_Called", bound=Callable[..., Any])
# torch's flags: modes of its dispatcher, functorch's transforms, and tensors that these left behind.
_MODES, _TRANSFORMS = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_IS_WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor


def apply(function: type[Function], *args: object) -> Tensor:
    """Return `function.apply(*args)` of a Function that returns one tensor.

    Function.apply asks whether functorch has a part in the call, in Python. Here C-level flags tell.
    """
    plain: bool = not _TRANSFORMS()
    for x in args:
        plain = plain and not (isinstance(x, Tensor) and _IS_WRAPPED(x))
    call: Any = super(Function, function) if plain else function
    out: Tensor = call.apply(*args)
    return out


apply._torchdynamo_inline = lambda function, *args: function.apply(*args)  # type: ignore[attr-defined]


def no_view(x: Tensor) -> Tensor:
    """Return x, whose memory nothing else refers to, as a tensor that is no view of another one.

    The result of a Function may be changed in place only then. (torch.compile cannot ask whether a tensor is a view.)
    """
    whole: Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return whole


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
    meta device need the dispatcher too. Each of them costs one call into C, or none.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None = None) -> None:
        """name: as in torch.ops, such as tpfuse::gemm_forward. function: mutates nothing, and returns new tensors."""
        self._name, self._function = name.removeprefix("tpfuse::"), function
        self._registered = custom_op(name, function, mutates_args=(), schema=schema)
        self._differentiable: Callable[..., Any] | None = None

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
        generated = type(f"GeneratedBackwardFor_tpfuse_{self._name}_default", (Function,), methods)
        self._differentiable = super(Function, generated).apply  # type: ignore[misc]  # `apply` does the same
        self._registered.register_autograd(backward, setup_context=setup_context)

    def _dispatched(self, *inputs: Any) -> Any:
        refuse_tangents(self._name.removesuffix("_forward"), *inputs)
        return self._registered(*inputs)

    def __call__(self, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0 or _MODES() or _TRANSFORMS():
            return self._dispatched(*inputs)
        needs_gradients = False
        for x in inputs:
            if isinstance(x, Tensor):
                if (type(x) is not Tensor and type(x) is not Parameter) or x.is_meta or _IS_WRAPPED(x):
                    return self._registered(*inputs)
                needs_gradients = needs_gradients or x.requires_grad
        if not needs_gradients or not torch.is_grad_enabled():
            return self._function(*inputs)
        if self._differentiable is None:  # the dispatcher makes a backward pass through it an error
            return self._registered(*inputs)
        return self._differentiable(*inputs)

    __call__._torchdynamo_inline = _dispatched  # type: ignore[attr-defined]  # torch.compile traces this instead


def registered(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], RegisteredFunction]:
    """Make a `RegisteredFunction` of a function."""
    return lambda function: RegisteredFunction(name, function, schema)


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
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling():  # compiled code has no create_graph
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
    nodes, wanted = iter(ctx.next_functions), []  # with a node for each needed gradient, in order
    for need in ctx.needs_input_grad:
        node: Any = None
        while need and node is None:
            node, _ = next(nodes)
        try:
            wanted.append(need and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch raises it for a leaf whose gradient torch.autograd.grad returns
            wanted.append(True)
    return tuple(wanted)


wanted_gradients._torchdynamo_inline = lambda ctx: ctx.needs_input_grad  # type: ignore[attr-defined]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of torch.autocast for tensors like x, None where it is off; the meta device has no autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors, converted under torch.autocast to its dtype as F.linear does; float64 and None stay."""
    tensors, dtype = (x, *others), autocast_dtype(x)
    if dtype is None:
        return tensors
    return tuple(x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(function: _Called) -> _Called:
    """Return `function`, whose first argument is a tensor, computed in the dtypes of its tensors under autocast too."""

    @functools.wraps(function)
    def in_own_dtypes(x: Tensor, *args: Any, **options: Any) -> Any:
        if autocast_dtype(x) is None:
            return function(x, *args, **options)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **options)

    return cast(_Called, in_own_dtypes)
