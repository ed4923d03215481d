"""Compressed sums between nodes: exact where they can be, sent completely over time otherwise, with bytes counted."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.tiers import exhaustive
from tpfuse.comm.collectives import collective
from tpfuse.comm.traffic import Traffic
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero.compression import Bf16Compression, PowerSGDCompression, compression_of

# A vector, a matrix that compresses at rank 2, a gap, a matrix that is too small, a second one, another vector.
MATRICES = ((7, 20, 16), (340, 4, 5), (360, 12, 30))
SIZE = 733


def _drawn(rank: int, step: int, size: int = SIZE, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def _whole(rank: int, step: int, size: int = SIZE) -> torch.Tensor:
    """Return whole numbers that bf16 represents exactly, as it does their sums."""
    return (torch.arange(size) * (rank + 3) + step).remainder(17).float() - 8


def _matrices(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        x[start : start + rows * columns].view(rows, columns) for start, rows, columns in (MATRICES[0], MATRICES[2])
    ]


def _reduce(compression: PowerSGDCompression, x: torch.Tensor) -> torch.Tensor:
    compression.all_reduce(x, 0, MATRICES, dist.group.WORLD, Traffic())
    compression.keep_pending()
    return x


def _wide(rank: int, size: int) -> torch.Tensor:
    """Return numbers of such different magnitudes that another order of addition gives another sum."""
    return _drawn(rank, 0, size, torch.float32) * 2.0 ** ((torch.arange(size) * 7 + rank * 13) % 41 - 20)


@contextlib.contextmanager
def _counted() -> Iterator[Traffic]:
    """Count the bytes that torch.distributed gets to send to other ranks, and has received from them afterwards."""
    found, world = Traffic(), dist.get_world_size()
    gather, exchange = collective.all_gather_single, dist.all_to_all_single

    def count_gathered(out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        found.add((world - 1) * x.nbytes, out.nbytes - x.nbytes)
        return gather(out, x, **options)

    def count_exchanged(out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        found.add(x.nbytes - x.nbytes // world, out.nbytes - out.nbytes // world)
        return exchange(out, x, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "all_gather_single", count_gathered)
        patch.setattr(dist, "all_to_all_single", count_exchanged)
        yield found


@pytest.mark.parametrize(("world", "size"), [(2, 63), (3, 1000), *exhaustive((3, 63), (4, 2))])
@on_ranks("world")
def test_bf16_is_summed_in_float32_in_rank_order(size: int) -> None:
    rank, world, traffic = dist.get_rank(), dist.get_world_size(), (Traffic(), Traffic())
    x = _wide(rank, size)
    with _counted() as half:
        shard = Bf16Compression().reduce_scatter(x.clone(), 0, (), dist.group.WORLD, traffic[0])
    with _counted() as both:
        Bf16Compression().all_reduce(x, 0, (), dist.group.WORLD, traffic[1])
    truth = sum(_wide(each, size).bfloat16().float() for each in range(world))
    shard_size = -(-size // world)
    padded = torch.cat([truth, torch.zeros(world * shard_size - size)]).view(world, shard_size)
    assert torch.equal(x, truth if world == 2 else truth.bfloat16().float()) and torch.equal(shard, padded[rank])
    times = 2 * (world - 1) * shard_size
    assert traffic == (half, both) and (half.sent, half.received) == (times, times)
    assert (both.sent, both.received) == ((2 * size,) * 2 if world == 2 else (2 * times,) * 2)


def _whole_numbers(rank: int) -> tuple[torch.Tensor, tuple[int, int]]:
    x, traffic = _whole(dist.get_rank(), 0), Traffic()
    with _counted() as found:
        PowerSGDCompression(rank).all_reduce(x, 0, MATRICES, dist.group.WORLD, traffic)
    assert traffic == found
    return x, (traffic.sent, traffic.received)


@pytest.mark.parametrize("world", [2, 3, *exhaustive(4)])
def test_vectors_and_small_matrices_are_sent_uncompressed(world: int) -> None:
    total = sum(_whole(rank, 0) for rank in range(world))
    for found, sent in pool(world).run(_whole_numbers, 6):  # at rank 6 no matrix compresses
        assert torch.equal(found, total)
        assert sent == ((4 * SIZE,) * 2 if world == 2 else (8 * (world - 1) * -(-SIZE // world),) * 2)
    plain = torch.ones(SIZE, dtype=torch.bool)
    for matrix in _matrices(plain):
        matrix.fill_(False)
    first, second = int(plain.sum()) + 2 * (20 + 12), 2 * (16 + 30)
    for found, sent in pool(world).run(_whole_numbers, 2):
        assert torch.equal(found[plain], total[plain]) and not torch.equal(found, total)
        if world == 2:
            assert sent == (4 * (first + second),) * 2
        else:
            assert sent == (8 * (world - 1) * (-(-first // world) + -(-second // world)),) * 2


@on_ranks(2)
def test_zero_gradients_do_not_stop_later_ones() -> None:
    compression, total = PowerSGDCompression(rank=2), _drawn(0, 2) + _drawn(1, 2)
    assert not _reduce(compression, torch.zeros(SIZE, dtype=torch.float64)).any()
    for step in (1, 2):
        x = _reduce(compression, _drawn(dist.get_rank(), step))
    for found, truth in zip(_matrices(x), _matrices(total), strict=True):
        assert found.isfinite().all() and torch.linalg.matrix_rank(found) == 2
        assert (found - truth).norm() < 2 * truth.norm()


def _steps(count: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Return the results of `count` steps, and the state before and after them; one step comes before."""
    compression = PowerSGDCompression(rank=2)
    x = _drawn(dist.get_rank(), 99, dtype=dtype)
    compression.all_reduce(x, 5, MATRICES, dist.group.WORLD, Traffic())
    compression.keep_pending()
    before = {name: {k: v.clone() for k, v in kept.items()} for name, kept in compression.state_dict().items()}
    results = []
    for step in range(count):
        x = _drawn(dist.get_rank(), step, dtype=dtype)
        compression.all_reduce(x, 5, MATRICES, dist.group.WORLD, Traffic())
        compression.keep_pending()
        results.append(x)
    return results, before, compression.state_dict()


