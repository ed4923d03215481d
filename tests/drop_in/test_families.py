"""`parallelize(plan="auto")` leaves what a decoder of each family computes as it is: outputs, gradients and steps."""

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.support.decoders import FAMILIES, OTHERS, decoder, exact
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive, pairwise
from tpfuse.comm.layout import gather_whole, local_tensor
from tpfuse.drop_in.parallelize import parallelize
from tpfuse.drop_in.replicated import rms_norm_terms
from tpfuse.layers.explain import plans
from tpfuse.ops.rms_norm import rms_norm
from tpfuse.testing.compare import check_error
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool

# The structures that differ: packed projections in [in, out]; packed with unequal parts; head by head; blocks that are
# left alone and view what they get in another shape; parameters of attention that have an entry for each head; experts
# that pack gate and up one after the other, alternately with biases, and beside shared ones; embeddings of another name
# with the weight of the head; norms over sharded features; activations with parameters; gates; latents that all heads
# share; linear attention and state spaces. (Other tests have Llama's, with separate projections.)
STRUCTURES = [
    "gpt2", "phi3_shared", "neox", "mixtral", "gpt_oss", "qwen2_moe", "falcon", "bitnet", "apertus", "afmoe",
    "minicpm3", "qwen3_5", "falcon_h1",
]  # fmt: skip


def _batch(sequences: int, length: int, padding: str) -> dict[str, Tensor]:
    """Return tokens, labels and, if there is padding, the mask: sequence i has 2 i tokens of padding on that side."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 101, (sequences, length), generator=generator)
    if padding == "none":
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    for sequence in range(sequences):
        missing = min(2 * sequence, length - 1)
        mask[sequence, slice(0, missing) if padding == "left" else slice(length - missing, length)] = 0
    ids = ids * mask
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _evaluate(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits, the loss and, by name, the whole gradients of all parameters."""
    loss = model(**batch).loss
    loss.backward()
    logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    if "attention_mask" in batch:  # what padded tokens give is nobody's concern
        logits = logits[batch["attention_mask"].bool()]
    found = {"logits": logits.detach(), "loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = gather_whole(parameter.grad)
    return found


def _agree(family: str, dtype: torch.dtype, sequence_parallel: bool, sequences: int, length: int, padding: str) -> None:
    whole, batch = decoder(family), _batch(sequences, length, padding)
    model = copy.deepcopy(whole).to(dtype)
    same = copy.deepcopy(model)
    with exact(whole):
        wide = _evaluate(whole, batch)
        if dtype == torch.float64:
            actual = _evaluate(parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel), batch)
    if dtype != torch.float64:
        actual = _evaluate(parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel), batch)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    plain = wide if dtype == torch.float64 else _evaluate(same, batch)
    assert list(actual) == list(wide)
    rounding: dict[str, float] = {}  # of all tensors of one name in all layers and heads: few entries may be exact
    for name, expected in wide.items():
        kind = re.sub(r"\d+", "*", name)
        rounding[kind] = max(rounding.get(kind, 0.0), (plain[name].double() - expected).abs().max().item())
    for name, expected in wide.items():
        # The gradient of a bias of keys is 0 but for rounding: its terms cancel, and those of the norm's weight do not.
        weight = wide.get(name.removesuffix("bias") + "weight", expected)
        scale = max(x.abs().max().item() for x in (expected, weight) if x.shape == expected.shape)
        error = rounding[re.sub(r"\d+", "*", name)]
        bound = 1e-10 * max(scale, 1.0) if dtype == torch.float64 else 3 * error + 4 * torch.finfo(dtype).eps * scale
        check_error(name, actual[name].reshape(expected.shape), plain[name], expected, bound)


@pytest.mark.parametrize("sequence_parallel", [True, *exhaustive(False)])
@on_ranks(2)
def test_each_structure_agrees_with_the_untouched_model(sequence_parallel: bool) -> None:
    for family in (*STRUCTURES, "bloom"):  # which also adds its residuals and masks as no other one does
        _agree(family, torch.float64, sequence_parallel, 3, 7, "left")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    *pairwise(
        first=0,
        family=[*FAMILIES, *OTHERS],
        world=[3, 4],
        dtype=[torch.float64, torch.float32],
        sequence_parallel=[True, False],
        shape=[(3, 13), (1, 3)],
    )
)
def test_every_family_agrees_with_the_untouched_model(
    family: str, world: int, dtype: torch.dtype, sequence_parallel: bool, shape: tuple[int, int]
) -> None:
    padding = ("right", "none", "left")[(list(FAMILIES | OTHERS).index(family) + world) % 3]
    pool(world).run(_agree, family, dtype, sequence_parallel, *shape, padding)


def _tokens_agree(families: list[str], sequence_parallel: bool) -> None:
    prompts = _batch(2, 5, "left")
    del prompts["labels"]
    for family in families:
        model = decoder(family).eval()
        with exact(model):
            expected = model.generate(**prompts, max_new_tokens=6, do_sample=False)
            parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel)
            actual = model.generate(**prompts, max_new_tokens=6, do_sample=False)
        assert expected.shape[1] > 6 and torch.equal(actual, expected), family


@pytest.mark.parametrize(
    ("families", "world", "sequence_parallel"), [(["llama"], 2, True), *exhaustive((list(FAMILIES), 3, False))]
)
def test_generate_with_its_cache_gives_the_tokens_of_one_rank(
    families: list[str], world: int, sequence_parallel: bool
) -> None:
    pool(world).run(_tokens_agree, families, sequence_parallel)


