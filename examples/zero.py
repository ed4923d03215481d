# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/zero.py
import torch
import torch.distributed as dist

from tpfuse import ZeroOptimizer

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank draws data of its own
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = ZeroOptimizer(model, stage=2, lr=1e-3, weight_decay=0.1)  # all ranks get the first rank's model
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
for step in range(3):
    optimizer.zero_grad()
    with optimizer.no_sync():  # the first micro-batch: its gradients stay on this rank
        (model(torch.randn(8, 64)).square().mean() / 2).backward()
    (model(torch.randn(8, 64)).square().mean() / 2).backward()  # the last one: the sums are exchanged
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    if dist.get_rank() == 0:
        print(f"step {step}: norm {norm:.4f}")
dist.destroy_process_group()
