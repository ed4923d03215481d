"""Activations and their gradients as device functions, in float32, chosen by a constexpr name.

| name        | act(x)                                   | source              |
|-------------|------------------------------------------|---------------------|
| "none"      | x                                        |                     |
| "gelu"      | x Φ(x), by erf                           | arXiv:1606.08415    |
| "gelu_tanh" | x sigmoid(2u), u = √(2/π)(x + 0.044715x³)| the same            |
| "relu"      | max(x, 0)                                |                     |
| "relu2"     | max(x, 0)²                               | arXiv:2109.08668    |
| "silu"      | x sigmoid(x)                             | arXiv:1702.03118    |
| "swiglu"    | silu(gate) up                            | arXiv:2002.05202    |
| "geglu"     | gelu(gate) up                            | the same            |

(1 + tanh u) / 2 is computed as sigmoid(2u), which loses no digits where tanh is near -1 and cannot overflow. relu
selects instead of multiplying, as torch does: NaN passes, and a gradient of inf where x <= 0 gives 0, not NaN.
"""

import triton
import triton.language as tl

ACTIVATIONS = (None, "gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu")
GATED = frozenset({"swiglu", "geglu"})

# Triton's interpreter needs a constexpr to be the right operand of a product with a tensor.
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
_CUBIC = tl.constexpr(0.044715)


def check_activation(operator: str, name: str | None) -> None:
    """Raise ValueError, which lists the known names, unless `name` is one of them."""
    if name not in ACTIVATIONS:
        expected = ", ".join(str(known) for known in ACTIVATIONS)
        raise ValueError(f"{operator}: activation {name!r} is not known: expected one of {expected}")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return act(x) of float32 x; for a gated activation, the activation of its gate."""
    if ACTIVATION == "gelu" or ACTIVATION == "geglu":
        return 0.5 * x * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid((x + x * x * x * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive
    elif ACTIVATION == "silu" or ACTIVATION == "swiglu":
        return x * tl.sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "none")
        return x


@triton.jit
def sigmoid_and_slope(x):
    """Return sigmoid(x) and its derivative, without the cancellation in sigmoid(x) (1 - sigmoid(x))."""
    e = tl.exp(-tl.abs(x))
    scale = 1.0 / (1.0 + e)
    return tl.where(x < 0.0, e, 1.0) * scale, e * scale * scale


@triton.jit
def activation_gradient(grad, x, ACTIVATION: tl.constexpr):
    """Return grad act'(x), both float32; for a gated activation, the gradient of its gate's activation."""
    if ACTIVATION == "gelu" or ACTIVATION == "geglu":
        cdf = 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
        return grad * (cdf + x * (tl.exp(-0.5 * x * x) * _INVERSE_SQRT_2PI))
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, 1e4)  # stays finite; the factor beside it is 0 long before this limit
        s, s_slope = sigmoid_and_slope((x + x * x * x * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
        slope = (1.0 + square * (3.0 * _CUBIC)) * _TWICE_SQRT_2_OVER_PI
        return grad * (s + x * s_slope * slope)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, grad)
    elif ACTIVATION == "relu2":
        return tl.where(x <= 0.0, 0.0, 2.0 * grad * x)
    elif ACTIVATION == "silu" or ACTIVATION == "swiglu":
        s, s_slope = sigmoid_and_slope(x)
        return grad * (s + x * s_slope)
    else:
        tl.static_assert(ACTIVATION == "none")
        return grad
