"""sharded_adamw: one pass over a shard: the sum of all ranks' gradients, AdamW, the new parameters to all ranks.

Each rank owns the elements [start, start + m) of a flat bucket: it alone has their optimizer state (ZeRO,
arXiv:1910.02054), while every rank has the parameters and gradients of the bucket in symmetric memory. The owner reads
the gradients of its elements in place, rank 0 first, sums them in float32, updates (`kernels/adamw.py`), and stores the
new parameters where every rank will read them: reduce-scatter, optimizer step and all-gather in one launch. Each
gradient is read once from each rank, the state is read and written once, a parameter is written once to each rank;
nothing is staged in between. Where the sum is already known (`kernels/shard_sum.py`, when the norm is needed first) it
replaces the gradients.

There are two rounds of signals. At the beginning program p waits until program p of every rank has started. That is
after all that the rank's stream did before, so its gradients are complete and it no longer computes with its
parameters. At the end program p waits until program p of every rank has stored its new parameters and read what it
needed: operations that follow on the stream read complete parameters, and may write gradients again, those of this
launch and of any sum before it. A launch that is cut short between the two rounds leaves a bucket of which some
parameters are new and some are not: after a timeout, training resumes from the last checkpoint.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.adamw import check_shard, drawn, kept, rates, updated
from tpfuse.kernels.configurations import choose_configuration
from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.launch import cdiv, launch
from tpfuse.kernels.shard_sum import check_flat, shard_pointer, sum_over_ranks
from tpfuse.kernels.signals import advance, barrier, begin
from tpfuse.kernels.tiles import rounded
from tpfuse.kernels.trace import COMPUTING, now, record


@triton.jit(do_not_specialize=["rank", "decay_end"])
def sharded_adamw_kernel(
    values_ptr,  # [size] bf16, this rank's parameters: read where master_ptr is None
    value_addresses_ptr,  # [WORLD] int64, addresses of [size] bf16, written
    gradients_ptr,  # [size] bf16, this rank's: read through its address; without addresses [m] float32, read
    gradient_addresses_ptr,  # [WORLD] int64, addresses of [size] bf16, read; or None
    master_ptr,  # [m] float32, updated; or None
    exp_avg_ptr,  # [m] float32 or bf16, updated
    exp_avg_sq_ptr,  # [m] like exp_avg, updated
    lr_ptr,  # [1] float32, read
    step_ptr,  # [1] float32 or int64, read
    clip_ptr,  # [1] float32, read; or None
    flags_ptr,  # [WORLD] int64, addresses of int32 words
    state_ptr,  # [2] int32
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    m,
    start,
    decay_end,
    rank,
    rate1,  # 1 - β₁
    log_beta1,
    beta2,
    rate2,  # 1 - β₂
    log_beta2,
    eps,
    weight_decay,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    epoch, running = begin(state_ptr, abort_ptr)
    if running:
        lr, step = tl.load(lr_ptr), tl.load(step_ptr).to(tl.float32)
        clip = 1.0 if clip_ptr is None else tl.load(clip_ptr)
        if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, ROUND=0, trace_ptr=trace_ptr):
            since = now(trace_ptr)
            for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK), tl.num_programs(0)):
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                mask = offs < m
                if gradient_addresses_ptr is not None:
                    sent: tl.constexpr = gradients_ptr.dtype.element_ty
                    gradient = sum_over_ranks(gradient_addresses_ptr, start, offs, mask, sent, WORLD)
                else:
                    gradient = tl.load(gradients_ptr + offs, mask=mask, other=0.0).to(tl.float32)
                if master_ptr is not None:
                    master = tl.load(master_ptr + offs, mask=mask, other=0.0)
                else:
                    master = tl.load(values_ptr + start + offs, mask=mask, other=0.0)
                exp_avg = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0).to(tl.float32)
                exp_avg_sq = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0).to(tl.float32)
                gradient *= clip
                random = drawn(master, gradient, exp_avg, exp_avg_sq, step, exp_avg_ptr.dtype.element_ty)
                decay = tl.where(offs < decay_end, weight_decay, 0.0)
                master, exp_avg, exp_avg_sq = updated(
                    master, gradient, exp_avg, exp_avg_sq,
                    lr, step, rate1, log_beta1, beta2, rate2, log_beta2, eps, decay,
                )  # fmt: skip
                exp_avg, exp_avg_sq = kept(exp_avg, exp_avg_sq, random, exp_avg_ptr.dtype.element_ty)
                if master_ptr is not None:
                    tl.store(master_ptr + offs, master, mask=mask)
                tl.store(exp_avg_ptr + offs, exp_avg, mask=mask)
                tl.store(exp_avg_sq_ptr + offs, exp_avg_sq, mask=mask)
                value = rounded(master, dtype)
                for distance in tl.static_range(WORLD):
                    peer_ptr = shard_pointer(value_addresses_ptr, (rank + distance) % WORLD, start, dtype)
                    tl.store(peer_ptr + offs, value, mask=mask)
            record(trace_ptr, COMPUTING, rank, since)
            if barrier(flags_ptr, abort_ptr, epoch, rank, WORLD, ROUND=1, trace_ptr=trace_ptr):
                advance(state_ptr, epoch)


def sharded_adamw_(
    values: Tensor,
    value_addresses: Tensor,
    gradients: Tensor,
    gradient_addresses: Tensor | None,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    start: int,
    decay_end: int,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    clip: Tensor | None,
    endpoint: Endpoint,
) -> None:
    """Update elements [start, start + m) of all ranks' values, once all ranks have called this.

    values: [size] float32, float16 or bfloat16, this rank's parameters; gradients: [size] of one of these too, this
    rank's; their addresses: [world] int64, the address of every rank's buffer, multiples of 16. gradient_addresses
    None: the gradients are [m], the sums over all ranks. master: [m] float32, None where values are float32 and so
    their own master. exp_avg, exp_avg_sq: [m] float32, or both bfloat16. All are contiguous. decay_end: elements of the
    shard before it are decayed, the others are not. lr, step, clip: one element each; lr and clip float32, step, the
    number of this update from 1, float32 or int64; the sum is multiplied by clip. A sum that is not finite goes into
    the state unchanged.

    All ranks pass the same size, dtypes and m, and shards that do not overlap. When the launch is over, in stream
    order, every rank's values are new in all shards, and every rank may write its gradients again. Raise ValueError
    for other shapes, dtypes or devices, for a shard that is not inside the buffer, and where the channel has too few
    flags: two for each program and rank.
    """
    m = exp_avg.numel()
    check_flat("sharded_adamw", "values", values, value_addresses, start, m, endpoint)
    shard, sums = values[start : start + m], gradients
    if gradient_addresses is not None:
        check_flat("sharded_adamw", "gradients", gradients, gradient_addresses, start, m, endpoint)
        sums = gradients[start : start + m]
    if master is None and values.dtype != torch.float32:
        raise ValueError(f"sharded_adamw: values are {values.dtype}, master is None: expected a master of float32")
    state = (exp_avg, exp_avg_sq, None if master is None else shard)
    check_shard("sharded_adamw", shard if master is None else master, sums, *state, lr, step, None, clip)
    row = choose_configuration("sharded_adamw", values.device, values.dtype)
    launch(
        sharded_adamw_kernel,
        endpoint.grid("sharded_adamw", 0, cdiv(m, row.blocks["BLOCK"]), rounds=2),
        values_ptr=values,
        value_addresses_ptr=value_addresses,
        gradients_ptr=gradients,
        gradient_addresses_ptr=gradient_addresses,
        master_ptr=master,
        exp_avg_ptr=exp_avg,
        exp_avg_sq_ptr=exp_avg_sq,
        lr_ptr=lr,
        step_ptr=step,
        clip_ptr=clip,
        m=m,
        start=start,
        decay_end=decay_end,
        **rates(beta1, beta2, eps, weight_decay),
        **row.options,
        **endpoint.signals(),
    )
