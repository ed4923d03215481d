"""RowParallelLinear: results and gradients of each option, parameters, initial weights, refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.kernels import reference
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.testing.cases import naming
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive

WIDTH = 60  # the width of the input, which 2, 3 and 4 divide


def _slice(dim: int, size: int) -> tuple[Any, ...]:
    """Return the index of this rank's slice along `dim` of three dimensions."""
    width = size // dist.get_world_size()
    index: list[Any] = [slice(None)] * 3
    index[dim] = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    return tuple(index)


def _check(dtype: torch.dtype, options: dict[str, Any]) -> None:
    world = dist.get_world_size()
    sequence_dim = options.get("sequence_dim", -2) % 3
    layer = RowParallelLinear(WIDTH, 63, device_mesh=tensor_mesh(), dtype=dtype, **options)
    shape = [3, 3, WIDTH]
    shape[sequence_dim] = 5 * world
    x, grad = normal(1, *shape, dtype=dtype), normal(2, *shape[:2], 63, dtype=dtype)

    def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.linear(x, weight, bias)

    inputs = {"x": x} | {name: p.full_tensor().detach() for name, p in layer.named_parameters()}
    expected = Expected(whole, inputs, grad)
    own_x = _slice(2, WIDTH) if options.get("input_is_parallel", True) else (slice(None),) * 3
    own_out = _slice(sequence_dim, 5 * world) if options.get("sequence_parallel") else (slice(None),) * 3
    mine = x[own_x].clone().requires_grad_()
    out = layer(mine)
    out.backward(grad[own_out])
    expected.check("out", out, own_out)
    expected.check("x", mine.grad, own_x)
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        slices = tuple(slice(start, stop) for start, stop in local_slices(parameter))
        expected.check(name, local_tensor(parameter.grad), slices)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"input_is_parallel": False},
    {"input_is_parallel": False, "bias": False},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "bias": False},
    {"sequence_parallel": True, "sequence_dim": 0},
    {"sequence_parallel": True, "sequence_dim": 1},
]


def _every_option(dtype: torch.dtype) -> None:
    for options in OPTIONS:
        with naming(options):
            _check(dtype, options)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (2, torch.bfloat16),
        (3, torch.float32),
        *exhaustive(
            (1, torch.float32), (2, torch.float64), (3, torch.bfloat16), (4, torch.float64), (4, torch.bfloat16)
        ),
    ],
)
def test_results_and_gradients_match_the_reference(world: int, dtype: torch.dtype) -> None:
    pool(world).run(_every_option, dtype)


def _parameters() -> None:
    layer = RowParallelLinear(WIDTH, 9, device_mesh=tensor_mesh())
    assert isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == (WIDTH, 9)
    assert isinstance(layer.weight, DTensor) and layer.weight.placements == (Shard(1),)
    assert isinstance(layer.bias, DTensor) and layer.bias.placements == (Replicate(),)
    assert layer.weight.shape == (9, WIDTH) and layer.weight.to_local().shape == (9, WIDTH // dist.get_world_size())
    assert "tp=" in repr(layer)


@pytest.mark.parametrize("world", [3, *exhaustive(1, 2, 4)])
def test_parameters_are_dtensors(world: int) -> None:
    pool(world).run(_parameters)


def _reset() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5 + dist.get_rank())
    layer = RowParallelLinear(WIDTH, 9, device_mesh=tensor_mesh())
    return layer.weight.full_tensor().detach(), layer.bias.full_tensor().detach()


@pytest.mark.parametrize("worlds", [(2, 3), *exhaustive(((1, 4),))])
def test_initial_weights_do_not_depend_on_the_world(worlds: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    layer = RowParallelLinear(WIDTH, 9)
    assert not isinstance(layer.weight, DTensor)
    for world in worlds:
        for weight, bias in pool(world).run(_reset):
            assert torch.equal(weight, layer.weight) and torch.equal(bias, layer.bias)


def _from_linear(dtype: torch.dtype) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    linear = nn.Linear(WIDTH, 9).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(integers(1, 9, WIDTH))
        linear.bias.copy_(integers(2, 9))
    x = integers(3, world, WIDTH, dtype=dtype)
    for bias in (True, False):
        if not bias:
            linear.bias = None
        layer = RowParallelLinear.from_linear(linear, input_is_parallel=False, device_mesh=tensor_mesh())
        assert layer.weight.dtype == dtype and torch.equal(layer.weight.full_tensor(), linear.weight)
        assert torch.equal(layer(x), linear(x))
        layer = RowParallelLinear.from_linear(linear, sequence_parallel=True, device_mesh=tensor_mesh())
        width = WIDTH // world
        assert torch.equal(layer(x[:, rank * width : (rank + 1) * width]), linear(x)[rank : rank + 1])
    assert RowParallelLinear.from_linear(linear, sequence_parallel=True, sequence_dim=0).sequence_dim == 0


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float32), (3, torch.float64), *exhaustive((1, torch.float64), (4, torch.float32))]
)
def test_layers_made_from_linear_layers_compute_the_same(world: int, dtype: torch.dtype) -> None:
    pool(world).run(_from_linear, dtype)


def _errors() -> None:
    with pytest.raises(ValueError, match="in_features 7 cannot be split among 2 ranks: expected a multiple of 2"):
        RowParallelLinear(7, 4, device_mesh=tensor_mesh())


def _advice() -> None:
    with pytest.raises(ValueError, match=r"in_features 15 cannot be split among 2 ranks: .*, or tp 1, 3, 5$"):
        RowParallelLinear(15, 4, device_mesh=tensor_mesh())


def test_the_error_lists_the_sizes_of_tp_that_fit() -> None:
    pool(2).run(_advice)


def test_bad_arguments_are_refused() -> None:
    pool(2).run(_errors)
    for dim, shape in ((-1, (4, 3, 8)), (2, (4, 3, 8)), (3, (4, 3, 8)), (-4, (4, 3, 8)), (-2, (8,))):
        layer = RowParallelLinear(8, 4, sequence_parallel=True, sequence_dim=dim)  # on one rank, as on several
        with pytest.raises(ValueError, match=f"sequence_dim {dim}: the input has shape"):
            layer(torch.zeros(shape))
    with pytest.raises(ValueError, match="sequence_parallel needs input_is_parallel"):
        RowParallelLinear(8, 4, sequence_parallel=True, input_is_parallel=False)


def _autocast_pair() -> None:
    """Check a sequence-parallel pair under autocast: bfloat16 products, float32 gradients of float32 parameters."""
    column = ColumnParallelLinear(WIDTH, WIDTH, sequence_parallel=True, device_mesh=tensor_mesh())
    row = RowParallelLinear(WIDTH, 63, sequence_parallel=True, device_mesh=tensor_mesh())
    x = normal(1, 5, WIDTH, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = row(column(x))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    weights = [layer.weight.full_tensor().detach().bfloat16().float() for layer in (column, row)]
    expected = torch.ones(5, 63) @ weights[1] @ weights[0]
    for gradient in (x.grad, column.weight.grad, row.weight.grad, row.bias.grad):
        assert gradient is not None and gradient.dtype is torch.float32
    torch.testing.assert_close(x.grad, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("world", [2, *exhaustive(1)])
def test_autocast_computes_in_bfloat16_and_returns_float32_gradients(world: int) -> None:
    pool(world).run(_autocast_pair)
