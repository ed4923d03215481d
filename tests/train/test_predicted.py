"""A run's prediction is what `tpfuse plan` says of its layout, on GPUs that are described."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import transformers

from tests.support.decoders import FAMILIES, OTHERS, SIZES
from tpfuse.commands.plan.planned import planned_cluster, planned_model
from tpfuse.commands.plan.search import search, train_options
from tpfuse.errors import UserError
from tpfuse.models.gpt import GPTConfig
from tpfuse.plan.hardware import known_gpu
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.memory import memory_of
from tpfuse.train.model_options import model_config
from tpfuse.train.options import PlanCommand, TrainCommand
from tpfuse.train.predicted import prediction
from tpfuse.train.rank_model import parameter_count

H100 = "NVIDIA H100 80GB HBM3", 85 * 10**9


@pytest.mark.parametrize(
    ("device", "memory", "name"),
    [
        (*H100, "h100"),
        ("NVIDIA A100-SXM4-40GB", 42 * 10**9, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 85 * 10**9, "a100"),
        ("NVIDIA H200", 150 * 10**9, "h200"),
        ("NVIDIA B200", 191 * 10**9, "b200"),
        ("NVIDIA H100 PCIe", 85 * 10**9, None),
        ("NVIDIA H100 80GB HBM2e", 85 * 10**9, None),
        ("NVIDIA H100 NVL", 85 * 10**9, None),
        ("NVIDIA A100-PCIE-40GB", 42 * 10**9, None),
        ("NVIDIA A100X", 85 * 10**9, None),
        ("NVIDIA RTX A1000", 42 * 10**9, None),
        ("NVIDIA GH200 480GB", 150 * 10**9, None),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 85 * 10**9, None),
        ("NVIDIA H100", 100 * 10**9, None),
        ("NVIDIA A100-SXM-64GB", 68 * 10**9, None),
        ("", 0, None),
    ],
)
def test_gpus_are_known_by_the_names_that_torch_gives_them(device: str, memory: int, name: str | None) -> None:
    found = known_gpu(device, memory)
    assert (found and found.name) == name


def _options(words: str, gpus: int) -> TrainCommand:
    return with_layout(parse_train(words.split()), gpus)


def test_a_run_takes_as_long_as_the_plan_of_its_layout_says() -> None:
    command = PlanCommand(model="gpt2-350m", gpus=8)
    model, cluster = planned_model(command), planned_cluster(command)
    fitting = search(model, cluster).fitting
    best = [next(each for each in fitting if each.shape[place] > 1) for place in range(4)]
    assert len(best) == 4, "with tensor-, context-, data- and pipeline-parallel ranks"
    for candidate in best:
        options = train_options(model, candidate.layout)
        found = prediction(options, model_config(options, model.vocabulary), *H100, 8)
        assert found is not None and found.layout == candidate.layout and found.program == model.program
        assert replace(found.sizes, name=model.sizes.name) == model.sizes and found.times == candidate.times
        assert found.described().startswith(f"{found.times.total * 1e3:.4g} ms a step on h100, ")
        apart = prediction(options, model_config(options, model.vocabulary), *H100, 4)
        assert apart is not None and " ms a step on h100 with a network of 400Gb between nodes, " in apart.described()


def test_the_cut_of_the_options_counts() -> None:
    options = _options("--model.preset tiny --parallel.pp 2 --parallel.pp-layers 1,3 --train.micro-batch 1", 2)
    config = GPTConfig(256, 128, 128, 4, 4)
    found = prediction(options, config, *H100, 2)
    assert found is not None and found.blocks == (1, 3)
    even = replace(found, blocks=(2, 2))
    assert found.timeline.idle_share(0) > even.timeline.idle_share(0) + 0.1, "rank 0 waits for that with three blocks"
    assert found.times.total > 1.1 * even.times.total, "so the step takes longer"


@pytest.mark.parametrize(
    "flag", ["--train.autocast bfloat16", "--zero.offload host", "--zero.compression bf16", "--train.dtype float64"]
)
def test_unknown_options_and_gpus_are_not_predicted(flag: str) -> None:
    config = GPTConfig(256, 128, 128, 4, 4)
    assert prediction(_options("--model.preset tiny", 1), config, *H100, 1) is not None
    assert prediction(_options(f"--model.preset tiny {flag}", 1), config, *H100, 1) is None
    assert prediction(_options("--model.preset tiny", 1), config, "NVIDIA T4", 16 * 10**9, 1) is None


def test_models_whose_blocks_differ_are_neither_predicted_nor_counted() -> None:
    """Layers that attend differently have the same weights. A dense layer among mixtures of experts has others."""
    for family, settings, refused in (("gemma3", {}, False), ("qwen3_moe", {"mlp_only_layers": [0]}, True)):
        _, kind, own = (FAMILIES | OTHERS)[family]
        theirs = getattr(transformers, kind)(**{**SIZES, **own, **settings})
        options = _options("--train.batch 1 --train.dtype bfloat16", 1)
        config = DecoderConfig.of(theirs.to_dict())
        assert (prediction(options, config, *H100, 1) is None) == refused
        with pytest.raises(UserError, match="block 1 of qwen3_moe has other weights") if refused else nullcontext():
            counted = memory_of(options, config, None, [0])[0][1]
            assert counted.parameters == pytest.approx(2 * parameter_count(config), 0.01)


def test_a_model_has_the_dropout_that_transformers_gives_it() -> None:
    """The rates that config.json leaves out are those of the family. Those of other tasks' heads do not count."""
    settings = {"model_type": "gpt2", "n_layer": 2, "n_embd": 48, "n_head": 12, "vocab_size": 101, "n_positions": 20}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    assert DecoderConfig.of(settings).drops and not DecoderConfig.of(settings | rates).drops
    assert DecoderConfig.of(settings | rates | {"attn_pdrop": 0.1}).drops


def test_sizes_of_a_layer_and_lengths_that_transformers_leaves_out() -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 101}
    assert [DecoderConfig.of({**bloom, **more}).longest for more in ({}, {"seq_length": 64})] == [1024, 64]
    assert DecoderConfig.of({**bloom, "seq_length": 64}).n_positions == 64
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 101}
    llama = {"model_type": "llama", "max_position_embeddings": 64, **sizes}
    heads = {"per_layer_config": {"1": {"head_dim": 16}}}
    assert DecoderConfig.of({**llama, **heads}).attention_flops() == 12 * 64 * 4 * (8 + 16) // 2
