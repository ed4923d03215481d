"""`tpfuse memory` prints what `tpfuse plan` counts (`tests/plan/test_memory.py`), and refuses bad input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.command import Commands
from tests.support.decoders import decoder
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.memory import memory_of
from tpfuse.train.model_options import model_config
from tpfuse.zero.muon_matrices import block_matrices

KINDS = ["parameters", "gradients", "optimizer", "buffers", "activations", "workspace", "total"]
LLAMA = (
    '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,'
    ' "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}'
)


def _table(text: str) -> dict[str, list[int]]:
    """Return the bytes in the table by kind, one number for each stage."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: [int(x.replace(",", "")) for x in row[3::3]] for row in rows if len(row) > 3 and row[2] == "GiB"}


def test_the_table_of_a_preset(tmp_path: Path, commands: Commands) -> None:
    out = commands.do("memory", "gpt2-124m", "--ranks", "8", "--micro-batch", "60")
    assert out.startswith("gpt2-124m: 124,439,808 parameters, bfloat16; ranks 8: tp 1 x cp 1 x dp 8\n")
    assert "micro-batches of 60 x 1024 tokens, 1 in each step; recompute none" in out
    assert "stage 0" in out and "stage 3" in out and "the first rank, which needs the most" in out
    assert "Gradients" not in out
    table = _table(out)
    assert list(table) == KINDS
    n = 124_439_808  # one rank has only the padding that eight equal shards of 16 need
    assert 2 * n <= table["parameters"][0] == table["parameters"][1] == table["parameters"][2] <= 2 * n + 2**16
    assert table["optimizer"][1] * 8 == table["optimizer"][0] == 6 * table["parameters"][0]
    for column in zip(*table.values(), strict=True):
        assert sum(column[:6]) == column[6]
    several = commands.do("memory", "gpt2-124m", "--ranks", "8", "--micro-batch", "15")
    assert "At stages 2 and 3 4 micro-batches are added up in shards: each one is reduced" in several
    assert _table(several)["gradients"] == table["gradients"]
    file = tmp_path / "whole.toml"
    file.write_text('[zero]\naccumulate = "whole"\n[train]\nbatch = 480\n[model]\npreset = "gpt2-124m"\n')
    whole = commands.do("memory", file, "--ranks", "8", "--micro-batch", "15")
    assert "added up in whole gradients, which are reduced once" in whole
    more = [b - a for a, b in zip(table["gradients"], _table(whole)["gradients"], strict=True)]
    assert more[:2] == [0, 0] and min(more[2:]) > 3 * n, "float32, less what is not sent yet"


def test_a_file_gives_the_layout_and_the_options_of_zero(tmp_path: Path, commands: Commands) -> None:
    file, tables = tmp_path / "run.toml", []
    file.write_text('[model]\npreset = "gpt2-350m"\nn_layer = 2\n[parallel]\ntp = 4\ncp = 2\n[train]\nbatch = 24\n')
    out = commands.do("memory", file, "--ranks", "16")
    assert "ranks 16: tp 4 x cp 2 x dp 2" in out and "1 x 1024 tokens, 12 in each step" in out
    assert "ranks 8: tp 4 x cp 2 x dp 1" in commands.do("memory", file)
    assert not dist.is_initialized()
    for zero in ("", 'gradient_dtype = "parameter"', 'reduce_dtype = "parameter"'):
        file.write_text(f'[train]\ndtype = "bfloat16"\n[zero]\n{zero}\n')
        tables.append(_table(commands.do("memory", file, "--ranks", "4")))
    plain, narrow, apart = tables
    assert narrow["gradients"][0] * 2 == plain["gradients"][0] == apart["gradients"][0]
    assert narrow["buffers"][2] * 2 == plain["buffers"][2] == apart["buffers"][2] * 2
    file.write_text('[parallel]\npp = 2\npp_layers = "1,3"\n')
    assert "dp 1" in commands.do("memory", file, "--pp", "1"), "no stages are left for pp_layers"
    file.write_text("[parallel]\nreplicas = 2\n")
    shared = _table(commands.do("memory", file, "--ranks", "4"))["optimizer"]
    assert shared[3] > 1.9 * shared[2], "each copy of the model is on two of the four ranks"
    file.write_text('[zero]\noffload = "host"\n')
    out = commands.do("memory", file, "--ranks", "2")
    assert "memory (zero.offload); at stage 3 the host's memory has the parameters and" in out
    assert "at stage 3" not in commands.do("memory", file, "--stage", "1", "--ranks", "2")
    assert "at stage 3" not in commands.do("memory", file), "a single rank shards nothing"
    file.write_text('[zero]\noffload = "/disk"\n')
    out = commands.do("memory", file, "--ranks", "2")
    assert "files (zero.offload); at stage 3 files have the parameters too, and the" in out
    file.write_text('[zero]\ncompression = "powersgd-4"\n')
    assert "remainders of PowerSGD are not counted (zero.compression)" in commands.do("memory", file)
    for text, error in (
        ("[parallel]\nreplicas = 3\n", "parallel.replicas 3 does not divide 4 data-parallel ranks"),
        ("[train]\nbatch = 6\n", "train.batch 6 cannot be divided among 4 data-parallel ranks"),
        ('[data]\ntokenizer = "chars"\n', "give --vocab-size"),
    ):
        file.write_text(text)
        assert error in commands.fail("memory", file, "--ranks", "4")
    commands.do("memory", file, "--vocab-size", "77")
    assert "--pp -1: expected at least 1" in commands.fail("memory", "gpt2-124m", "--pp", "-1")


