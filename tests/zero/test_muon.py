"""Muon on shards: which matrices it updates, where, and in what precision; `test_zero` trains with it."""

import inspect
from collections import Counter
from dataclasses import asdict, replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.decoders import decoder
from tests.support.tiers import exhaustive
from tests.zero.zero_training import (
    ADAMW,
    CONFIG,
    STEPS,
    Layout,
    TorchsMuon,
    ToyExperts,
    engine_of,
    gpt,
    matrices_and_others,
    micro_batches,
    run,
    toy,
    train_step,
    whole,
)
from tpfuse.choices import Implementation
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool
from tpfuse.zero import MuonOptions, adamw, hidden_matrices, muon, shard
from tpfuse.zero.muon import _owners, orthogonalised
from tpfuse.zero.muon_matrices import HiddenMatrix, matrices_of
from tpfuse.zero.optimizer import ZeroOptimizer

MUON = MuonOptions(momentum=0.9)


def calls(layout: Layout) -> tuple[Counter[torch.Size], int]:
    """Train with three micro-batches. Return the shapes that this rank orthogonalises, and the matrices it has cut."""
    shapes: Counter[torch.Size] = Counter()

    def counted(x: Tensor, options: MuonOptions) -> Tensor:
        shapes[x.shape[1:]] += len(x)
        return orthogonalised(x, options)

    with mock.patch.object(muon, "orthogonalised", counted):
        run("gpt", layout, 3, muon=MUON)
    engine = engine_of("gpt", layout, muon=MUON)[1]
    held = adamw(engine)._muon
    assert held is not None
    elements = Counter[int]()
    for part in held._parts:
        elements[part.matrix] += prod(stop - start for start, stop in part.slices)
    return shapes, sum(count < prod(held._matrices[number].shape) for number, count in elements.items())


@pytest.mark.parametrize("layout", [Layout(dp=2, stage=3), *exhaustive(Layout(dp=2, stage=0))])
def test_one_rank_orthogonalises_each_matrix_whole_once_a_step(layout: Layout) -> None:
    """Not each micro-batch's gradient by itself, not a shard by itself, not q, k and v together, not on every rank."""
    width, steps = CONFIG.n_embd, CONFIG.n_layer * STEPS
    (first, cut), (second, _) = pool(layout.world).run(calls, layout)
    assert first + second == {
        (width, width): 4 * steps,  # q, k, v and the projection of attention
        (4 * width, width): steps,
        (width, 4 * width): steps,
    }
    assert sum(map(prod, first.elements())) == sum(map(prod, second.elements())), "owners have equal work"
    assert bool(cut) == (layout.stage > 0)


def test_constants_are_those_of_torch_and_the_original_rate_grows_with_the_features_out() -> None:
    theirs = inspect.signature(torch.optim.Muon).parameters
    for name in ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps"):
        assert getattr(MuonOptions(), name) == theirs[name].default, name
    tall, original = HiddenMatrix("tall", (16, 4), (), False, ()), MuonOptions(adjust_lr_fn="original")
    assert original.scale(tall) == 2 and original.scale(replace(tall, transposed=True)) == 1


def test_the_owner_of_equal_matrices_has_the_largest_part_of_its_own() -> None:
    matrices, whole = [HiddenMatrix(name, (4, 4), (), False, ()) for name in "ab"], ((0, 4), (0, 4))
    assert _owners(matrices, [[(1, whole)], [(0, whole)]]) == [1, 0]


def test_float32_is_orthogonalised_in_bfloat16_as_by_torch() -> None:
    """The first gradients are below eps. Without a gradient a matrix only decays."""
    options = MuonOptions(lr=0.02, weight_decay=0.3, nesterov=False, adjust_lr_fn="original", ns_steps=4, eps=2.0)
    start = {"0.weight": normal(1, 9, 5), "1.weight": normal(2, 5, 9), "2.weight": normal(3, 4, 6)}
    model = nn.Sequential(nn.Linear(5, 9, False), nn.Linear(9, 5, False), nn.Linear(6, 4, False))
    model.load_state_dict(start)
    theirs = TorchsMuon([nn.Parameter(x.clone()) for x in start.values()], **asdict(options))
    engine = shard(model, stage=0, matrices={"0.weight": 1, "1.weight": 1, "2.weight": 2})
    optimizer = adamw(engine, muon=options)
    for step in range(3):
        engine.start(last=True)
        loss = model[1](model[0](normal(step, 7, 5))).square().mean()
        loss.backward()
        engine.finish()
        gradients = [
            bucket.layout.view(bucket.reduced_shard, s) for bucket in engine.buckets for s in bucket.layout.segments
        ]
        for (parameter, _), gradient in zip(theirs.parts, gradients[::-1], strict=True):
            parameter.grad = gradient.clone()
        theirs.step()
        optimizer.step(lr=1.0)
    for (parameter, _), (name, ours) in zip(theirs.parts, model.named_parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)
    assert torch.equal(
        model[2].weight, start["2.weight"].mul_(1 - 0.02 * 0.3).mul_(1 - 0.02 * 0.3).mul_(1 - 0.02 * 0.3)
    )


