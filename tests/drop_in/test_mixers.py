"""Linear attention, state spaces and short convolutions: every rank computes the recurrences of its heads."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.support.decoders import adapted, check_adapters, decoder
from tests.support.meshes import tensor_mesh
from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.drop_in import mixers, structure
from tpfuse.drop_in.mixers import mixer_of
from tpfuse.drop_in.parallelize import parallelize
from tpfuse.drop_in.replicated import ShardedRMSNorm
from tpfuse.drop_in.sketch import apart
from tpfuse.drop_in.structure import recognise
from tpfuse.layers.explain import plans
from tpfuse.testing.ranks import on_ranks

IDS = torch.arange(3, 29).view(2, 13)
HYBRIDS = {
    "qwen3_next": "linear_attn", "qwen3_5": "linear_attn", "olmo_hybrid": "linear_attn", "falcon_h1": "mamba",
    "nemotron_h": "mixer", "lfm2": "conv", "kimi_linear": "self_attn", "ling": "self_attn",
}  # fmt: skip


def _kept(model: nn.Module, ranks: int) -> set[str]:
    return {x for x in recognise(model, ranks, True).kept.values() if x != "every rank computes the same"}


def test_mixers_are_divided_by_their_heads() -> None:
    for family in HYBRIDS:
        for ranks in (2, 4):  # 4 ranks share the 12 heads of 4 keys
            assert _kept(decoder(family), ranks) == set(), family


def test_a_mixer_whose_heads_the_ranks_do_not_divide_is_kept_and_named() -> None:
    kept = _kept(decoder("nemotron_h", mamba_num_heads=6), 4)
    assert kept == {"24 features of 6 heads cannot be divided among 4 ranks: expected tp 1, 2, 3, 6"}
    kept = _kept(decoder("qwen3_next", linear_num_key_heads=6), 4)
    assert kept == {"72 features of 6 heads cannot be divided among 4 ranks: expected tp 1, 2, 3, 6"}
    mixer = decoder("nemotron_h").model.layers[0].mixer
    mixer.n_groups = 5
    with pytest.raises(NotImplementedError, match="12 heads and 5 groups of them do not fit its convolution of 64"):
        mixer_of(mixer)


# The placements of one mixer's parameters. What packs sections of different heights is sharded by rows, and gathered.
_OWN: dict[str, Any] = dict.fromkeys(("A_log", "dt_bias", "D", "in_proj_z.weight", "in_proj_b.weight"), Shard(0))
_OWN |= {"in_proj_a.weight": Shard(0), "out_proj.weight": Shard(1)}
_OWN |= dict.fromkeys(("in_proj.weight", "in_proj_qkv.weight"), Shard(0))
_OWN |= dict.fromkeys(("conv1d.weight", "conv1d.bias"), Replicate())


@on_ranks(2)
def test_a_rank_holds_its_heads() -> None:
    for family, norm in (("qwen3_5", Replicate()), ("falcon_h1", Shard(0))):
        model = parallelize(decoder(family), tensor_mesh())
        mixer = getattr(model.model.layers[0], HYBRIDS[family])
        placements = {name: x.placements for name, x in mixer.named_parameters()}
        expected = _OWN | {"norm.weight": norm}
        assert placements == {name: (expected[name],) for name in placements}, family
        assert "rms_norm" not in {
            plan.operator for plan in plans(model) if plan.layer.endswith(("attn.norm", "mamba.norm"))
        }
        assert local_tensor(mixer.A_log).numel() == mixer.A_log.numel() // 2


@on_ranks(2)
def test_a_norm_over_the_features_of_all_ranks_works_in_half_types() -> None:
    """Its input then has another dtype than its weight, and a rank has fewer features than the norm's one group."""
    plain, model = (decoder("nemotron_h", torch.bfloat16, n_groups=1) for _ in range(2))
    parallelize(model, tensor_mesh())
    assert any(isinstance(module, ShardedRMSNorm) for module in model.modules())
    losses = [each(input_ids=IDS, labels=IDS).loss for each in (plain, model)]
    torch.testing.assert_close(*losses, rtol=0.01, atol=0.01)


@on_ranks(2)
def test_adapters_of_what_every_rank_holds_of_a_mixer_have_whole_gradients() -> None:
    plain, model = adapted("kimi_linear", target_modules=["g_a_proj", "f_a_proj", "f_b_proj"])
    parallelize(model, tensor_mesh())
    mixer = model.base_model.model.model.layers[0].self_attn
    assert is_sharded(mixer.o_proj.weight), "the mixer was left alone"
    check_adapters(plain, model, IDS)


@pytest.mark.parametrize(("family", "wrong"), [("falcon_h1", "_of_state_space"), ("qwen3_5", "_of_delta_rule")])
def test_the_proof_finds_shifted_sections_and_sums_that_are_missing(family: str, wrong: str) -> None:
    own, prepared = getattr(mixers, wrong), structure._input

    def shifted(*sizes: int) -> Any:
        sections = own(*sizes)
        name = "in_proj" if "in_proj" in sections else "in_proj_qkv"
        return sections | {name: sections[name][-1:] + sections[name][:-1]}

    def not_summed(*args: Any, sum_gradients: bool = False, **more: Any) -> Any:
        return prepared(*args, **more)

    with mock.patch.object(mixers, wrong, shifted):
        assert any("on a rank" in reason or "would differ" in reason for reason in _kept(decoder(family), 2))
    with mock.patch.object(structure, "_input", not_summed):
        assert any(reason.startswith("the gradient of its input would differ") for reason in _kept(decoder(family), 2))


@on_ranks(2)
def test_a_kernel_that_skips_the_projection_out_is_not_called() -> None:
    """In training mamba_ssm's kernel takes the weights of all modules, and computes the last product too."""
    model = parallelize(decoder("nemotron_h"), tensor_mesh())
    code = sys.modules["transformers.models.nemotron_h.modeling_nemotron_h"]
    with mock.patch.object(code, "mamba2_split_conv1d_scan_combined", side_effect=AssertionError("it was called")):
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].mixer.training


def test_the_proof_needs_no_kernels_of_other_packages() -> None:
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    def scan(x: str) -> str:
        return f"{x} by torch"

    with mock.patch.dict(sys.modules, {"of_a_gpu": SimpleNamespace(scan=lambda x: f"{x} by a kernel")}):
        chosen = use_kernel_func_from_hub_with_fallback("scan", "of_a_gpu")(scan)
        with apart():
            assert chosen("x") == "x by torch"
        assert chosen("x") == "x by a kernel"