@pytest.mark.parametrize("world", [2, 3])
def test_each_step_equals_that_of_the_paper(world: int) -> None:
    """The sum is projected onto the span of Σ M Q; numpy computes it here from all ranks' matrices."""
    ranks = pool(world).run(_steps, 4, torch.float64)
    for place, (name, kept) in enumerate(ranks[0][1].items()):
        factor = kept["factor"].numpy()
        errors = [before[name]["error"].numpy() for _, before, _ in ranks]
        for step in range(4):
            matrices = [_matrices(_drawn(rank, step))[place].numpy() + errors[rank] for rank in range(world)]
            basis, _ = np.linalg.qr(sum(matrices) @ factor)
            errors = [matrix - basis @ (basis.T @ matrix) for matrix in matrices]
            factor = sum(matrices).T @ basis
            for results, _, _ in ranks:
                np.testing.assert_allclose(_matrices(results[step])[place].numpy(), basis @ factor.T, atol=1e-11)
        for rank, (_, _, after) in enumerate(ranks):
            np.testing.assert_allclose(after[name]["error"].numpy(), errors[rank], atol=1e-11)
        assert list(ranks[0][1]) == ["0.5.7", "0.5.360"]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_to_the_bit_and_only_remainders_are_missing(world: int) -> None:
    ranks = pool(world).run(_steps, 3, torch.float32)
    for results, _, after in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(results, ranks[0][0], strict=True))
        assert all(torch.equal(after[name]["factor"], ranks[0][2][name]["factor"]) for name in after)
    for place, name in enumerate(ranks[0][1]):
        given = sum(_matrices(_drawn(rank, step))[place] for rank in range(world) for step in range(3))
        given += sum(before[name]["error"] for _, before, _ in ranks)
        arrived = sum(_matrices(result)[place] for result in ranks[0][0]) + sum(r[2][name]["error"] for r in ranks)
        torch.testing.assert_close(arrived.double(), given.double(), rtol=0, atol=1e-4)


