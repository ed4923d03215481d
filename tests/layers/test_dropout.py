"""Dropout as a module: its masks, and evaluation."""

import torch

from tpfuse.layers.dropout import Dropout, DropoutState
from tpfuse.ops.dropout import dropout, dropout_key, dropout_keys
from tpfuse.testing.inputs import normal


def _state(seed: int = 1, step: int = 2) -> DropoutState:
    return DropoutState(dropout_keys(torch.empty(0), seed, step, 7), torch.arange(21), torch.arange(4).view(2, 2))


def test_the_mask_is_that_of_the_site_the_step_and_the_seed() -> None:
    x = normal(1, 21, 63)
    out = Dropout(0.3, site=5)(x, _state())
    assert torch.equal(out, dropout(x, 0.3, torch.arange(21), torch.tensor(dropout_key(1, 2, 5))))
    others = [Dropout(0.3, site=6)(x, _state()), Dropout(0.3, site=5)(x, _state(step=3)), Dropout(0.3, 5)(x, _state(0))]
    assert not any(torch.equal(out, other) for other in others)


def test_nothing_is_dropped_in_evaluation_or_at_p_zero() -> None:
    x = normal(1, 21, 63)
    assert Dropout(0.3, site=5)(x, None) is x
    assert Dropout(0.0, site=5)(x, _state()) is x
    assert repr(Dropout(0.3, site=5)) == "Dropout(p=0.3, site=5)"
