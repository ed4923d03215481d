"""The fused styles do in torch's `parallelize_module` what the styles do whose names they extend, and mix with them."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import prune

from tests.support.meshes import tensor_mesh
from tests.support.tiers import UNEVEN_SEQUENCES, exhaustive
from tpfuse.drop_in.sequence_hooks import SequenceLength
from tpfuse.drop_in.styles import (
    FusedColwiseParallel,
    FusedPrepareModuleInput,
    FusedRowwiseParallel,
    FusedSequenceParallel,
    WholeSequences,
)
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool

R = Replicate()
S = Shard
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def _input(whole: Tensor, layout: Placement | None, kind: Placement | None) -> Tensor:
    """Return `whole` as a leaf that a module is called with.

    layout: of which a plain tensor is this rank's part; kind: the placement of a DTensor, None for a plain tensor.
    """
    mesh = tensor_mesh()
    placed = R if layout is None else layout
    x: Tensor = distribute_tensor(whole, mesh, [placed if kind is None else kind], src_data_rank=None)
    x = x.to_local() if kind is None and isinstance(x, DTensor) else x  # type: ignore[assignment]
    x = x.detach().clone()
    return x.requires_grad_() if x.is_floating_point() else x


def _whole(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _close(found: Tensor | None, expected: Tensor | None, what: Any) -> None:
    torch.testing.assert_close(_whole(found), _whole(expected), **TOLERANCE, msg=lambda text: f"{what}: {text}")


def _assert_equal(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Compare outputs: plain shards of tpfuse may have rows of zeros after those of torch's."""
    assert isinstance(ours, DTensor) == isinstance(theirs, DTensor), what
    if isinstance(ours, DTensor) and isinstance(theirs, DTensor):
        assert ours.placements == theirs.placements and ours.device_mesh == theirs.device_mesh, what
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride(), (what, ours.shape, theirs.shape)
        ours, theirs = ours.to_local(), theirs.to_local()
    _close(ours, theirs, what)


def _compare(
    module: nn.Module, fused: ParallelStyle, torchs: ParallelStyle, whole: Tensor, kinds: Sequence[Placement | None]
) -> None:
    """Compare outputs, their layouts, and the gradients of a module under two styles, for each kind of input."""
    mesh = tensor_mesh()
    layout = (torchs.sequence_sharding if isinstance(torchs, SequenceParallel) else torchs.input_layouts)[0]  # type: ignore[attr-defined]
    for kind in kinds:
        modules, outs, inputs = [], [], []
        what = f"{torchs!r} of {module} called with {kind}"
        for style in (fused, torchs):
            made = parallelize_module(copy.deepcopy(module), mesh, style)
            x = _input(whole, layout, kind)
            out = made(x)
            local = out.to_local() if isinstance(out, DTensor) else out
            weights = torch.arange(local.numel(), dtype=local.dtype).cos().view(local.shape)
            (local * weights).sum().backward()
            modules.append(made)
            outs.append(out.detach())
            inputs.append(x)
        _assert_equal(outs[0], outs[1], what)
        if inputs[0].is_floating_point():
            _close(inputs[0].grad, inputs[1].grad, f"{what}: dx")
        ours, theirs = (dict(made.named_parameters()) for made in modules)
        assert ours.keys() == theirs.keys()
        for name, parameter in ours.items():
            assert isinstance(parameter, DTensor) and parameter.placements == theirs[name].placements, (what, name)
            _close(parameter.grad, theirs[name].grad, f"{what}: d{name}")


def _linears(
    fused: Callable[..., ParallelStyle],
    torchs: Callable[..., ParallelStyle],
    inputs: list[Any],
    outputs: list[Any],
    kinds: tuple[Placement | None, ...] = (None, R, S(1), S(-1)),
) -> None:
    whole = normal(1, 4, 12, 24, dtype=torch.float64)
    layouts = itertools.product(inputs, outputs, (True, False))
    for index, (source, target, local) in enumerate(layouts):
        arguments = {"input_layouts": source, "output_layouts": target, "use_local_output": local}
        module = nn.Linear(24, 36, bias=index % 3 > 0, dtype=torch.float64)
        _compare(module, fused(**arguments), torchs(**arguments), whole, kinds)


