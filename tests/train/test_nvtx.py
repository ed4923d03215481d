"""NVTX ranges of training, as a stand-in of NVTX receives them. The steps are real, on CPUs; the domain is faked."""

import sys
import threading
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.command import Commands
from tests.support.training import new_trainer, options_of
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks
from tpfuse.train.options import ProfileOptions
from tpfuse.train.step_profile import StepProfile

MISSING = "--profile.nvtx needs the package nvtx: pip install 'tpfuse[profile]'"


class Domain:
    """A stand-in of NVTX's domain, which keeps each call as (what, range or thread, attributes)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, Any]] = []

    def get_event_attributes(self, message: str, color: int = 0, category: str = "") -> tuple[str, str]:
        return message, category

    def push_range(self, attributes: tuple[str, str]) -> None:
        self.calls.append(("push", threading.get_ident(), attributes))

    def pop_range(self) -> None:
        self.calls.append(("pop", threading.get_ident(), None))

    def start_range(self, attributes: tuple[str, str]) -> int:
        self.calls.append(("start", len(self.calls), attributes))
        return len(self.calls) - 1

    def end_range(self, number: int) -> None:
        self.calls.append(("end", number, None))


@on_ranks(2)
def test_ranks_show_their_spans() -> None:
    """The ranges of each thread are balanced, and the first and last range of a rank names rank and layout."""
    nvtx, domain, group = pytest.importorskip("nvtx"), Domain(), dist.group.WORLD
    with mock.patch.object(nvtx, "get_domain", lambda name: {"tpfuse": domain}[name]), use(implementation="direct"):
        trainer, windows = new_trainer(options_of(tp=2))
        for wanted in (False, True):
            model, layout, device = trainer.model, trainer.layout, trainer.device
            profile = StepProfile(ProfileOptions(nvtx=wanted), model, layout, group, device, False, range(1, 3))
            assert not domain.calls, "nothing calls NVTX without the option"
            with profile:
                for number in (1, 2):
                    with profile.step(number):
                        trainer.train_step(windows, lambda: False)
    (kind, whole, place), *_, last = domain.calls
    assert (kind, place) == ("start", (f"rank {dist.get_rank()} of 2: tp 2 x cp 1 x dp 1", "rank"))
    assert last == ("end", whole, None)
    found = _spans(domain.calls)
    layer, operator = "transformer.h.0.mlp.c_proj", "linear_reduce_scatter"
    for step in ("step 1", "step 2"):
        around = step, "micro-batch 0"
        assert found[*around, "forward", f"{operator} (direct) in {layer}"] == "operator"
        assert found[*around, "backward", f"{operator} backward (direct) in {layer}"] == "operator"
    shown = [attributes for _, _, attributes in domain.calls if attributes]
    assert shown.count((layer, "layer")) == 4, "in the forward and the backward pass of two steps"
    assert not [message for message, _ in shown if " torch." in message]
    assert {category for _, category in shown} >= {"step", "phase", "operator", "communication", "wait"}


def _spans(calls: list[tuple[str, int, Any]]) -> dict[tuple[str, ...], str]:
    """Return the kind of each push by the messages around it. Fails unless ranges are balanced on each thread."""
    stacks: dict[int, list[str]] = defaultdict(list)
    found, started = {}, set[int]()
    for kind, where, attributes in calls:
        if kind == "push":
            stacks[where].append(attributes[0])
            found[tuple(stacks[where])] = attributes[1]
        elif kind == "pop":
            stacks[where].pop()
        elif kind == "start":
            started.add(where)
        else:
            started.remove(where)
    assert not started and not any(stacks.values())
    return found


def test_the_missing_package_is_named_before_a_rank_starts(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert commands.fail_to_train("--profile.nvtx", "--parallel.tp", "2").endswith(MISSING)
    assert not commands.out.exists()


@pytest.mark.parametrize(
    ("last", "expected"),
    [(4, ["start", "step 2", "step 3", "stop", "step 4"]), (2, ["start", "step 2", "stop"])],
    ids=["all", "ended early"],
)
def test_tools_of_nvidia_are_told_which_steps_to_record(
    last: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends before the last step to profile ends the recording too."""
    pytest.importorskip("nvtx")
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    options, layout = ProfileOptions(steps="2:3", nvtx=True), {"tp": 1, "cp": 1, "dp": 1}
    profile = StepProfile(options, nn.Linear(2, 2), layout, None, torch.device("cuda"), False, range(1, 5))
    with profile:
        for number in range(1, last + 1):
            with profile.step(number):
                said.append(f"step {number}")
    assert said == ["step 1", *expected]
