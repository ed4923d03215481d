"""Rows, statistics and unusual values of cross_entropy's launchers; the operator's numbers are in tests/ops."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_backward_,
    cross_entropy_combine,
    cross_entropy_forward,
)
from tpfuse.testing.inputs import integers, normal

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]


def _targets(rows: int, vocabulary: int) -> Tensor:
    target = integers(3, rows, low=0, high=vocabulary - 1, dtype=torch.int64)
    target[4::5], target[9::10] = -1, -100
    target[1:2], target[2:3] = 0, vocabulary - 1
    return target


def _by_kernels(
    logits: Tensor, target: Tensor, grad: Tensor | None, cuts: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Return losses and gradient, computed from shards of the vocabulary that begin at 0 and at each cut."""
    starts, stops = (0, *cuts), (*cuts, logits.shape[1])
    shards = [logits[:, start:stop] for start, stop in zip(starts, stops, strict=True)]
    statistics = [cross_entropy_forward(shard, target, start) for shard, start in zip(shards, starts, strict=True)]
    loss, normalizer = cross_entropy_combine(torch.stack(statistics), target, logits.shape[1])
    gradients = [
        cross_entropy_backward(shard, target, start, normalizer, grad)
        for shard, start in zip(shards, starts, strict=True)
    ]
    return loss, torch.cat(gradients, dim=1)


@pytest.mark.parametrize("dtype", [BF16, *exhaustive(F16)])
def test_half_types_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    logits, target, grad = normal(1, 33, 101, dtype=dtype), _targets(33, 101), normal(2, 33)
    loss, gradient = _by_kernels(logits, target, grad)
    wide_loss, wide_gradient = _by_kernels(logits.float(), target, grad)
    assert torch.equal(loss, wide_loss) and torch.equal(gradient, wide_gradient.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_one_shard(dtype: torch.dtype) -> None:
    logits, target = normal(1, 70, 300, dtype=dtype), _targets(70, 1000)
    maximum, total, target_logit = cross_entropy_forward(logits, target, 500)
    assert torch.equal(maximum, logits.amax(1).float())
    torch.testing.assert_close(total, (logits.double().logsumexp(1) - maximum).exp().float())
    in_shard = (target >= 500) & (target < 800)
    assert in_shard.any()
    picked = logits.float()[torch.arange(70), torch.where(in_shard, target - 500, 0)]
    assert torch.equal(target_logit, torch.where(in_shard, picked, 0))


@pytest.mark.parametrize(
    ("stride", "first", "width", "dtype"),
    [
        (131, 7, 100, F32),
        (160, 16, 96, BF16),
        *exhaustive(
            (150, 0, 101, F16), (150, 0, 101, F32), (160, 16, 96, F32), (131, 7, 100, BF16), (90, 3, 15, F32),
            (90, 3, 15, F16),
        ),
    ],
)  # fmt: skip
def test_rows_at_every_alignment_and_nothing_written_beside_them(
    stride: int, first: int, width: int, dtype: torch.dtype
) -> None:
    storage = normal(1, 40, stride, dtype=dtype)
    logits, target = storage[:, first : first + width], _targets(40, width)
    loss, gradient = _by_kernels(logits.contiguous(), target, None)
    statistics = cross_entropy_forward(logits, target, 0)
    strided, normalizer = cross_entropy_combine(statistics[None], target, width)
    torch.testing.assert_close(strided, loss)
    torch.testing.assert_close(cross_entropy_backward(logits, target, 0, normalizer), gradient)
    before = storage.clone()
    assert cross_entropy_backward_(logits, target, 0, normalizer) is logits
    torch.testing.assert_close(logits, gradient)
    before[:, first : first + width] = logits
    assert torch.equal(storage, before)


def test_rows_far_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    stride = 2**31 // 4 + 5
    path = tmp_path_factory.mktemp("sparse") / "logits"  # a sparse file, of which 8 GiB take no memory
    storage = torch.from_file(str(path), shared=True, size=4 * stride + 40, dtype=torch.float32)
    logits = storage.as_strided((5, 40), (stride, 1))
    logits.copy_(normal(1, 5, 40))
    target = _targets(5, 40)
    loss, gradient = _by_kernels(logits.clone(), target, None)
    strided, normalizer = cross_entropy_combine(cross_entropy_forward(logits, target, 0)[None], target, 40)
    assert torch.equal(strided, loss)
    torch.testing.assert_close(cross_entropy_backward_(logits, target, 0, normalizer), gradient)
    path.unlink()


@pytest.mark.parametrize(("column", "dtype"), [(40, F32), (99, BF16), *exhaustive((0, F32), (0, F16), (99, F32))])
def test_infinities_and_nan_as_in_torch(column: int, dtype: torch.dtype) -> None:
    logits, target = normal(1, 12, 100, dtype=dtype), torch.full((12,), 7)
    logits[0, column] = torch.nan
    logits[1, column] = torch.inf
    logits[2] = -torch.inf
    logits[3, :50] = -torch.inf
    logits[4, 1:] = -torch.inf
    logits[5, column] = -torch.inf
    logits[6] = -torch.inf
    logits[6, 7] = 1.0
    logits[7] = torch.finfo(dtype).min
    logits[8, column], target[8] = -torch.inf, column
    logits[9] = torch.inf
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, target, reduction="none")
    expected.sum().backward()
    for cuts in ((), (50,), (1,)):
        loss, gradient = _by_kernels(logits, target, None, cuts)
        torch.testing.assert_close(loss.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-6)
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(gradient.double(), leaf.grad, equal_nan=True, **close)


