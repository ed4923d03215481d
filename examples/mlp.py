# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/mlp.py
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpfuse import ColumnParallelLinear, RowParallelLinear

device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
options = {"sequence_parallel": True, "device_mesh": init_device_mesh(device, (dist.get_world_size(),))}
up = ColumnParallelLinear(512, 2048, activation="gelu_tanh", **options)
mlp = torch.nn.Sequential(up, RowParallelLinear(2048, 512, **options))
y = mlp(torch.randn(8, 64, 512, device=device))  # this rank's 64 positions of 8 sequences
y.sum().backward()
print(y.shape, up.weight.grad.placements)
dist.destroy_process_group()
