"""What each operator means, in plain PyTorch on one rank: the yardstick of tests and benchmarks.

    linear            y = act(x Wᵀ + b)
    layer_norm        y = (x - mean) / sqrt(var + eps) * weight + bias
    cross_entropy     loss = log Σ exp(logit) - logit[target]
    causal_attention  y = softmax(mask(q kᵀ / sqrt(D))) v

Each runs in the dtype of its inputs: float64 gives the truth, a half type the error that plain PyTorch makes.
Only torch's own operators, so that autograd gives every gradient; nothing here is fast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def activation(x: Tensor, name: str | None) -> Tensor:
    """[..., N] -> [..., N]; "swiglu" and "geglu" take [..., gate | up] and return half the width.

    Raises ValueError for a name that is not known.
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation_name: str | None = None) -> Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] -> [..., N], or N / 2 for a gated activation."""
    return activation(F.linear(x, weight, bias), activation_name)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x: [..., C]; weight, bias: [C] -> [..., C]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """logits: [M, V]; target: [M] int64, -1 where there is no loss -> [M] in nats, 0 there."""
    picked = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(target < 0, 0, logits.logsumexp(dim=1) - picked)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
    """q: [B, H, Tq, D], the last Tq of Tk positions; k, v: [B, H, Tk, D] -> [B, H, Tq, D].

    dropout_mask: [B, H, Tq, Tk], what the probabilities are multiplied with: 0 or 1 / (1 - p).
    """
    tq, tk = q.shape[2], k.shape[2]
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    query = torch.arange(tk - tq, tk, device=q.device).unsqueeze(1)
    future = torch.arange(tk, device=q.device) > query
    probabilities = scores.masked_fill(future, -torch.inf).softmax(dim=3)
    if dropout_mask is not None:
        probabilities = probabilities * dropout_mask
    return torch.matmul(probabilities, v)
