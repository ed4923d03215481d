# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/ring_attention.py
import torch
import torch.distributed as dist

from tpfuse import SequenceLayout, ring_attention

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
layout = SequenceLayout(length=1001, world=world)  # zigzag; 1001 tokens are padded
torch.manual_seed(0)
q, k, v = (torch.randn(1, 8, 1001, 64) for _ in range(3))  # whole only to compare; yours need never be whole
shards = [layout.shard(x, rank, dim=2).requires_grad_() for x in (q, k, v)]
out = ring_attention(*shards, group=dist.group.WORLD, length=1001)
out.square().sum().backward()  # the complete gradients of this rank's tokens
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
error = (out - layout.shard(expected, rank, dim=2)).abs().max().item()
assert error < 1e-5
print(f"rank {rank} holds {out.shape[2]} tokens, from {layout.positions(rank)[0]}: error {error:.0e}")
dist.destroy_process_group()
