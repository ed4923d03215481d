"""Tiny decoders of Hugging Face's transformers with random weights, one for each structure that `parallelize` knows."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PHI = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BIGCODE = {"attn_pdrop": 0.0, **_PHI}
_STABLELM = {"qk_layernorm": True, "partial_rotary_factor": 0.5, "attention_dropout": 0.0}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_NEOX = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

# By name: the class of the model, the class of its configuration, and the settings that differ from SIZES.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama_one_kv_head": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1}),
    "llama_three_kv_heads": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 3}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 12, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 4, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 4, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"num_key_value_heads": 4, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config", {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 5},
    ),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {"num_key_value_heads": 4, **_PHI}),
    "phi_norms": ("PhiForCausalLM", "PhiConfig", {"qk_layernorm": True, **_PHI}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"num_key_value_heads": 12, **_PHI}),
    "phi3_shared": ("Phi3ForCausalLM", "Phi3Config", {"num_key_value_heads": 4, **_PHI}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"use_parallel_residual": True, **_NEOX}),
    "neox_sequential": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"use_parallel_residual": False, **_NEOX}),
    # Latent attention: key heads of 8 + 4, value heads of 6; the 4 are one rotary key of all heads.
    "minicpm3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", {"num_key_value_heads": 12, "q_lora_rank": 16, **_LATENT}),
    "youtu": ("YoutuForCausalLM", "YoutuConfig", {"num_key_value_heads": 12, "q_lora_rank": None, **_LATENT}),
    # What plan "auto" leaves alone, in part: q, k and v of a head lie together; a norm for each head. A layer with
    # parameters of its own.
    "bigcode_heads": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {"multi_query": False, **_BIGCODE}),
    "stablelm_norms": ("StableLmForCausalLM", "StableLmConfig", {"num_key_value_heads": 4, **_STABLELM}),
    "doge": ("DogeForCausalLM", "DogeConfig", {"num_key_value_heads": 4}),
}  # fmt: skip
# Decoders of which `parallelize` leaves modules alone, or which have parameters and names of their own.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_key_value_heads": 4, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32},
    ),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2_moe": (  # with shared experts behind a gate
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36,
         "shared_expert_intermediate_size": 24},
    ),
    "llama4": (  # whose experts take all tokens, which come back in one dimension
        "Llama4ForCausalLM", "Llama4TextConfig",
        {"num_key_value_heads": 4, "head_dim": 4, "num_local_experts": 3, "interleave_moe_layer_step": 2,
         "intermediate_size_mlp": 96, "attention_chunk_size": 8},
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", {}),  # tied; one key head
    "falcon_groups": (
        "FalconForCausalLM", "FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 4},
    ),
    # Norms over all heads, and over all features of an MLP; an activation with parameters; gates beside the projections
    # and in them, and one that reads the values of all heads; linears that are all that a module holds.
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"num_key_value_heads": 4}),
    "bitnet": ("BitNetForCausalLM", "BitNetConfig", {"num_key_value_heads": 4}),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {"num_key_value_heads": 4, "attention_bias": True}),
    "afmoe": (
        "AfmoeForCausalLM", "AfmoeConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "num_dense_layers": 2, "sliding_window": 5},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1]},
    ),
    "moshi": ("MoshiForCausalLM", "MoshiConfig", {"num_key_value_heads": 4, "head_dim": 8, "ffn_dim": 96}),
    # Two attentions and MLPs in lists of each layer, beside experts.
    "longcat": (
        "LongcatFlashForCausalLM", "LongcatFlashConfig",
        {"num_layers": 2, "num_key_value_heads": 12, "head_dim": 4, "q_lora_rank": 16, "ffn_hidden_size": 96,
         "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1, **_LATENT},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 12}),  # tied
}  # fmt: skip


def decoder(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a model of the family in training mode, with the same weights at every call and on every rank.

    settings: what differs from SIZES and from the family's own. No parameter is zero or constant, so that none can be
    forgotten without a trace. The state of torch's default generator stays as it was.
    """
    import transformers

    model_class, config_class, own = (FAMILIES | OTHERS)[family]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZES, **own, **settings})
    # Soft caps, sinks and ALiBi need eager attention, and torch's grouped product of experts has no float64.
    config._attn_implementation = "eager" if family in ("gemma2", "gpt_oss", "bloom") else "sdpa"
    config._experts_implementation = "eager"
    model = getattr(transformers, model_class)(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 20)
    torch.set_rng_state(state)
    return model.to(dtype).train()


@contextlib.contextmanager
def exact(*models: nn.Module) -> Iterator[None]:
    """Let these models' RMS norms, losses, routers and softmax of eager attention compute in the dtype of their input.

    The families' own compute in float32, whose reciprocal square root differs by one unit in the last place between
    vector and scalar code, so with the shape. Float64 results of shards and of the whole would differ by that; and the
    least number of float64, which masks a score, is -inf in float32 and makes rows NaN in which all is masked.
    """
    kinds = {type(module).__mro__ for model in models for module in model.modules()}
    norms = {kind for kinds_of_one in kinds for kind in kinds_of_one if kind.__name__.endswith("RMSNorm")}
    with contextlib.ExitStack() as stack:
        for kind in norms:
            if kind.__module__.startswith("transformers."):
                stack.enter_context(mock.patch.object(kind, "forward", _exact_norm(cast(Any, kind).forward)))
        stack.enter_context(mock.patch.object(nn.functional, "softmax", lambda x, dim, **_: x.softmax(dim)))
        stack.enter_context(mock.patch.object(Tensor, "float", _exact_float))
        for model in models:
            stack.enter_context(mock.patch.object(model, "_loss_function", exact_loss, create=True))
        yield


def _exact_float(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.to(torch.float32)


def exact_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """Return the loss of transformers' causal language models in the dtype of the logits."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def _exact_norm(own: Any) -> Any:
    """Return the forward of a root-mean-square norm in the dtype of its input; `own` if that computes something else.

    own: the norm's forward, which says whether 1 is added to the weight.
    """

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        theirs: Tensor = own(self, x, *args, **kwargs)
        eps, weight = getattr(self, "variance_epsilon", getattr(self, "eps", None)), getattr(self, "weight", None)
        if eps is None or weight is None or args or kwargs:
            return theirs
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        choices = (out * weight, out * (1.0 + weight))
        return next((each for each in choices if torch.allclose(each, theirs.to(each.dtype), 1e-4, 1e-4)), theirs)

    return forward
