"""AdamW on flat buffers equals AdamW on the parameters; the schedule is what it says."""

import copy
import itertools

import pytest
import torch

from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.gradient_buckets import GradientBuckets, decays
from tpfuse.parallel.initialize import initialize
from tpfuse.train.optimizer import FlatAdamW, learning_rate
from tpfuse.train.options import OptimOptions


def test_equals_adamw_on_the_parameters() -> None:
    torch.manual_seed(0)
    plain = GPT(GPTConfig(vocab_size=31, n_positions=8, n_embd=24, n_layer=2, n_head=3), dtype=torch.float64)
    initialize(plain, 0)
    model = copy.deepcopy(plain)
    decayed = [p for n, p in plain.named_parameters() if decays(n, p)]
    rest = [p for n, p in plain.named_parameters() if not decays(n, p)]
    assert {p.ndim for p in rest} == {1, 2}  # norms and biases, the packed one of q, k, v among them
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.95)
    )
    buckets = GradientBuckets(model, bucket_bytes=4000)
    assert len(buckets.buckets) > 2
    optimizer = FlatAdamW(buckets, OptimOptions(weight_decay=0.3, beta1=0.8, beta2=0.95))
    for step in range(5):
        ids = torch.randint(31, (2, 8))
        plain(ids, ids).sum().backward()
        reference.step()
        reference.zero_grad()
        buckets.start(last=True)
        model(ids, ids).sum().backward()
        buckets.finish()
        optimizer.step(1e-2)
        assert optimizer.updates == step + 1
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10, msg=name)  # a key bias has no gradient but rounding


def test_half_parameters_follow_float32_masters() -> None:
    model = GPT(GPTConfig(vocab_size=31, n_positions=8, n_embd=24, n_layer=1, n_head=3), dtype=torch.bfloat16)
    initialize(model, 0)
    buckets = GradientBuckets(model)
    optimizer = FlatAdamW(buckets, OptimOptions())
    before = [bucket.master.clone() for bucket in buckets.buckets]
    for _ in range(3):
        buckets.start(last=True)
        model(torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(0)).sum().backward()
        buckets.finish()
        optimizer.step(1e-6)  # far below what bfloat16 can add to a weight
    for bucket, old in zip(buckets.buckets, before, strict=True):
        assert bucket.master.dtype is torch.float32
        assert not torch.equal(bucket.master, old)
        assert torch.equal(bucket.values, bucket.master.bfloat16())


def test_schedule() -> None:
    options = OptimOptions(lr=1.0, min_lr=0.1, warmup=10, decay_steps=110)
    rates = [learning_rate(options, step, 500) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == rates[199] == 0.1
    assert all(b <= a for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(OptimOptions(lr=1.0, min_lr=0.1, warmup=0), 50, 100) == pytest.approx(0.55)
