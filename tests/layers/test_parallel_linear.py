"""ColumnParallelLinear and RowParallelLinear: results and gradients of each option, parameters, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.kernels import reference
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks

SIZE = 60  # the features that are sharded, in each part, which 2, 3 and 4 divide
LAYERS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
EVERY_LAYER = pytest.mark.parametrize("kind", LAYERS)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
Index = tuple[Any, ...]


def _layer(kind: str, features: int, mesh: Any = None, **options: Any) -> Any:
    """Return a layer whose other side than the sharded one has `features` features."""
    if kind == "column":
        return ColumnParallelLinear(features, SIZE * options.get("parts", 1), device_mesh=mesh, **options)
    return RowParallelLinear(SIZE, features, device_mesh=mesh, **options)


def _slice(dim: int, size: int, wanted: bool = True) -> Index:
    """Return the index of this rank's slice along `dim` of three dimensions, or of everything."""
    width = size // dist.get_world_size()
    index: list[Any] = [slice(None)] * 3
    if wanted:
        index[dim] = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    return tuple(index)


def _own_features(out: Tensor, parts: int) -> Tensor:
    """Return this rank's output, given the whole one: its slices of all parts, concatenated."""
    packed = out.unflatten(-1, (parts, -1))
    return packed[(..., *_slice(-1, packed.shape[-1])[-1:])].flatten(-2)


def _check(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    world, activation = dist.get_world_size(), options.get("activation")
    parts, sequence_dim = options.get("parts", 1), options.get("sequence_dim", -2) % 3
    parts_out = 1 if activation in ("swiglu", "geglu") else parts
    layer = _layer(kind, 63, tensor_mesh(), dtype=dtype, **options)
    width_in, width_out = (63, SIZE * parts_out) if kind == "column" else (SIZE, 63)
    shape = [3, 3, width_in]
    shape[sequence_dim] = 5 * world
    inputs = {"x": normal(1, *shape, dtype=dtype)}
    inputs |= {name: p.full_tensor().detach() for name, p in layer.named_parameters()}
    grad = normal(2, *shape[:2], width_out, dtype=dtype)

    def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.linear(x, weight.reshape(-1, width_in), None if bias is None else bias.flatten(), activation)

    expected = Expected(whole, inputs, grad)
    of_sequence = _slice(sequence_dim, 5 * world, options.get("sequence_parallel", False))
    if kind == "column":
        own_x, own_out = of_sequence, _slice(2, 0, wanted=False)
        if not options.get("gather_output"):
            grad = _own_features(grad, parts_out)
            for results in (expected.same_dtype, expected.float64):
                results["out"] = _own_features(results["out"], parts_out)
    else:
        own_x, own_out = _slice(2, SIZE, options.get("input_is_parallel", True)), of_sequence
    mine = inputs["x"][own_x].clone().requires_grad_()
    out = layer(mine)
    if options.get("sequence_parallel") and not options.get("gather_output"):
        assert not out._is_view(), "fully_shard loses its hook when a view is changed in place"
    out.backward(grad[own_out])
    expected.check("out", out, own_out)
    expected.check("x", mine.grad, own_x)
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        slices = tuple(slice(start, stop) for start, stop in local_slices(parameter))
        expected.check(name, local_tensor(parameter.grad), slices)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "column": [
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
    ],
    "row": [
        {},
        {"bias": False},
        {"input_is_parallel": False},
        {"input_is_parallel": False, "bias": False},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "bias": False},
        {"sequence_parallel": True, "sequence_dim": 0},
        {"sequence_parallel": True, "sequence_dim": 1},
    ],
}


@EVERY_LAYER
@pytest.mark.parametrize(("world", "dtype"), [(2, BF16), (3, F32), *exhaustive((4, F64))])
@on_ranks("world")
def test_results_and_gradients_match_the_reference(kind: str, dtype: torch.dtype) -> None:
    for options in OPTIONS[kind]:
        with naming(options):
            _check(kind, dtype, options)


@on_ranks(3)
def test_parameters_are_dtensors() -> None:
    mesh, own = tensor_mesh(), SIZE // dist.get_world_size()
    column, row = ColumnParallelLinear(9, SIZE, device_mesh=mesh), RowParallelLinear(SIZE, 9, device_mesh=mesh)
    packed = ColumnParallelLinear(9, 3 * SIZE, parts=3, device_mesh=mesh)
    for parameter, shape, placement, local in (
        (column.weight, (SIZE, 9), Shard(0), (own, 9)),
        (column.bias, (SIZE,), Shard(0), (own,)),
        (packed.weight, (3, SIZE, 9), Shard(1), (3, own, 9)),
        (packed.bias, (3 * SIZE,), Replicate(), (3 * SIZE,)),  # one dimension: p.dim() >= 2 decays matrices alone
        (row.weight, (9, SIZE), Shard(1), (9, own)),
        (row.bias, (9,), Replicate(), (9,)),
    ):
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        assert parameter.shape == shape and parameter.placements == (placement,)
        assert parameter.to_local().shape == local
    meta = ColumnParallelLinear(9, SIZE, bias=False, device_mesh=mesh, device="meta")
    assert meta.weight.is_meta and meta.bias is None and list(meta.state_dict()) == ["weight"]


