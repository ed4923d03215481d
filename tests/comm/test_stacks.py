"""The Python stacks of other processes are read when they are complete."""

import signal
from pathlib import Path

import pytest

from tpfuse.comm import stacks

USER = f"{1 << (signal.SIGUSR2 - 1):016x}"
PART, WHOLE = "Current thread 0x1:\n", "Current thread 0x1:\n  File a.py\n"


@pytest.mark.parametrize("signals", ["SigPnd", "ShdPnd", "SigBlk"])
def test_a_stack_that_is_being_written_is_waited_for(
    signals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has written one line when it is first looked at, and the whole stack when its handler ends."""
    path = tmp_path / ".stack-7"
    path.write_text(PART)
    looks = []

    def status(pid: int) -> dict[str, str]:
        looks.append(pid)
        if len(looks) == 4:
            path.write_text(WHOLE)
        busy = {signals: USER} if len(looks) < 4 else {}
        return {"State": "R (running)", "SigCgt": USER, "SigBlk": "0", "SigPnd": "0", "ShdPnd": "0"} | busy

    monkeypatch.setattr(stacks, "_status", status)
    assert stacks.stacks_of(tmp_path, [7]) == {7: WHOLE}


def test_a_stack_is_not_read_while_its_signal_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is then neither pending nor blocked for a moment, which is the second look here."""
    path = tmp_path / ".stack-7"
    path.write_text(PART)
    looks = []

    def status(pid: int) -> dict[str, str]:
        looks.append(pid)
        if len(looks) == 4:
            path.write_text(WHOLE)
        blocked = USER if len(looks) == 3 else "0"
        return {"State": "R (running)", "SigCgt": USER, "SigBlk": blocked, "SigPnd": "0", "ShdPnd": "0"}

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
