"""Products on shared memory, rank by rank in one process: what orders every access, under many schedules."""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tpfuse.comm import channel, row_channel
from tpfuse.comm.errors import PeerTimeout
from tpfuse.ops import direct_linear
from tpfuse.testing.explore import PCT, SimulatedMemory, explore
from tpfuse.testing.explore.mutants import Mutant, mutants_of, surviving
from tpfuse.testing.inputs import integers

_PASS = "                    pass\n"
_LATE_NOTE = """        epoch = self.signal()
        self._told[self.memory.rank][epoch % 2].fill_(rows)
        return epoch
"""
Program = Callable[[SimulatedMemory], None]
K, N = 2, 3


def _check_gathering(products: direct_linear.DirectLinear, rank: int, world: int, n: int) -> None:
    whole, grads = integers(n, world, n, K), integers(n + 1, world, world * n, N)
    weights, bias = integers(n + 2, world, N, K), integers(n + 3, N)
    x = whole.flatten(0, 1)
    ((out, _), (again, _)) = products.all_gather(
        whole[rank], [weights[rank], weights[rank][:1]], [bias, None], None, False
    )
    assert torch.equal(out, x @ weights[rank].t() + bias) and torch.equal(again, x @ weights[rank][:1].t())
    grad_x, (grad_weight,), (grad_bias,) = products.all_gather_backward(
        [grads[rank]], whole[rank], [weights[rank]], [None], None, [(True, True)], True
    )
    own = slice(n * rank, n * (rank + 1))
    assert torch.equal(grad_x, torch.einsum("rmn,rnk->mk", grads, weights)[own])
    assert torch.equal(grad_weight, grads[rank].t() @ x) and torch.equal(grad_bias, grads[rank].sum(0))


def _check_scattering(products: direct_linear.DirectLinear, rank: int, world: int, n: int) -> None:
    x, weights, bias = integers(n, world, world * n, K), integers(n + 1, world, N, K), integers(n + 2, N)
    grad, own = integers(n + 3, world * n, N), slice(n * rank, n * (rank + 1))
    total: Tensor = torch.einsum("rmk,rnk->mn", x, weights) + bias
    out = products.reduce_scatter(x[rank], weights[rank], bias, grad[own])
    assert torch.equal(out, (total + grad)[own])
    found = products.reduce_scatter_backward(grad[own], x[rank], weights[rank], (True, True, True))
    for one, other in zip(found, (grad @ weights[rank], grad.t() @ x[rank], grad.sum(0)), strict=True):
        assert torch.equal(one, other)


def _check_all_reduce(products: direct_linear.DirectLinear, rank: int, world: int, n: int) -> None:
    x, weights = integers(n, world, n, K), integers(n + 1, world, N, K)
    bias, residual = integers(n + 2, N), integers(n + 3, n, N)
    total: Tensor = torch.einsum("rmk,rnk->mn", x, weights)
    assert torch.equal(products.all_reduce(x[rank], weights[rank], bias, residual), total + bias + residual)


def program_of(channel: ModuleType, row_channel: ModuleType, direct_linear: ModuleType) -> Program:
    """Each product, of several pieces and of none; then of ranks that disagree, and after that of one row."""

    def program(memory: SimulatedMemory) -> None:
        direct_linear.ONE_SHOT_BYTES = direct_linear.SLOT_BYTES = 4 * N  # one row
        rank, world = memory.rank, memory.world
        small, large = direct_linear.DirectLinear(memory, 8 * K), direct_linear.DirectLinear(memory, 20 * N)
        for n in (3, 0):
            _check_gathering(small, rank, world, n)
            _check_scattering(small, rank, world, n)
        for n in (7, 1):
            _check_all_reduce(large, rank, world, n)
        if world > 1:
            rows = 2 if rank == world - 1 else 1
            x, weight = torch.ones(rows, K), torch.ones(N, K)
            with pytest.raises(ValueError, match="all ranks must have equally many"):
                small.all_gather(x, [weight], [None], None, False)
            with pytest.raises(ValueError, match="all ranks must have equally many"):
                small.all_reduce(x, weight, None, None)
        _check_gathering(small, rank, world, 1)
        _check_scattering(small, rank, world, 1)
        _check_all_reduce(small, rank, world, 1)

    return program


