"""ColumnParallelLinear: results and gradients of each option, parameters, initial weights, refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.kernels import reference
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.testing.cases import naming
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import tensor_mesh
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive

HEIGHT = 60  # the height of one part, which 2, 3 and 4 divide


def _slice(dim: int, size: int) -> tuple[Any, ...]:
    """Return the index of this rank's slice along `dim` of three dimensions."""
    width = size // dist.get_world_size()
    index: list[Any] = [slice(None)] * 3
    index[dim] = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    return tuple(index)


def _own_features(out: Tensor, parts: int, gated: bool) -> Tensor:
    """Return this rank's output, given the whole one: its slices of all parts, concatenated."""
    packed = out.unflatten(-1, (1 if gated else parts, -1))
    return packed[(..., *_slice(-1, packed.shape[-1])[-1:])].flatten(-2)


def _check(dtype: torch.dtype, options: dict[str, Any]) -> None:
    world = dist.get_world_size()
    parts, sequence_dim = options.get("parts", 1), options.get("sequence_dim", -2) % 3
    gated = options.get("activation") in ("swiglu", "geglu")
    layer = ColumnParallelLinear(63, HEIGHT * parts, device_mesh=tensor_mesh(), dtype=dtype, **options)
    shape = [3, 3, 63]
    shape[sequence_dim] = 5 * world
    x = normal(1, *shape, dtype=dtype)
    grad = normal(2, *shape[:2], HEIGHT * (1 if gated else parts), dtype=dtype)
    inputs = {"x": x} | {name: p.full_tensor().detach() for name, p in layer.named_parameters()}

    def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.flatten()
        return reference.linear(x, weight.reshape(-1, 63), bias, options.get("activation"))

    expected = Expected(whole, inputs, grad)
    own = _slice(sequence_dim, 5 * world) if options.get("sequence_parallel") else (slice(None),) * 3
    mine = x[own].clone().requires_grad_()
    out = layer(mine)
    if not options.get("gather_output"):
        grad = _own_features(grad, parts, gated)
        expected.same_dtype["out"], expected.float64["out"] = (
            _own_features(y["out"], parts, gated) for y in (expected.same_dtype, expected.float64)
        )
    out.backward(grad)
    expected.check("out", out)
    expected.check("x", mine.grad, own)
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        slices = tuple(slice(start, stop) for start, stop in local_slices(parameter))
        expected.check(name, local_tensor(parameter.grad), slices)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"gather_output": True},
    {"gather_output": True, "parts": 3, "bias": False},
    {"parts": 3, "sequence_parallel": True},
    {"activation": "gelu_tanh", "sequence_parallel": True, "bias": False},
    {"activation": "relu2", "gather_output": True, "sequence_parallel": True},
    {"activation": "swiglu", "parts": 2},
    {"activation": "geglu", "parts": 2, "sequence_parallel": True, "sequence_dim": 0},
    {"sequence_parallel": True, "sequence_dim": 0},
    {"sequence_parallel": True, "sequence_dim": 1, "gather_output": True, "parts": 3},
    {"sequence_parallel": True, "sequence_dim": -2},
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
    mesh = tensor_mesh()
    layer = ColumnParallelLinear(9, HEIGHT, device_mesh=mesh)
    packed = ColumnParallelLinear(9, 3 * HEIGHT, parts=3, device_mesh=mesh)
    assert isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == (9, HEIGHT)
    for parameter, shape, dim in (
        (layer.weight, (HEIGHT, 9), 0),
        (layer.bias, (HEIGHT,), 0),
        (packed.weight, (3, HEIGHT, 9), 1),
        (packed.bias, (3, HEIGHT), 1),
    ):
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        assert parameter.shape == shape and parameter.placements == (Shard(dim),)
        assert parameter.to_local().shape[dim] == HEIGHT // dist.get_world_size()
    meta = ColumnParallelLinear(9, HEIGHT, bias=False, device_mesh=mesh, device="meta")
    assert meta.weight.is_meta and meta.bias is None and list(meta.state_dict()) == ["weight"]
    assert "tp=" in repr(layer)


