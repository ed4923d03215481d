"""Tiny decoders of Hugging Face's transformers with random weights, one for each structure that `parallelize` knows."""

import contextlib
from collections.abc import Iterator
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tpfuse.comm.layout import gather_whole
from tpfuse.testing.inputs import normal

SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PHI = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BIGCODE = {"attn_pdrop": 0.0, **_PHI}
_STABLELM = {"qk_layernorm": True, "partial_rotary_factor": 0.5, "attention_dropout": 0.0}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_DELTA = {
    "linear_num_value_heads": 12, "linear_num_key_heads": 12, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
}  # fmt: skip
_HYBRID = ["linear_attention", "full_attention"]
_KEY_DELTA = {
    "linear_num_heads": 12, "linear_head_dim": 4, "layer_types": _HYBRID, "n_group": 1, "topk_group": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
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
        {"num_key_value_heads": 4, "head_dim": 8, "layer_types": _HYBRID, "mlp_only_layers": [0, 1], **_DELTA},
    ),
    # Linear attention with fewer queries than values; state spaces with a norm of groups of heads, and with one of all
    # heads; decays of features, of two matrices or one; short convolutions.
    "qwen3_5": (
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "layer_types": _HYBRID, **_DELTA, "linear_num_key_heads": 4},
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {"layer_types": _HYBRID, **_DELTA}),
    "falcon_h1": (
        "FalconH1ForCausalLM", "FalconH1Config",
        {"num_key_value_heads": 4, "mamba_d_ssm": 48, "mamba_n_heads": 24, "mamba_d_head": 2, "mamba_d_state": 4,
         "mamba_n_groups": 12, "mamba_rms_norm": True, "mamba_chunk_size": 8,
         "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 3.0]},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM", "NemotronHConfig",
        {"num_key_value_heads": 4, "head_dim": 4, "layers_block_type": ["mamba", "attention", "mlp"],
         "mamba_num_heads": 12, "mamba_head_dim": 4, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM", "KimiLinearConfig",
        {"num_key_value_heads": 12, "q_lora_rank": None, **_LATENT, **_KEY_DELTA},
    ),
    "ling": (
        "BailingHybridForCausalLM", "BailingHybridConfig",
        {"num_key_value_heads": 12, "q_lora_rank": None, "head_dim": 4, **_LATENT, **_KEY_DELTA},
    ),
    "lfm2": (
        "Lfm2ForCausalLM", "Lfm2Config",
        {"num_key_value_heads": 4, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "moshi": ("MoshiForCausalLM", "MoshiConfig", {"num_key_value_heads": 4, "head_dim": 8, "ffn_dim": 96}),
    # Two attentions and MLPs in lists of each layer, beside experts.
    "longcat": (
        "LongcatFlashForCausalLM", "LongcatFlashConfig",
        {"num_layers": 2, "num_key_value_heads": 12, "head_dim": 4, "q_lora_rank": 16, "ffn_hidden_size": 96,
         "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1, **_LATENT},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 12}),  # tied; a norm of its embeddings
    # Positions of its own; projections behind the embedding and before the head, and no last norm.
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 48, "dropout": 0.0}),
    "opt_without_norm": (
        "OPTForCausalLM", "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 24, "do_layer_norm_before": False, "dropout": 0.0},
    ),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", {"num_key_value_heads": 4}),  # whose norm comes first too
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


def adapted(family: str, **options: Any) -> tuple[Any, Any]:
    """Return two equal decoders with PEFT's LoRA adapters of these options, of which no number is zero."""
    from peft import LoraConfig, get_peft_model

    models = tuple(get_peft_model(decoder(family), LoraConfig(r=3, **options)).double() for _ in range(2))
    for model in models:
        for seed, x in enumerate(model.parameters()):
            if x.requires_grad:
                x.data.copy_(normal(seed, *x.shape) / 8)
    return models[0], models[1]


def check_adapters(plain: Any, model: Any, ids: Tensor, passes: int = 1) -> None:
    """Assert that the gradients of all adapters are those of the plain model, after some passes. Collective."""
    with exact(plain.base_model.model):
        for each in (plain, model) * passes:
            each(input_ids=ids, labels=ids).loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(gather_whole(found.grad), expected.grad, rtol=1e-9, atol=1e-11, msg=name)


@contextlib.contextmanager
def exact(*models: nn.Module) -> Iterator[None]:
    """Let these models compute in float64 where their code goes to float32: norms, losses, routers, softmax, states.

    The families' own compute in float32, whose reciprocal square root differs by one unit in the last place between
    vector and scalar code, so with the shape. Float64 results of shards and of the whole would differ by that; and the
    least number of float64, which masks a score, is -inf in float32 and makes rows NaN in which all is masked.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.functional, "softmax", lambda x, dim, **_: x.softmax(dim)))
        stack.enter_context(mock.patch.object(Tensor, "float", _exact_float))
        for name in ("to", "type"):
            as_other = partialmethod(_as_other, getattr(Tensor, name))
            stack.enter_context(mock.patch.object(Tensor, name, as_other))
        for model in models:
            stack.enter_context(mock.patch.object(model, "_loss_function", exact_loss, create=True))
        yield


def _exact_float(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def _as_other(x: Tensor, own: Any, *args: Any, **options: Any) -> Tensor:
    narrower = torch.float32 in (*args[:1], options.get("dtype")) and x.dtype is torch.float64
    return x if narrower else own(x, *args, **options)


def exact_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """Return the loss of transformers' causal language models in the dtype of the logits."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
