"""Deadlines become longer on a slow machine. Most tests replace the measurement of its slowness."""

import time

import pytest

from tpfuse.testing import patience
from tpfuse.testing.patience import Deadline, patient, slowness, wait_until


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The measurements and the time, which the test sets."""
    found = {"stretch": 1.0, "load": 0.0, "now": 100.0}
    monkeypatch.setattr(patience, "_stretch", lambda: found["stretch"])
    monkeypatch.setattr(patience, "_load", lambda: found["load"])
    monkeypatch.setattr(patience, "_last", (-1.0, 1.0))
    monkeypatch.setattr(time, "monotonic", lambda: found["now"])
    return found


def test_the_larger_of_two_measurements_counts_and_is_kept_for_a_second(machine: dict[str, float]) -> None:
    assert slowness() == 1.0
    machine |= {"stretch": 2.0, "load": 3.0, "now": 100.9}
    assert slowness() == 1.0
    machine["now"] = 101.1
    assert slowness() == 3.0 and patient(20.0) == 60.0
    machine |= {"stretch": 4.0, "now": 103.0}
    assert patient(0.5) == 2.0
    machine |= {"stretch": 1e6, "now": 105.0}
    assert 4.0 < slowness() < 100.0, "an error of measurement"


def test_a_deadline_becomes_later_but_never_earlier(machine: dict[str, float]) -> None:
    deadline = Deadline(10.0)
    assert deadline.left() == 10.0 and deadline.next_look() == 1.0
    machine |= {"now": 105.0, "stretch": 2.0}
    assert deadline.left() == 15.0
    machine |= {"now": 119.5, "stretch": 1.0}
    assert deadline.left() == deadline.next_look() == 0.5
    machine["now"] = 121.0
    assert deadline.left() == deadline.next_look() == 0.0


def test_the_slowness_of_this_machine_is_measured() -> None:
    patience._last = (-1.0, 1.0)
    began = time.monotonic()
    assert slowness() == slowness() >= 1.0
    assert patience._last[0] >= began
    assert patience._stretch() > 0.5 and patience._load() >= -1.0


def test_wait_until_returns_when_the_condition_holds_and_names_it_otherwise() -> None:
    turns = iter([False, False, True])
    wait_until(lambda: next(turns), "the third turn has come")
    with pytest.raises(AssertionError, match="were not enough until: the fourth turn has come"):
        wait_until(lambda: False, "the fourth turn has come", 0.01)


def test_the_time_out_of_a_test_grows_with_the_slowness(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook of conftest.py multiplies the time-out of pytest-timeout by the slowness of the machine."""
    seen: list[float] = []
    monkeypatch.setattr(
        "pytest_timeout.pytest_timeout_set_timer", lambda item, settings: seen.append(settings.timeout) or True
    )
    monkeypatch.setattr(patience, "_last", (time.monotonic() + 100.0, 2.5))
    import pytest_timeout

    settings = pytest_timeout._get_item_settings(request.node)
    request.config.pluginmanager.hook.pytest_timeout_set_timer(item=request.node, settings=settings)
    assert seen == [2.5 * settings.timeout] and settings.timeout >= 300