@pytest.mark.parametrize("world", [3, *exhaustive(1, 2, 4)])
def test_parameters_are_dtensors(world: int) -> None:
    pool(world).run(_parameters)


def _reset() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5 + dist.get_rank())
    layer = ColumnParallelLinear(9, 3 * HEIGHT, parts=3, device_mesh=tensor_mesh())
    return layer.weight.full_tensor().detach(), layer.bias.full_tensor().detach()


@pytest.mark.parametrize("worlds", [(2, 3), *exhaustive(((1, 4),))])
def test_initial_weights_do_not_depend_on_the_world(worlds: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    layer = ColumnParallelLinear(9, 3 * HEIGHT, parts=3)
    assert not isinstance(layer.weight, DTensor)
    assert layer.weight.abs().max() <= 1 / 3 and layer.weight.std() > 0.9 / 27**0.5
    for world in worlds:
        for weight, bias in pool(world).run(_reset):
            assert torch.equal(weight, layer.weight) and torch.equal(bias, layer.bias)


def _from_linear(dtype: torch.dtype) -> None:
    linear = nn.Linear(9, HEIGHT).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(integers(1, HEIGHT, 9))
        linear.bias.copy_(integers(2, HEIGHT))
    for bias in (True, False):
        if not bias:
            linear.bias = None
        layer = ColumnParallelLinear.from_linear(linear, gather_output=True, device_mesh=tensor_mesh())
        assert layer.weight.dtype == dtype and torch.equal(layer.weight.full_tensor(), linear.weight)
        x = integers(3, 4, 9, dtype=dtype)
        assert torch.equal(layer(x), linear(x))
    packed = nn.Linear(9, 3 * HEIGHT, bias=False).to(dtype)
    with torch.no_grad():
        packed.weight.copy_(integers(4, 3 * HEIGHT, 9))
    layer = ColumnParallelLinear.from_linear(packed, parts=3, gather_output=True, device_mesh=tensor_mesh())
    assert torch.equal(layer(x), packed(x)), "each part is sharded by itself"


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float32), (3, torch.float64), *exhaustive((1, torch.float64), (4, torch.float32))]
)
def test_layers_made_from_linear_layers_compute_the_same(world: int, dtype: torch.dtype) -> None:
    pool(world).run(_from_linear, dtype)


def _errors() -> None:
    mesh = tensor_mesh()
    with pytest.raises(ValueError, match=r"out_features 7 in 1 part\(s\) cannot be split among 2 ranks"):
        ColumnParallelLinear(4, 7, device_mesh=mesh)
    with pytest.raises(ValueError, match=r"expected a multiple of 6, or tp 1, 3$"):
        ColumnParallelLinear(4, 9, parts=3, device_mesh=mesh)
    layer = ColumnParallelLinear(4, 8, device_mesh=mesh)
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    layer.bias = nn.Parameter(distribute_tensor(torch.zeros(8), other, [Shard(0)]))
    with pytest.raises(ValueError, match=r"bias is on .*: expected .*, the mesh of its layer"):
        layer(torch.ones(3, 4))


def test_bad_arguments_are_refused() -> None:
    pool(2).run(_errors)
    for dim, shape in ((-1, (4, 3, 8)), (2, (4, 3, 8)), (3, (4, 3, 8)), (-4, (4, 3, 8)), (-2, (8,))):
        layer = ColumnParallelLinear(8, 4, sequence_parallel=True, sequence_dim=dim)  # on one rank, as on several
        with pytest.raises(ValueError, match=f"sequence_dim {dim}: the input has shape"):
            layer(torch.zeros(shape))
    with pytest.raises(ValueError, match="'tanh' is not known"):
        ColumnParallelLinear(4, 8, activation="tanh")
    with pytest.raises(ValueError, match="with parts=1: expected parts=2"):
        ColumnParallelLinear(4, 8, activation="swiglu")
    with pytest.raises(ValueError, match="gather_output is not defined for a gated activation"):
        ColumnParallelLinear(4, 8, activation="geglu", parts=2, gather_output=True)
    with pytest.raises(ValueError, match=r"3 part\(s\)"):
        ColumnParallelLinear(4, 8, parts=3)
