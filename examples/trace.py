# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/trace.py
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse

dist.init_process_group("gloo")
options = {"sequence_parallel": True, "device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
up = tpfuse.ColumnParallelLinear(256, 1024, activation="gelu_tanh", **options)
mlp = torch.nn.Sequential(up, tpfuse.RowParallelLinear(1024, 256, **options))
mlp(torch.randn(8, 64, 256)).sum().backward()  # opens the channels between the ranks, which is not worth recording
folder = Path("profiles/example")
with tpfuse.profile.record(folder, mlp, dist.group.WORLD) as step:
    for _ in range(2):
        with step():
            mlp(torch.randn(8, 64, 256)).sum().backward()
print(f"rank {dist.get_rank()} has written {folder}/rank{dist.get_rank()}.json")
dist.destroy_process_group()
