"""`tpfuse memory` prints a table, counts the shapes that real ranks have, and refuses bad input."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.long_context import SavedBytes
from tests.support.command import Commands
from tests.support.meshes import mesh_of
from tpfuse.comm.layout import local_tensor
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import pool
from tpfuse.train.config import parse_train
from tpfuse.train.memory import BUCKET_BYTES, count
from tpfuse.train.setup import with_layout
from tpfuse.zero import shard
from tpfuse.zero.memory import MemoryAccount, account

TOY = "--model.n-layer 3 --model.n-embd 48 --model.n-head 4 --model.n-positions 16 --train.batch 6 --kernels torch"

SMALL = 20_000  # bytes of gradients of a bucket, so that there are several, and their order matters


def _table(text: str) -> dict[str, list[int]]:
    """Returns the bytes in the table by kind, one number for each stage."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: [int(x.replace(",", "")) for x in row[3::3]] for row in rows if len(row) > 3 and row[2] == "GiB"}


def test_the_table_of_a_preset(commands: Commands) -> None:
    out = commands.do("memory", "gpt2-124m", "--ranks", "8", "--micro-batch", "60")
    assert out.startswith("gpt2-124m: 124,439,808 parameters, bfloat16; ranks 8: tp 1 x cp 1 x dp 8\n")
    assert "micro-batches of 60 x 1024 tokens, 1 in each step; recompute none" in out
    assert "stage 0" in out and "stage 3" in out and "workspaces are not counted" in out
    table = _table(out)
    assert list(table) == [
        "parameters", "gradients", "master", "moments", "buffers", "activations", "total", "padding"
    ]  # fmt: skip
    n = 124_439_808  # one rank has only the padding that eight equal shards of 16 need
    assert 2 * n <= table["parameters"][0] == table["parameters"][1] == table["parameters"][2] <= 2 * n + 2**16
    assert table["moments"][1] * 8 == table["moments"][0] == 2 * table["master"][0] == 4 * table["parameters"][0]
    assert len(set(table["activations"])) == 1
    for column in zip(*table.values(), strict=True):
        assert sum(column[:6]) == column[6]


def test_a_note_says_that_micro_batches_accumulate_whole_gradients(commands: Commands) -> None:
    alone = commands.do("memory", "gpt2-124m", "--ranks", "8", "--micro-batch", "60")
    assert "Gradients:" not in alone
    out = commands.do("memory", "gpt2-124m", "--ranks", "8", "--micro-batch", "15")
    kept = [f"{_table(alone)['gradients'][stage] / 2**30:.3f} GiB at stage {stage}" for stage in (2, 3)]
    assert "Gradients: 4 micro-batches are accumulated in whole gradients before ranks exchange them" in out
    assert f"In a step of one micro-batch gradients would be {' and '.join(kept)}.\n" in out
    assert "Gradients:" not in commands.do("memory", "gpt2-124m", "--ranks", "8", "--micro-batch", "15", "--stage", "1")


def test_recomputing_more_holds_less(commands: Commands) -> None:
    found = []
    for recompute in ("none", "selective", "full"):
        table = _table(commands.do("memory", "tiny", "--stage", "1", "--recompute", recompute))
        assert all(len(values) == 1 for values in table.values())
        found += table["activations"]
    assert found[0] > found[1] > found[2]


