"""The layers work under torch's own FSDP: their parameters are DTensors, so that ZeRO-3 composes with them."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.meshes import mesh_of
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.ranks import on_ranks

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=4, dropout=0.2)


@pytest.mark.exhaustive
@on_ranks(4)
def test_local_slices_are_those_of_fully_shard() -> None:
    """Check that a rank has the elements that `local_slices` names, for every combination of sharded dimensions."""
    mesh = mesh_of(2, 2)
    for data in (mesh["dp"], mesh["dp"]._unflatten(0, (2, 1), ("replicate", "shard"))):
        model = parallelize_gpt(GPT(CONFIG, dtype=torch.float64), mesh)
        initialize(model, 1)
        for block in model.transformer.h:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
        for name, parameter in model.named_parameters():
            part = parameter.full_tensor()[tuple(slice(*each) for each in local_slices(parameter))]
            assert torch.equal(part, local_tensor(parameter)), (name, parameter.placements)
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    with pytest.raises(ValueError, match="expected Shard or Replicate"):
        local_slices(DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False))
