"""AdamW on flat buckets is the same with torch, with the kernels, and with both in turn; masters are float32."""

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.choices import Kernels
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.switches import use
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import normal
from tpfuse.zero import shard
from tpfuse.zero.flat_adamw import FlatAdamW


def _model(dtype: torch.dtype, n_layer: int = 1) -> GPT:
    model = GPT(GPTConfig(vocab_size=31, n_positions=8, n_embd=24, n_layer=n_layer, n_head=3), dtype=dtype)
    initialize(model, 0)
    return model


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_half_parameters_follow_float32_masters(name: Kernels) -> None:
    model = _model(torch.bfloat16)
    buckets = shard(model, stage=0)
    optimizer = FlatAdamW(buckets)
    before = [optimizer.state(bucket)["model"].clone() for bucket in buckets.buckets]
    for _ in range(3):
        buckets.start(last=True)
        model(torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(0)).sum().backward()
        buckets.finish()
        with use(kernels=name):
            optimizer.step(1e-6)  # much less than the smallest change of a bfloat16 weight
    for bucket, old in zip(buckets.buckets, before, strict=True):
        master = optimizer.state(bucket)["model"]
        assert master.dtype is torch.float32
        assert not torch.equal(master, old)
        assert torch.equal(bucket.values, master.bfloat16())


def _trained(model: GPT, names: list[Kernels]) -> tuple[dict[str, Tensor], FlatAdamW]:
    """Return masters and moments after one update with each of the kernels `names`; gradients are drawn for each step.

    Where the kernels change, a new optimizer takes over moments and count, as from a checkpoint.
    """
    buckets = shard(model, stage=0, bucket_bytes=8000)
    optimizer = FlatAdamW(buckets, betas=(0.9, 0.95), weight_decay=0.1)
    places = sorted(((s.name, b, s) for b in buckets.buckets for s in b.layout.segments), key=lambda place: place[0])
    for step, name in enumerate(names):
        if step and name != names[step - 1]:
            old, optimizer = optimizer, FlatAdamW(buckets, betas=(0.9, 0.95), weight_decay=0.1)
            optimizer.updates = old.updates
            for bucket in buckets.buckets:
                for kind, x in optimizer.state(bucket).items():
                    x.copy_(old.state(bucket)[kind])
        buckets.start(last=True)
        buckets.finish()  # all gradients are zero
        for index, (_, bucket, segment) in enumerate(places):
            gradient = normal(100 * step + index, *segment.shape) * 10.0 ** (step % 5 - 4)
            bucket.layout.view(bucket.reduced_shard, segment).copy_(gradient)
        with use(kernels=name):
            optimizer.step(1e-2 / (step + 1), 0.5 if step % 2 else 1.0)
    state = {}
    for n, bucket, segment in places:
        state |= {
            f"{kind} of {n}": bucket.layout.view(x, segment).clone() for kind, x in optimizer.state(bucket).items()
        }
    return state, optimizer


@pytest.mark.parametrize(
    ("dtype", "updates"), [(torch.bfloat16, 6), *exhaustive((torch.float32, 20), (torch.bfloat16, 20))]
)
def test_updates_by_torch_and_by_triton_agree(dtype: torch.dtype, updates: int) -> None:
    third = updates // 3
    truth, _ = _trained(_model(dtype).double(), ["torch"] * updates)
    plain, _ = _trained(_model(dtype), ["torch"] * updates)
    fused, optimizer = _trained(_model(dtype), ["triton"] * updates)
    both, _ = _trained(_model(dtype), ["torch"] * third + ["triton"] * third + ["torch"] * (updates - 2 * third))
    assert optimizer.updates == updates
    for name, expected in truth.items():
        error = (plain[name] - expected).abs().max().item()
        bound = 2 * error + torch.finfo(torch.float32).eps * expected.abs().max().item()
        check_error(name, fused[name], plain[name], expected, bound)
        check_error(name, both[name], plain[name], expected, bound)