@on_ranks(2)
def test_sinks_are_sharded_with_the_heads_and_tied_embeddings_with_the_head() -> None:
    oss, falcon = parallelize(decoder("gpt_oss"), tensor_mesh()), parallelize(decoder("falcon"), tensor_mesh())
    sinks = oss.model.layers[1].self_attn.sinks
    assert sinks.placements == (Shard(0),) and sinks.to_local().shape == (6,)
    plan = next(plan for plan in plans(oss) if plan.layer == "model.layers.1.self_attn")
    assert (plan.shard, plan.implementation, plan.reason) == ((6,), "sharded", "every rank has those of its heads")
    embedding = falcon.transformer.word_embeddings.weight
    assert embedding is falcon.lm_head.weight and embedding.placements == (Shard(0),)


# The parameters of a layer that each rank holds whole; of all others it holds half.
WHOLE = {
    "bitnet": "layernorm",
    "apertus": r"layernorm|q_norm|k_norm|act_fn|o_proj\.bias",
    "afmoe": "layernorm|q_norm|k_norm",
}


@on_ranks(2)
def test_norms_over_all_features_and_gates_are_sharded() -> None:
    for family, whole in WHOLE.items():
        for name, parameter in parallelize(decoder(family), tensor_mesh()).model.layers[1].named_parameters():
            held = parameter.numel() if re.search(whole, name) else parameter.numel() // 2
            assert local_tensor(parameter).numel() == held, name
    plan = next(plan for plan in plans(parallelize(decoder("bitnet"), tensor_mesh())) if "ffn_sub_norm" in plan.layer)
    assert (plan.shard, plan.implementation, plan.reason) == (
        (48,), "sharded", "every rank has its features, and sums their squares"
    )  # fmt: skip


@on_ranks(2)
def test_a_sharded_norm_has_the_dtype_of_the_whole_one() -> None:
    for family in ("olmo2", "bitnet"):  # the one returns that of its input, the other that of its weight
        whole, model = decoder(family, torch.float32), parallelize(decoder(family, torch.float32), tensor_mesh())
        name = "model.layers.1.self_attn." + ("q_norm" if family == "olmo2" else "attn_sub_norm")
        own, norm = whole.get_submodule(name), model.get_submodule(name)
        for dtype in (torch.bfloat16, torch.float32):
            x = normal(1, 2, 3, 48, dtype=dtype)
            found, expected = norm(x.chunk(2, -1)[dist.get_rank()]), own(x).chunk(2, -1)[dist.get_rank()]
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


@on_ranks(2)
def test_latents_are_whole_on_every_rank_and_heads_sharded() -> None:
    model = parallelize(decoder("minicpm3"), tensor_mesh())
    attention = model.model.layers[1].self_attn
    shapes = {name: tuple(x.to_local().shape) for name, x in attention.named_parameters()}
    assert shapes == {
        "q_a_proj.weight": (16, 48), "q_a_layernorm.weight": (16,), "q_b_proj.weight": (12 * 12 // 2, 16),
        "kv_a_proj_with_mqa.weight": (20 + 4, 48), "kv_a_layernorm.weight": (20,),
        "kv_b_proj.weight": (12 * (8 + 6) // 2, 20), "o_proj.weight": (48, 12 * 6 // 2),
    }  # fmt: skip


class _OwnRMSNorm(nn.Module):
    """`factor` times a root-mean-square norm of each `size` features."""

    def __init__(self, factor: float, size: int) -> None:
        super().__init__()
        self.weight, self.eps, self.factor, self.size = nn.Parameter(torch.ones(16)), 1e-6, factor, size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.size))
        scaled = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.factor * scaled.flatten(-2) * self.weight


def test_norms_are_recognised_by_what_they_compute() -> None:
    terms = {name: rms_norm_terms(decoder(name).model.norm) for name in ("llama", "qwen3", "gemma")}
    assert terms == {"llama": (0.0, 1e-6, ""), "qwen3": (0.0, 1e-6, ""), "gemma": (1.0, 1e-6, "")}
    gated = [
        decoder("nemotron_h").model.layers[0].mixer.norm,
        decoder("olmo_hybrid").model.layers[0].linear_attn.o_norm,
    ]
    assert [rms_norm_terms(norm) for norm in gated] == [(0.0, 1e-5, "input"), (0.0, 1e-5, "output")]
    own = [rms_norm_terms(_OwnRMSNorm(*numbers)) for numbers in ((1.0, 8), (2.0, 16), (1.0, 16))]
    assert own == [None, None, (0.0, 1e-6, "")] and rms_norm_terms(nn.LayerNorm(8)) is None


@on_ranks(2)
def test_norms_run_as_one_operator() -> None:
    model = parallelize(decoder("gemma", torch.bfloat16), tensor_mesh())
    operators = {plan.layer: plan.operator for plan in plans(model)}
    assert operators["model.layers.1.input_layernorm"] == operators["model.norm"] == "rms_norm"
    x = normal(1, 2, 3, 48, dtype=torch.bfloat16)
    module, own = model.model.norm, decoder("gemma", torch.bfloat16).model.norm
    for dtype in (torch.bfloat16, torch.float32):  # a float32 input of a bfloat16 norm: transformers decides
        with mock.patch("tpfuse.drop_in.replicated.rms_norm", wraps=rms_norm) as operator:
            found, expected = module.forward(x.to(dtype)), own(x.to(dtype))
        assert operator.call_count == (dtype == torch.bfloat16)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
