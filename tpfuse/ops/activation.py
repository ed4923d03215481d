"""Activations, by the names that every layer and kernel uses.

gelu_tanh(x) = x σ(z) with z = √(8 / π) (x + 0.044715 x³). On CPUs in float32 a few passes of torch compute this form,
in blocks that stay in the caches. They take less time than the one pass of F.gelu, whose tanh is slow
(`benchmarks/results`), and they keep the digits of results near 0, which 1 + tanh loses.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfuse.ops.autograd import is_transformed, registered

_BLOCK = 2**16  # elements of a thread
# z = x (_LINEAR + _CUBIC x²), in which a sum needs a tensor
_LINEAR, _CUBIC = math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi)
_LINEAR_TERM = torch.tensor(_LINEAR)


def _by_passes(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu" and x.is_contiguous()


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(x.view(-1), _BLOCK * torch.get_num_threads()) for x in tensors), strict=True)


@registered("tpfuse::gelu_tanh")
def _gelu_tanh(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for part, result in _blocks(x, out):
        torch.addcmul(_LINEAR_TERM, part, part, value=_CUBIC, out=result)
        result.mul_(part).sigmoid_().mul_(part)
    return out


@registered("tpfuse::gelu_tanh_backward")
def _gelu_tanh_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad σ (1 + x z' (1 - σ))."""
    out = torch.empty_like(x)
    for of_result, part, result in _blocks(grad.contiguous(), x, out):
        torch.addcmul(_LINEAR_TERM, part, part, value=_CUBIC, out=result)
        slope = torch.add(result.mul_(part), part, alpha=-2 / 3 * _LINEAR)  # x z' / 3
        sigmoid = result.sigmoid_()
        slope.addcmul_(slope, sigmoid, value=-1)
        sigmoid.addcmul_(sigmoid, slope, value=3).mul_(of_result)
    return out


_gelu_tanh.register_fake(torch.empty_like)
_gelu_tanh_gradient.register_fake(lambda grad, x: torch.empty_like(x))


def gelu_tanh_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the argument x of `gelu_tanh`, of its shape and dtype."""
    if _by_passes(x) and not torch.is_grad_enabled():
        return _gelu_tanh_gradient(grad, x)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return gelu_tanh_gradient(grad, *ctx.saved_tensors)  # with create_graph torch's, which has a graph


_gelu_tanh.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GPT-2's form of GELU of x, in its shape and dtype."""
    if not _by_passes(x) or is_transformed(x):
        return F.gelu(x, approximate="tanh")
    return _gelu_tanh(x)  # type: ignore[no-any-return]


def _gated(inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return inner(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": torch.relu,
    "relu2": lambda x: torch.square(torch.relu(x)),
    "silu": F.silu,
    "swiglu": partial(_gated, F.silu),
    "geglu": partial(_gated, F.gelu),
}
GATED = frozenset({"swiglu", "geglu"})


def check_activation(name: str | None) -> None:
    """Raise ValueError, which lists the known names, for an unknown name."""
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known: expected None or one of {', '.join(ACTIVATIONS)}")


def activation(x: Tensor, name: str | None) -> Tensor:
    """Apply activation `name` to [..., N], any float dtype; the gated ones take [..., gate | up], 2N wide.

    "gelu" is the exact (erf) form, "gelu_tanh" GPT-2's; "relu2" is the square of relu (arXiv:2109.08668); "swiglu" and
    "geglu" are silu(gate) * up and gelu(gate) * up (arXiv:2002.05202). Raise ValueError for an unknown name.
    """
    check_activation(name)
    return x if name is None else ACTIVATIONS[name](x)