def test_a_file_gives_the_layout(tmp_path: Path, commands: Commands) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "gpt2-350m"\nn_layer = 2\n[parallel]\ntp = 4\ncp = 2\n[train]\nbatch = 24\n')
    out = commands.do("memory", file, "--ranks", "16")
    assert "ranks 16: tp 4 x cp 2 x dp 2" in out and "12 x 1024 tokens, 1 in each step" in out
    assert "ranks 8: tp 4 x cp 2 x dp 1" in commands.do("memory", file)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("heads", "impl", "schedule"),
    [(4, "auto", "ulysses"), (4, "direct", "ulysses"), (4, "fused", "all_gather"), (2, "auto", "all_gather")],
)
def test_the_automatic_schedule_is_the_one_that_ranks_choose(heads: int, impl: str, schedule: str) -> None:
    """The ranks exchange heads if they can divide them, and the fused implementation gathers."""

    def activations(schedule: str) -> int:
        flags = f"--model.n-head {heads} --parallel.cp 4 --parallel.impl {impl} --parallel.cp-schedule {schedule}"
        options = parse_train([*TOY.split(), *flags.split(), "--train.batch", "1", "--model.n-positions", "15"])
        return count(with_layout(options, 4), 61, [0]).accounts[0].activations

    assert activations("auto") == activations(schedule)
    if heads == 4:
        assert activations("ulysses") > activations("all_gather")


def test_the_options_of_zero_are_taken_from_the_configuration(tmp_path: Path, commands: Commands) -> None:
    file, tables = tmp_path / "run.toml", []
    for zero in ("", 'gradient_dtype = "parameter"', 'reduce_dtype = "parameter"'):
        file.write_text(f'[train]\ndtype = "bfloat16"\n[zero]\n{zero}\n')
        tables.append(_table(commands.do("memory", file, "--ranks", "4")))
    plain, narrow, apart = tables
    assert narrow["gradients"][0] * 2 == plain["gradients"][0] == apart["gradients"][0]
    assert narrow["buffers"][2] * 2 == plain["buffers"][2] == apart["buffers"][2] * 2
    file.write_text("[parallel]\nreplicas = 2\n")
    shared = _table(commands.do("memory", file, "--ranks", "4"))["moments"]
    assert shared[3] > 1.9 * shared[2], "each copy of the model is on two of the four ranks"
    file.write_text('[zero]\noffload = "host"\n')
    assert "are in the host's memory" in commands.do("memory", file)
    file.write_text("[parallel]\nreplicas = 3\n")
    assert "parallel.replicas 3 does not divide 4 data-parallel ranks" in commands.fail("memory", file, "--ranks", "4")


def _real(tp: int, dp: int) -> MemoryAccount:
    """Returns the bytes of the buckets that real ranks make."""
    mesh = mesh_of(dp, tp)
    model = GPT(GPTConfig(61, 16, 48, 3, 4), device_mesh=mesh["tp"], device="cpu")
    buckets = shard(model, mesh, stage=2, bucket_bytes=SMALL)
    return account([bucket.layout for bucket in buckets.buckets], 2)


def test_shapes_are_those_of_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpfuse.train.memory.BUCKET_BYTES", SMALL)
    first, *others = pool(4).run(_real, 2, 2)
    options = with_layout(parse_train([*TOY.split(), "--parallel.tp", "2"]), 4)
    found = count(options, 61, [0, 2]).accounts[2]
    assert found.activations > 0
    assert MemoryAccount(**{**vars(found), "activations": 0}) == first
    assert all(other.total <= first.total for other in others)


def test_activations_are_those_of_a_real_model() -> None:
    options = with_layout(parse_train([*TOY.split(), "--train.micro-batch", "2", "--train.recompute", "selective"]), 1)
    counted = count(options, 61, [0])
    assert counted.micro_batches == 3
    model = GPT(counted.config, recompute="selective")
    for parameter in model.parameters():
        local_tensor(parameter).zero_()
    ids = integers(1, 2, 16, low=0, high=60, dtype=torch.int64)
    saved = SavedBytes(list(model.parameters()))
    with saved.hooks:
        model(ids, ids, loss_weight=0.1)
    assert saved.total == counted.accounts[0].activations


def test_the_size_of_buckets_is_that_of_training() -> None:
    assert inspect.signature(shard).parameters["bucket_bytes"].default == BUCKET_BYTES


def test_the_tokenizer_chars_needs_the_size_of_the_vocabulary(tmp_path: Path, commands: Commands) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\ntokenizer = "chars"\n')
    assert "give --vocab-size" in commands.fail("memory", file)
    commands.do("memory", file, "--vocab-size", "77")