@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_alarm(world: int) -> None:
    explore(program_of(channel, row_channel, direct_linear), world)


def test_no_alarm_in_fifty_seeds() -> None:
    explore(program_of(channel, row_channel, direct_linear), 2, schedules=map(PCT, range(50)))


def test_every_line_is_needed() -> None:
    mutants = mutants_of(channel, row_channel, direct_linear)
    assert len(mutants) >= 11
    left = surviving(program_of, [channel, row_channel, direct_linear], 3, mutants=mutants)
    assert not left, "\n".join(map(str, left))


FAULTS = {
    "one half": (channel, [("self.next_epoch % 2", "0")]),
    "an epoch too old": (channel, [("rank, 0, epoch, op=op", "rank, 0, epoch - 1, op=op")]),
    "a shard that is staged behind its signal": (
        direct_linear,
        [
            ("            slots[own].copy_(rows[part])\n", ""),
            (
                "            yield own, part, slots[own]\n",
                "            slots[own].copy_(rows[part])\n            yield own, part, slots[own]\n",
            ),
        ],
    ),
    "partial sums that are stored behind their signal": (
        direct_linear,
        [
            ("                    torch.mm(rows[rank, part], weight.t(), out=slots[own][rank])\n", _PASS),
            (
                "                epoch = channel.signal_rows(sums.shape[0])\n",
                "                epoch = channel.signal_rows(sums.shape[0])\n"
                "                for rank in range(world):\n"
                "                    torch.mm(rows[rank, part], weight.t(), out=slots[own][rank])\n",
            ),
        ],
    ),
    "a product that is stored behind its signal": (
        direct_linear,
        [
            ("                torch.mm(rows[part], weight.t(), out=slots[own])\n", ""),
            (
                "                if slots[own].nbytes <= most:\n",
                "                torch.mm(rows[part], weight.t(), out=slots[own])\n"
                "                if slots[own].nbytes <= most:\n",
            ),
        ],
    ),
    "sums in the half that others read": (
        direct_linear,
        [("sums = channel.next_slots(out.dtype, most, out.shape[1])", "sums = [slot[:most] for slot in slots]")],
    ),
    "rows noted behind the signal": (
        row_channel,
        [
            (
                "        self._told[self.memory.rank][self.next_epoch % 2].fill_(rows)\n        return self.signal()\n",
                _LATE_NOTE,
            ),
        ],
    ),
    "one note of rows": (
        row_channel,
        [("[self.next_epoch % 2].fill_", "[0].fill_"), ("[rank][epoch % 2]", "[rank][0]")],
    ),
}


def _mutant(fault: str) -> Mutant:
    module, changes = FAULTS[fault]
    source = inspect.getsource(module)
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return Mutant(module.__name__, str(module.__file__), (1, 1), fault, "", source)


def test_faults_that_are_no_deletion() -> None:
    left = surviving(program_of, [channel, row_channel, direct_linear], 3, mutants=map(_mutant, FAULTS))
    assert not left, "\n".join(map(str, left))


def test_waits_end_and_the_next_product_is_right() -> None:
    def program(memory: SimulatedMemory) -> None:
        rank, world = memory.rank, memory.world
        products = direct_linear.DirectLinear(memory, 8 * K)
        for come in (_check_gathering, _check_scattering, _check_all_reduce):
            come(products, rank, world, 3)
            with pytest.raises(PeerTimeout):
                if rank == 0:
                    memory.barrier("elsewhere")
                else:
                    come(products, rank, world, 3)
            memory.reset()
            come(products, rank, world, 3)

    explore(program, 3, timeouts=True)