def test_initial_weights_are_those_of_torchs_layers() -> None:
    assert 0.9 < VocabParallelEmbedding(63, 9).weight.std() < 1.1
    weight = ColumnParallelLinear(9, 3 * SIZE, parts=3).weight
    assert not isinstance(weight, DTensor) and weight.abs().max() <= 1 / 3 and weight.std() > 0.9 / 27**0.5


def _linear(in_features: int, out_features: int, dtype: torch.dtype, bias: bool) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias).to(dtype)
    for seed, parameter in enumerate(linear.parameters()):
        parameter.data.copy_(integers(seed, *parameter.shape))
    return linear


@on_ranks(2)
def test_layers_made_from_linear_layers_compute_the_same() -> None:
    rank, world, mesh, dtype = dist.get_rank(), dist.get_world_size(), tensor_mesh(), F64
    x, wide = integers(3, world, 9, dtype=dtype), integers(3, world, SIZE, dtype=dtype)
    for bias in (True, False):
        linear = _linear(9, SIZE, dtype, bias)
        column = ColumnParallelLinear.from_linear(linear, gather_output=True, device_mesh=mesh)
        assert column.weight.dtype == dtype and torch.equal(column.weight.full_tensor(), linear.weight)
        assert torch.equal(column(x), linear(x))
        linear = _linear(SIZE, 9, dtype, bias)
        row = RowParallelLinear.from_linear(linear, input_is_parallel=False, device_mesh=mesh)
        assert row.weight.dtype == dtype and torch.equal(row.weight.full_tensor(), linear.weight)
        assert torch.equal(row(wide), linear(wide))
        row = RowParallelLinear.from_linear(linear, sequence_parallel=True, device_mesh=mesh)
        width = SIZE // world
        assert torch.equal(row(wide[:, rank * width : (rank + 1) * width]), linear(wide)[rank : rank + 1])
    packed = _linear(9, 3 * SIZE, dtype, True)
    column = ColumnParallelLinear.from_linear(packed, parts=3, gather_output=True, device_mesh=mesh)
    assert torch.equal(column(x), packed(x)), "each part is sharded by itself"
    assert column(x[:0]).shape == packed(x[:0]).shape
    weights = integers(4, 3 * SIZE, dtype=dtype)
    for layer in (column, packed):
        (layer(x) * weights).sum().backward()
    assert column.bias.grad is not None
    assert torch.equal(local_tensor(column.bias.grad), packed.bias.grad), "each rank has the whole gradient"
    assert RowParallelLinear.from_linear(linear, sequence_parallel=True, sequence_dim=0).sequence_dim == 0


class _Squared(nn.Module):
    """A parametrization whose result has Shard(0), as that of weight_norm, for which DTensor has no backward."""

    def forward(self, weight: Tensor) -> Tensor:
        weight = weight.redistribute(placements=[Shard(0)]) if isinstance(weight, DTensor) else weight
        return weight * weight


@EVERY_LAYER
@on_ranks(2)
def test_a_parametrized_weight_with_other_placements_computes_what_one_rank_does(kind: str) -> None:
    options = {"column": {"parts": 2, "gather_output": True}, "row": {"input_is_parallel": False}}[kind]
    alone, layer = (_layer(kind, 9, mesh, dtype=F64, **options) for mesh in (None, tensor_mesh()))
    layer.load_state_dict(alone.state_dict())
    for each in (alone, layer):
        register_parametrization(each, "weight", _Squared())
    x = normal(1, 3, alone.in_features, dtype=F64)
    for each in (alone, layer):
        each(x).square().sum().backward()
    torch.testing.assert_close(layer(x), alone(x), rtol=1e-12, atol=1e-12)
    for parameter, whole in zip(layer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)


@EVERY_LAYER
@on_ranks(2)
def test_a_weight_that_was_written_since_the_forward_pass_is_an_error(kind: str) -> None:
    layer = _layer(kind, 6, tensor_mesh())
    loss = layer(torch.ones(2, 6 if kind == "column" else SIZE // 2, requires_grad=True)).sum()
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation, such as an optimizer's step"):
        loss.backward()


@on_ranks(2)
def test_a_penalty_of_the_weights_gradient_has_a_gradient() -> None:
    linear, x = _linear(9, SIZE, F64, False), normal(1, 3, 9, dtype=F64)
    layer = ColumnParallelLinear.from_linear(linear, device_mesh=tensor_mesh())
    for each in (layer, linear):
        loss = each(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, each.weight, create_graph=True)
        (loss + (gradient.to_local() if isinstance(gradient, DTensor) else gradient).square().sum()).backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), linear.weight.grad, rtol=1e-12, atol=1e-9)


