"""At stage 3 a write to a parameter counts or is an error; parameters without gradient or elements change nothing."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tests.zero.zero_training import torchs_adamw
from tpfuse.choices import Accumulate
from tpfuse.comm.layout import gather_whole
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import shard
from tpfuse.zero.optimizer import ZeroOptimizer

_LR = 1e-2
_X = normal(7, 6, 5, dtype=torch.float64)


class _Layers(nn.Module):
    """Three units of one size and a head; a forward pass may leave out the second unit."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(5, 2, dtype=dtype)

    def forward(self, x: Tensor, without: bool = False) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if without and index == 1 else torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def _made(replicas: int = 1, dtype: torch.dtype = torch.float64) -> tuple[_Layers, ZeroOptimizer]:
    model = _Layers(dtype)
    return model, ZeroOptimizer(model, mesh_of(2, 1), stage=3, units=model.layers, replicas=replicas, lr=_LR)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _rows() -> Tensor:
    return _X.chunk(2)[dist.get_rank()]


def _scaled(model: nn.Module) -> dict[str, Tensor]:
    return {name: (tensor.detach() * 1.5).clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("how", "replicas"), [("load", 1), *exhaustive(("update", 2), ("unit in place", 1), ("head in place", 2))]
)
@on_ranks(2)
def test_a_write_between_a_forward_pass_and_its_backward_pass_is_an_error(how: str, replicas: int) -> None:
    model, optimizer = _made(replicas)
    _loss(model, _rows()).backward()
    if how == "update":
        optimizer.clip_grad_norm_(1.0)
    else:
        optimizer.step()
        optimizer.zero_grad()
    loss = _loss(model, _rows())
    if how == "load":
        model.load_state_dict(_scaled(model))
    elif how == "update":
        optimizer.step()
        optimizer.zero_grad()
    else:
        with torch.no_grad():
            (model.layers[1] if how == "unit in place" else model.head).weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_writes_between_steps_are_in_the_next_one() -> None:
    """The same holds where an evaluation has gathered parameters and prefetched a unit that it did not use."""
    model, optimizer = _made()
    plain = _Layers()
    reference = torchs_adamw(dict(plain.named_parameters()), lr=_LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    for step in range(3):
        for evaluate in (torch.inference_mode, torch.no_grad):
            with evaluate():
                torch.testing.assert_close(model(_X), plain(_X), rtol=1e-12, atol=1e-12)
                model(_X, without=True)
        if step == 1:
            model.load_state_dict(_scaled(model))
            plain.load_state_dict(_scaled(plain))
        if step == 2:
            optimizer.engine.free_gathered()  # type: ignore[union-attr]
            with torch.no_grad():
                for each in (model, plain):
                    each.head.weight.mul_(1.5)
        _loss(model, _rows()).backward()
        optimizer.step()
        optimizer.zero_grad()
        _loss(plain, _X).backward()
        reference.step()
        reference.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gather_whole(model.get_parameter(name)), parameter, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_write_to_a_gathered_parameter_is_refused() -> None:
    model, optimizer = _made()
    with torch.no_grad():
        model(_X)
        model.head.weight.mul_(1.5)
    _loss(model, _rows()).backward()
    with pytest.raises(
        ValueError, match=r"^head.weight was written to while it was gathered, .*engine.free_gathered\(\)"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [(torch.bfloat16, "sharded"), (torch.bfloat16, "whole"), *exhaustive((torch.float64, "sharded"))],
)
@on_ranks(2)
def test_a_parameter_that_takes_no_part_in_a_micro_batch_has_gradient_zero_there(
    dtype: torch.dtype, accumulate: Accumulate
) -> None:
    """A pattern says for each rank and micro-batch whether the layer takes part; it is not a unit of its own."""
    patterns = [((False, False), (False, False)), ((True, True), (False, False)), ((False, True), (True, False))]
    for pattern in patterns:
        model, plain, rank = _Layers(dtype), _Layers(dtype), dist.get_rank()
        engine = shard(model, mesh_of(2, 1), stage=3, accumulate=accumulate)
        expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in plain.named_parameters()}
        for micro, x in enumerate(_X.to(dtype).chunk(2)):
            engine.start(last=micro == 1)
            _loss(model, x[rank:]).backward() if pattern[rank][micro] else _loss_without(model, x[rank:]).backward()
            for r in range(2):
                _loss(plain, x[r:]).backward() if pattern[r][micro] else _loss_without(plain, x[r:]).backward()
                for name, parameter in plain.named_parameters():
                    if parameter.grad is not None:
                        expected[name] += parameter.grad.double()
                plain.zero_grad()
        engine.finish()
        for member in engine.members:
            found = gather_whole(member.place.sums)  # type: ignore[arg-type]
            rtol = 1e-12 if dtype == torch.float64 else 4 * 2.0**-24  # up to three additions in float32
            torch.testing.assert_close(found.double(), expected[member.name], rtol=rtol, atol=rtol)


def _loss_without(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x, without=True).square().mean()
    return loss


@pytest.mark.parametrize("shape", [(0, 8), *exhaustive(((0,),))])
@on_ranks(2)
def test_a_parameter_without_elements_changes_nothing(shape: tuple[int, ...]) -> None:
    """It may be of another dtype too. The second half of the steps continues from a saved state."""
    results = []
    for extra in (None, torch.bfloat16):
        state: list[Any] = []
        for _ in range(2):
            model = _Layers()
            if extra is not None:
                model.layers[1].register_parameter("extra", nn.Parameter(torch.empty(shape, dtype=extra)))
            optimizer = ZeroOptimizer(model, mesh_of(2, 1), stage=3, units=model.layers, lr=_LR)
            for each, saved in zip((model, optimizer), state, strict=False):
                each.load_state_dict(saved)
            loss = _loss(model, _rows())
            if extra is not None:
                assert model.layers[1].extra.dtype == extra
                loss = loss + model.layers[1].extra.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = [model.state_dict(), optimizer.state_dict()]
        results.append([gather_whole(p).clone() for p in model.parameters() if p.numel()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
