import itertools

import pytest

from tpfuse.train.options import OptimOptions
from tpfuse.train.schedule import learning_rate


def test_schedule() -> None:
    options = OptimOptions(lr=1.0, min_lr=0.1, warmup=10, decay_steps=110)
    rates = [learning_rate(options, step, 500) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == rates[199] == 0.1
    assert all(b <= a for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(OptimOptions(lr=1.0, min_lr=0.1, warmup=0), 50, 100) == pytest.approx(0.55)
