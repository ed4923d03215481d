"""`--train.compile`: the losses of a run without it, at every stage of ZeRO and layout, and its errors in one line."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from tpfuse.cli import run
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import Windows
from tpfuse.train.options import ParallelOptions, TrainCommand, TrainOptions, ZeroOptions
from tpfuse.train.trainer import Trainer

CONFIG = GPTConfig(vocab_size=61, n_positions=8, n_embd=32, n_layer=2, n_head=4)


def _losses(compiled: bool, tp: int, cp: int, stage: int, dropout: float, autocast: Any) -> list[float]:
    dp = dist.get_world_size() // (tp * cp)
    train = TrainOptions(steps=4, batch=4 * dp, micro_batch=2, autocast=autocast, compile=compiled)
    parallel, zero = ParallelOptions(tp=tp, dp=dp, cp=cp), ZeroOptions(stage=stage)
    mesh = mesh_of(dp, tp, cp) if dist.get_world_size() > 1 else None
    config = GPTConfig(61, 8, 32, 2, 4, dropout=dropout)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = Trainer(TrainCommand(train=train, parallel=parallel, zero=zero), config, mesh, torch.device("cpu"))
    windows = Windows((np.arange(1000) * 7 % 61).astype(np.uint16), 8, 5, "train", 4 * dp)
    losses = [trainer.train_step(windows, lambda: False).loss for _ in range(4)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (graphs > 0) == compiled, "steps are compiled, or not"
    return losses


@pytest.mark.compile
@pytest.mark.parametrize(
    ("world", "tp", "cp", "stage", "dropout", "autocast"),
    [
        (1, 1, 1, 0, 0.2, "none"),
        (2, 1, 2, 2, 0.0, "none"),
        (2, 1, 1, 3, 0.0, "none"),
        (2, 2, 1, 1, 0.0, "bfloat16"),
    ],
)
def test_compiled_steps_have_the_same_losses(
    world: int, tp: int, cp: int, stage: int, dropout: float, autocast: str
) -> None:
    plain, compiled = (pool(world).run(_losses, on, tp, cp, stage, dropout, autocast)[0] for on in (False, True))
    np.testing.assert_allclose(compiled, plain, rtol=1e-5 if autocast == "none" else 3e-3)


def test_a_machine_without_a_compiler_is_an_error(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        assert run(["train", *flags, "--train.compile", "--out", str(tmp_path / "run")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--train.compile needs a C++ compiler, and none was found: install g++" in line
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_compiled_is_an_error(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such luck")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: real(model, **options, backend=broken))
    assert run(["train", *flags, "--train.compile", "--out", str(tmp_path / "run")]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "step 0: torch.compile failed: " in line and "no such luck" in line
    assert line.endswith("(train without --train.compile)")
    assert isinstance(tqdm.get_lock(), type(threading.RLock())), "a rank that ends at once leaves no semaphore"
