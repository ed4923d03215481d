# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/masked_labels.py
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tpfuse import ZeroOptimizer

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank draws data of its own
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100))
optimizer = ZeroOptimizer(model, stage=2, lr=1e-2)
for step in range(3):
    optimizer.zero_grad()
    for index in range(2):
        ids = torch.randint(100, (4, 17))
        masked = torch.rand(4, 16) < torch.rand(())
        targets = ids[:, 1:].masked_fill(masked, -100)
        with nullcontext() if index == 1 else optimizer.no_sync():
            logits = model(ids[:, :-1])
            cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        optimizer.divide_by((targets != -100).sum())  # the number of labels in the sum, which may be 0
    norm = optimizer.clip_grad_norm_(1.0)  # of the gradient of the mean over all labels
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: norm {norm:.4f}")
dist.destroy_process_group()