def half_parameters(stage: int, by: Implementation) -> dict[str, Tensor]:
    """Train in bfloat16, and return the weights; check that they are the rounded masters of this rank's shards."""
    with use(implementation=by):
        case, engine = engine_of("toy", Layout(dp=2, stage=stage), torch.bfloat16, muon=MUON)
        optimizer = adamw(engine, **ADAMW, muon=MUON)
        train_step(case, engine, optimizer, micro_batches(Layout(dp=2), 1), 0)
        weights = whole(engine)
    for piece in optimizer.rectangles():
        assert piece.tensor.dtype is torch.float32
        if piece.kind == "model":
            assert torch.equal(weights[piece.name][tuple(slice(*x) for x in piece.slices)], piece.tensor.bfloat16())
    return weights


@pytest.mark.parametrize(("stage", "by"), [(1, "auto"), *exhaustive((2, "collective"), (1, "fused"))])
def test_masters_are_rounded_into_parameters_of_a_half_type(stage: int, by: Implementation) -> None:
    start = toy(torch.bfloat16).model.state_dict()
    first, second = pool(2).run(half_parameters, stage, by)
    for name in hidden_matrices(toy().model):
        assert torch.equal(first[name], second[name]) and not torch.equal(first[name], start[name]), name


def test_own_loops_say_which_matrices_muon_updates() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    with pytest.raises(ValueError, match="no matrices of hidden layers"):
        ZeroOptimizer(model, stage=0, algorithm="muon")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"0.wait": 1}, "'0.wait' is no parameter that the model trains"),
        ({"0.bias": 1}, r"0.bias \[6\] is no matrix"),
        ({"0.weight": 4}, r"0.weight \[6, 4\] is to be cut into 4: expected a number that divides its 6 rows"),
        ({"0.weight": [[(0, 2)], [(3, 6)]]}, "is to be cut into"),
    ]
    for matrices, message in wrong:
        with pytest.raises(ValueError, match=message):
            ZeroOptimizer(model, stage=0, algorithm="muon", matrices=matrices)
    with pytest.raises(ValueError, match='muon and matrices are for algorithm="muon"'):
        ZeroOptimizer(model, stage=0, matrices={"0.weight": 1})
    with pytest.raises(ValueError, match="algorithm is 'lion'"):
        ZeroOptimizer(model, stage=0, algorithm="lion")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Muon: momentum 1\.0: expected from 0 to below 1"):
        MuonOptions(momentum=1.0)
    optimizer = ZeroOptimizer(model, stage=0, algorithm="muon", matrices={"0.weight": 2})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2, 1]
    assert [matrix.shape for matrix in optimizer.engine.matrices] == [(3, 4), (3, 4)]


def rows_of(family: str) -> dict[str, list[Tensor]]:
    """Return the matrices, by the names of their parameters."""
    model = decoder(family)
    named, found = hidden_matrices(model), dict[str, list[Tensor]]()
    for matrix in matrices_of(model, named):
        whole = torch.zeros(matrix.shape, dtype=torch.float64)
        parameter = model.get_parameter(matrix.name).detach()
        for index, inside in matrix.parts([(0, size) for size in parameter.shape]):
            whole[tuple(slice(*bounds) for bounds in inside)] = parameter[index]
        found.setdefault(matrix.name, []).append(whole)
    return found


