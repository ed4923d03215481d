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

Where a result is rounded to a half type, a GPU computes sigmoid(x) = 1 / (1 + 2^(-x log2 e)) by its approximations of
2^x and 1 / x, whose relative errors are 2^-22 and 2^-23 (PTX ISA 8.7, ex2 and rcp), and flushes subnormal numbers to 0.
`tl.sigmoid` checks the range of 2^x and divides: 9 of the 17 instructions that gelu_tanh took for an element. With the
rounding of its argument the relative error is below 2e-6 for x > -3 and 1e-5 down to -9.
"""

import triton
import triton.language as tl

from tpfuse.kernels.tiles import INTERPRETED

ACTIVATIONS = (None, "gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu")
GATED = frozenset({"swiglu", "geglu"})

# Triton's interpreter needs a constexpr to be the right operand of a product with a tensor.
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
_CUBIC = tl.constexpr(0.044715)
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
# The coefficients of x and x³ in -2u log2 e.
_LINEAR_POWER = tl.constexpr(-1.5957691216057308 * 1.4426950408889634)
_CUBIC_POWER = tl.constexpr(-1.5957691216057308 * 1.4426950408889634 * 0.044715)
_RECIPROCAL = tl.constexpr(
    "ex2.approx.ftz.f32 $0, $1; add.rn.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;"
)  # $0 = 1 / (1 + 2^$1)


def check_activation(operator: str, name: str | None) -> None:
    """Raise ValueError, which lists the known names, unless `name` is one of them."""
    if name not in ACTIVATIONS:
        expected = ", ".join(str(known) for known in ACTIVATIONS)
        raise ValueError(f"{operator}: activation {name!r} is not known: expected one of {expected}")


@triton.jit
def sigmoid_of_power(power):
    """Return 1 / (1 + 2^power), which is sigmoid(x) for power = -x log2 e. A GPU approximates it, see above."""
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x, DTYPE: tl.constexpr):
    """Return sigmoid(x) of float32 x, for a result that is rounded to DTYPE."""
    if INTERPRETED or DTYPE == tl.float32:
        return tl.sigmoid(x)
    else:
        return sigmoid_of_power(x * _MINUS_LOG2_E)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return act(x) of float32 x, which the caller rounds to DTYPE; for a gated activation, that of its gate."""
    if ACTIVATION == "gelu" or ACTIVATION == "geglu":
        return 0.5 * x * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        if INTERPRETED or DTYPE == tl.float32:
            return x * tl.sigmoid((x + x * x * x * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
        else:
            return x * sigmoid_of_power(x * (x * x * _CUBIC_POWER + _LINEAR_POWER))
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive
    elif ACTIVATION == "silu" or ACTIVATION == "swiglu":
        return x * sigmoid(x, DTYPE)
    else:
        tl.static_assert(ACTIVATION == "none")
        return x


@triton.jit
def sigmoid_and_slope(x, DTYPE: tl.constexpr):
    """Return sigmoid(x) and its derivative, for a result that is rounded to DTYPE.

    For half types it is s - s², whose cancellation where s is near 1 is far below the rounding of what it is added to.
    """
    if INTERPRETED or DTYPE == tl.float32:
        e = tl.exp(-tl.abs(x))
        scale = 1.0 / (1.0 + e)
        return tl.where(x < 0.0, e, 1.0) * scale, e * scale * scale
    else:
        s = sigmoid_of_power(x * _MINUS_LOG2_E)
        return s, s - s * s


@triton.jit
def activation_gradient(grad, x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return grad act'(x) of float32 numbers, which the caller rounds to DTYPE; for a gated activation, its gate's."""
    if ACTIVATION == "gelu" or ACTIVATION == "geglu":
        cdf = 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
        return grad * (cdf + x * (tl.exp(-0.5 * x * x) * _INVERSE_SQRT_2PI))
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, 1e4)  # stays finite; the factor beside it is 0 long before this limit
        s, s_slope = sigmoid_and_slope((x + x * x * x * _CUBIC) * _TWICE_SQRT_2_OVER_PI, DTYPE)
        slope = (1.0 + square * (3.0 * _CUBIC)) * _TWICE_SQRT_2_OVER_PI
        return grad * (s + x * s_slope * slope)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, grad)
    elif ACTIVATION == "relu2":
        return tl.where(x <= 0.0, 0.0, 2.0 * grad * x)
    elif ACTIVATION == "silu" or ACTIVATION == "swiglu":
        s, s_slope = sigmoid_and_slope(x, DTYPE)
        return grad * (s + x * s_slope)
    else:
        tl.static_assert(ACTIVATION == "none")
        return grad
