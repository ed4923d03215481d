"""Offloaded activations: the same bits, with one input of a block on the device.

A stand-in makes copies as late as streams allow, so that each wait that is missing gives NaN.
"""

import dataclasses
from functools import partial
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor

from tests.support.copy_stand_in import CopyStandIn
from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, Result, decoder_config, options_of, ranks_of, train, train_decoder
from tpfuse.models.gpt import GPT
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.parallel import offloaded_inputs
from tpfuse.parallel.offloaded_inputs import OffloadedInputs
from tpfuse.parallel.recompute import recomputed_whole
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool


def _offloaded() -> tuple[OffloadedInputs, list[str]]:
    made, copies = OffloadedInputs(), CopyStandIn(torch.device("cpu"))
    made._copies = copies
    return made, copies.log


def _gradient(recompute: Any, log: list[str], inputs: list[Any], passes: int = 1) -> Tensor:
    """Return the gradient of three blocks' weight, and note when a block computes and which inputs there are."""
    weight = normal(1, 4, 4).requires_grad_()

    def block(x: Tensor) -> Tensor:
        log.append("compute")
        return (x @ weight).tanh()

    x = normal(2, 5, 4) @ weight
    for _ in range(3):
        inputs.append(ref(x.untyped_storage()))
        x = recompute(block, x)
    loss = x.square().sum()
    del x
    log += [f"{sum(each() is not None for each in inputs)} inputs", "backward"]
    for left in range(passes, 0, -1):
        loss.backward(retain_graph=left > 1)
    assert weight.grad is not None
    return weight.grad


def test_copies_run_one_block_ahead_of_the_backward_pass() -> None:
    offloaded, log = _offloaded()
    found = _gradient(partial(offloaded, recomputed_whole), log, [])
    assert torch.equal(found, _gradient(recomputed_whole, [], []))
    forward = ["to host", "compute", "wait", "to host", "compute", "wait", "to host", "compute", "1 inputs", "backward"]
    backward = ["wait", "to device", "compute", "wait", "to device", "compute", "wait", "compute"]
    assert log == forward + backward


def test_passes_over_a_graph_that_is_kept_copy_again() -> None:
    offloaded, log = _offloaded()
    found = _gradient(partial(offloaded, recomputed_whole), log, [], passes=2)
    assert torch.equal(found, _gradient(recomputed_whole, [], [], passes=2))


def test_a_write_to_an_offloaded_input_is_an_error() -> None:
    offloaded, _ = _offloaded()
    weight = normal(1, 4).requires_grad_()
    x = weight * 2
    y = offloaded(recomputed_whole, lambda x: x * weight, x)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match=r"the input of a block, \(4,\), was written to in place"):
        y.sum().backward()


def test_only_full_recomputation_keeps_inputs_alone() -> None:
    with pytest.raises(ValueError, match="offload_activations is for recompute full, not for selective"):
        parallelize_gpt(GPT(CONFIG), None, GPTOptions(recompute="selective", offload_activations=True))


def _train(layout: dict[str, Any], family: str | None, layers: int) -> tuple[Result, bool]:
    """Return the result of three steps, and whether inputs went to the host and back."""
    made: list[CopyStandIn] = []

    def stand_in(device: torch.device) -> CopyStandIn:
        made.append(CopyStandIn(device))
        return made[-1]

    with mock.patch.object(offloaded_inputs, "CopyStream", stand_in):
        if family is None:
            config = dataclasses.replace(CONFIG, n_layer=layers)
            result = train(options_of(recompute="full", **layout), 3, config=config)
        else:
            options = options_of(recompute="full", order="random", batch=8, **layout)
            result = train_decoder(decoder_config(family), options, 3)
    return result, any("to device" in each.log for each in made)


@pytest.mark.parametrize(
    ("layout", "family", "layers"),
    [
        ({"dp": 1}, "llama", 2),
        *exhaustive(
            ({"dtype": "bfloat16", "tp": 2, "pp": 2, "accumulation": 3}, None, 4),
            ({"pp": 2, "accumulation": 4, "pp_schedule": "zbv"}, None, 8),
            ({"pp": 2, "accumulation": 6, "pp_schedule": "interleaved_1f1b", "stage": 3, "dp": 2}, None, 4),
            ({"pp": 2, "accumulation": 4}, "gpt2", 2),
            ({"cp": 2, "stage": 3}, "phi3", 2),
        ),
    ],
)
def test_offloaded_activations_train_to_the_same_bits(layout: dict[str, Any], family: str | None, layers: int) -> None:
    ranks = pool(ranks_of(options_of(**layout)))
    expected = ranks.run(_train, layout, family, layers)
    found = ranks.run(_train, {**layout, "offload_activations": True}, family, layers)
    for (losses, norms, weights), (other_losses, other_norms, other_weights) in zip(
        (each for each, _ in found), (each for each, _ in expected), strict=True
    ):
        assert losses == other_losses and norms == other_norms
        assert all(torch.equal(weights[name], weight) for name, weight in other_weights.items())
    assert any(copied for _, copied in found) and not any(copied for _, copied in expected)
