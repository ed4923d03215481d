"""`--optim.name muon` in every layout: losses and weights of one rank, also after a checkpoint of another layout."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import training
from tests.support.command import Commands
from tests.support.decoders import decoder
from tests.support.tiers import exhaustive
from tests.support.training import Result, decoder_config, new_trainer, options_of, trained, trained_decoder
from tpfuse.testing.ranks import on_ranks

CONFIG = replace(training.CONFIG, n_layer=4, bias=False)  # AdamW makes of the rounding of keys' biases whole updates
MUON = {"name": "muon", "muon_lr": 5e-2, "muon_adjust": "original", "muon_momentum": 0.9}
STEPS = 4
Layout = dict[str, Any]


@functools.cache
def one_rank() -> Result:
    return trained(options_of(optim=MUON), STEPS, "auto", None, None, CONFIG)[0]


def check_same(found: Result, expected: Result, start: int = 0, tolerance: float = 1e-12) -> None:
    """Raise AssertionError unless a run that began at step `start` is the same, up to this part of the largest."""
    stop = start + len(found[0])
    assert found[0] == pytest.approx(expected[0][start:stop], rel=tolerance)
    assert found[1] == pytest.approx(expected[1][start:stop], rel=tolerance)
    if stop < STEPS:
        return
    for name, weight in expected[2].items():
        actual = found[2][name].reshape(weight.shape)
        assert (actual - weight).abs().max() <= tolerance * weight.abs().max(), name


# Layouts in which a run takes its steps, one after another.
CHAINS: list[list[Layout]] = [
    [{"pp": 2, "accumulation": 4}, {"dp": 2, "stage": 3, "accumulation": 2}],
    [
        {"pp": 2, "pp_schedule": "zbv", "tp": 2, "accumulation": 6},
        {"dp": 2, "cp": 2, "stage": 3, "offload": "host", "accumulation": 3},
        {"tp": 4, "stage": 0},
        {"pp": 2, "dp": 2, "stage": 2, "offload": "a folder", "accumulation": 6},
    ],
    [
        {"dp": 3, "stage": 2, "offload": "host", "accumulation": 2},
        {"dp": 4, "stage": 3, "replicas": 2, "offload": "a folder"},
        {"pp": 2, "cp": 2, "stage": 1, "accumulation": 4},
        {},
    ],
    [
        {"pp": 2, "pp_schedule": "interleaved_1f1b", "dp": 2, "stage": 3, "accumulation": 6},
        {"dp": 2, "tp": 2, "stage": 1, "accumulation": 3},
        {"cp": 4, "cp_schedule": "ulysses_ring", "stage": 2, "accumulation": 2},
        {"dp": 2, "tp": 2, "stage": 3, "accumulation": 3},
    ],
]


@pytest.mark.parametrize("layouts", [CHAINS[0], *exhaustive(*CHAINS[1:])], ids=str)
def test_a_run_goes_on_in_another_layout_as_on_one_rank(tmp_path: Path, layouts: list[Layout]) -> None:
    folder, steps = tmp_path / "offload", STEPS // len(layouts)
    folder.mkdir()
    source = None
    for place, layout in enumerate(layouts):
        more = {"offload": str(folder)} if layout.get("offload") == "a folder" else {}
        save_to = tmp_path / str(place)
        for found in trained(options_of(optim=MUON, **layout | more), steps, "auto", save_to, source, CONFIG):
            check_same(found, one_rank(), steps * place)
        source = save_to


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("gpt2", [{"tp": 2}]),
        ("llama4", [{"tp": 2}, {"dp": 2, "stage": 3}]),
        *exhaustive(
            ("phi3_shared", [{"tp": 2, "dp": 2, "stage": 3}]),
            ("gpt2", [{"pp": 2, "dp": 2, "stage": 3, "accumulation": 2}]),
            ("neox", [{"tp": 2, "stage": 1}]),
            ("llama_three_kv_heads", [{"tp": 2, "cp": 2, "stage": 1}]),
            ("llama_tied", [{"pp": 2, "tp": 2, "accumulation": 2}]),
            ("mixtral", [{"tp": 2, "dp": 2, "stage": 1}, {"tp": 4}]),
            ("mixtral", [{"pp": 2, "tp": 2, "accumulation": 2}, {"tp": 2, "dp": 2, "stage": 3}]),
        ),
    ],
    ids=str,
)
def test_models_of_transformers_train_as_on_one_rank(tmp_path: Path, family: str, layouts: list[Layout]) -> None:
    """In each layout they take as many steps, from the checkpoint of the one before."""
    settings = {"attention_bias": False, "mlp_bias": False} if "llama" in family else {}
    config = decoder_config(family, **settings)
    expected = trained_decoder(config, options_of(batch=4, order="random", optim=MUON), STEPS)
    steps, source = STEPS // len(layouts), None
    for place, layout in enumerate(layouts):
        options, save_to = options_of(batch=4, order="random", optim=MUON, **layout), tmp_path / str(place)
        check_same(trained_decoder(config, options, steps, save_to, source), expected, steps * place)
        source = save_to


@pytest.mark.parametrize("stage", [1, *exhaustive(2, 3)])
@on_ranks(2)
def test_a_gradient_that_overflows_does_not_reach_the_momentum(stage: int) -> None:
    """One that did would stay in it as NaN for ever (DeepSpeed, issue 8432). The first step in float16 overflows."""
    trainer, windows = new_trainer(options_of(dtype="float16", dp=2, stage=stage, optim=MUON), CONFIG)
    trainer.loss_scale = 2.0**34
    before = [piece.tensor.clone() for piece in trainer.optimizer.rectangles()]
    assert trainer.train_step(windows, lambda: False).skipped
    for piece, old in zip(trainer.optimizer.rectangles(), before, strict=True):
        assert torch.equal(piece.tensor, old), f"{piece.kind} of {piece.name}"
    while trainer.train_step(windows, lambda: False).skipped:
        assert trainer.loss_scale > 1
    for piece, old in zip(trainer.optimizer.rectangles(), before, strict=True):
        assert piece.tensor.isfinite().all() and not torch.equal(piece.tensor, old), f"{piece.kind} of {piece.name}"


def test_a_model_that_muon_cannot_tell_is_refused_before_a_run_starts(tmp_path: Path, commands: Commands) -> None:
    decoder("gpt_oss", torch.float32).config.save_pretrained(tmp_path / "gpt_oss")
    words = "train", "--model.from", str(tmp_path / "gpt_oss"), "--out", str(tmp_path / "run"), "--optim.name", "muon"
    said = commands.fail(*words)
    assert "--optim.name muon: Muon cannot tell what matrices model.layers.0.mlp.experts.gate_up_proj [4, 48" in said
    assert said.endswith(": give --optim.name adamw") and not (tmp_path / "run").exists()
