# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 examples/reference_ring.py
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


def rotate(*tensors):
    """Send the tensors to the next rank, and return those of the previous one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, (rank + 1) % world, tag=tag) for tag, x in enumerate(tensors)]
    receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world, tag=tag) for tag, x in enumerate(received)]
    for request in dist.batch_isend_irecv(sends + receives):
        request.wait()
    return received


def causal_scores(q, k, own):
    """q kᵀ / √d; within a rank's own block, a query sees no later key."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf) if own else scores


class RingAttention(torch.autograd.Function):
    """Causal attention. q, k, v, out: [batch, heads, tokens / world, head size]; rank r has the r-th part."""

    @staticmethod
    def forward(ctx, q, k, v):
        rank, world = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)  # of the keys seen so far
        for step in range(world):
            if step <= rank:  # k and v belong to rank - step; those of later ranks are in the future
                scores = causal_scores(q, k, own=step == 0)
                block_lse = scores.logsumexp(-1, keepdim=True)
                total = torch.logaddexp(lse, block_lse)
                out = out * (lse - total).exp() + (scores - total).exp() @ v
                lse = total
            k, v = rotate(k, v)
        ctx.save_for_backward(q, k, v, out, lse)  # after `world` steps, k and v are this rank's own again
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = dist.get_rank(), dist.get_world_size()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dout * out).sum(-1, keepdim=True)
        for step in range(world):
            if step <= rank:
                p = (causal_scores(q, k, own=step == 0) - lse).exp()
                ds = p * (dout @ v.mT - delta) * q.shape[-1] ** -0.5
                dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dout
            k, v, dk, dv = rotate(k, v, dk, dv)  # gradients travel with the block they belong to
        return dq, dk, dv


dist.init_process_group("gloo")
torch.manual_seed(0)
whole = [torch.randn(1, 2, 48, 16, requires_grad=True) for _ in range(3)]
shards = [x.chunk(dist.get_world_size(), 2)[dist.get_rank()].detach().requires_grad_() for x in whole]
out, expected = RingAttention.apply(*shards), scaled_dot_product_attention(*whole, is_causal=True)
out.square().sum().backward()
expected.square().sum().backward()
pairs = [(out, expected), *((shard.grad, x.grad) for shard, x in zip(shards, whole, strict=True))]
error = max((a - b.chunk(dist.get_world_size(), 2)[dist.get_rank()]).abs().max().item() for a, b in pairs)
assert error < 1e-5
print(f"rank {dist.get_rank()}: output and gradients differ from one rank by {error:.0e}")
dist.destroy_process_group()
