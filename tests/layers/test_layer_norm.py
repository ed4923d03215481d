"""LayerNorm and RMSNorm as modules: whole or sequence-parallel, their parameters and their gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tpfuse.comm.layout import local_tensor
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool


@on_ranks(2)
def test_a_new_layer_has_ones_and_zeros_on_every_rank_and_sums_its_gradients_if_need_be() -> None:
    for sequence_parallel in (True, False):
        layer = LayerNorm(100, sequence_parallel=sequence_parallel, device_mesh=tensor_mesh())
        assert layer.sum_gradients == sequence_parallel
        for number, parameter in enumerate(layer.parameters()):
            assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
            assert torch.equal(parameter.to_local(), torch.full((100,), 1.0 - number))


def _from_torch(sequence_parallel: bool) -> None:
    """Check that layers made from torch's layers compute the same, forward and backward."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = tensor_mesh() if world > 1 else None
    plains: list[nn.LayerNorm | nn.RMSNorm] = [
        nn.LayerNorm(10, 1e-3),
        nn.LayerNorm(10, bias=False),
        nn.LayerNorm(10, elementwise_affine=False),
        nn.RMSNorm(10, 1e-3),
        nn.RMSNorm(10),
        nn.RMSNorm(10, elementwise_affine=False),
    ]
    for plain, dtype in itertools.product(plains, (torch.float64, torch.bfloat16)):
        with naming((plain, dtype)):
            plain.to(dtype).zero_grad()
            for seed, parameter in enumerate(plain.parameters()):
                parameter.data.copy_(normal(seed, 10))
            options = {"sequence_parallel": sequence_parallel, "device_mesh": mesh}
            layer: LayerNorm | RMSNorm
            if isinstance(plain, nn.LayerNorm):
                layer = LayerNorm.from_layer_norm(plain, **options)  # type: ignore[arg-type]
            else:
                layer = RMSNorm.from_rms_norm(plain, **options)  # type: ignore[arg-type]
            assert isinstance(layer, type(plain)) and repr(layer) == repr(plain)
            assert [name for name, _ in layer.named_parameters()] == [name for name, _ in plain.named_parameters()]
            x, grad = normal(3, 7 * world, 10, dtype=dtype), normal(4, 7 * world, 10, dtype=dtype)
            rows = slice(7 * rank, 7 * rank + 7) if sequence_parallel else slice(None)
            whole, mine = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
            expected, out = plain(whole), layer(mine)
            expected.backward(grad)
            out.backward(grad[rows])
            assert torch.equal(out, expected[rows]) and whole.grad is not None and mine.grad is not None
            assert torch.equal(mine.grad, whole.grad[rows])
            error = 1e-13 if dtype == torch.float64 else 2e-2
            for found, parameter in zip(layer.parameters(), plain.parameters(), strict=True):
                assert found.grad is not None and parameter.grad is not None
                torch.testing.assert_close(local_tensor(found.grad), parameter.grad, rtol=error, atol=error)


def test_layers_made_from_torchs_layers_compute_the_same() -> None:
    _from_torch(False)
    for sequence_parallel in (False, True):
        pool(2).run(_from_torch, sequence_parallel)


@pytest.mark.parametrize("layer", [LayerNorm, RMSNorm])
def test_norms_of_several_dimensions_are_refused(layer: type[LayerNorm] | type[RMSNorm]) -> None:
    with pytest.raises(ValueError, match=r"normalized_shape \[2, 3\]: expected the last dimension alone"):
        layer((2, 3))


def test_kernels_compute_norms_without_weights() -> None:
    x = normal(1, 5, 10)
    for layer in (LayerNorm(10, elementwise_affine=False), RMSNorm(10, 1e-3, elementwise_affine=False)):
        results = []
        for name in ("triton", "torch"):
            mine = x.clone().requires_grad_()
            with use(kernels=name):  # type: ignore[arg-type]
                out = layer(mine)
                out.backward(normal(2, 5, 10))
            results.append((out.detach(), mine.grad))
        torch.testing.assert_close(*results)
