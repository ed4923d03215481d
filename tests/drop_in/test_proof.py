"""`plan="auto"` converts what it has proved, whatever the names of modules say. The ranks are run in this process."""

import re
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.decoders import FAMILIES, SIZES, decoder
from tests.support.tiers import exhaustive
from tpfuse.drop_in.huggingface import whole_logits
from tpfuse.drop_in.loss_proof import prove_loss
from tpfuse.drop_in.structure import recognise


def _kept(model: nn.Module, ranks: int = 2, sequence_parallel: bool = True) -> dict[str, str]:
    return recognise(model, ranks, sequence_parallel).kept


@pytest.mark.parametrize(
    ("family", "path", "reason"),
    [
        ("bigcode_heads", "transformer.h.0.attn", "the input of c_proj would differ by .* of its largest value"),
        ("stablelm_norms", "model.layers.1.self_attn", "the input of o_proj would differ by"),
    ],
)
def test_what_would_compute_something_else_is_kept_and_named(family: str, path: str, reason: str) -> None:
    with torch.device("meta"):
        model = decoder(family, torch.bfloat16)
    state = torch.get_rng_state()
    kept = _kept(model)
    assert re.match(reason, kept[path]), kept[path]
    assert torch.equal(torch.get_rng_state(), state) and all(x.is_meta for x in model.parameters())


@pytest.mark.parametrize("ranks", [3, *exhaustive(2, 4)])  # 3 ranks do not divide the key/value heads
def test_structures_that_are_right_are_converted_whole(ranks: int) -> None:
    for family in list(FAMILIES)[: list(FAMILIES).index("bigcode_heads")]:
        assert set(_kept(decoder(family), ranks).values()) <= {"every rank computes the same"}, family


def test_norms_gates_and_linears_of_other_classes_are_converted_whole() -> None:
    for family in ("olmo2", "bitnet", "apertus", "afmoe", "moshi", "falcon", "falcon_groups", "doge"):
        assert set(_kept(decoder(family)).values()) <= {"every rank computes the same"}, family
    kept = _kept(decoder("olmo2"), 3)["model.layers.0.self_attn"]
    assert kept == "k_norm.weight [16] is of 4 key/value heads, which 3 ranks do not divide: expected tp 1, 2, 4"


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * (2 if self.training else 1) + self.bias


def test_a_linear_that_computes_something_else_keeps_its_module() -> None:
    model = decoder("llama")
    model.model.layers[0].mlp.up_proj.__class__ = Doubled
    kept = _kept(model)
    assert kept["model.layers.0.mlp"].startswith("up_proj: it is a tests.drop_in.test_proof.Doubled: expected an nn.Li")
    assert "model.layers.1.mlp" not in kept


class Scaled(nn.Module):
    """A layer with a parameter of its own, `place` of which says where it multiplies."""

    def __init__(self, layer: Any, place: str) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = layer.input_layernorm, layer.self_attn, layer.mlp
        self.scale, self.place = nn.Parameter(torch.ones(48)), place

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        x = self.input_layernorm(hidden_states)
        if self.place == "sequence":  # the mean over all tokens
            x = x + hidden_states.mean(1, keepdim=True)
        attended = self.self_attn(hidden_states=x, **others)[0]
        mixed = attended + self.mlp(x)
        out: Tensor = hidden_states + (mixed * self.scale if self.place == "output" else mixed)
        return out


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("output", None),  # the gradients of the ranks' tokens are summed
        ("sequence", "the input of self_attn would differ"),
        ("nowhere", None),
    ],
)
def test_a_layer_whose_own_code_needs_all_tokens_runs_on_whole_sequences(place: str, reason: str | None) -> None:
    model = decoder("llama")
    model.model.layers[1] = Scaled(model.model.layers[1], place)
    plan = recognise(model, 2, True)
    styles = [type(style).__name__ for style in plan.styles["model.layers.1"]]
    if reason is None:
        assert "model.layers.1" not in plan.kept and styles == ["ReplicatedParallel"]
    else:
        assert plan.kept["model.layers.1"].startswith(f"on shards of the sequence {reason}")
        assert styles == ["WholeSequences", "ReplicatedParallel"]
    assert "model.layers.0" not in plan.kept


def test_a_decoder_whose_own_code_needs_all_tokens_keeps_whole_sequences() -> None:
    config = transformers.NanoChatConfig(**SIZES, num_key_value_heads=4)  # its last norm is the first one too
    kept = _kept(transformers.NanoChatForCausalLM(config))
    assert kept["model.layers"].startswith("its sequences stay whole: the input of norm")
    assert "model.layers.0.self_attn" not in kept


