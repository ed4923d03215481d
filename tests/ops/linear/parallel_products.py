"""The suite of tensor-parallel products: a product is described once, and its checks follow from the description.

    PRODUCTS["all_gather_linear"].check(Case(torch.bfloat16, (21, 2), activation="gelu"), group)  # on every rank

The description says which part of the inputs and of the result each rank holds. It determines the whole inputs, which
every rank draws by itself, the plain computation on one rank that the product is compared with, and a rank's parts of
both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.kernels import reference
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce
from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from tpfuse.testing.compare import Expected, evaluate
from tpfuse.testing.inputs import integers, normal

# The part of a whole tensor that a rank holds: its index of a first dimension over ranks, its rows of dimension 0, or
# the whole tensor.
Held = Literal["index", "rows", "all"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """The inputs of one call.

    rows: the dimensions before the last of a rank's shard, or of x if no tensor is sharded by rows. k, n: the columns
    and rows of each rank's weight. whole_numbers: whether every sum is exact, so that results must be equal to the
    bit. wanted: the inputs that need a gradient, by default all. device: the device of the operator; everything else is
    computed on the CPU.
    """

    dtype: torch.dtype = torch.float32
    rows: tuple[int, ...] = (5,)
    bias: bool = True
    residual: bool = True
    activation: str | None = None
    k: int = 33
    n: int = 70
    whole_numbers: bool = False
    wanted: tuple[str, ...] | None = None
    seed: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class ParallelProduct:
    """The description of a tensor-parallel product.

    function: the operator, called with the inputs by name and `group`. held: the part that each rank holds of every
    input and of the result, "out".
    """

    function: Callable[..., Tensor]
    held: Mapping[str, Held]

    def part(self, tensor: str, case: Case, rank: int) -> int | slice:
        """Return the index of a rank's part in the whole tensor."""
        if self.held[tensor] == "index":
            return rank
        return slice(rank * case.rows[0], (rank + 1) * case.rows[0]) if self.held[tensor] == "rows" else slice(None)

    def draw(self, case: Case, world: int) -> tuple[Tensors, Tensor]:
        """Return the whole inputs and the gradient of the whole result, which are the same on every rank."""
        n, k, rows = case.n, case.k, case.rows
        if "rows" in self.held.values():
            rows = (world * rows[0], *rows[1:])
        width = reference.linear(torch.zeros(1, k), torch.zeros(n, k), None, case.activation).shape[-1]
        shapes = {"x": (*rows, k), "weight": (n, k), "bias": (n,), "residual": (*rows, width), "out": (*rows, width)}
        left_out = {name for name, given in (("bias", case.bias), ("residual", case.residual)) if not given}
        tensors = {}
        for index, (name, held) in enumerate(self.held.items()):
            shape = (world, *shapes[name]) if held == "index" else shapes[name]
            if name not in left_out:
                tensors[name] = _drawn(10 * case.seed + index, shape, case)
        if not case.whole_numbers:
            tensors["weight"] /= k**0.5  # the arguments of activations are then in the range where these are curved
        grad = tensors.pop("out")
        return tensors, grad

    def plain(self, case: Case) -> Callable[..., Tensor]:
        """Return a function that computes the product of the whole inputs by plain torch, on one rank."""

        def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
            if self.held["out"] == "index":  # each rank has other rows of the weight
                biases = [None] * len(weight) if bias is None else list(bias)
                outs = [reference.linear(x, w, b, case.activation) for w, b in zip(weight, biases, strict=True)]
                return torch.stack(outs)
            out = reference.linear(torch.cat(list(x), -1), torch.cat(list(weight), -1), bias, case.activation)
            return out if residual is None else out + residual

        return whole

    def leaves(self, case: Case, group: dist.ProcessGroup) -> Tensors:
        """Return this rank's parts of the inputs, as views with several strides; all elements in between are NaN."""
        inputs, _ = self.draw(case, group.size())
        parts = {name: x[self.part(name, case, group.rank())] for name, x in inputs.items()}
        leaves = {name: x.to(case.device, copy=True) for name, x in parts.items()}
        if len(case.rows) > 1:
            leaves = {name: strided(x) for name, x in leaves.items()}
        else:
            leaves["weight"] = leaves["weight"].t().contiguous().t()
        return {name: x.requires_grad_(case.wanted is None or name in case.wanted) for name, x in leaves.items()}

    def run(self, case: Case, leaves: Tensors, group: dist.ProcessGroup | None) -> Tensor:
        """Return the operator's result for this rank's inputs."""
        options = {} if case.activation is None else {"activation": case.activation}
        return self.function(**{"bias": None} | leaves, group=group, **options)

    def check(self, case: Case, group: dist.ProcessGroup, *, backward: bool = True) -> Tensors:
        """Compare the result and every gradient with the plain ones; return those that must be equal on all ranks."""
        inputs, grad = self.draw(case, group.size())
        leaves = self.leaves(case, group)
        out = self.run(case, leaves, group)
        results = {"out": out.detach().clone()}
        out.neg_().neg_()  # no view, which torch does not let change in place
        if backward:
            out.backward(strided(grad[self.part("out", case, group.rank())].to(case.device)))  # type: ignore[no-untyped-call]
            for name, leaf in leaves.items():
                given = leaf.grad is not None
                assert given == leaf.requires_grad, f"{name}: gradient: {given}, required: {leaf.requires_grad}"
            results |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        compare = self._equal if case.whole_numbers else self._near
        results = {name: x.cpu() for name, x in results.items()}
        compare(case, group, inputs, grad, results)
        return {name: x for name, x in results.items() if self.held[name] == "all"}

    def _near(
        self, case: Case, group: dist.ProcessGroup, inputs: Tensors, grad: Tensor, results: Mapping[str, Tensor]
    ) -> None:
        expected = Expected(self.plain(case), inputs, grad)
        for name, actual in results.items():
            expected.check(name, actual, self.part(name, case, group.rank()))

    def _equal(
        self, case: Case, group: dist.ProcessGroup, inputs: Tensors, grad: Tensor, results: Mapping[str, Tensor]
    ) -> None:
        expected = evaluate(self.plain(case), {name: x.double() for name, x in inputs.items()}, grad.double())
        for name, actual in results.items():
            assert actual.dtype == case.dtype, f"{name}: {actual.dtype}"
            assert torch.equal(actual.double(), expected[name][self.part(name, case, group.rank())]), name

    def check_each_gradient_alone(self, group: dist.ProcessGroup) -> None:
        """Check the gradient of one input after the other, when no other input needs one."""
        for name in self.held.keys() - {"out"}:
            self.check(Case(rows=(3,), k=4, n=5, whole_numbers=True, wanted=(name,)), group)

    def check_autocast(self, group: dist.ProcessGroup) -> None:
        """Check autocast: products are bfloat16, float32 inputs get float32 gradients, a residual keeps its dtype."""
        case = Case(torch.bfloat16, (6,), k=9, n=7, residual=False)
        inputs, grad = self.draw(case, group.size())
        leaves = {name: x.detach().float().requires_grad_() for name, x in self.leaves(case, group).items()}
        given = grad[self.part("out", case, group.rank())]
        added = {"residual": torch.full_like(given, 1000.0, dtype=torch.float32).requires_grad_()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.run(case, leaves, group)
            more = self.run(case, leaves | added, group) if "residual" in self.held else None
        out.backward(given)  # type: ignore[no-untyped-call]
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert gradients.keys() == leaves.keys() and all(x.dtype == torch.float32 for x in gradients.values())
        results = {"out": out} | {name: x.bfloat16() for name, x in gradients.items()}
        self._near(case, group, inputs, grad, results)
        if more is not None:
            more.backward(given.float())  # type: ignore[no-untyped-call]
            assert more.dtype == torch.float32 and torch.equal(more, out.float() + 1000)
            assert added["residual"].grad is not None and torch.equal(added["residual"].grad, given.float())

    def check_without_gradients(self, group: dist.ProcessGroup) -> None:
        """Check that without gradients the result is the same and requires no gradient."""
        case = Case(rows=(4,), k=5, n=3, whole_numbers=True)
        inputs, grad = self.draw(case, group.size())
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                out = self.run(case, self.leaves(case, group), group)
            assert not out.requires_grad
            self._equal(case, group, inputs, grad, {"out": out})
        frozen = {name: x.detach() for name, x in self.leaves(case, group).items()}
        assert not self.run(case, frozen, group).requires_grad


# act(all_gather(x) Wᵀ + bias): rows of x are sharded, and each rank has its own rows of the weight. The others sum
# x Wᵀ over ranks, each of which has its own features, and add bias and residual: a rank gets its rows, or everything.
_SUMMED: dict[str, Held] = {"x": "index", "weight": "index", "bias": "all"}
_HELD: dict[Callable[..., Tensor], dict[str, Held]] = {
    all_gather_linear: {"x": "rows", "weight": "index", "bias": "index", "out": "index"},
    linear_reduce_scatter: _SUMMED | {"residual": "rows", "out": "rows"},
    linear_all_reduce: _SUMMED | {"residual": "all", "out": "all"},
}
PRODUCTS = {function.__name__: ParallelProduct(function, held) for function, held in _HELD.items()}


def strided(x: Tensor) -> Tensor:
    """Return `x` as a view whose elements have NaN between them in memory, which must not be read."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def _drawn(seed: int, shape: tuple[int, ...], case: Case) -> Tensor:
    if not case.whole_numbers:
        return normal(seed, *shape, dtype=case.dtype)
    most = 4 if case.dtype in (torch.float32, torch.float64) else 1  # 16-bit dtypes are exact for small numbers only
    return integers(seed, *shape, low=-most, high=most, dtype=case.dtype)
