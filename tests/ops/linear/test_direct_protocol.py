"""Products on shared memory, rank by rank in one process: signals order every access, under many schedules."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.channels import epochs_of
from tpfuse.comm import channel
from tpfuse.comm.errors import PeerTimeout
from tpfuse.explore import SimulatedMemory
from tpfuse.explore.suite import Fault, ProtocolSuite, current, replace
from tpfuse.ops.linear import direct as direct_linear
from tpfuse.testing.inputs import integers

K, N = 2, 3


def _check_gathering(products: direct_linear.DirectLinear, rank: int, world: int, n: int) -> None:
    whole, grads = integers(n, world, n, K), integers(n + 1, world, world * n, N)
    weights, bias = integers(n + 2, world, N, K), integers(n + 3, N)
    x = whole.flatten(0, 1)
    ((out, _), (again, _)) = products.all_gather(
        whole[rank], [weights[rank], weights[rank][:1]], [bias, None], None, False
    )
    assert torch.equal(out, x @ weights[rank].t() + bias) and torch.equal(again, x @ weights[rank][:1].t())
    grad_x, (grad_weight,) = products.all_gather_backward(
        [grads[rank]], whole[rank], [weights[rank]], [True], needs_x=True
    )
    own = slice(n * rank, n * (rank + 1))
    assert torch.equal(grad_x, torch.einsum("rmn,rnk->mk", grads, weights)[own])
    assert torch.equal(grad_weight, grads[rank].t() @ x)


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


LINEAR = direct_linear.DirectLinear
PARTIAL = "torch.mm(rows[rank, part], weight.t(), out=slots[own][rank])"
PRODUCT = "torch.mm(rows[part], weight.t(), out=slots[own])"
STAGED, SLOT, SIGNAL = "slots[own].copy_(rows[part])", "part, slots[own]", "epoch = channel.signal()"


class TestDirectLinear(ProtocolSuite):
    modules = (channel, direct_linear)
    needed = (channel, direct_linear)
    worlds = ((3, 1), (2, 1), (1, 1))
    faults = (
        Fault("one half", replace(channel.Channel.next_slots, "self.next_epoch % 2", by="0")),
        Fault("an epoch too old", replace(channel.Channel.wait_for, "epoch", by="epoch - 1", call="wait_signal")),
        Fault(
            "a shard that is staged after its signal",
            replace(LINEAR._gathered, STAGED, by="pass"),
            replace(LINEAR._gathered, f"yield own, {SLOT}", by=f"{STAGED}\nyield own, {SLOT}"),
        ),
        Fault(
            "partial sums that are stored after their signal",
            replace(LINEAR.reduce_scatter, PARTIAL, by="pass"),
            replace(LINEAR.reduce_scatter, SIGNAL, by=f"{SIGNAL}\nfor rank in range(world):\n    {PARTIAL}"),
        ),
        Fault(
            "a product that is stored after its signal",
            replace(LINEAR.all_reduce, PRODUCT, by="pass"),
            replace(LINEAR.all_reduce, SIGNAL, by=f"{SIGNAL}\n{PRODUCT}"),
        ),
        Fault(
            "sums in the half that others read",
            replace(
                direct_linear._sum_by_row_slices,
                "channel.next_slots(out.dtype, most, out.shape[1])",
                by="[slot[:most] for slot in slots]",
            ),
        ),
    )

    def program(self, memory: SimulatedMemory) -> None:
        """Run each product with several rounds, and with no rows; then with one row."""
        module = current(direct_linear)
        module.ONE_SHOT_BYTES = module.SLOT_BYTES = 4 * N  # one row
        rank, world = memory.rank, memory.world
        small, large = module.DirectLinear(memory, 8 * K), module.DirectLinear(memory, 20 * N)
        for n in (3, 0):
            _check_gathering(small, rank, world, n)
            _check_scattering(small, rank, world, n)
        for n in (7, 1):
            _check_all_reduce(large, rank, world, n)
        _check_gathering(small, rank, world, 1)
        _check_scattering(small, rank, world, 1)
        _check_all_reduce(small, rank, world, 1)

    def short_program(self, memory: SimulatedMemory) -> Iterator[object]:
        products = current(direct_linear).DirectLinear(memory, 8 * K)
        for _ in range(4):
            _check_gathering(products, memory.rank, memory.world, 3)
            _check_scattering(products, memory.rank, memory.world, 3)
            _check_all_reduce(products, memory.rank, memory.world, 1)
            yield epochs_of(memory)

    def late_program(self, memory: SimulatedMemory) -> None:
        rank, world = memory.rank, memory.world
        products = current(direct_linear).DirectLinear(memory, 8 * K)
        for come in (_check_gathering, _check_scattering, _check_all_reduce):
            come(products, rank, world, 3)
            with pytest.raises(PeerTimeout):
                if rank == 0:
                    memory.barrier("elsewhere")
                else:
                    come(products, rank, world, 3)
            memory.reset()
            come(products, rank, world, 3)