def _colwise() -> None:
    _linears(FusedColwiseParallel, ColwiseParallel, [None, R, S(0), S(1), S(2), S(-1)], [None, R, S(-1), S(1), S(2)])


def _rowwise() -> None:
    _linears(FusedRowwiseParallel, RowwiseParallel, [None, S(-1), R, S(1)], [None, R, S(0), S(1), S(-1)])


@on_ranks(2)
def test_each_style_does_what_torchs_style_does() -> None:
    """Compare a few layouts of each style."""
    _linears(FusedColwiseParallel, ColwiseParallel, [S(1), S(-1)], [None], (None, R))
    _linears(FusedRowwiseParallel, RowwiseParallel, [None, R], [S(1)], (None, R))
    _sequence([nn.LayerNorm(24, dtype=torch.float64), OwnNorm(24)], (1,), (None, S(1)))
    _embeddings([S(1)], [S(1)])


@UNEVEN_SEQUENCES
@pytest.mark.parametrize("world", [2, *exhaustive(4)])
@on_ranks("world")
def test_sequences_that_the_ranks_do_not_divide() -> None:
    """Compare what DTensors hold of a sequence that the ranks do not divide."""
    whole = normal(1, 2, 7, 24, dtype=torch.float64)
    kinds: list[Placement | None] = [R, S(1)]
    linear = nn.Linear(24, 36, dtype=torch.float64)
    for source, target in itertools.product((R, S(1)), (R, S(-1))):
        arguments = {"input_layouts": source, "output_layouts": target, "use_local_output": False}
        _compare(linear, FusedColwiseParallel(**arguments), ColwiseParallel(**arguments), whole, kinds)
    for target in (R, S(1)):
        arguments = {"output_layouts": target, "use_local_output": False}
        _compare(linear, FusedRowwiseParallel(**arguments), RowwiseParallel(**arguments), whole, [R, S(-1)])
    norm = nn.LayerNorm(24, dtype=torch.float64)
    _compare(norm, FusedSequenceParallel(), SequenceParallel(), whole, kinds)
    ids = integers(1, 2, 7, low=0, high=100, dtype=torch.int64)
    for target in (R, S(1)):
        arguments = {"input_layouts": R, "output_layouts": target, "use_local_output": False}
        embedding = nn.Embedding(101, 24, dtype=torch.float64)
        _compare(embedding, FusedRowwiseParallel(**arguments), RowwiseParallel(**arguments), ids, [None, R, S(1)])


@on_ranks(2)
def test_plain_shards_of_such_sequences_are_refused() -> None:
    """A module that gathers them would take the padding for tokens."""
    x = normal(1, 2, 7, 24)
    ids, mesh = integers(1, 2, 7, low=0, high=100, dtype=torch.int64), tensor_mesh()
    block = nn.Sequential(nn.Linear(24, 24))
    prepared = {"input_layouts": R, "desired_input_layouts": S(1), "use_local_output": True, "attributes": {"n": 1}}
    for module, style, given in (
        (nn.Linear(24, 24), FusedRowwiseParallel(input_layouts=R, output_layouts=S(1)), x),
        (nn.Embedding(101, 24), FusedRowwiseParallel(input_layouts=R, output_layouts=S(1)), ids),
        (block, FusedPrepareModuleInput(**prepared), x),
    ):
        parallelize_module(module, mesh, style)
        with pytest.raises(ValueError, match=r"2 ranks do not divide the 7 tokens .*: give the styles use_local_out"):
            module(given)
        assert module(given[:, :6]).shape == (2, 3, 24)


