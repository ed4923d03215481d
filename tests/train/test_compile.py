"""`--train.compile`: the losses of a run without it, at every stage of ZeRO and layout, and its errors in one line."""

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tests.support.command import Commands
from tests.support.training import Result, check_same, decoder_config, options_of, ranks_of, train, trained_decoder
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.ranks import pool


def _trained(layout: dict[str, Any], dropout: float, backend: str) -> Result:
    """Return losses, norms and weights of four steps of two micro-batches. backend: torch.compile's, or ""."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batch, real = 4 * layout.get("dp", 1), torch.compile
    options = options_of(batch=batch, micro_batch=2, dtype="float32", compile=bool(backend), **layout)
    with mock.patch.object(torch, "compile", lambda model, **more: real(model, **more, backend=backend)):
        result = train(options, 4, config=GPTConfig(61, 8, 32, 2, 4, dropout=dropout))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (graphs > 0) == bool(backend), "steps are compiled, or not"
    return result


@pytest.mark.compile
@pytest.mark.parametrize(
    ("layout", "dropout"),
    [
        ({"cp": 2, "stage": 2}, 0.0),
        ({"dp": 2, "stage": 3}, 0.0),
        ({"tp": 2, "autocast": "bfloat16"}, 0.0),
        ({"pp": 2}, 0.2),
    ],
    ids=str,
)
def test_compiled_steps_have_the_same_losses(layout: dict[str, Any], dropout: float) -> None:
    ranks = pool(ranks_of(options_of(**layout)))
    plain, compiled = (ranks.run(_trained, layout, dropout, backend)[0][0] for backend in ("", "inductor"))
    np.testing.assert_allclose(compiled, plain, rtol=3e-3 if "autocast" in layout else 1e-5)


@pytest.mark.compile
def test_compiled_steps_of_a_decoder_have_the_same_dropout() -> None:
    config = decoder_config("gpt2", num_hidden_layers=1, resid_pdrop=0.2, embd_pdrop=0.3, attn_pdrop=0.1)
    plain, compiled = (trained_decoder(config, options_of(tp=2, batch=4, compile=on), 2) for on in (False, True))
    check_same(compiled, plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "tp": 2, "stage": 3},
        {"pp": 2, "pp_schedule": "gpipe", "dp": 2, "stage": 3},
    ],
    ids=str,
)
def test_traced_steps_are_equal_to_the_bit(layout: dict[str, Any]) -> None:
    ranks = pool(ranks_of(options_of(**layout)))
    for plain, traced in zip(
        *(ranks.run(_trained, layout, 0.0, backend) for backend in ("", "aot_eager")), strict=True
    ):
        assert plain[:2] == traced[:2]
        assert all(torch.equal(weight, traced[2][name]) for name, weight in plain[2].items())


def test_a_machine_without_a_compiler_is_an_error(commands: Commands) -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        error = commands.fail_to_train("--train.compile")
    assert "--train.compile needs a C++ compiler, and none was found: install g++" in error
    assert not commands.out.exists()


def test_a_model_that_cannot_be_compiled_is_an_error(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such luck")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: real(model, **options, backend=broken))
    error = commands.fail_to_train("--train.compile", status=1)
    assert "step 0: torch.compile failed: " in error and "no such luck" in error
    assert error.endswith("(train without --train.compile)")
    assert isinstance(tqdm.get_lock(), type(threading.RLock())), "a rank that ends at once leaves no semaphore"
