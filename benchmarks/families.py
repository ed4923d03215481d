"""Write docs/families.md: what `parallelize(plan="auto")` does with every family of decoders in transformers.

    python -m benchmarks.families

For each class that AutoModelForCausalLM knows it makes a tiny model with random weights, if the family's configuration
allows one, and trains it: on two ranks tensor parallel with and without sequence parallelism, and context parallel, and
on four ranks. The loss, the logits and the gradient of every parameter are compared with those of the untouched model
in float64.
"""

import copy
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.harness import Parser
from tests.support.decoders import exact
from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.huggingface import quiet
from tpfuse.drop_in.parallelize import parallelize, replacements
from tpfuse.testing.ranks import RankError, pool

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
MODES = {
    "tp": "tensor and sequence parallel",
    "whole": "tensor parallel, whole sequences",
    "cp": "context parallel",
    "tp 4": "tensor and sequence parallel, 4 ranks",
}
TOLERANCE = 2e-5  # models compute in float32 in places, in any dtype; faults of layout are larger
_LARGEST = 6e6  # parameters of a model that counts as tiny
_KINDS = ["sliding_attention", "full_attention"]

# What all configurations are given; those that do not know a name ignore it.
_SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 5, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_KDA = {**_LATENT, "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": _LINEAR["layer_types"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
_GRANITE = {**_MAMBA, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]}
# By the model type, what a family needs besides; None instead of a value: not to be given. After a colon: a variant.
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT, "axk2": _LATENT, "minicpm3": _LATENT, "sarvam_mla": _LATENT,
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "glm4_moe_lite": _LATENT, "youtu": _LATENT,
    "longcat_flash": _LATENT, "kimi_linear": _KDA, "bailing_hybrid": _KDA,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bart": {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2},
    "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4},
    "falcon": {"head_dim": None, "num_kv_heads": 2, "new_decoder_architecture": True, "tie_word_embeddings": False},
    "falcon: multi_query": {"head_dim": None, "tie_word_embeddings": False},
    "falcon: alibi": {
        "head_dim": None, "multi_query": False, "alibi": True, "new_decoder_architecture": False,
        "tie_word_embeddings": False,
    },
    "bloom: untied": {"tie_word_embeddings": False},
    "cohere: use_qk_norm": {"use_qk_norm": True},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 48},
    "gemma2": {"query_pre_attn_scalar": 12}, "gemma2: layer_types": {"layer_types": _KINDS},
    "gemma3n_text": {
        "layer_types": _KINDS, "intermediate_size": [96, 96], "vocab_size_per_layer_input": 101, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None,
    },
    "gpt_bigcode: multi_query=False": {"multi_query": False},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gpt_neox: sequential": {"use_parallel_residual": False},
    "gpt_oss": {"layer_types": _KINDS},
    "granite: multipliers": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "granitemoehybrid": _GRANITE, "granitemoehybrid: dense": {**_GRANITE, "num_local_experts": 0},
    "granitemoeshared: shared_intermediate_size": {"shared_intermediate_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama: one key head": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama: tied": {"tie_word_embeddings": True},
    "llama4_text": {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_chunk_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 12, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "opt: post-norm": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "phi: qk_layernorm": {"qk_layernorm": True}, "phi3: as many key heads": {"num_key_value_heads": 4},
    "qwen2: layer_types": {"layer_types": _KINDS, "use_sliding_window": True},
    "qwen2_moe: mixed": {"mlp_only_layers": [0], "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _LINEAR, "qwen3_5_moe_text": {**_LINEAR, "shared_expert_intermediate_size": 32},
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"partial_rotary_factor": 0.5},
    "stablelm: qk_layernorm": {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
}  # fmt: skip

_WORDS = ("exact", "left alone", "refused", "wrong", "error")
_PAGE = """# Families of transformers

Transformers {version} has {families} families of decoders. `tpfuse.parallelize(model, mesh)` converts all layers of
these, exactly. Most of the others are right too, with some modules whole on every rank; the rest is refused.

{exact}

Each family is tried with a tiny model of random weights, some in several variants, {models} models in all, on two ranks
in three ways, and on four ranks. `python -m benchmarks.families` makes them and writes this page. Loss, logits and the
gradient of every parameter are compared with those of the untouched model. Results: {counts}.

- **exact**: all agree, and all layers are converted.
- **left alone**: all agree, and some modules run whole on every rank; the reasons are below.
- **refused**: the call, or the first forward pass, raises an error of one line, below.

{table}

## Reasons

{reasons}"""


def families() -> list[str]:
    """Return the names of all families and of their variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted({*NAMES, *_OWN})


def tiny(family: str) -> Any:
    """Return a tiny model of a family, in float64 and in training, the same at every call.

    Raise ValueError if there is none.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    quiet()
    kind = family.partition(":")[0]
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    made = getattr(transformers, names if isinstance(names, str) else names[0])
    settings = {name: value for name, value in {**_SIZES, **_OWN.get(family, {})}.items() if value is not None}
    state = torch.get_rng_state()
    try:
        config = getattr(transformers, CONFIG_MAPPING_NAMES[kind])(**settings)
        for name, value in list(vars(config).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(config, name, 0.0)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in made(copy.deepcopy(config)).parameters())
        if size > _LARGEST:
            raise ValueError(f"it has {size} parameters")
        torch.manual_seed(0)
        config._experts_implementation = "eager"  # others take bfloat16 alone
        model = made(config)
    except Exception as error:
        raise ValueError(f"there is no tiny model: {_line(error)}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 20)
    torch.set_rng_state(state)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().train()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _evaluate(model: Any) -> dict[str, Tensor | None]:
    ids = torch.randint(3, 101, (2, 13), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"the loss": loss.detach()}
    with torch.no_grad():
        found["the logits"] = model(input_ids=ids).logits
    for name, parameter in model.named_parameters():
        found[name] = None if parameter.grad is None else gather_whole(parameter.grad)
    return found


def _worst(whole: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> tuple[float, str]:
    """Return the largest difference, as a share of the largest value, and where it is."""
    gradients = [float(x.abs().max()) for name, x in whole.items() if x is not None and not name.startswith("the ")]
    worst = 0.0, ""
    for name, expected in whole.items():
        actual = found[name]
        if expected is None or actual is None:
            there = expected if actual is None else actual
            error = 0.0 if there is None or not bool(there.any()) else float("inf")
        else:
            scale = max(float(expected.abs().max()), 1e-30 if name.startswith("the ") else 1e-3 * max(gradients))
            error = float((actual.reshape(expected.shape) - expected).abs().max()) / scale
        worst = max(worst, (float("inf") if error != error else error, name))
    return worst


def trial(family: str, modes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return, for each of these modes, (what happened, details), on a rank.

    It is "exact", "left alone" (exact, but named modules run whole), "refused", "wrong" or "error".
    """
    try:
        reference = tiny(family)
        with exact(reference):
            whole = _evaluate(reference)
    except Exception as error:
        return {"none": ("not built", _line(error))}
    results = {}
    for mode in modes:
        model = tiny(family)
        try:
            mesh = mesh_of(1, 1, cp=2) if mode == "cp" else tensor_mesh()
            parallelize(model, mesh, sequence_parallel=mode.startswith("tp"))
            with exact(reference):  # not the model's loss, which is tpfuse's
                found = _evaluate(model)
        except ValueError as error:
            ours = "/tpfuse/" in traceback.extract_tb(error.__traceback__)[-1].filename
            results[mode] = ("refused" if ours and "\n" not in str(error) else "error", _line(error))
            continue
        except Exception as error:
            results[mode] = "error", _line(error)
            continue
        error, where = _worst(whole, found)
        if error > TOLERANCE:
            results[mode] = "wrong", f"{where} by {error:.0e}"
            continue
        kept = {each.module: each.reason for each in replacements(model) if each.reason}
        results[mode] = _left_alone(kept)
    return results


def _left_alone(kept: dict[str, str]) -> tuple[str, str]:
    """Return ("exact" or "left alone", the modules that run whole with the reasons), once for all layers."""
    found: dict[str, str] = {}
    for name, reason in kept.items():
        inside = any(name.startswith(f"{other}.") and kept[other] == reason for other in kept)
        if not inside and reason != "every rank computes the same" and not reason.startswith("attention over cp"):
            found.setdefault(re.sub(r"^.*\.\d+\b", "layers", name).removeprefix("layers.") or name, reason)
    return ("left alone" if found else "exact"), "; ".join(f"`{name}`: {reason}" for name, reason in found.items())


def _of_all(first: tuple[str, str], *others: tuple[str, str]) -> tuple[str, str]:
    """Return the result of all ranks."""
    other = next((each for each in others if each[0] != first[0]), None)
    return first if other is None else ("error", f"one rank: {first[0]} {first[1]}; another: {other[0]} {other[1]}")


def sweep(names: list[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the trial of each family on two ranks of this machine, and on four."""
    results: dict[str, dict[str, tuple[str, str]]] = {name: {} for name in names}
    for ranks, modes in ((2, ["tp", "whole", "cp"]), (4, ["tp 4"])):
        for name in names:
            try:
                first, *others = pool(ranks).run(trial, name, modes)
                results[name] |= {mode: _of_all(x, *(other[mode] for other in others)) for mode, x in first.items()}
            except RankError as error:
                results[name] |= {"none": ("error", str(error).strip().splitlines()[-1])}
    return results


def _families(models: Iterable[str]) -> int:
    return len({name.partition(":")[0] for name in models})


def page(results: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Return the page."""
    built = {name: modes for name, modes in results.items() if "none" not in modes}
    counts = {what: sum(of[0] == what for modes in results.values() for of in modes.values()) for what in _WORDS}
    exact = {mode: [name for name in built if built[name][mode][0] == "exact"] for mode in MODES}
    whole = "\n".join(
        f"- {MODES[mode]}: {_families(names)} families ({len(names)} models)" for mode, names in exact.items()
    )
    head = f"| family | {' | '.join(MODES.values())} |\n|{'---|' * (len(MODES) + 1)}\n"
    rows = [f"| {name} | {' | '.join(modes[mode][0] for mode in MODES)} |" for name, modes in built.items()]
    texts: dict[str, list[str]] = {}
    for name, modes in results.items():
        for mode, (what, text) in modes.items():
            if text:
                where = f"{name}, {MODES[mode]}" if what in ("wrong", "error") else name
                texts.setdefault(f"{what}: {text}", []).append(where)
    reasons = "".join(f"- {', '.join(dict.fromkeys(names))}. {text}\n" for text, names in sorted(texts.items()))
    return _PAGE.format(
        version=transformers.__version__, families=_families(built), models=len(built), exact=whole,
        counts=", ".join(f"{n} {w}" for w, n in counts.items()),
        table=head + "\n".join(rows), reasons=reasons,
    )  # fmt: skip


def main() -> None:
    """Try all families, write the page and print the counts."""
    Parser(__doc__, keep=False).parse_args()
    results = sweep(families())
    PAGE.write_text(page(results), encoding="utf-8")
    for name, modes in results.items():
        for mode, (what, text) in modes.items():
            print(f"{name:32} {mode:6} {what:10} {text}")


if __name__ == "__main__":
    main()