class OwnNorm(nn.Module):
    """A norm of a class that tpfuse does not know, with another parameter than its weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(normal(3, features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (1 + self.scale)


def _norms() -> None:
    f64 = torch.float64
    norms = [
        nn.LayerNorm(24, dtype=f64), nn.LayerNorm(24, bias=False, dtype=f64), nn.RMSNorm(24, dtype=f64),
        nn.RMSNorm(24, eps=0.1, dtype=f64), nn.LayerNorm(24, elementwise_affine=False, dtype=f64),
        nn.RMSNorm(24, elementwise_affine=False, dtype=f64), OwnNorm(24), nn.Dropout(0.0),
    ]  # fmt: skip
    _sequence(norms, (0, 1), (None, R, S(0), S(1)))


def _sequence(norms: list[nn.Module], dims: tuple[int, ...], kinds: tuple[Placement | None, ...]) -> None:
    whole = normal(1, 4, 12, 24, dtype=torch.float64)
    for norm, dim, local in itertools.product(norms, dims, (False, True)):
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.add_(normal(4, *parameter.shape, dtype=torch.float64))
        arguments = {"sequence_dim": dim, "use_local_output": local}
        _compare(norm, FusedSequenceParallel(**arguments), SequenceParallel(**arguments), whole, kinds)


def _all_embeddings() -> None:
    _embeddings([R, S(1)], [R, S(1), S(-1), S(0)])


def _embeddings(inputs: list[Placement], outputs: list[Placement]) -> None:
    ids = integers(1, 4, 12, low=0, high=34, dtype=torch.int64)
    for rows, padding in ((36, None), (35, 3)):
        table = nn.Embedding(rows, 24, padding_idx=padding, dtype=torch.float64)
        for source, target, local in itertools.product(inputs, outputs, (True, False)):
            arguments = {"input_layouts": source, "output_layouts": target, "use_local_output": local}
            kinds: list[Placement | None] = [None, R, S(1)]
            pairs: list[tuple[ParallelStyle, ParallelStyle]] = [
                (FusedRowwiseParallel(**arguments), RowwiseParallel(**arguments)),
                (FusedColwiseParallel(**arguments), ColwiseParallel(**arguments)),
            ]
            for fused, torchs in pairs[: 1 if padding is not None else 2]:
                _compare(table, fused, torchs, ids, kinds)
    _compare(nn.Embedding(36, 24, dtype=torch.float64), FusedRowwiseParallel(), RowwiseParallel(), ids, [None, R])


@pytest.mark.parametrize("cases", exhaustive(_colwise, _rowwise, _norms, _all_embeddings))
def test_each_style_does_what_torchs_style_does_for_all_layouts(cases: Callable[[], None]) -> None:
    pool(2).run(cases)


class Mlp(nn.Module):
    """A gated MLP, which reads its input in two products."""

    def __init__(self, features: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(features, hidden, bias=bias, dtype=dtype) for bias in (True, False))
        self.w2 = nn.Linear(hidden, features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """A norm and an MLP with a residual connection."""

    def __init__(self, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(features, dtype=dtype), Mlp(features, 2 * features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Model(nn.Module):
    """An embedding, two blocks, a norm and a projection to the vocabulary."""

    def __init__(self, vocabulary: int = 36, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(vocabulary, 24, dtype=dtype)
        self.layers = nn.ModuleList(Block(24, dtype) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(24, dtype=dtype), nn.Linear(24, vocabulary, bias=False, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


PARTS = ("embedding", "norm", "mlp", "w1", "w3", "w2", "last", "head")
OURS, TORCHS = (True,) * len(PARTS), (False,) * len(PARTS)


_ALTERNATING = tuple(index % 2 == 0 for index in range(len(PARTS)))
_OTHERS = tuple(not fused for fused in _ALTERNATING)


def _plan(ours: tuple[bool, ...], local: bool, logits: Placement = R, logits_local: bool = True) -> dict[str, Any]:
    """Return the plan of torch's tutorial for `Model`, with the fused style for each part for which `ours` is true.

    local: activations between modules are plain tensors.
    """
    fused = dict(zip(PARTS, ours, strict=True))
    row = {name: FusedRowwiseParallel if fused[name] else RowwiseParallel for name in ("embedding", "w2")}
    column = {name: FusedColwiseParallel if fused[name] else ColwiseParallel for name in ("w1", "w3", "head")}
    norm = {name: FusedSequenceParallel if fused[name] else SequenceParallel for name in ("norm", "last")}
    inputs: dict[str, Any] = {"input_layouts": S(1), "desired_input_layouts": R, "use_local_output": local}
    return {
        "embedding": row["embedding"](input_layouts=R, output_layouts=S(1), use_local_output=local),
        "layers.*.norm": norm["norm"](use_local_output=local),
        "layers.*.mlp": FusedPrepareModuleInput(**inputs, projections=("w1", "w3"))
        if fused["mlp"]
        else PrepareModuleInput(**inputs),
        "layers.*.mlp.w1": column["w1"](use_local_output=local),
        "layers.*.mlp.w3": column["w3"](use_local_output=local),
        "layers.*.mlp.w2": row["w2"](output_layouts=S(1), use_local_output=local),
        "norm": norm["last"](use_local_output=local),
        "head": column["head"](input_layouts=S(1), output_layouts=logits, use_local_output=logits_local),
    }


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1),
        ids.roll(-1, 1).flatten(),
    )


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
    return {name: x for name, x in found.items() if x is not None}


def _assert_same_training(model: nn.Module, gradients: dict[str, Tensor], what: Any) -> None:
    found = _gradients(model)
    assert found.keys() == gradients.keys(), what
    for name, x in gradients.items():
        _close(found[name], x, f"{what}: {name}")


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
@pytest.mark.parametrize(
    ("tokens", "choices"),
    [
        (12, [OURS, _ALTERNATING, _OTHERS]),
        (7, [OURS]),
        pytest.param(7, [_ALTERNATING, _OTHERS], marks=UNEVEN_SEQUENCES),
    ],
)
@on_ranks("world")
def test_fused_styles_and_torchs_mix_in_one_plan(tokens: int, choices: list[tuple[bool, ...]]) -> None:
    for local in (True, False):
        if local and tokens % dist.get_world_size():
            continue  # torch's plain shards of a sequence that the ranks do not divide have no padding
        ids = integers(1, 2, tokens, low=0, high=35, dtype=torch.int64)
        whole = Model()
        expected = _loss(whole, ids)
        expected.backward()
        for ours in choices:
            model = parallelize_module(Model(), tensor_mesh(), _plan(ours, local))
            loss = _loss(model, ids)
            loss.backward()
            what = f"{dict(zip(PARTS, ours, strict=True))}, local {local}, {tokens} tokens"
            _close(loss, expected, what)
            _assert_same_training(model, _gradients(whole), what)


@on_ranks(2)
def test_prepared_inputs_are_those_of_torchs_style() -> None:
    """Compare FusedPrepareModuleInput with torch's style: without projections, and with those that torch converts."""
    mesh = tensor_mesh()
    whole = normal(1, 4, 12, 24, dtype=torch.float64)
    kinds: list[tuple[Placement | None, Placement]] = [(None, R), (R, R), (None, S(1)), (R, S(1)), (S(1), S(1))]
    for (kind, source), fused_columns in itertools.product(kinds, (False, True)):
        results = []
        column: Any = FusedColwiseParallel if fused_columns else ColwiseParallel
        for style in (
            PrepareModuleInput(input_layouts=source, desired_input_layouts=R, use_local_output=True),
            FusedPrepareModuleInput(input_layouts=source, desired_input_layouts=R, use_local_output=True),
            FusedPrepareModuleInput(
                input_layouts=source, desired_input_layouts=R, use_local_output=True, projections=("w1", "w3")
            ),
        ):
            torch.manual_seed(1)
            plan = {"": style, "w1": column(), "w3": column(), "w2": RowwiseParallel()}
            mlp = parallelize_module(Mlp(24, 48, torch.float64), mesh, plan)
            x = _input(whole, source, kind)
            out = mlp(x)
            (out * normal(2, *out.shape, dtype=torch.float64)).sum().backward()
            results.append([out, _whole(x.grad), *_gradients(mlp).values()])
        for other in results[1:]:
            for expected, found in zip(results[0], other, strict=True):
                _close(found, expected, (kind, source))


