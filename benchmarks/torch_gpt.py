"""The GPT-2 of `tpfuse.models.gpt` in plain torch, and torch's own tensor parallelism of it, as a peer.

The modules are nn.Embedding, nn.LayerNorm and nn.Linear, with scaled_dot_product_attention; every name of torch's API
has its usual meaning. The plan is that of torch's tensor-parallel tutorial and of torchtitan (arXiv:2410.06511): linear
layers by columns and by rows, shards of the sequence between them, norms on shards, the loss of sharded logits. Two
choices make the peer faster and change no result: q, k and v are one product (the features of a head are adjacent, so
that ColwiseParallel cuts between heads), and the residual path stays a plain tensor. Input and output embedding are
tied, as GPT-2's are.

Shape suffixes: B sequences, T positions, C width, H this rank's heads, D head size, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tpfuse.models.gpt import GPTConfig
from tpfuse.train.options import OptimOptions
from tpfuse.zero.bucket_layout import decays


class TorchBlock(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.head_size = width // config.n_head
        self.ln_1 = nn.LayerNorm(width, config.layer_norm_epsilon, bias=config.bias)
        self.c_attn = nn.Linear(width, 3 * width, config.bias)
        self.attn_proj = nn.Linear(width, width, config.bias)
        self.ln_2 = nn.LayerNorm(width, config.layer_norm_epsilon, bias=config.bias)
        self.c_fc = nn.Linear(width, 4 * width, config.bias)
        self.mlp_proj = nn.Linear(4 * width, width, config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Apply the block to [B, T, C], or to this rank's T / world positions of it; the result has the same shape."""
        qkv = self.c_attn(self.ln_1(x_BTC))
        q_BHTD, k_BHTD, v_BHTD = qkv.unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.attn_proj(y_BHTD.transpose(1, 2).flatten(-2))
        z_BTC: Tensor = x_BTC + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x_BTC)), approximate="tanh"))
        return z_BTC


class TorchGPT(nn.Module):
    """The model without dropout. Its weights are uninitialised until `load`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(TorchBlock(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss in nats per token."""
        x_BTC = self.wte(ids_BT) + self.wpe(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.h:
            x_BTC = block(x_BTC)
        logits_BTV = self.lm_head(self.ln_f(x_BTC))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def optimizer(self, optim: OptimOptions) -> torch.optim.AdamW:
        """Return torch's fused AdamW, which decays what tpfuse's decays."""
        groups = decay_groups(self, optim.weight_decay)
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the whole weights of a `tpfuse.models.gpt.GPT`, by its names."""
        for name, parameter in self.named_parameters():
            theirs = name.replace("c_attn", "attn.c_attn").replace("attn_proj", "attn.c_proj")
            theirs = theirs.replace("c_fc", "mlp.c_fc").replace("mlp_proj", "mlp.c_proj")
            weight = weights[f"transformer.{theirs}"]
            if "c_attn" in name:  # [part, head and feature, …] -> [head, part, feature, …]
                weight = weight.view(3, self.config.n_head, -1, *weight.shape[2:]).transpose(0, 1)
            parameter.copy_(weight.reshape(parameter.shape))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in the groups of torch's optimizers: with weight decay, and without."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if decays(name, p) == decayed], "weight_decay": weight_decay * decayed}
        for decayed in (True, False)
    ]


def parallelize(model: TorchGPT, mesh: DeviceMesh) -> None:
    """Shard a loaded model over a one-dimensional mesh, whose size must divide heads and positions.

    The model must then be called, forward and backward, within `torch.distributed.tensor.parallel.loss_parallel()`.
    """
    root = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, root)
    model.lm_head.weight = model.wte.weight
    for block in model.h:
        plan = {
            "ln_1": SequenceParallel(),
            "c_attn": ColwiseParallel(input_layouts=Shard(1)),
            "attn_proj": RowwiseParallel(output_layouts=Shard(1)),
            "ln_2": SequenceParallel(),
            "c_fc": ColwiseParallel(input_layouts=Shard(1)),
            "mlp_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
