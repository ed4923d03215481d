"""Context-parallel ranks hold their part of the activations, and the benchmark would report it if they did not."""

import sys

import pytest
import torch

from benchmarks import long_context
from benchmarks.long_context import SavedBytes, Steps

ALONE = Steps((5.5, 5.4), 4000, 1.0)


@pytest.mark.processes
def test_two_ranks_save_half_and_have_the_same_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["long_context", "--tokens", "256", "--cp", "2"])
    assert long_context.main() == 0
    title, head, alone, shared, last = capsys.readouterr().out.splitlines()
    assert "256 tokens" in title and "saved by a rank" in head
    assert alone.split()[:4] == ["cp", "1", "1", "x"] and shared.split()[:4] == ["cp", "2", "2", "x"]
    assert alone.split()[5:7] == shared.split()[5:7], "the losses of two steps"
    assert last.startswith("goal met: losses differ by ")


def test_every_storage_is_counted_once_and_parameters_never() -> None:
    weight, x = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    saved = SavedBytes([weight])
    with saved.hooks:
        y = (x @ weight.t()).exp()  # this saves x, weight and its own result
        (y * y).sum()  # this saves y again
    assert saved.total == 4 * (5 * 4 + 5 * 3)
