"""Without --train.micro-batch, a run takes as many sequences at once as the free memory holds, and says so."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.decoders import decoder
from tests.support.training import looped, prepared
from tpfuse.ops.linear_cross_entropy import chunk_of
from tpfuse.testing.ranks import on_ranks
from tpfuse.train import micro_batch
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.hardware import free_bytes
from tpfuse.train.micro_batch import needed_bytes, with_micro_batch
from tpfuse.train.model_options import model_config
from tpfuse.train.options import TrainCommand
from tpfuse.train.setup import PreparedRun

GIB, CPU, GPU = 2**30, torch.device("cpu"), torch.device("cuda", 0)
SMALL = (
    "--model.n-layer 1 --model.n-embd 16 --model.n-head 2 --model.n-positions 16 --train.batch 12 --train.steps 4"
    " --train.eval-every 0 --train.save-every 2 --train.keep 0 --optim.warmup 0 --data.path"
).split()


def chosen(
    words: str, free: float | None, kept: int | None = None, device: torch.device = GPU
) -> tuple[TrainCommand, TrainCommand, str]:
    """Return the options before and after the choice with so much free memory, and what is said."""
    options = with_layout(parse_train(words.split()), None)
    config = model_config(options, 50257)
    with mock.patch.object(micro_batch, "free_bytes", lambda *_: None if free is None else int(free)):
        return options, *with_micro_batch(options, config, None, device, 1, kept)


def needs(words: str, device: torch.device = GPU) -> dict[int, float]:
    options = with_layout(parse_train(words.split()), None)
    return needed_bytes(options, model_config(options, 50257), None, device)


@pytest.mark.parametrize("preset", ["gpt2-124m", "gpt2-1558m"])
def test_the_size_is_the_largest_that_fits(preset: str) -> None:
    by_size = needs(f"--model.preset {preset}")
    assert list(by_size) == sorted(by_size, reverse=True) and list(by_size.values()) == sorted(by_size.values())[::-1]
    for free in (8 * GIB, 79 * GIB):
        before, options, said = chosen(f"--model.preset {preset}", free)
        size = options.train.micro_batch
        assert options == replace(before, train=replace(before.train, micro_batch=size)) and size is not None
        fitting = [each for each, needed in by_size.items() if needed <= micro_batch._USABLE * free]
        assert size == max(fitting, default=1) and before.train.batch % size == 0
        assert said.startswith(f"micro-batch {size} (--train.micro-batch): it needs ")
        assert ("may be too little" in said) == (not fitting)
    launched = needs(f"--model.preset {preset} --train.cuda-graph no")
    assert all(launched[size] < by_size[size] for size in by_size), "evaluations need memory beside a graph"
    assert all(needs(f"--model.preset {preset}", CPU)[size] < launched[size] for size in by_size), "no CUDA context"


def test_a_size_that_fits_stays_and_all_sequences_are_no_choice() -> None:
    words = "--model.preset gpt2-124m"
    assert chosen(words, 79 * GIB, kept=20)[1].train.micro_batch == 20
    assert chosen(words, 8 * GIB, kept=120)[1].train.micro_batch == max(chosen(words, 8 * GIB)[1].train.micro_batch, 1)
    before, options, said = chosen(words, 1000 * GIB)
    assert options == before and said.startswith("micro-batch 480: it needs ")
    assert chosen(words, 1000 * GIB, kept=20)[1].train.micro_batch == 20
    before, options, said = chosen(f"{words} --train.micro-batch 6", 79 * GIB, kept=20)
    assert options == before and said == ""
    before, options, said = chosen(words, None)
    assert options == before and said.startswith("micro-batch 480: the free memory is not known")


def test_a_pipeline_takes_sizes_that_its_schedule_accepts() -> None:
    words = "--parallel.pp 2 --parallel.pp-schedule interleaved_1f1b --model.n-layer 8 --train.batch"
    assert list(needs(f"{words} 27")) == [9], "9 and 27 micro-batches are refused"
    words = f"{words} 32"
    assert list(needs(words)) == [4, 2, 1], "there are at least eight micro-batches"
    assert chosen(words, 1.0)[1].train.micro_batch == 1


def test_a_model_that_the_formula_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(decoder("mixtral").config.to_json_string())
    before, options, said = chosen(f"--model.from {tmp_path} --train.batch 8", 79 * GIB)
    assert options == before and said.startswith(
        "micro-batch 8: what it needs of 79.0 GiB of free memory is not counted"
    )


def test_ranks_share_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpfuse.train.hardware.available_memory", lambda: 800)
    assert free_bytes(CPU, 2) == 200
    monkeypatch.setattr("tpfuse.train.hardware.available_memory", lambda: None)
    assert free_bytes(CPU, 2) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [free_bytes(GPU, ranks) for ranks in (1, 2, 3, 4)] == [900, 900, 450, 450]


@on_ranks(2)
def test_all_ranks_take_what_fits_the_least_memory() -> None:
    words = "--model.preset gpt2-124m --parallel.dp 2"
    options = with_layout(parse_train(words.split()), 2)
    config = model_config(options, 50257)
    by_size = needed_bytes(options, config, None, GPU)
    sizes = sorted(by_size)
    free = by_size[sizes[3 + 4 * dist.get_rank()]] / micro_batch._USABLE + 1
    with mock.patch.object(micro_batch, "free_bytes", lambda *_: int(free)):
        taken, _ = with_micro_batch(options, config, None, GPU, 2, None)
    assert taken.train.micro_batch == sizes[3]


def _looped(run: PreparedRun, sequences: int) -> list[str]:
    """Return what a run prints where the memory holds this number of sequences."""
    needed = needed_bytes(run.options, run.config, None, CPU)[sequences]
    with mock.patch.object(micro_batch, "free_bytes", lambda *_: int(needed / micro_batch._USABLE) + 1):
        return looped(run).splitlines()


def test_a_run_trains_on_the_same_sequences_and_resumes_with_the_same_size(tmp_path: Path) -> None:
    """Only rounding differs from one pass. A checkpoint has the size that was taken, and config.toml none."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (i * 7 + i // 5) % 26) for i in range(4000)))

    def losses(folder: str) -> list[float]:
        rows = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]

    words = [*SMALL, text, "--train.log-every", "1", "--out"]
    whole = _looped(prepared([*words, tmp_path / "whole"], 1), 12)
    assert any(line.startswith("         micro-batch 12: it needs 0.0 of 0.0 GiB") for line in whole)
    parts = _looped(prepared([*words, tmp_path / "parts"], 1), 4)
    assert any(line.startswith("         micro-batch 4 (--train.micro-batch): it needs ") for line in parts)
    assert losses("parts") == pytest.approx(losses("whole"), rel=1e-4)
    saved = json.loads((tmp_path / "parts" / "step-4" / "manifest.json").read_text())
    assert saved["state"]["config"]["train"]["micro_batch"] == 4
    assert "micro_batch" not in (tmp_path / "parts" / "config.toml").read_text()
    resumed = prepared(["--resume", "--out", tmp_path / "parts", "--train.steps", 5], 1)
    assert resumed.micro_batch == 4
    assert any(line.startswith("         micro-batch 4 (") for line in _looped(resumed, 12))


def test_the_chunks_of_the_loss() -> None:
    assert [chunk_of(x) for x in (1, 32768, 65536, 10**6)] == [4096, 4096, 8192, 16384]
