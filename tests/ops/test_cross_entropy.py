"""Cross entropy over a vocabulary that is sharded among ranks, by torch and by the kernels."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.mesh import group_of, shard_range
from tpfuse.kernels import reference
from tpfuse.ops import checks
from tpfuse.ops.cross_entropy import cross_entropy
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.switches import use
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool

HALF = (torch.bfloat16, torch.float16)


def _upcast(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return reference.cross_entropy(logits.float() if logits.dtype in HALF else logits, target)


def _targets(rows: int, vocabulary: int) -> torch.Tensor:
    target = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))
    target[::5], target[5::10] = -1, -100
    target[1], target[2] = 0, vocabulary - 1
    return target


def _against_reference(kind: str, dtype: torch.dtype, vocabulary: int, scale: float) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = (slice(None), slice(*shard_range(vocabulary, rank, world)))
    logits, target = normal(1, 63, vocabulary, dtype=dtype) * scale, _targets(63, vocabulary)
    grad = normal(2, 63, dtype=torch.float32 if dtype in HALF else dtype)
    expected = Expected(_upcast, {"logits": logits, "target": target}, grad)
    mine = logits[own].clone().requires_grad_()
    with use(kernels=kind):
        losses = cross_entropy(mine, target, vocabulary, group_of(tensor_mesh()))
        losses.backward(grad)
    expected.check("out", losses)
    expected.check("logits", mine.grad, own)
    assert torch.count_nonzero(losses[target < 0]) == 0
    assert torch.count_nonzero(mine.grad[target < 0]) == 0


Case = tuple[torch.dtype, int, float]  # the dtype, the size of the vocabulary, the scale of the logits
OF_TORCH: list[Case] = [
    *itertools.product((torch.float32, torch.float64, torch.bfloat16), (1, 2, 63, 1000), (1.0,)),
    *((torch.float32, 100, scale) for scale in (1e-4, 1e4, 1e30)),
]
FEW: list[Case] = [(torch.float32, 257, 1.0), (torch.bfloat16, 2, 1.0), (torch.float32, 100, 1e30)]
FEW += [(torch.float16, 2003, 1.0)]  # several blocks on each rank
MANY: list[Case] = [
    *itertools.product((torch.float32, torch.float16, torch.bfloat16), (2, 257), (1.0,)),
    *((torch.float32, 100, scale) for scale in (1e-4, 1e4, 1e30)),
    (torch.float64, 63, 1.0),  # torch computes it
]


@pytest.mark.parametrize(
    ("kind", "world", "cases"),
    [*(("torch", world, OF_TORCH) for world in (1, 3)), ("triton", 2, FEW), *exhaustive(("triton", 3, MANY))],
)
@on_ranks("world")
def test_losses_and_gradients_match_the_reference(kind: str, cases: list[Case]) -> None:
    for case in cases:
        with naming(case):
            _against_reference(kind, *case)


def _masked(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient with half of the vocabulary at -inf, all of the third of three ranks', and a NaN."""
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = shard_range(12, rank, world)
    whole = normal(5, 6, 12)
    whole[:, 6:] = -torch.inf
    whole[5, 11] = torch.nan
    logits = whole[:, start:stop].clone().requires_grad_()
    with use(kernels=kind):
        losses = cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4, 5]), 12, group_of(tensor_mesh()))
        losses.sum().backward()
    return losses.detach(), logits.grad


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_a_masked_vocabulary_and_a_nan(kind: str) -> None:
    whole = normal(5, 6, 12)[:, :6].requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole, torch.tensor([0, 1, 2, 3, 4, 5]), reduction="none")
    expected.sum().backward()
    results = pool(3).run(_masked, kind)
    assert all(torch.equal(losses, results[0][0]) or losses[5].isnan() for losses, _ in results)
    losses, gradient = results[0][0], torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(losses[:5], expected[:5])
    torch.testing.assert_close(gradient[:5, :6], whole.grad[:5])
    assert losses[5].isnan() and gradient[5].isnan().all()
    assert torch.count_nonzero(gradient[:5, 6:]) == 0


