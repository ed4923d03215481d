"""A block of GPT-2 on tensor- and sequence-parallel layers: attention and MLP, each after a norm, on a residual path.

With "selective" recomputation (`tpfuse.parallel.recompute`) the GELU is an operator of its own between the layers of
the MLP, which is computed again from its input. Otherwise it is part of the first layer, whose last pass applies it in
Triton's kernels before rounding. So the two differ by rounding in 16-bit dtypes on GPUs, and not at all on CPUs.

Shape suffixes are those of `tpfuse.models.gpt`; N is the number of this rank's features.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.dropout import Dropout, DropoutState
from tpfuse.layers.explain import LayerPlan
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.models.gpt_config import GPTConfig
from tpfuse.models.key_value_cache import KeyValueCache
from tpfuse.ops.activation import activation
from tpfuse.parallel.context import ONE_RANK, ShardedBatch
from tpfuse.parallel.recompute import recomputed

ACTIVATION = "gelu_tanh"


def first_rows(x: Tensor, count: int) -> Tensor:
    """Return x[:count]; x itself if that is all: the gradient of a slice is a copy with zeros around it."""
    return x if x.shape[0] == count else x[:count]


class Attention(nn.Module):
    """Causal self-attention, of which each rank computes its heads."""

    def __init__(self, config: GPTConfig, layer: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.layer, self.context, self.length = layer, ONE_RANK, config.n_positions
        self.recomputes = False
        self.heads = config.n_head if mesh is None else config.n_head // mesh.size()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = ColumnParallelLinear(
            config.n_embd, 3 * config.n_embd, config.bias, parts=3, sequence_parallel=True, device_mesh=mesh
        )
        self.c_proj = RowParallelLinear(
            config.n_embd, config.n_embd, config.bias, sequence_parallel=True, device_mesh=mesh
        )
        self.dropout = config.dropout
        self.resid_dropout = Dropout(config.dropout, site=4 * layer + 2)

    def forward(
        self,
        x_mC: Tensor,
        residual_mC: Tensor,
        sharded: ShardedBatch,
        state: DropoutState | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Return residual + attention(x)."""
        qkv_MN, tokens = self.c_attn(x_mC), sharded.tokens
        padding = qkv_MN.shape[0] - tokens
        rows_MN = first_rows(qkv_MN, tokens) if padding else qkv_MN
        qkv_BnpHD = rows_MN.reshape(sharded.batch, sharded.local_length, 3, self.heads, self.head_size)
        # Parts of a permuted view would take another pass over the gradient of qkv.
        q_BnHD, k_BnHD, v_BnHD = qkv_BnpHD.unbind(2)
        q_BHnD, k_BHnD, v_BHnD = q_BnHD.transpose(1, 2), k_BnHD.transpose(1, 2), v_BnHD.transpose(1, 2)
        if cache is not None:
            k_BHnD, v_BHnD = cache.append(self.layer, k_BHnD, v_BHnD)
        dropout: dict[str, Any] = {}
        if state is not None and self.dropout:
            key = state.keys[4 * self.layer + 1]
            dropout = {"dropout_p": self.dropout, "head_rows": state.head_rows, "key": key}

        def attend(q_BHnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor) -> Tensor:
            y_BHnD = sharded.attention(q_BHnD, k_BHnD, v_BHnD, **dropout)
            y_MC = y_BHnD.transpose(1, 2).reshape(tokens, -1)
            return F.pad(y_MC, (0, 0, 0, padding)) if padding else y_MC

        drops = state is not None and self.dropout > 0.0
        project = partial(self.c_proj, residual=None if drops else residual_mC)  # its last pass adds the residual
        if self.recomputes:
            out_mC = recomputed(attend, (q_BHnD, k_BHnD, v_BHnD), project)
        else:
            out_mC = project(attend(q_BHnD, k_BHnD, v_BHnD))
        return residual_mC + self.resid_dropout(out_mC, state) if drops else out_mC

    def explained(self, name: str) -> LayerPlan | None:
        """Return for `tpfuse.explain` how context-parallel ranks attend to each other's tokens; None for one rank."""
        plan = self.context.plan(self.length, self.heads, self.head_size, self.c_proj.weight)
        return None if plan is None else LayerPlan(name, "Attention", (), (), "ring_attention", *plan)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, of four times the features."""

    def __init__(self, config: GPTConfig, layer: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        width = config.n_embd
        self.recomputes = False
        self.c_fc = ColumnParallelLinear(
            width, 4 * width, config.bias, activation=ACTIVATION, sequence_parallel=True, device_mesh=mesh
        )
        self.c_proj = RowParallelLinear(4 * width, width, config.bias, sequence_parallel=True, device_mesh=mesh)
        self.p, self.dropout = config.dropout, Dropout(config.dropout, site=4 * layer + 3)

    def forward(self, x_mC: Tensor, residual_mC: Tensor, state: DropoutState | None) -> Tensor:
        """Return residual + MLP(x)."""
        y_MN, drops = self.c_fc(x_mC), state is not None and self.p > 0.0
        project = partial(self.c_proj, residual=None if drops else residual_mC)  # its last pass adds the residual
        if self.recomputes:
            out_mC = recomputed(partial(activation, name=ACTIVATION), (y_MN,), project)
        else:
            out_mC = project(y_MN)
        return residual_mC + self.dropout(out_mC, state) if drops else out_mC


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and on a residual path."""

    def __init__(self, config: GPTConfig, layer: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        norm = partial(
            LayerNorm, config.n_embd, config.layer_norm_epsilon, config.bias, sequence_parallel=True, device_mesh=mesh
        )
        self.ln_1 = norm()
        self.attn = Attention(config, layer, mesh)
        self.ln_2 = norm()
        self.mlp = MLP(config, layer, mesh)

    def recompute_selectively(self) -> None:
        """Let the backward pass compute attention and the activation again, as "selective" says."""
        self.attn.recomputes = self.mlp.recomputes = True
        self.mlp.c_fc.activation = None  # it is an operator of its own

    def forward(
        self, x_mC: Tensor, sharded: ShardedBatch, state: DropoutState | None, cache: KeyValueCache | None
    ) -> Tensor:
        y_mC, x_mC = self.ln_1(x_mC, with_input=True)
        y_mC, x_mC = self.ln_2(self.attn(y_mC, x_mC, sharded, state, cache), with_input=True)
        z_mC: Tensor = self.mlp(y_mC, x_mC, state)
        return z_mC
