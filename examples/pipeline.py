# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/pipeline.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse import Pipeline

WIDTH, VOCABULARY, MICRO_BATCHES = 64, 32, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """It learns to tell the next number from one number. The head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def embed(self, ids, targets):
        return self.embedding(ids)

    def loss(self, x, ids, targets):
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten()) / MICRO_BATCHES


dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank builds the same model and draws the same batches
model = Model()
pipeline = Pipeline(
    model,
    embed=(model.embed, [model.embedding]),
    blocks=model.blocks,
    head=(model.loss, [model.norm, model.head]),
    device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
    schedule="1f1b",
    micro_batches=MICRO_BATCHES,
)
tpfuse.explain(pipeline)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of this rank's blocks
for step in range(20):
    ids = torch.randint(VOCABULARY, (MICRO_BATCHES, 4, 16))
    optimizer.zero_grad()
    losses = pipeline.step(list(zip(ids, (ids + 1) % VOCABULARY, strict=True)))  # forward and backward
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    if pipeline.has_last:
        print(f"step {step}: loss {sum(losses):.4f}")
dist.destroy_process_group()
