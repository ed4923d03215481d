# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/halo.py
import torch
import torch.distributed as dist

from tpfuse import symmetric_memory

dist.init_process_group("gloo")
memory = symmetric_memory(dist.group.WORLD, torch.device("cpu"))
halo = memory.buffer("halo", (4,), torch.float32)  # the same on every rank, zero at first
flags = memory.signals("halo flags", 1)
right = (memory.rank + 1) % memory.world
halo.local.fill_(memory.rank)
memory.signal(flags, memory.rank, 0, 1)  # "my part is written", after everything before it
memory.wait_signal(flags, right, 0, 1, op="halo")  # until the right neighbour has said so
print(f"rank {memory.rank} reads {halo.peers[right].tolist()}")
memory.barrier()
dist.destroy_process_group()