def test_packed_projections_are_matrices_of_their_own() -> None:
    """The rows are those that the models themselves split; the sizes are those of `tests.support.decoders`."""
    size, width = 4, 48
    layer = {name: decoder(name).get_submodule(path) for name, path in ATTENTION.items()}
    for family, expected in {
        "gpt2": ("c_attn", [x.T for x in layer["gpt2"].c_attn.weight.detach().split(width, dim=1)]),
        "phi3_shared": ("qkv_proj", layer["phi3_shared"].qkv_proj.weight.detach().split([width, 16, 16])),
        "neox": ("query_key_value", layer["neox"].query_key_value.weight.detach().view(12, 3, size, width).unbind(1)),
    }.items():
        name, parts = expected
        found = next(x for key, x in rows_of(family).items() if name in key)
        for ours, theirs in zip(found, parts, strict=True):
            assert torch.equal(ours if family != "gpt2" else ours.T, theirs.reshape(-1, width))
    assert [x.shape for x in rows_of("phi3")["model.layers.0.mlp.gate_up_proj.weight"]] == [(96, 48)] * 2
    for family, path, dim in ("mixtral", "model.layers.0.mlp.experts", 0), ("llama4", EXPERTS, 1):
        found, experts = rows_of(family), decoder(family).get_submodule(path)
        parts = [part for each in experts.gate_up_proj.detach() for part in each.chunk(2, dim)]
        for kind, expected in {"gate_up_proj": parts, "down_proj": list(experts.down_proj.detach())}.items():
            torch.testing.assert_close(found[f"{path}.{kind}"], expected, rtol=0, atol=0)
    assert [x.shape for x in rows_of("moshi")["model.layers.0.mlp.fc1.weight"]] == [(48, 48)] * 2
    assert all(len(parts) == 1 for parts in rows_of("llama").values())


EXPERTS = "model.layers.1.feed_forward.experts"
ATTENTION = {
    "gpt2": "transformer.h.0.attn",
    "phi3_shared": "model.layers.0.self_attn",
    "neox": "gpt_neox.layers.0.attention",
}


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt_oss", r"cannot tell what matrices model.layers.0.mlp.experts.gate_up_proj \[4, 48, 192\] packs"),
        ("bigcode_heads", r"cannot tell what matrices transformer.h.0.attn.c_attn \[144, 48\] packs"),
        ("falcon", "cannot tell what matrices .*query_key_value .* packs"),
    ],
)
def test_what_cannot_be_told_is_refused(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hidden_matrices(decoder(family))


def test_tensors_of_three_dimensions_are_stacks_if_their_module_says_how_they_are_stored() -> None:
    decays = nn.ParameterDict({"decays": torch.ones(1, 1, 4, 1)})  # a vector, as of Kimi's heads
    assert set(hidden_matrices(nn.ModuleList([nn.Conv1d(4, 8, 3, groups=4), ToyExperts(), decays]))) == {
        "1.up_proj", "1.down_proj",
    }  # fmt: skip
    for module, name in (nn.Conv1d(4, 8, 3), "weight"), (nn.ParameterDict({"up_proj": torch.ones(8, 4, 3)}), "up_proj"):
        with pytest.raises(ValueError, match=rf"cannot tell what 0.{name} \[8, 4, 3\] is"):
            hidden_matrices(nn.ModuleList([module]))
    with pytest.raises(ValueError, match=r"0.weight \[8, 4, 3\] is no matrix"):
        matrices_of(nn.Sequential(nn.Conv1d(4, 8, 3)), {"0.weight": 1})
    cut = matrices_of(nn.ModuleList([ToyExperts()]), {"0.up_proj": 2})
    assert [matrix.shape for matrix in cut] == [(2, 5)] * 6


def test_embeddings_heads_norms_biases_and_tied_matrices_are_not_muons() -> None:
    """Tied ones are one parameter: with an embedding AdamW's, with another block Muon's, once."""
    for family in ("llama", "llama_tied", "stablelm_norms", "gemma3"):
        names = hidden_matrices(decoder(family))
        assert names and all(".layers." in name and name.endswith("proj.weight") for name in names), family
    model = gpt().model
    assert set(hidden_matrices(model)) == set(matrices_and_others(dict(model.named_parameters()))[0])
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4)) for _ in range(3))
    blocks[1][0].weight = blocks[0][0].weight  # type: ignore[index]
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(4, 4)})
    blocks[2][0].weight = model["head"].weight  # type: ignore[index]
    assert set(hidden_matrices(model)) == {"blocks.0.0.weight"}
