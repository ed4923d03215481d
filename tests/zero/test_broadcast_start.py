"""Engines copy the first data-parallel rank's model to the others: parameters, trained or not, and buffers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import shard

CONFIG = GPTConfig(vocab_size=13, n_positions=4, n_embd=8, n_layer=1, n_head=4)


def _gpt(dp: int, tp: int, cp: int, seed: int) -> GPT:
    mesh = mesh_of(dp, tp, cp)
    model = parallelize_gpt(GPT(CONFIG), mesh)
    initialize(model, seed)
    return model


def _engine(model: nn.Module, stage: int, dp: int, tp: int, cp: int) -> None:
    shard(model, mesh_of(dp, tp, cp), stage=stage, bucket_bytes=1000)


@pytest.mark.parametrize(
    ("stage", "dp", "tp", "cp"), [(2, 2, 1, 1), (3, 1, 1, 2), *exhaustive((1, 2, 2, 1), (3, 2, 1, 2))]
)
@on_ranks("dp", "tp", "cp")
def test_all_ranks_begin_with_the_first_ranks_weights(stage: int, dp: int, tp: int, cp: int) -> None:
    """Check that ranks that began with other weights have the first rank's, each its own shard of them."""
    expected = GPT(CONFIG)
    initialize(expected, 0)
    model = _gpt(dp, tp, cp, dist.get_rank() // tp)
    _engine(model, stage, dp, tp, cp)
    for (name, parameter), whole in zip(model.named_parameters(), expected.parameters(), strict=True):
        part = whole[tuple(slice(*each) for each in local_slices(parameter))]
        assert torch.equal(local_tensor(parameter), part), name


class _Mixed(nn.Module):
    """A model with parameters and buffers of several dtypes, layouts and sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(integers(seed, 5, 4).to(torch.float64).t(), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.register_buffer("complex", torch.complex(integers(seed, 3), integers(seed + 1, 3)))
        self.register_buffer("flags", integers(seed, 7) > 0)
        for tensor in (*self.linear.parameters(), self.norm.running_mean, self.norm.num_batches_tracked):
            assert tensor is not None
            tensor.data.copy_(integers(seed + 2, *tensor.shape))


@on_ranks(2)
def test_frozen_parameters_and_buffers_are_broadcast_too() -> None:
    model, expected = _Mixed(dist.get_rank()), _Mixed(0).state_dict()
    shard(model, stage=0)
    assert not model.frozen.is_contiguous()
    for name, x in model.state_dict().items():
        assert torch.equal(x, expected[name]), name


@on_ranks(2)
def test_buffers_that_are_not_plain_are_broadcast_or_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.tensor([[3.0], [4.0]]).add(dist.get_rank()).expand(2, 5))
    shard(model, stage=0)
    assert torch.equal(model.wide, torch.tensor([[3.0], [4.0]]).expand(2, 5)) and model.wide.stride() == (1, 0)
    x = torch.eye(3)
    for special in (x.to_sparse(), x.cfloat().conj(), torch._neg_view(x)):
        model = nn.Linear(2, 2)
        model.register_buffer("odd", special if dist.get_rank() else x)
        with pytest.raises(ValueError, match=r"^odd of rank 1 is sparse, or a view with other signs than its memory: "):
            shard(model, stage=0)


@on_ranks(2)
def test_different_models_on_the_ranks_are_refused() -> None:
    rank = dist.get_rank()
    frozen = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))
    frozen[rank].requires_grad_(False)
    models = [
        (nn.Linear(3, 2 + rank), r"weight float32 \[3, 3\] where rank 0 has weight float32 \[2, 3\]"),
        (nn.Linear(3, 3, dtype=(torch.float32, torch.float64)[rank]), r"weight float64 .* has weight float32"),
        (nn.Linear(3, 3, bias=rank == 0), r"nothing where rank 0 has bias float32 \[3\]"),
        (frozen, r"0.weight float32 \[3, 3\] where rank 0 has 0.weight float32 \[3, 3\] frozen$"),
    ]
    for stage in (1, 3):
        for model, message in models:
            before = [local_tensor(x).clone() for x in model.parameters()]
            with pytest.raises(ValueError, match=f"ranks have different parameters or buffers: rank 1 has {message}"):
                _engine(model, stage, 2, 1, 1)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