@pytest.mark.parametrize(
    ("heads", "impl", "schedule"),
    [(4, "auto", "ulysses"), (4, "fused", "all_gather"), (2, "auto", "all_gather")],
)
def test_the_automatic_schedule_is_the_one_that_ranks_choose(heads: int, impl: str, schedule: str) -> None:
    """The ranks exchange heads if they can divide them, and the fused implementation gathers."""

    def activations(schedule: str) -> float:
        flags = (
            "--model.n-layer 3 --model.n-embd 48 --model.n-positions 15 --train.batch 1 --kernels torch"
            f" --model.n-head {heads} --parallel.cp 4 --parallel.impl {impl} --parallel.cp-schedule {schedule}"
        )
        options = with_layout(parse_train(flags.split()), 4)
        return memory_of(options, model_config(options, 61), None, [0])[0][1].activations

    assert activations("auto") == activations(schedule)


@pytest.mark.parametrize("model", ["gpt2-124m", "llama"])
def test_the_command_counts_what_the_plan_counts(model: str, tmp_path: Path, commands: Commands) -> None:
    name: str | Path = model
    if model == "llama":
        (tmp_path / "config.json").write_text(LLAMA)
        name = tmp_path
    document = json.loads(commands.do("plan", "--model", name, "--gpus", "2", "--json", "-"))
    entries = [each for each in document["layouts"] if each["layout"]["cp"] == each["layout"]["tp"] == 1][::9]
    options = parse_train(document["train"])
    config = model_config(with_layout(options, 2), 50257 if model == "gpt2-124m" else 0)
    assert {each["layout"]["pp"] for each in entries} == {1, 2}
    for each in entries:
        layout = each["layout"]
        parallel = replace(
            options.parallel, tp=1, dp=layout["dp"], pp=layout["pp"], pp_schedule=layout["schedule"],
            pp_stages_per_rank=layout["stages_per_rank"] if layout["pp"] > 1 else 0, cp=1,
        )  # fmt: skip
        train = replace(options.train, recompute=layout["recompute"], micro_batch=layout["micro_batch"])
        asked = replace(options, parallel=parallel, train=train)
        assert memory_of(asked, config, None, [layout["zero"]])[layout["zero"]][1].total == each["bytes"], layout
    table = _table(commands.do("memory", name, "--ranks", "2", "--tp", "2", "--stage", "1"))
    assert table["activations"][0] > 0 and table["total"][0] > 0


def test_blocks_without_an_mlp(tmp_path: Path, commands: Commands) -> None:
    model = decoder("mixtral")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    assert "--vocab-size 9 is for the GPT" in commands.fail("memory", tmp_path, "--vocab-size", "9")
    out = commands.do("memory", tmp_path, "--stage", "0", "--micro-batch", "1", "--tp", "2")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"{parameters:,} parameters" in out
    assert "Activations of blocks without an MLP, such as mixtures of experts, are not counted." in out
    assert parameters <= _table(out)["parameters"][0] <= 1.02 * parameters + 2**10, "half of them, of two bytes"
    (file := tmp_path / "muon.toml").write_text(
        f'[model]\nfrom = "{tmp_path}"\n[train]\ndtype = "float32"\n[optim]\nname = "muon"\n'
    )
    held = 8 * parameters - 4 * sum(model.get_parameter(name).numel() for name in block_matrices(model))
    for stage, bytes_of in enumerate(_table(commands.do("memory", file))["optimizer"]):
        assert held <= bytes_of <= 1.02 * held, f"stage {stage}: one moment of experts too"


def test_layers_that_tensor_parallel_ranks_do_not_share_are_refused(tmp_path: Path, commands: Commands) -> None:
    (tmp_path / "config.json").write_text(decoder("bigcode_heads").config.to_json_string())
    assert "count it for tp 1" in commands.fail("memory", tmp_path, "--tp", "2")
