"""Activations, by the names that every layer and kernel uses."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def _gated(inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return inner(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
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