def test_ignored_rows_have_no_gradient_even_with_nan() -> None:
    logits = normal(1, 4, 40)
    logits[0], logits[1], logits[2] = torch.nan, torch.inf, -torch.inf
    loss, gradient = _by_kernels(logits, torch.tensor([-1, -100, -100, -1]), normal(2, 4))
    assert torch.equal(loss, torch.zeros(4)) and torch.equal(gradient, torch.zeros(4, 40))


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    logits, target = normal(1, 6, 40), torch.tensor([0, 40, -2, 39, -99, -101])
    loss, gradient = _by_kernels(logits, target, None)
    outside = [False, True, True, False, True, True]
    assert loss.isnan().tolist() == outside
    assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == outside


def test_targets_of_any_stride_and_a_vocabulary_of_2_to_the_40() -> None:
    start = 2**40
    target = (torch.arange(20) + start).repeat_interleave(2)[::2]
    logits = normal(1, 20, 20)
    statistics = cross_entropy_forward(logits, target, start)
    assert torch.equal(statistics[2], logits.diagonal())
    loss, normalizer = cross_entropy_combine(statistics[None], target, start + 20)
    expected, gradient = _by_kernels(logits, target - start, None)
    assert torch.equal(loss, expected)
    assert torch.equal(cross_entropy_backward(logits, target, start, normalizer), gradient)


def test_empty() -> None:
    none = torch.empty(0, dtype=torch.int64)
    loss, gradient = _by_kernels(torch.empty(0, 7), none, torch.empty(0))
    assert loss.shape == (0,) and gradient.shape == (0, 7)
    maximum, total, target_logit = cross_entropy_forward(torch.empty(3, 0), torch.tensor([-1, 0, 5]), 5)
    assert torch.equal(maximum, torch.full((3,), -torch.inf))
    assert torch.equal(total, torch.zeros(3)) and torch.equal(target_logit, torch.zeros(3))


def test_bad_input_is_refused() -> None:
    logits, target, normalizer = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), torch.ones(2, 3)
    for wrong, message in {
        "logits is torch.float64": (logits.double(), target),
        r"logits has shape \(8,\)": (logits[0], target),
        "expected rows of adjacent elements": (torch.zeros(8, 3).t(), target),
        r"target has shape \(2,\): expected \(3,\)": (logits, target[:2]),
        "target is torch.int32: expected int64": (logits, target.int()),
        "target is on meta": (logits, target.to("meta")),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            cross_entropy_forward(*message, 0)
        with pytest.raises(ValueError, match=wrong):
            cross_entropy_backward_(*message, 0, normalizer)
    for name, arguments in {
        r"normalizer has shape \(3,\)": (normalizer[0],),
        "normalizer is torch.float64": (normalizer.double(),),
        r"scale has shape \(2,\)": (normalizer, torch.ones(2)),
        "scale is torch.bfloat16": (normalizer, torch.ones(3).bfloat16()),
    }.items():
        with pytest.raises(ValueError, match=name):
            cross_entropy_backward(logits, target, 0, *arguments)
    with pytest.raises(ValueError, match="expected rows that are disjoint"):
        cross_entropy_backward_(torch.zeros(1, 8).expand(3, 8), target, 0, normalizer)
    with pytest.raises(ValueError, match=r"statistics has shape \(3, 3\)"):
        cross_entropy_combine(torch.zeros(3, 3), target, 8)
    with pytest.raises(ValueError, match=r"statistics is torch\.float64"):
        cross_entropy_combine(torch.zeros(1, 3, 3).double(), target, 8)