@on_ranks(2)
def test_bad_arguments_are_refused_on_several_ranks() -> None:
    mesh = tensor_mesh()
    for kind, sizes, options, message in (
        ("column", (4, 7), {}, r"out_features 7 in 1 part\(s\) cannot be split among 2 ranks: .*Embedding.project$"),
        ("column", (4, 9), {"parts": 3}, r"expected a multiple of 6, or tp 1, 3$"),
        ("row", (7, 4), {}, "in_features 7 cannot be split among 2 ranks: expected a multiple of 2"),
        ("row", (15, 4), {}, r"in_features 15 cannot be split among 2 ranks: .*, or tp 1, 3, 5$"),
    ):
        with naming(message), pytest.raises(ValueError, match=message):
            LAYERS[kind](*sizes, device_mesh=mesh, **options)
    row = RowParallelLinear(4, 8, sequence_parallel=True, device_mesh=mesh)
    with pytest.raises(ValueError, match=r"residual has shape \(\): expected \(1, 8\)"):
        row(torch.ones(2, 2), residual=torch.tensor(1.0))
    layer = ColumnParallelLinear(4, 8, device_mesh=mesh)
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    layer.bias = nn.Parameter(distribute_tensor(torch.zeros(8), other, [Shard(0)]))
    with pytest.raises(ValueError, match=r"bias is on .*: expected .*, the mesh of its layer"):
        layer(torch.ones(3, 4))


@EVERY_LAYER
@pytest.mark.parametrize(
    ("dim", "shape"), [(-1, (4, 3, 8)), (2, (4, 3, 8)), (3, (4, 3, 8)), (-4, (4, 3, 8)), (-2, (8,))]
)
def test_dimensions_that_no_sequence_has_are_refused(kind: str, dim: int, shape: tuple[int, ...]) -> None:
    layer = LAYERS[kind](8, 4, sequence_parallel=True, sequence_dim=dim)  # on one rank, as on several
    with pytest.raises(ValueError, match=f"sequence_dim {dim}: the input has shape"):
        layer(torch.zeros(shape))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("column", {"activation": "tanh"}, "'tanh' is not known"),
        ("column", {"activation": "swiglu"}, "with parts=1: expected parts=2"),
        ("column", {"activation": "geglu", "parts": 2, "gather_output": True}, "gather_output is not defined for a"),
        ("column", {"parts": 3}, r"3 part\(s\)"),
        ("row", {"sequence_parallel": True, "input_is_parallel": False}, "sequence_parallel needs input_is_parallel"),
    ],
)
def test_bad_arguments_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LAYERS[kind](8, 8, **options)


class Norm(nn.Module):
    """A norm of a model's own class, such as nanoGPT's, and as little a linear layer or an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (ColumnParallelLinear.from_linear, "linear is a .*Norm: expected an nn.Linear"),
        (RowParallelLinear.from_linear, "linear is a .*Norm: expected an nn.Linear"),
        (LayerNorm.from_layer_norm, "norm is a .*Norm: expected an nn.LayerNorm; if it computes the same, load its"),
        (RMSNorm.from_rms_norm, "norm is a .*Norm: expected an nn.RMSNorm"),
        (VocabParallelEmbedding.from_embedding, "embedding is a .*Norm: expected an nn.Embedding"),
        (PositionEmbedding.from_embedding, "embedding is a .*Norm: expected an nn.Embedding"),
    ],
)
def test_a_module_of_another_class_is_refused(make: Callable[[nn.Module], nn.Module], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make(Norm())


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, out: 2 * out)
    return module


class Shifted(nn.Embedding):
    """An embedding with a forward of its own, such as OPT's of positions."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 2)


@pytest.mark.parametrize(
    ("make", "module", "expected"),
    [
        (PositionEmbedding.from_embedding, Shifted(9, 8), "is a .*Shifted with a forward of its own: expected an nn.E"),
        (RowParallelLinear.from_linear, weight_norm(nn.Linear(8, 8)), "parameters parametrizations.weight.original0, "),
        (RowParallelLinear.from_linear, prune.identity(nn.Linear(8, 8), "weight"), "has the parameters weight_orig: e"),
        (LayerNorm.from_layer_norm, _hooked(nn.LayerNorm(8)), "norm has hooks, which the new layer would not run"),
    ],
)
def test_a_module_that_computes_more_is_refused(
    make: Callable[[nn.Module], nn.Module], module: nn.Module, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        make(module)
