"""adamw_ by torch and by the kernel: results, scalars on the device and refusals."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.cases import naming
from tests.support.tiers import exhaustive
from tpfuse.choices import Kernels
from tpfuse.ops.adamw import _update, adamw_
from tpfuse.switches import use
from tpfuse.testing.inputs import normal

RATES = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SIZES = (100, 1, 63)


def _shards(dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return masters, gradients, moments and parameters of shards of SIZES."""
    lists = [[normal(10 * i + j, n) for j, n in enumerate(SIZES)] for i in range(5)]
    lists[3] = [x.square() for x in lists[3]]
    return [*lists[:4], [x.to(dtype) for x in lists[4]]]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_updates_are_those_of_torchs_optimizer(name: Kernels) -> None:
    masters, _, exp_avgs, exp_avg_sqs, parameters = _shards(torch.bfloat16)
    for moment in (*exp_avgs, *exp_avg_sqs):
        moment.zero_()
    leaves = [x.clone().requires_grad_() for x in masters]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 6):
        gradients = [normal(step, n) for n in SIZES]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
        with use(kernels=name):
            adamw_(masters, gradients, exp_avgs, exp_avg_sqs, parameters, step=torch.tensor(float(step)), **RATES)
    for leaf, master, parameter in zip(leaves, masters, parameters, strict=True):
        if name == "torch":
            assert torch.equal(master, leaf)
        torch.testing.assert_close(master, leaf.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("clip", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_scalars_on_the_device_and_half_gradients(name: Kernels, clip: float | Tensor) -> None:
    expected, actual = _shards(), _shards()
    expected[1] = [x.bfloat16().float() * 0.25 for x in expected[1]]
    actual[1] = [x.bfloat16() * 2 for x in actual[1]]
    with use(kernels=name):
        adamw_(*expected, step=torch.tensor(3.0), **RATES)
        factors = {"scale": torch.tensor([0.5]), "clip": clip}
        adamw_(*actual, step=torch.tensor([3]), **RATES | {"lr": torch.tensor(1e-2)}, **factors)
    assert torch.equal(actual[1][0], _shards()[1][0].bfloat16() * 2)  # gradients are only read
    for a, b in zip(actual, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x is actual[1] or a is actual[1] or torch.allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_float32_parameters_are_their_own_masters(name: Kernels) -> None:
    with_parameters, alone = _shards(), _shards()
    with use(kernels=name):
        adamw_(*with_parameters, step=torch.tensor(3.0), **RATES)
        adamw_(*alone[:4], [None] * 3, step=torch.tensor(3.0), **RATES)
        adamw_([], [], [], [], [], step=torch.tensor(3.0), **RATES)
    for master, parameter, other in zip(with_parameters[0], with_parameters[4], alone[0], strict=True):
        assert torch.equal(master, other) and torch.equal(parameter, master)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_autograd_knows_that_saved_tensors_were_overwritten(name: Kernels) -> None:
    shards = _shards()
    weight = shards[0][0].requires_grad_()
    product = (weight * weight).sum()
    with use(kernels=name), torch.no_grad():
        adamw_(*shards, step=torch.tensor(1.0), **RATES)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("gradient", [1.25, *exhaustive(0.0)])
def test_half_moments_follow_those_of_float32(name: Kernels, gradient: float) -> None:
    """Their changes are smaller than half of the last bit. Rounded to the nearest, exp_avg_sq would stay 1.

    In expectation it is 1.25² - (1.25² - 1) 0.999^t. The deviation of n means of it is at most that of t roundings.
    """
    n, steps, drawn = 2000, 100, torch.Generator().manual_seed(1)
    master, given = normal(1, n), torch.full((n,), gradient)
    exp_avg = torch.rand(n, generator=drawn).bfloat16()
    exp_avg_sq = torch.ones(n, dtype=torch.bfloat16)
    wide = [master.clone(), exp_avg.float(), exp_avg_sq.float()]
    rates = RATES | {"beta1": 0.999, "beta2": 0.999, "lr": 1e-4}
    with use(kernels=name):
        for step in range(1, steps + 1):
            number = torch.tensor(float(step))
            adamw_([master], [given], [exp_avg], [exp_avg_sq], [None], step=number, **rates)
            adamw_([wide[0]], [given], [wide[1]], [wide[2]], [None], step=number, **rates)
    for found, expected in ((exp_avg, wide[1]), (exp_avg_sq, wide[2])):
        deviation = 2**-8 * 1.6 * (steps / 4 / n) ** 0.5
        assert abs(found.float().mean() - expected.mean()) < 4 * deviation
        assert (found.float() != found.float().mean()).any()
    assert abs(master - wide[0]).mean() < 0.01 * abs(normal(1, n) - wide[0]).mean()


def test_torch_and_the_kernel_round_moments_alike() -> None:
    """The products are exact, so that both round the same numbers, which are NaN and negative too."""
    found = []
    for name in ("torch", "triton"):
        master, gradient = torch.zeros(4096), (normal(1, 4096) * 2**12).round() / 2**12
        exp_avg, exp_avg_sq = (normal(2, 4096).bfloat16(), normal(3, 4096).abs().bfloat16())
        exp_avg[0] = exp_avg_sq[1] = torch.nan
        gradient.view(torch.int32)[2] = 0x7FFFFFFF  # the NaN of GPUs
        exp_avg_sq[3] = torch.inf
        rates = RATES | {"beta1": 0.5, "beta2": 0.5}
        torchs = mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_)
        with use(kernels=name), mock.patch("tpfuse.ops.adamw._BLOCK", 1024), torchs as update:  # type: ignore[arg-type]
            adamw_([master], [gradient], [exp_avg], [exp_avg_sq], [None], step=torch.tensor(70000.0), **rates)
        blocks = [len(x) for call in update.call_args_list for x in call.args[0]]
        assert blocks == ([1024] * 4 if name == "torch" else []), "temporary tensors are those of a block"
        found.append((exp_avg, exp_avg_sq))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        assert not ours[0 if ours is found[0][0] else 3].isfinite() and ours[4:].isfinite().all()
    nearest = (0.5 * (normal(2, 4096).bfloat16().float() + (normal(1, 4096) * 2**12).round() / 2**12)).bfloat16()
    assert 0.1 < (found[0][0] != nearest).float().mean() < 0.7, "some are rounded to the other neighbour"


def test_the_operator_is_registered_correctly_and_compiles() -> None:
    master, gradient, exp_avg, exp_avg_sq, parameter = (tensors[0] for tensors in _shards())
    rates = [torch.tensor(1e-2), *list(RATES.values())[1:], torch.tensor(2.0), None, torch.tensor(0.5)]
    torch.library.opcheck(_update, (master, gradient, exp_avg, exp_avg_sq, parameter, *rates))
    torch.library.opcheck(_update, (master, gradient, exp_avg, exp_avg_sq, None, *rates))
    torch.library.opcheck(_update, (master, gradient, exp_avg.bfloat16(), exp_avg_sq.bfloat16(), None, *rates))

    def step(shards: list[list[Tensor]], number: Tensor) -> None:
        adamw_(*shards, step=number, **RATES)

    expected, actual = _shards(), _shards()
    with use(kernels="triton"):
        step(expected, torch.tensor(2.0))
        torch.compile(step, fullgraph=True, backend="aot_eager")(actual, torch.tensor(2.0))
    assert all(torch.equal(x, y) for a, b in zip(actual, expected, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_bad_arguments_are_refused(name: Kernels) -> None:
    masters, gradients, exp_avgs, exp_avg_sqs, parameters = _shards()
    halves, step = [x.half() for x in exp_avgs], torch.tensor(1.0)
    for given, moments, number, message in (
        (gradients[:2], exp_avgs, step, "adamw: 2 gradients: expected 3, as many as masters"),
        (gradients[::-1], exp_avgs, step, r"gradient has shape \(63,\): expected \(100,\)"),
        (gradients, halves, step, r"exp_avg is torch\.float16: expected float32"),
        (gradients, [x.bfloat16() for x in exp_avgs], step, r"exp_avg_sq is torch\.float32: expected bfloat16"),
        (gradients, exp_avgs, torch.zeros(3), r"step has shape \(3,\): expected one element"),
    ):
        with naming(message), use(kernels=name), pytest.raises(ValueError, match=message):
            adamw_(masters, given, moments, exp_avg_sqs, parameters, step=number, **RATES)
