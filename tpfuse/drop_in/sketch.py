"""Copies of models without values, which run on the CPU in float64 to try what the model's code does."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tpfuse.comm.layout import has_values
from tpfuse.drop_in.outline import outline
from tpfuse.drop_in.styles import is_conv1d, is_linear

LARGE = 2**22  # elements of a parameter that gets no values: more than those of a router of 384 experts
# The largest difference that counts as rounding, as a share of the largest value: models compute in float32 in places.
_TOLERANCE = 1e-4


def sketch(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values and hooks, as it evaluates in float64 on the CPU, without a cache."""
    made = outline(model, {})
    configs: dict[int, Any] = {}
    for module in made.modules():
        module.__dict__.pop("forward", None)
        module.training = False
        for name, value in list(module.__dict__.items()):
            if "_hooks" in name and isinstance(value, dict):
                module.__dict__[name] = type(value)()
            elif isinstance(value, Tensor):
                module.__dict__[name] = value.detach().cpu()
        config = module.__dict__.get("config")
        if config is not None:
            module.__dict__["config"] = configs.setdefault(id(config), _plain_config(config))
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():  # a result in which it takes part is NaN
                values = torch.full((), torch.nan, dtype=torch.float64).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for module, original in zip(made.modules(), model.modules(), strict=True):
        for name, buffer in original._buffers.items():
            if buffer is not None:
                module._buffers[name] = _buffer(buffer)
    return made


def set_forwards(model: nn.Module) -> list[str]:
    """Return the names of the modules whose forward is set on the module, and is therefore not that of their class."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def refuse_set_forward(name: str) -> NoReturn:
    """Raise NotImplementedError for one of `set_forwards`, which a sketch does not run."""
    raise NotImplementedError(f"the forward of {name or 'the model'} is set on the module: expected that of its class")


def _buffer(x: Tensor) -> Tensor:
    """Return the values of a buffer, on the CPU; others if it has none or many."""
    if not has_values(x) or x.numel() > 16 * LARGE:
        filled = torch.full((), 0.5 if x.is_floating_point() else 1, device="cpu").expand(x.shape)
    else:
        filled = x.detach().cpu()
    return filled.double() if x.is_floating_point() else filled.to(x.dtype)


def _plain_config(config: Any) -> Any:
    """Return a copy of a model's configuration, with an attention that torch computes on any device."""
    made = copy.copy(config)
    if getattr(made, "use_cache", False):
        made.use_cache = False
    if getattr(made, "_attn_implementation", "eager") not in ("eager", "sdpa", None):
        made._attn_implementation = "sdpa"
    if getattr(made, "_experts_implementation", None) is not None:
        made._experts_implementation = "eager"
    return made


def give_values(module: nn.Module, generator: torch.Generator) -> None:
    """Give the module's own parameters random values, unless they are large."""
    for name, x in module._parameters.items():
        if x is not None and x.numel() <= LARGE and x.is_floating_point():
            values = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            module._parameters[name] = nn.Parameter(values, requires_grad=x.requires_grad)


@contextmanager
def apart() -> Iterator[None]:
    """Let foreign code run with gradients, on the CPU, and without drawing from the process's random numbers."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"), _with_torch_alone():
        yield


@contextmanager
def _with_torch_alone() -> Iterator[None]:
    """Let transformers compute as it does for torch.export: without the kernels of other packages, which need a GPU."""
    kernels: Any = sys.modules.get("transformers.integrations.hub_kernels")
    own = getattr(kernels, "is_torchdynamo_exporting", None)
    if own is None:
        yield
        return
    kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        kernels.is_torchdynamo_exporting = own


def width_of(module: nn.Module) -> int | None:
    """Return the output features of a linear layer or an embedding; None for any other module.

    A small module with a forward of its own runs it, and is none.
    """
    for kind, width in ((nn.Embedding, "embedding_dim"), (nn.Linear, "out_features")):
        if isinstance(module, kind):
            weight: Any = module.weight
            own = type(module).forward is not kind.forward and weight.numel() <= LARGE
            return None if own and not is_linear(module) else int(getattr(module, width))
    return int(module.nf) if is_conv1d(module) else None  # type: ignore[arg-type]


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a module's first input: the tensor that styles prepare."""
    tensors = (x for x in (kwargs.get("hidden_states"), *kwargs.values()) if isinstance(x, Tensor))
    x = args[0] if args else next(tensors, None)
    if not isinstance(x, Tensor):
        raise NotImplementedError(f"its first input is a {type(x).__name__}: expected a tensor")
    return x


def with_first_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with x as its first input."""
    if args:
        return (x, *args[1:]), kwargs
    first = first_input(args, kwargs)
    return args, {name: x if value is first else value for name, value in kwargs.items()}


def first_tensor(out: Any) -> Tensor:
    """Return a module's output, or the first entry of it."""
    entries = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else [out]
    first = next((x for x in entries if isinstance(x, Tensor)), None)
    if not isinstance(first, Tensor):
        raise NotImplementedError(f"a module in it returns a {type(out).__name__}: expected a tensor in it")
    return first


def tensors_in(out: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, in order."""
    if isinstance(out, Tensor):
        yield out
    for entry in out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ():
        yield from tensors_in(entry)


def mapped(function: Callable[[Tensor], Tensor], out: Any) -> Any:
    """Return a module's output with function(x) in the place of each tensor x in it."""
    if isinstance(out, Tensor):
        return function(out)
    if isinstance(out, Mapping):
        return type(out)({name: mapped(function, entry) for name, entry in out.items()})  # type: ignore[call-arg]
    if isinstance(out, tuple | list):
        entries = [mapped(function, entry) for entry in out]
        return type(out)(*entries) if hasattr(out, "_fields") else type(out)(entries)
    return out


def with_first_tensor(out: Any, x: Tensor) -> Any:
    """Return a module's output with x as its first entry."""
    return x if isinstance(out, Tensor) else type(out)((x, *out[1:]))


def kind_of(module: nn.Module) -> Any:
    """Return what modules that are built alike have in common, whatever their numbers and values."""
    plain = (int, float, str, type(None))
    numbers = ("layer_idx", "layer_id", "layer_number")
    return tuple(
        (
            name,
            type(part),
            tuple((key, x) for key, x in vars(part).items() if isinstance(x, plain) and key not in numbers),
            tuple((key, x.shape, x.requires_grad) for key, x in part.named_parameters(recurse=False)),
        )
        for name, part in module.named_modules()
    )


def agree(name: str, actual: Tensor, expected: Tensor, scale: float) -> None:
    agree_in_shape(name, actual, expected)
    if bool(expected.isnan().any()):
        raise NotImplementedError(f"{name} cannot be tried, since it depends on parameters that are large")
    error = largest_value(actual.detach().double() - expected.detach().double())
    if not error <= _TOLERANCE * scale:  # also for NaN
        raise NotImplementedError(f"{name} would differ by {error / max(scale, 1e-30):.0e} of its largest value")


def agree_in_shape(name: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise NotImplementedError(f"{name} is {tuple(actual.shape)} on a rank: expected {tuple(expected.shape)}")


def largest_value(x: Tensor) -> float:
    return x.detach().double().abs().max().item() if x.numel() else 0.0


def line_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]}"