@on_ranks(2)
def test_non_finite_gradients_reach_all_ranks_and_leave_no_trace() -> None:
    """A bad number in one matrix on one rank; the next step of that matrix is as without it."""
    nexts = []
    for spoil in (True, False):
        compression = PowerSGDCompression(rank=2)
        _reduce(compression, _drawn(dist.get_rank(), 0))
        if spoil:
            x = _drawn(dist.get_rank(), 1)
            if dist.get_rank() == 1:
                x[10] = torch.inf
            one, other = _matrices(_reduce(compression, x))
            assert one.isnan().all() and other.isfinite().all()
        nexts.append(_matrices(_reduce(compression, _drawn(dist.get_rank(), 2))))
    (first, second), (first_without, second_without) = nexts
    assert torch.equal(first, first_without) and not torch.equal(second, second_without)


@on_ranks(2)
def test_a_run_resumes_from_the_saved_state() -> None:
    def steps(compression: PowerSGDCompression, *numbers: int) -> torch.Tensor:
        return [_reduce(compression, _drawn(dist.get_rank(), step)) for step in numbers][-1]

    first, second = PowerSGDCompression(rank=2), PowerSGDCompression(rank=2, seed=9)
    whole = steps(PowerSGDCompression(rank=2), 0, 1, 2)
    steps(first, 0, 1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(steps(second, 2), whole)
    assert not torch.equal(steps(PowerSGDCompression(rank=2), 2), whole)
    with pytest.raises(ValueError, match=r"^the state has factors of rank 2: expected 3$"):
        PowerSGDCompression(rank=3).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"^the state is PowerSGD's: expected the empty state of compression in bf"):
        Bf16Compression().load_state_dict(first.state_dict())


@on_ranks(2)
def test_remainders_are_scaled_with_the_gradients() -> None:
    found = []
    for scale in (1.0, 1024.0):
        compression = PowerSGDCompression(rank=2)
        for step in range(2):
            _reduce(compression, _drawn(dist.get_rank(), step))
        compression.scale_errors(scale)
        found.append(_reduce(compression, _drawn(dist.get_rank(), 2) * scale) / scale)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_groups_have_separate_states() -> None:
    """One bucket and one first element in two groups are two matrices; another shape in one of them is an error."""
    other = dist.new_group()
    assert other is not None
    alone, both = PowerSGDCompression(rank=2), PowerSGDCompression(rank=2)
    for step in range(2):
        x, y = (_reduce(each, _drawn(dist.get_rank(), step)) for each in (alone, both))
        both.all_reduce(_drawn(dist.get_rank(), 7), 0, ((7, 10, 32),), other, Traffic())
        both.keep_pending()
    assert torch.equal(x, y)
    with pytest.raises(ValueError, match=r"^bucket 0: the matrix at 7 has shape \(16, 20\), but it had \(10, 32\) be"):
        both.all_reduce(y.clone(), 0, ((7, 16, 20),), other, Traffic())


def test_options() -> None:
    assert compression_of("none") is None
    assert isinstance(compression_of("bf16"), Bf16Compression)
    chosen = compression_of("powersgd-7", seed=5)
    assert isinstance(chosen, PowerSGDCompression) and (chosen.rank, chosen.seed) == (7, 5)
    for name in ("fp8", "powersgd", "powersgd-0", "powersgd--1", "bf16-4"):
        with pytest.raises(ValueError, match=f"^compression {name}: expected none, bf16, or powersgd-RANK"):
            compression_of(name)


def test_first_factors_do_not_depend_on_how_a_rank_numbers_its_groups() -> None:
    """In a pipeline, ranks of a group are in different numbers of other groups."""
    matrix = torch.zeros(8, 6)
    first, other = (PowerSGDCompression(2, seed=3)._first_factor((group, 5, 16), matrix) for group in (0, 1))
    assert torch.equal(first, other)
    assert not torch.equal(first, PowerSGDCompression(2, seed=3)._first_factor((0, 5, 32), matrix))
