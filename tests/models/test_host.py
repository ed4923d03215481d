"""The host's work for a layer of GPT-2 whose launches nothing captures, with stand-ins for the driver of a GPU."""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from tpfuse.kernels import compiled_launch
from tpfuse.kernels import launch as launching
from tpfuse.models.gpt import GPT, GPTConfig

MOST = 150  # plain torch needs 45


@pytest.fixture
def first_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Let Triton's kernels start on CPU tensors as on an H100, where they do nothing.

    The counter has the launches that looked for a compiled kernel, as only the first one of a plan does.
    """
    seen: Counter[str] = Counter()
    compiled = SimpleNamespace(function=1, packed_metadata=(), metadata=SimpleNamespace(global_scratch_size=0))
    driver = SimpleNamespace(get_current_device=partial(int, -1), get_current_stream=int)

    def run(kernel: Any, grid: object, arguments: object, *_: object) -> compiled_launch.Started:
        seen[kernel.__name__] += 1
        return compiled_launch.Started(compiled_launch._known(kernel), compiled, itertools.chain, driver, -1)

    monkeypatch.setattr(compiled_launch, "run", run)
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setitem(launching._gpus, torch.device("cpu"), ("sm_90", 132))
    monkeypatch.setattr("tpfuse.switches.resolved_kernels", lambda device_type: "triton")
    launching.forget_plans()
    torch.use_deterministic_algorithms(False)
    yield seen
    torch.use_deterministic_algorithms(True)
    launching.forget_plans()


def _calls(layers: int) -> Counter[str]:
    """Return the Python functions that are called in a step of a model whose launches have been planned."""
    config = GPTConfig(vocab_size=96, n_positions=16, n_embd=32, n_layer=layers, n_head=2, dropout=0.0)
    model, calls = GPT(config, dtype=torch.bfloat16), Counter[str]()
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    ids = torch.arange(16).view(1, 16)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_qualname}"] += 1

    for noted in (False, True):
        sys.setprofile(note if noted else None)
        try:
            model(ids, ids, loss_weight=1 / 16).backward()
        finally:
            sys.setprofile(None)
    return calls


def test_python_calls_of_a_layer(first_launches: Counter[str]) -> None:
    few, many = _calls(2), _calls(4)
    assert set(first_launches) >= {"norm_forward_kernel", "norm_sum_parts_kernel", "activation_backward_kernel"}
    more = many - few
    assert sum(more.values()) / 2 <= MOST, more.most_common()
    assert "launch.py:launch" not in more and "compiled_launch.py:run" not in more, "a launch has no plan"
