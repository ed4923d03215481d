# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/transformer.py
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tpfuse
from tpfuse import ColumnParallelLinear, LayerNorm, PositionEmbedding, RowParallelLinear, VocabParallelEmbedding


class DecoderBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class WholeTransformer(nn.Module):  # as it is written for one process
    def __init__(self, vocabulary=101, length=16, width=64, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(self.positions(ids))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.ln_f(x), targets)

    def positions(self, ids):
        return torch.arange(ids.shape[1])

    def loss(self, x, targets):  # the head is the token embedding
        return F.cross_entropy(F.linear(x, self.wte.weight).flatten(0, 1), targets.flatten(), ignore_index=-1)


class ParallelTransformer(WholeTransformer):
    def positions(self, ids):  # of this rank's shard of the sequence
        return super().positions(ids).chunk(self.mesh.size())[self.mesh.get_local_rank()]

    def loss(self, x, targets):  # -1 is ignored
        return self.wte.loss(x, targets, 1.0 / (targets != -1).sum().item())


def parallelized(model, mesh):
    options = {"sequence_parallel": True, "device_mesh": mesh}
    model = copy.deepcopy(model)
    model.__class__, model.mesh = ParallelTransformer, mesh
    model.wte = VocabParallelEmbedding.from_embedding(model.wte, **options)
    model.wpe = PositionEmbedding.from_embedding(model.wpe, **options)
    model.ln_f = LayerNorm.from_layer_norm(model.ln_f, **options)
    for block in model.blocks:
        block.heads //= mesh.size()  # those of this rank
        block.ln_1 = LayerNorm.from_layer_norm(block.ln_1, **options)
        block.c_attn = ColumnParallelLinear.from_linear(block.c_attn, parts=3, **options)  # q, k and v
        block.c_proj = RowParallelLinear.from_linear(block.c_proj, **options)
        block.ln_2 = LayerNorm.from_layer_norm(block.ln_2, **options)
        block.up = ColumnParallelLinear.from_linear(block.up, **options)
        block.down = RowParallelLinear.from_linear(block.down, **options)
    return model


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and tokens on all ranks
torch.set_default_dtype(torch.float64)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
whole = WholeTransformer()
model = parallelized(whole, mesh)
ids, targets = torch.randint(101, (2, 3, 16))
losses = whole(ids, targets), model(ids, targets)
for loss in losses:
    loss.backward()
torch.testing.assert_close(*losses)
for name, parameter in model.named_parameters():
    expected = whole.get_parameter(name).grad
    gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    torch.testing.assert_close(gradient.reshape(expected.shape), expected, rtol=1e-9, atol=1e-12)
tpfuse.explain(model)  # it would warn of a parameter that sees a shard alone
print(f"rank {dist.get_rank()}: loss {losses[1].item():.6f} and all gradients are those of one process")
dist.destroy_process_group()
