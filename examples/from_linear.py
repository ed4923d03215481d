# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/from_linear.py
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpfuse import ColumnParallelLinear, RowParallelLinear

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and inputs on all ranks
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
up, down = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)  # layers that you have
mlp = torch.nn.Sequential(
    ColumnParallelLinear.from_linear(up, activation="gelu", device_mesh=mesh["tp"]),
    RowParallelLinear.from_linear(down, device_mesh=mesh["tp"]),
)
x = torch.randn(64, 512)
torch.testing.assert_close(mlp(x), down(torch.nn.functional.gelu(up(x))))
print(f"rank {dist.get_rank()} holds {tuple(mlp[0].weight.to_local().shape)} of {tuple(up.weight.shape)}")
dist.destroy_process_group()
