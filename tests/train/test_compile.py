"""`--train.compile`: the losses of a run without it, at every stage of ZeRO and layout, and its errors in one line."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.command import Commands
from tpfuse.testing.ranks import pool
from tpfuse.testing.training import new_trainer, options_of, ranks_of


def _losses(layout: dict[str, Any], dropout: float, compiled: bool) -> list[float]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = options_of(
        batch=4 * layout.get("dp", 1), micro_batch=2, compile=compiled, **{"dtype": "float32", **layout}
    )
    trainer, windows = new_trainer(options, GPTConfig(61, 8, 32, 2, 4, dropout=dropout))
    losses = [trainer.train_step(windows, lambda: False).loss for _ in range(4)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (graphs > 0) == compiled, "steps are compiled, or not"
    return losses


@pytest.mark.compile
@pytest.mark.parametrize(
    ("layout", "dropout"),
    [({}, 0.2), ({"cp": 2, "stage": 2}, 0.0), ({"dp": 2, "stage": 3}, 0.0), ({"tp": 2, "autocast": "bfloat16"}, 0.0)],
    ids=str,
)
def test_compiled_steps_have_the_same_losses(layout: dict[str, Any], dropout: float) -> None:
    ranks = pool(ranks_of(options_of(**layout)))
    plain, compiled = (ranks.run(_losses, layout, dropout, on)[0] for on in (False, True))
    np.testing.assert_allclose(compiled, plain, rtol=3e-3 if "autocast" in layout else 1e-5)


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
