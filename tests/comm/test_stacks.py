"""The Python stacks of other processes are read when they are complete."""

import signal
from pathlib import Path

import pytest

from tpfuse.comm import stacks

USER = f"{1 << (signal.SIGUSR2 - 1):016x}"
PART, WHOLE = "Current thread 0x1:\n", "Current thread 0x1:\n  File a.py\n"


@pytest.mark.parametrize(
    "busy",
    [
        [{"SigPnd": USER}] * 3,
        [{"ShdPnd": USER}] * 3,
        [{"SigBlk": USER}] * 3,
        [{}, {}, {"SigBlk": USER}],  # while a signal is delivered, it is neither pending nor blocked for a moment
    ],
    ids=["SigPnd", "ShdPnd", "SigBlk", "delivered"],
)
def test_a_stack_that_is_being_written_is_waited_for(
    busy: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has written one line when it is first looked at, and the whole stack when its handler ends.

    busy: what its status has at each look before the handler ends.
    """
    path = tmp_path / ".stack-7"
    path.write_text(PART)
    left = iter(busy)

    def status(pid: int) -> dict[str, str]:
        now = next(left, None)
        if now is None:
            path.write_text(WHOLE)
        return {"State": "R (running)", "SigCgt": USER, "SigBlk": "0", "SigPnd": "0", "ShdPnd": "0"} | (now or {})

    monkeypatch.setattr(stacks, "_status", status)
    assert stacks.stacks_of(tmp_path, [7]) == {7: WHOLE}


@pytest.mark.parametrize(("state", "caught"), [("T (stopped)", USER), ("R (running)", "0")])
def test_a_process_that_would_not_answer_is_not_asked(
    state: str, caught: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not catch the signal, the signal would end it."""
    (tmp_path / ".stack-7").touch()
    monkeypatch.setattr(stacks, "_status", lambda pid: {"State": state, "SigCgt": caught})
    monkeypatch.setattr(stacks.os, "kill", lambda *arguments: pytest.fail("the process was asked"))
    assert stacks.stacks_of(tmp_path, [7]) == {}
