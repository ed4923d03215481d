"""`tpfuse plan` reads the sizes of a model from presets, TOML files, flags and configurations of Hugging Face."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.decoders import FAMILIES, SIZES
from tests.support.tiers import exhaustive
from tpfuse.commands.plan.planned import planned_model
from tpfuse.errors import UserError
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.predicted import UNTIMED, check_timed


def _folder(path: Path, kind: str, **settings: Any) -> Path:
    sizes = {key: value for key, value in SIZES.items() if (kind, key) != ("GPT2Config", "intermediate_size")}
    config = getattr(transformers, kind)(**{**sizes, **settings})
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return path


@pytest.mark.parametrize("family", ["gpt2", "qwen3", *exhaustive("gemma3", "neox")])
def test_sizes_of_transformers_have_the_parameters_of_the_model(family: str, tmp_path: Path) -> None:
    _, kind, settings = FAMILIES[family]
    folder = _folder(tmp_path, kind, **settings)
    real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    counted = sum(parameter.numel() for parameter in real.parameters())
    for name in (folder, folder / "config.json"):
        model = planned_model(PlanCommand(model=str(name)))
        assert model.parameters == counted
        assert model.sizes.parameters == counted
        assert model.sizes.gated == (family not in ("gpt2", "neox")) and model.recomputes == ("none", "full")
        assert model.sizes.tokens == 64 and model.sizes.vocabulary == 101
        assert model.options.train.batch * 64 == 2**20


def test_a_preset_and_flags_give_the_gpt() -> None:
    preset = planned_model(PlanCommand(model="gpt2-1558m"))
    assert preset.sizes.parameters == 1_557_611_200 and preset.options.train.batch == 960
    flags = planned_model(PlanCommand(layers=48, width=1600, heads=25, gpus=24))
    assert flags.sizes.parameters == preset.sizes.parameters
    assert flags.options.train.batch % 24 == 0 and 2**20 <= flags.options.train.batch * 1024 < 2**20 + 24 * 1024
    assert planned_model(PlanCommand(model="gpt2-1558m", tokens=512, batch=8)).sizes.tokens == 512


def test_a_file_of_a_run_gives_its_model_and_its_dtypes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nn_layer = 3\nbias = false\n[train]\nbatch = 12\n[zero]\ngradient_dtype = "parameter"\n')
    model = planned_model(PlanCommand(model=str(file)))
    assert (model.sizes.layers, model.sizes.vocabulary, model.options.train.batch) == (3, 256, 12)
    assert not model.sizes.biases and not model.sizes.norm_bias
    assert (model.program.parameter_bytes, model.program.gradient_bytes, model.program.optimizer_bytes) == (4, 4, 8)
    file.write_text('[train]\ndtype = "bfloat16"\n[zero]\ngradient_dtype = "parameter"\n')
    program = planned_model(PlanCommand(model=str(file))).program
    assert (program.parameter_bytes, program.gradient_bytes, program.optimizer_bytes) == (2, 2, 12)
    assert program.muon_steps == 0
    file.write_text('[optim]\nname = "muon"\nmuon_steps = 4\n')
    assert planned_model(PlanCommand(model=str(file))).program.muon_steps == 4


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[train]\ndtype = "float64"', "train.dtype float64: tpfuse plan knows float32, bfloat16, float16"),
        ('[zero]\noffload = "host"', "zero.offload host: tpfuse plan does not know its cost"),
        ("{", "config.json: Expecting property name"),
        ("[]", "config.json: it is no JSON object"),
        ('{"model_type": "nonsense"}', "model_type is 'nonsense': expected a model that transformers knows"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers is 0"),
        ('{"model_type": "gemma3", "text_config": {"hidden_size": 64}}', "takes more than text: .* text_config"),
        (
            '{"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "hidden_size": 64,'
            ' "intermediate_size": 64, "vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 4}',
            "tpfuse plan does not know the times of mixtures of experts and other blocks; `tpfuse memory` counts",
        ),
        (
            '{"model_type": "glm4_moe", "num_hidden_layers": 3, "first_k_dense_replace": 2, "n_routed_experts": 8,'
            ' "hidden_size": 64, "intermediate_size": 64, "vocab_size": 99, "num_attention_heads": 4, "head_dim": 16}',
            "block 2 of glm4_moe has other weights than block 0, as where only some blocks are mixtures of experts",
        ),
        (
            '{"model_type": "falcon_h1", "num_hidden_layers": 1, "hidden_size": 64, "mamba_d_ssm": 64,'
            ' "mamba_n_heads": 4, "mamba_d_head": 16, "num_attention_heads": 4, "num_key_value_heads": 4}',
            "the blocks of falcon_h1 have convolutions and recurrences: tpfuse does not know the memory and times",
        ),
        (
            '{"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 8,'
            ' "vocab_size": 512, "num_attention_heads": 4, "max_position_embeddings": 64}',
            "opt has 76,416 parameters, and 104,064 if it had nothing but equal blocks, a norm, embeddings and a head",
        ),
    ],
)
def test_broken_and_unsupported_configurations_are_refused(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / ("run.toml" if text.startswith(("[t", "[z")) else "config.json")
    file.write_text(text)
    with pytest.raises(UserError, match=error):
        planned_model(PlanCommand(model=str(file)))


@pytest.mark.parametrize("option", UNTIMED)
def test_options_of_unknown_cost_are_refused(option: str) -> None:
    usual, (section, name) = TrainCommand(), option.split(".")
    own = getattr(usual, section)
    value = {False: True, 1: 2, "none": "bf16"}[getattr(own, name)]
    given = option if value is True else f"{option} {value}"
    check_timed(usual)
    with pytest.raises(UserError, match=f"^{given}: tpfuse plan does not know its cost yet: leave it out$"):
        check_timed(replace(usual, **{section: replace(own, **{name: value})}))
