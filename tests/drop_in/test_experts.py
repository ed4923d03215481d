"""Experts with stacked weights: every rank has a part of each of them, or all of them and a line that says why."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.decoders import adapted, check_adapters, decoder
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole, local_tensor
from tpfuse.drop_in.parallelize import parallelize, replacements
from tpfuse.drop_in.structure import recognise
from tpfuse.layers.explain import plans
from tpfuse.testing.ranks import on_ranks

IDS = torch.arange(3, 29).view(2, 13)
ADAPTED: dict[str, Any] = {"target_modules": ["q_proj", "gate_proj", "down_proj"]}
# By family: the parameters of a block with their placements.
WHOLE, ROWS = (Replicate(),), (Shard(0),)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "mixtral": {"gate.weight": WHOLE, "experts.gate_up_proj": (Shard(2),), "experts.down_proj": (Shard(2),)},
    "gpt_oss": {
        "router.weight": WHOLE, "router.bias": WHOLE, "experts.gate_up_proj": (Shard(2),),
        "experts.gate_up_proj_bias": (Shard(1),), "experts.down_proj": (Shard(1),), "experts.down_proj_bias": WHOLE,
    },
    "qwen2_moe": {
        "gate.weight": WHOLE, "experts.gate_up_proj": (Shard(2),), "experts.down_proj": (Shard(2),),
        "shared_expert.gate_proj.weight": ROWS, "shared_expert.up_proj.weight": ROWS,
        "shared_expert.down_proj.weight": (Shard(1),), "shared_expert_gate.weight": WHOLE,
    },
    "llama4": {
        "experts.gate_up_proj": (Shard(3),), "experts.down_proj": (Shard(1),), "router.weight": WHOLE,
        "shared_expert.gate_proj.weight": ROWS, "shared_expert.up_proj.weight": ROWS,
        "shared_expert.down_proj.weight": (Shard(1),),
    },
}  # fmt: skip


@on_ranks(2)
def test_a_rank_holds_its_part_of_every_expert_and_the_whole_router() -> None:
    for family, expected in PLACEMENTS.items():
        model = decoder(family)
        layer = model.model.layers[1]
        name = "feed_forward" if family == "llama4" else "mlp"
        whole = {key: x.numel() for key, x in getattr(layer, name).named_parameters()}
        parallelize(model, tensor_mesh())
        block: dict[str, Any] = dict(getattr(layer, name).named_parameters())
        assert {key: x.placements for key, x in block.items()} == expected, family
        held = {key: local_tensor(x).numel() for key, x in block.items()}
        assert held == {key: n if expected[key] == WHOLE else n // 2 for key, n in whole.items()}, family
        reasons = {each.module: each.reason for each in replacements(model)}
        path = f"model.layers.1.{name}"
        assert reasons[path] == reasons[f"{path}.experts"] == "", family
        plan = next(plan for plan in plans(model) if plan.layer == f"{path}.experts")
        assert plan.implementation == "sharded" and plan.reason.startswith("every rank has a part of each of")


@on_ranks(2)
def test_adapters_of_shared_experts_are_divided_and_those_of_stacked_weights_leave_them_alone() -> None:
    for options in ({}, {"target_parameters": ["mlp.experts.down_proj"]}):
        plain, model = adapted("qwen2_moe", **ADAPTED, **options)
        parallelize(model, tensor_mesh())
        reasons = {each.module.partition("layers.0.mlp.")[2]: each.reason for each in replacements(model)}
        assert reasons["shared_expert.down_proj.base_layer"] == ""
        if options:
            assert reasons["experts.base_layer"].startswith("its stacked weights have adapters: expected adapters of")
        check_adapters(plain, model, IDS, passes=2)  # the second one meets what PEFT has left behind


@on_ranks(2)
def test_experts_whose_part_grouped_products_do_not_take_are_computed_one_after_another() -> None:
    plain, model = (decoder("mixtral", torch.float32, intermediate_size=40) for _ in range(2))
    for each in (plain, model):
        each.config._experts_implementation = "grouped_mm"
    parallelize(model, tensor_mesh())
    torch.testing.assert_close(*(each(input_ids=IDS, labels=IDS).loss for each in (plain, model)))
    plan = next(plan for plan in plans(model) if plan.layer.endswith("experts"))
    assert plan.reason.endswith("grouped_mm takes multiples of 8 features, and a rank has 20")


@pytest.mark.parametrize("implementation", ["batched_mm", *exhaustive("grouped_mm")])
@on_ranks(2)
def test_every_implementation_of_experts_gives_the_results_of_one_rank(implementation: str) -> None:
    for family in ("mixtral", "gpt_oss"):
        plain, model = (decoder(family, torch.float32) for _ in range(2))
        model.set_experts_implementation(implementation)
        parallelize(model, tensor_mesh())
        losses = [each(input_ids=IDS, labels=IDS).loss for each in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            scale = expected.grad.abs().max().item()
            actual = gather_whole(found.grad).view(expected.shape)
            torch.testing.assert_close(actual, expected.grad, rtol=0, atol=1e-5 * scale + 1e-7, msg=name)


def _kept(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    return {name: x for name, x in recognise(model, ranks, True).kept.items() if "every rank" not in x}


def test_experts_that_no_way_of_dividing_fits_are_kept_and_named() -> None:
    assert not _kept(decoder("mixtral"), 4) and not _kept(decoder("gpt_oss"), 4)
    model, path = decoder("qwen2_moe"), "model.layers.0.mlp.experts"
    assert _kept(model, 6) == {}
    uneven = _kept(decoder("qwen2_moe", moe_intermediate_size=30), 4)[path]
    assert uneven == "its 30 inner features cannot be split among 4 ranks: expected a multiple, or tp 1, 2, 3, 5, 6"
    model.model.layers[0].mlp.shared_expert = nn.Sequential(nn.Linear(48, 9), nn.Linear(9, 48)).double()
    expected = "Sequential is no attention or MLP that tpfuse knows"
    assert _kept(model)["model.layers.0.mlp.shared_expert"] == expected
    model.config._experts_implementation = "sonicmoe"
    expected = "experts_implementation 'sonicmoe' was not tried: expected eager, batched_mm, grouped_mm"
    assert _kept(model)[path] == expected


class Changed(nn.Module):
    """Experts that compute more than a sum over their inner features; `change` says what."""

    def __init__(self, experts: nn.Module, change: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.change = experts.gate_up_proj, experts.down_proj, change

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eih->tei", x, self.gate_up_proj).chunk(2, -1)
        inner = F.silu(gate) * up
        if self.change == "norm":
            inner = inner / inner.square().mean(-1, keepdim=True).sqrt()
        out = torch.einsum("tei,ehi->teh", inner, self.down_proj)
        out = (out.gather(1, index[..., None].expand(-1, -1, x.shape[-1])) * weights[..., None]).sum(1)
        if self.change == "identity":  # as zero experts, which return their input
            out = out + x * weights.sum(-1, keepdim=True)
        return out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("none", ""),
        ("norm", "its output would differ by"),
        ("identity", "its output would differ by"),
    ],
)
def test_experts_are_divided_only_where_their_parts_add_up(change: str, reason: str) -> None:
    model = decoder("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = Changed(layer.mlp.experts, change)
    kept = _kept(model)
    assert set(kept) == ({f"model.layers.{layer}.mlp.experts" for layer in range(2)} if reason else set())
    assert all(line.startswith(reason) for line in kept.values())


class Listed(nn.Module):
    """A mixture of a list of MLPs, each of which is called if it has tokens."""

    def __init__(self, mlps: list[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(48, len(mlps), bias=False, dtype=torch.float64), nn.ModuleList(mlps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        weights, index = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return out.view_as(hidden_states)


@on_ranks(2)
def test_a_list_of_mlps_is_divided_too() -> None:
    """An expert without a token is not called on any rank, and has no gradient."""
    plain, model = (decoder("llama", num_hidden_layers=1) for _ in range(2))
    for each in (plain, model):
        torch.manual_seed(3)
        mlps = [decoder("llama").model.layers[number % 2].mlp for number in range(3)]
        each.model.layers[0].mlp = Listed(mlps)
        each.model.layers[0].mlp.router.weight.data.normal_()[2].zero_()
    parallelize(model, tensor_mesh())
    reasons = {each.module: each.reason for each in replacements(model)}
    assert not {name: x for name, x in reasons.items() if x and "every rank" not in x}
    for each in (plain, model):
        each(input_ids=IDS, labels=IDS).loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None:
            assert isinstance(found, DTensor)
            torch.testing.assert_close(gather_whole(found.grad), expected.grad, rtol=0, atol=1e-6, msg=name)
