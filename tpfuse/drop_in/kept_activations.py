"""Count what autograd keeps for the blocks of transformers' models, in a pass on the meta device."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tpfuse.drop_in.structure import decoder_layers

COUNTED = "tpfuse_counted"  # the attn_implementation of the pass


def kept_by_blocks(model: Any, tokens: int) -> tuple[float, float]:
    """Return the bytes that autograd keeps of a token in a block of the model, the mean over all blocks.

    The second number is that with tpfuse's norms and dropout, which tensor-parallel ranks have. Both are 0 if the
    forward pass fails without values.

    model: a causal language model of transformers on the meta device, in the dtype of the run; the call changes it.
    tokens: those of its sequence. Attention keeps its inputs, its output and a sum for each row, as that of GPUs does,
    unless the model must write its scores; masks of windows are left out.
    """
    if model.config._attn_implementation == "sdpa":
        model.config._attn_implementation = COUNTED
    own = _counted(model.train(), tokens)
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.p = 0.0
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = _Norm.apply
    return own, _counted(model, tokens)


def _counted(model: nn.Module, tokens: int) -> float:
    seen = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    held: list[Tensor] = []  # A storage that is gone could have the address of a later one.
    inside = kept = 0

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = 1

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = 0

    def keep(x: Tensor) -> Tensor:
        nonlocal kept
        if x.untyped_storage()._cdata not in seen:
            seen.add(x.untyped_storage()._cdata)
            held.append(x)
            kept += inside * x.untyped_storage().nbytes()
        return x

    blocks = decoder_layers(model)
    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            # Without a mask, models look for padding and documents in the values of ids and positions.
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except Exception:  # Whatever a model does with values fails in a way of its own.
        return 0.0
    return kept / (tokens * len(blocks))


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """See transformers' AttentionInterface: q, k and v are [batch, heads, tokens, size]."""
    out: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out, None


class _Attention(torch.autograd.Function):
    """Attention that computes nothing and keeps what FlashAttention keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, tokens, dtype=torch.float32))
        return out


class _Norm(torch.autograd.Function):
    """A norm that computes nothing and keeps what `tpfuse.RMSNorm` keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)