def test_a_forward_that_cannot_be_tried_leaves_everything_alone() -> None:
    class Picky(type(decoder("llama"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("expected\nan image")

    model = decoder("llama")
    model.__class__ = Picky
    kept = _kept(model)
    expected = "the model's forward cannot be tried: RuntimeError: expected an image"
    assert kept["model.layers.0.self_attn"] == kept["model.layers.1.mlp"] == expected

    class Checkpointed(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, x: Tensor, **others: Any) -> Any:
            return checkpoint(partial(super().forward, **others), x, use_reentrant=True)

    model = decoder("llama")
    model.model.layers[0].__class__ = Checkpointed
    expected = "on shards of the sequence its gradients cannot be tried: RuntimeError: When use_reentrant=True"
    assert _kept(model)["model.layers.0"].startswith(expected)


def test_a_count_of_heads_that_is_a_property_keeps_a_layer_whole() -> None:
    model = decoder("llama")

    class Counted(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        num_heads = property(lambda self: self.config.num_attention_heads)

    model.model.layers[0].self_attn.__class__ = Counted
    kept = _kept(model)
    assert {name[: len("model.layers.0.self_attn")] for name in kept} == {"model.layers.0.self_attn"}
    assert set(kept.values()) == {"it fails on a rank's part: KeyError: 'num_heads'"}


def test_parts_of_a_gradient_that_ranks_sum_must_be_the_whole_one() -> None:
    model = decoder("qwen3")

    class Shifted(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, *others = super().forward(*args, **kwargs)
            return out + self.q_norm.weight.mean(), *others  # every rank adds it, also to what all compute

    model.model.layers[0].self_attn.__class__ = Shifted
    kept = _kept(model, sequence_parallel=False)
    assert kept["model.layers.0.self_attn"].startswith("the gradient of q_norm.weight would differ")
    assert "model.layers.0.self_attn" not in _kept(model), "ranks add it to their own tokens"


def test_a_forward_that_is_set_on_a_module_is_kept_and_named() -> None:
    model = decoder("llama", num_hidden_layers=3)
    layers = model.model.layers
    for module in (layers[0].self_attn, layers[1].input_layernorm, layers[2]):
        module.forward = MethodType(type(module).forward, module)
    kept = _kept(model)
    expected = "the forward of {} is set on the module: expected that of its class"
    assert kept["model.layers.0.self_attn"] == expected.format("model.layers.0.self_attn")
    on_shards = "on shards of the sequence " + expected.format("model.layers.1.input_layernorm")
    assert kept["model.layers.1"] == on_shards and "model.layers.1.self_attn" not in kept
    assert kept["model.layers.2.mlp"] == expected.format("model.layers.2")
    model.forward = MethodType(type(model).forward, model)
    assert _kept(model)["model.layers"] == f"its sequences stay whole: {expected.format('the model')}"


def test_a_large_model_is_tried_without_its_weights() -> None:
    with torch.device("meta"):
        config = transformers.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=2,
                                          num_attention_heads=64, num_key_value_heads=8)  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    assert not _kept(model)


def test_an_encoder_with_a_decoder_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=8, d_ff=8, num_layers=1))
    with pytest.raises(ValueError, match=r"found an encoder and a decoder: expected a decoder alone, .*; give a plan"):
        recognise(model, 2, True)


def test_logits_are_sliced_only_where_the_loss_function_alone_reads_them() -> None:
    for family in ("llama", "gemma2", "gpt2", "falcon", "mixtral"):
        assert not whole_logits(decoder(family)), family
        prove_loss(decoder(family), 1)

    class Changed(type(decoder("llama"))):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            if self.masks:
                logits[:, :, [60]] = torch.finfo(logits.dtype).min
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=101)
            if self.training and not self.masks:
                loss = loss + 1e-9 * logits.logsumexp(-1).square().mean()
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    model = decoder("llama")
    model.__class__ = Changed
    model.masks = True
    assert list(whole_logits(model)) == ["lm_head"]
    prove_loss(model, 1)
    model.masks = False
    assert "its loss depends on the logits" in whole_logits(model)["lm_head"]
    with pytest.raises(NotImplementedError, match="its loss depends on the logits, not through its loss function"):
        prove_loss(model, 1)
