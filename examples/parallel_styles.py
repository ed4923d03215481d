# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/parallel_styles.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from tpfuse import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
mlp = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
plan = {  # torch's styles may stand beside these
    "0": FusedSequenceParallel(use_local_output=True),
    "1": FusedColwiseParallel(input_layouts=Shard(1)),
    "3": FusedRowwiseParallel(output_layouts=Shard(1)),
}
parallelize_module(mlp, mesh, plan)
y = mlp(torch.randn(8, 64, 512))  # this rank's 64 positions of 8 sequences
y.sum().backward()
print(y.shape, mlp[1].weight.placements)
dist.destroy_process_group()
