"""The candidates of tensor parallelism compute the same result; a candidate that does not is not timed."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.bench_tensor_parallel import TORCH, TpSubject, measure, prepare_mlp
from benchmarks.cpu_ranks import ALONE
from benchmarks.harness import OURS
from benchmarks.torch_gpt import TorchGPT, parallelize
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.ranks import pool


def test_candidates_take_turns() -> None:
    """Every candidate is compared with float64 first; `measure` raises where one differs."""
    times, others = measure(TpSubject("mlp", prepare_mlp, (4, 8)), pool(2), pool(1), rounds=2)
    assert times.keys() == {OURS, TORCH, ALONE}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert math.isnan(others) or -0.5 < others < 1.5  # the kernel counts in hundredths of a second


def losses(world: int) -> tuple[float, float]:
    """Return the loss of tpfuse's model on one rank, and that of torch's on `world` ranks."""
    config = GPTConfig(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=4)
    ours = GPT(config)
    initialize(ours, 3)
    peer = TorchGPT(config)
    peer.load(dict(ours.named_parameters()))
    parallelize(peer, init_device_mesh("cpu", (world,)))
    ids = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    with loss_parallel():
        loss = peer(ids[:, :-1], ids[:, 1:])
        loss.backward()
    return ours(ids[:, :-1], ids[:, 1:]).mean().item(), loss.full_tensor().item()


def test_torchs_gpt_has_the_same_loss() -> None:
    for ours, theirs in pool(2).run(losses, 2):
        assert ours == pytest.approx(theirs, rel=1e-5)
