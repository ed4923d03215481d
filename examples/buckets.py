# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/buckets.py
import torch
import torch.distributed as dist

from tpfuse import GradientBuckets
from tpfuse.comm.collectives import all_reduce
from tpfuse.zero.flat_adamw import FlatAdamW

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank draws data of its own
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
buckets = GradientBuckets(model, stage=2, data_group=dist.group.WORLD)  # all ranks get the first rank's model
optimizer = FlatAdamW(buckets, weight_decay=0.1)
for step in range(3):
    micro_batches = torch.randn(2, 8, 64).unbind()
    for index, x in enumerate(micro_batches):
        buckets.start(last=index == 1)  # gradients are exchanged in the last backward pass
        (model(x).square().mean() / 2 / dist.get_world_size()).backward()  # sums over ranks, not averages
    buckets.finish()
    norm = all_reduce(buckets.squared_norm(), dist.group.WORLD).sqrt().item()
    optimizer.step(lr=1e-3, factor=min(1.0, 1.0 / norm))
    if dist.get_rank() == 0:
        print(f"step {step}: norm {norm:.4f}")
dist.destroy_process_group()