class OwnRMSNorm(nn.Module):
    """A root-mean-square norm, which runs as one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(24, dtype=torch.float64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


@on_ranks(2)
def test_inputs_may_have_any_name() -> None:
    x, mesh = normal(1, 2, 4, 24, dtype=torch.float64), tensor_mesh()
    inputs = FusedPrepareModuleInput(input_layouts=S(1), desired_input_layouts=R, projections=("w1", "w3"))
    plan = {"": inputs, "w[13]": FusedColwiseParallel(), "w2": FusedRowwiseParallel(output_layouts=S(1))}
    for module, style in (
        (Mlp(24, 48, torch.float64), plan), (OwnNorm(24), FusedSequenceParallel()),
        (OwnRMSNorm(), FusedSequenceParallel()), (Mlp(24, 48, torch.float64), WholeSequences()),
    ):  # fmt: skip
        parallelize_module(module, mesh, style)
        _assert_equal(module(x=x), module(x), str(module))
        with pytest.raises(ValueError, match=r"^\w+: its input is no tensor: expected one as its fir"):
            module(x=None)


@on_ranks(2)
def test_inputs_are_split_as_by_torchs_style() -> None:
    x = normal(1, 4, 12, dtype=torch.float64)
    split: dict[str, Any] = {"input_layouts": R, "desired_input_layouts": S(1), "use_local_output": True}
    for kind in (None, R, S(1)):
        found = []
        for style in (FusedPrepareModuleInput(**split, length=SequenceLength()), PrepareModuleInput(**split)):
            inner = parallelize_module(nn.Identity(), tensor_mesh(), style)
            each = _input(x, R, kind)
            out = inner(each)
            (out * out.detach().cos()).sum().backward()
            found.append((out.detach(), each.grad))
        for ours, theirs in zip(*found, strict=True):
            _close(ours, theirs, kind)


@on_ranks(2)
def test_what_a_style_cannot_convert_is_refused_and_left_as_it_was() -> None:
    mesh = tensor_mesh()
    linear, watched = nn.Linear(24, 35), nn.Linear(24, 36)
    watched.weight.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
    cases: list[tuple[nn.Module, ParallelStyle, str]] = [
        (linear, FusedColwiseParallel(), r"FusedColwiseParallel of Linear\(in_features=24, out_features=35, .*\):"
         r" its 35 output features cannot be split among 2 ranks"),
        (watched, FusedColwiseParallel(), "its weight has hooks, which would be lost"),
        (nn.Linear(35, 24), FusedRowwiseParallel(), "its 35 input features cannot be split among 2 ranks"),
        (nn.Conv1d(2, 2, 1), FusedColwiseParallel(), "expected an nn.Linear or transformers' Conv1D"),
        (linear, FusedColwiseParallel(parts=2), "its 35 output features cannot be 2 matrices of equal height"),
        (Mlp(24, 48, torch.float64), FusedPrepareModuleInput(
            input_layouts=S(1), desired_input_layouts=R, projections=("w4",)
        ), "projection 'w4': it has no such child, but w1, w3, w2"),
        (Mlp(24, 48, torch.float64), FusedPrepareModuleInput(
            input_layouts=(S(1), R), desired_input_layouts=(R, R), projections=("w1",)
        ), "expected the layouts of the first input alone"),
        (nn.Embedding(8, 4, max_norm=1.0), FusedRowwiseParallel(input_layouts=R), "it has max_norm=1.0"),
        (prune.identity(nn.Embedding(8, 4), "weight"), FusedRowwiseParallel(input_layouts=R), "parameters weight_orig"),
    ]  # fmt: skip
    for module, style, message in cases:
        before = module.state_dict(), type(module)
        with pytest.raises(ValueError, match=message):
            parallelize_module(module, mesh, style)
        assert type(module) is before[1]
        for name, x in module.state_dict().items():
            assert torch.equal(x, before[0][name]) and not isinstance(x, DTensor)

    table = parallelize_module(nn.Embedding(16, 4), mesh, FusedRowwiseParallel(input_layouts=R, output_layouts=S(1)))
    with pytest.raises(ValueError, match=r"ConvertedEmbedding: ids of shape \(8,\) have no dimension 1.* Shard\(1\)"):
        table(torch.arange(8))


@on_ranks(2)
def test_the_values_are_those_of_src_data_rank() -> None:
    rank, mesh = dist.get_rank(), tensor_mesh()
    for source in (0, 1, None):
        modules: list[tuple[nn.Module, ParallelStyle]] = [
            (nn.Linear(8, 6), FusedColwiseParallel()), (nn.Linear(8, 6), FusedRowwiseParallel()),
            (nn.Embedding(7, 4), FusedRowwiseParallel(input_layouts=R)), (nn.LayerNorm(4), FusedSequenceParallel()),
        ]  # fmt: skip
        for module, style in modules:
            wholes = {}
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    wholes[name] = [normal(each, *parameter.shape) for each in range(2)]
                    parameter.copy_(wholes[name][rank])
            parallelize_module(module, mesh, style, src_data_rank=source)
            for name, parameter in module.named_parameters():
                assert isinstance(parameter, DTensor)
                expected = distribute_tensor(
                    wholes[name][rank if source is None else source], mesh, parameter.placements, src_data_rank=None
                )
                assert torch.equal(parameter.to_local(), expected.to_local()), (source, style, name)


@on_ranks(2)
def test_a_parameter_that_was_written_after_its_conversion_is_converted_again() -> None:
    """A caller may still hold what a style has replaced, and use it for another module."""
    first, second = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    shared = second.weight = first.weight
    parallelize_module(first, tensor_mesh(), FusedColwiseParallel(output_layouts=R))
    with torch.no_grad():
        shared.fill_(1.0)
    parallelize_module(second, tensor_mesh(), FusedColwiseParallel(output_layouts=R))
    assert torch.equal(second(torch.ones(1, 4)), torch.full((1, 6), 4.0))


@on_ranks(2)
def test_losses_of_sharded_logits_under_loss_parallel() -> None:
    for local in (True, False):
        ids = integers(1, 2, 12, low=0, high=35, dtype=torch.int64)
        whole = Model()
        expected = _loss(whole, ids)
        expected.backward()
        model = parallelize_module(Model(), tensor_mesh(), _plan(OURS, local, S(-1), False))
        with loss_parallel():
            loss = _loss(model, ids)
            assert isinstance(loss, DTensor)
            loss.backward()
        _close(loss, expected, local)
        _assert_same_training(model, _gradients(whole), local)


@on_ranks(2)
def test_training_under_autocast_is_as_exact_as_with_torchs_styles() -> None:
    ids = integers(1, 2, 12, low=0, high=35, dtype=torch.int64)
    exact = Model()
    _loss(exact, ids).backward()
    errors = []
    for ours in (OURS, TORCHS):
        model = parallelize_module(Model(dtype=torch.float32), tensor_mesh(), _plan(ours, True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(ids).dtype == torch.bfloat16
            loss = _loss(model, ids)
        loss.backward()
        wanted = _gradients(exact)
        errors.append({name: (x - wanted[name]).abs().max() for name, x in _gradients(model).items()})
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    for name, error in errors[0].items():
        assert error <= 2 * errors[1][name] + 1e-6, (name, error, errors[1][name])


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_compiled_model_is_one_graph_with_the_same_gradients() -> None:
    ids = integers(1, 2, 12, low=0, high=35, dtype=torch.int64)
    model = parallelize_module(Model(), tensor_mesh(), _plan(OURS, local=False))
    _loss(model, ids).backward()
    expected = _gradients(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        _loss(compiled, ids).backward()
        for name, x in _gradients(model).items():
            _close(x, expected[name], name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