@pytest.mark.parametrize("kind", ["torch", "triton"])
@on_ranks(2)
def test_a_target_outside_the_vocabulary_is_nan_where_values_are_not_checked(kind: str) -> None:
    rank, group = dist.get_rank(), group_of(tensor_mesh())
    logits, target = normal(rank, 5, 4).requires_grad_(), torch.tensor([7, 8, -2, -100, 10**6])
    wrong = torch.tensor([False, True, True, False, True])
    with use(kernels=kind), mock.patch.object(checks, "is_traced", return_value=True):
        losses = cross_entropy(logits, target, 8, group)
        losses.sum().backward()
        total, each = linear_cross_entropy(torch.ones(5, 3), torch.ones(4, 3), target, 8, group)
    assert torch.equal(losses.isnan(), wrong) and torch.equal(each.isnan(), wrong) and total.isnan()
    assert torch.equal(logits.grad.isnan(), wrong.unsqueeze(1).expand(5, 4))


@pytest.mark.parametrize("kind", ["torch", "triton"])
@on_ranks(2)
def test_the_logits_are_not_overwritten(kind: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    start, stop = shard_range(50, rank, world)
    logits, target = normal(7, 20, 50)[:, start:stop].clone().requires_grad_(), _targets(20, 50)
    with use(kernels=kind):
        before = logits.detach().clone()
        loss = cross_entropy(logits, target, 50, group_of(tensor_mesh())).sum()
        (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (again,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.equal(first, again) and torch.equal(logits, before)


def test_logits_of_any_stride() -> None:
    target = _targets(20, 50)
    for logits in (normal(7, 50, 20).t(), normal(7, 20, 80)[:, 9:59], normal(7, 40, 50)[::2]):
        expected = Expected(_upcast, {"logits": logits, "target": target}, torch.ones(20))
        with use(kernels="triton"):
            expected.check_function(partial(cross_entropy, vocabulary=50, group=None))


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_no_tokens(kind: str) -> None:
    logits = torch.empty(0, 10, requires_grad=True)
    with use(kernels=kind):
        losses = cross_entropy(logits, torch.empty(0, dtype=torch.int64), 10, None)
        losses.sum().backward()
    assert losses.shape == (0,) and logits.grad.shape == (0, 10)


def test_the_custom_operators_keep_torchs_rules() -> None:
    logits, target = normal(7, 12, 20, dtype=torch.bfloat16).requires_grad_(), _targets(12, 20)
    forward, backward = torch.ops.tpfuse.cross_entropy_forward.default, torch.ops.tpfuse.cross_entropy_backward.default
    with use(kernels="triton"):
        torch.library.opcheck(forward, (logits, target, 20, 0, None))
        torch.library.opcheck(backward, (logits.detach(), target, torch.ones(2, 12), torch.ones(12), 0))


@pytest.mark.parametrize("kind", ["torch", "triton"])
@on_ranks(3)
def test_bad_arguments_are_refused(kind: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = group_of(tensor_mesh())
    start, stop = shard_range(10, rank, world)
    logits, target = torch.zeros(3, stop - start), torch.zeros(3, dtype=torch.int64)
    for wrong, of, message in (
        (torch.zeros(3, stop - start + 1), target, rf"expected \[M, {stop - start}\] on rank {rank}"),
        (torch.zeros(3), target, r"logits \(3,\)"),
        (logits.long(), target, r"logits are torch\.int64"),
        (logits, target[:2], r"target is torch\.int64 \(2,\): expected int64 \(3,\)"),
        (logits, target.int(), r"target is torch\.int32 \(3,\): expected int64"),
        (logits, target.to("meta"), "target is on meta: expected cpu"),
        *(
            (logits, torch.tensor([0, outside, 0]), "expected 0 to 9, or -1 or -100 for")
            for outside in (10, -2, -99, -101)
        ),
    ):
        with naming(message), use(kernels=kind), pytest.raises(ValueError, match=message):
            cross_entropy(wrong, of, 10, group)
