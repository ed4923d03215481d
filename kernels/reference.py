"""The meaning of each operator in plain PyTorch on one rank: the reference of tests and benchmarks.

    linear            y = act(x Wᵀ + b) + residual
    layer_norm        y = (x - mean) / sqrt(var + eps) * weight + bias
    rms_norm          y = x / sqrt(mean(x²) + eps) * weight
    adamw             p = p - lr decay p - lr m̂ / (sqrt(v̂) + eps)
    shard_sum         sum = g_0 + g_1 + …, rank 0 first
    sharded_adamw     adamw of clip shard_sum, decayed before decay_end
    cross_entropy     loss = log Σ exp(logit) - logit[target]
    linear_cross_entropy  Σ weights * cross_entropy(x Wᵀ)
    attention         y = softmax(mask(q kᵀ scale)) v, and log Σ exp of the scores
    attention_merge   y = y_a exp(lse_a - lse) + y_b exp(lse_b - lse), lse = log(exp lse_a + exp lse_b)

Each function runs in the dtype of its inputs: float64 gives the exact result up to its rounding, a half type shows the
error that plain PyTorch makes. Only attention of half types is computed in float32, as `tpfuse.ops` does without Triton
kernels. The functions use only torch's own operators, so that autograd computes every gradient; none of them is fast.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def activation(x: Tensor, name: str | None) -> Tensor:
    """Return act(x): [..., N] -> [..., N]; "swiglu" and "geglu" take [..., gate | up] and return half the width.

    Raise ValueError for a name that is not known.
    """
    match name:
        case None:
            return x
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x) ** 2
        case "silu":
            return F.silu(x)
        case "swiglu" | "geglu":
            gate, up = x.tensor_split(2, dim=-1)
            return (F.silu(gate) if name == "swiglu" else F.gelu(gate)) * up
    raise ValueError(f"activation {name!r} is not known")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation_name: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return act(x Wᵀ + bias) + residual.

    x: [..., K]; weight: [N, K]; bias: [N]; residual like the result -> [..., N], or N / 2 for a gated activation.
    """
    y = activation(F.linear(x, weight, bias), activation_name)
    return y if residual is None else y + residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return x normalised over its last dimension. x: [..., C]; weight, bias: [C] -> [..., C]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x divided by its root mean square over the last dimension. x: [..., C]; weight: [C] -> [..., C]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (parameter, exp_avg, exp_avg_sq), [n] each, after update number `step` (from 1), arXiv:1711.05101."""
    exp_avg = exp_avg + (1 - beta1) * (gradient - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    unbiased = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    parameter = parameter - lr * weight_decay * parameter
    return parameter - lr / (1 - beta1**step) * exp_avg / unbiased, exp_avg, exp_avg_sq


def shard_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum [m] of every rank's [m], rank 0 first; half types in float32."""
    half = gradients[0].dtype in (torch.bfloat16, torch.float16)
    total = gradients[0].to(torch.float32 if half else gradients[0].dtype, copy=True)
    for gradient in gradients[1:]:
        total += gradient
    return total


def sharded_adamw(
    parameter: Tensor,
    gradients: Sequence[Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    decay_end: int,
    clip: float,
    weight_decay: float,
    **rates: Any,
) -> tuple[Tensor, ...]:
    """Return (parameter, exp_avg, exp_avg_sq), [m] each, after an update with `adamw`'s rates.

    gradients: [m] of each rank. Elements before `decay_end` are decayed, the others are not.
    """
    state = parameter, clip * shard_sum(gradients), exp_avg, exp_avg_sq
    decayed = adamw(*(x[:decay_end] for x in state), weight_decay=weight_decay, **rates)
    others = adamw(*(x[decay_end:] for x in state), weight_decay=0.0, **rates)
    return tuple(torch.cat(pair) for pair in zip(decayed, others, strict=True))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return each row's loss in nats.

    logits: [M, V]; target: [M] int64, -1 or -100 where there is no loss -> [M], 0 there.
    """
    picked = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(target < 0, 0, logits.logsumexp(dim=1) - picked)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of weights * cross_entropy(x Wᵀ), in nats: [].

    x: [M, C]; weight: [V, C]; target: [M] int64, -1 or -100 where there is no loss; weights: [M]. Logits of half
    types are upcast to float32, as in every training loop.
    """
    logits = F.linear(x, weight)
    losses = cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)
    return losses.sum() if weights is None else (losses * weights).sum()


def attention_scores(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scaled scores [B, H, Tq, Tk], -inf for keys that a query does not see, and the mask of those [Tq, Tk].

    For the arguments see `attention`.
    """
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    query = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + q_offset
    distance = query - torch.arange(k.shape[2], device=q.device) - k_offset
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance.abs() >= window)
    return scores.masked_fill(hidden, -torch.inf), hidden


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    dropout_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(mask(q kᵀ scale)) v, [B, H, Tq, D], and the log-sum-exp [B, H, Tq] of the scores.

    q: [B, H, Tq, D]; k, v: [B, Hk, Tk, D], head h of q using head h // (H / Hk). A query that sees no key has 0 and
    -inf. Half types are computed in float32, and the result is rounded; their log-sum-exp is float32.

    Query i has position q_offset + i, key j has k_offset + j. causal: no query sees a key after its position; window:
    none sees a key at a distance of window or more. dropout_mask: [B, H, Tq, Tk], the factors of the probabilities, 0
    or 1 / (1 - p). Documents of different lengths need one call each.
    """
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    v = v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), dim=1)
    bounds = {"causal": causal, "window": window, "q_offset": q_offset, "k_offset": k_offset}
    scores, hidden = attention_scores(q, k, scale=scale, **bounds)  # type: ignore[arg-type]
    probabilities = scores.softmax(dim=3).masked_fill(hidden.all(dim=1, keepdim=True), 0)
    if dropout_mask is not None:
        probabilities = probabilities * dropout_mask.to(probabilities.dtype)
    return torch.matmul(probabilities, v).to(dtype), scores.logsumexp(dim=3)


def attention_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to two disjoint sets of keys: outs [..., D], log-sum-exps [...] of each -> of both together."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((x - lse).exp().masked_fill(x == -torch.inf, 0).unsqueeze(-1) for x in (lse_a, lse_b))
    return share_a * out_a + share_b * out_b, lse
