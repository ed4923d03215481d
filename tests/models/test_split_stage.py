"""A stage of a GPT has the same gradients, to the bit, if a pipeline computes those of its weights in a later pass."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import GraphExecGroup

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm.layout import local_tensor
from tpfuse.layers.local_parameter import offer_leaf
from tpfuse.models import gpt_block
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.parallel.pipeline.runner import backward_weights
from tpfuse.parallel.recompute import RECOMPUTE, Recompute, recomputed
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

B, T, C, LAYERS = 2, 6, 32, 2
MIDDLE = Stage(1, range(LAYERS), False, False)


class _Run:
    """A forward and a backward pass of a stage. passes: how often its blocks and activations ran up to now."""

    def __init__(self, recompute: Recompute, tp: int, leaves: bool, calls: Counter[str]) -> None:
        config = GPTConfig(61, 16, C, LAYERS, 4, dropout=0.2)
        on_rank = GPTOptions(recompute=recompute, stages=[MIDDLE])
        model = parallelize_gpt(GPT(config, dtype=torch.float64), mesh_of(1, tp) if tp > 1 else None, on_rank)
        initialize(model, 1)
        self.weights: list[Tensor] = list(model.parameters())
        if leaves:
            self.weights = [offer_leaf(weight) for weight in self.weights if isinstance(weight, DTensor)]
        ids = integers(1, B, T, low=0, high=60, dtype=torch.int64)
        self.x = normal(2, B * T // tp, C, dtype=torch.float64).requires_grad_()
        self._calls, self._recomputed = calls, "forward" if recompute == "full" else "activation"
        calls.clear()
        self.out = model(ids, dropout_at=(3, 4), stage=MIDDLE, x_mC=self.x)
        self.grad = normal(3, *self.out.shape, dtype=torch.float64)
        self.passes = [calls[self._recomputed]]

    def whole(self) -> list[Tensor]:
        """Return all gradients, from one backward pass."""
        self.out.backward(self.grad)
        return self._gradients()

    def parts(self, weights_together: AbstractContextManager[object]) -> list[Tensor]:
        """Return all gradients, those of the weights from later passes within the context manager."""
        edge = get_gradient_edge(self.out)
        _, groups = stage_backward_input([self.out], [self.grad], [self.x], iter(self.weights))
        self.passes.append(self._calls[self._recomputed])
        assert self.x.grad is not None and all(weight.grad is None for weight in self.weights)
        with weights_together:
            backward_weights(self.weights, groups)
        del edge
        return self._gradients()

    def _gradients(self) -> list[Tensor]:
        self.passes.append(self._calls[self._recomputed])
        return [local_tensor(leaf.grad) for leaf in (self.x, *self.weights)]


def _counting(calls: Counter[str], owner: Any, name: str) -> AbstractContextManager[object]:
    """Return a patch under which the calls of owner.name are counted."""
    function = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*args, **options)

    return mock.patch.object(owner, name, counted)


def _compare(tp: int, name: Implementation) -> None:
    """A recomputed block runs once more for the input and, in a GraphExecGroup, once more for the weights.

    Without such a group torch runs one pass for the parameters of each layer, and each of a block's six layers makes
    the whole block run again.
    """
    calls: Counter[str] = Counter()
    blocks, activations = _counting(calls, gpt_block.Block, "forward"), _counting(calls, gpt_block, "activation")
    with use(implementation=name), blocks, activations:
        for recompute in RECOMPUTE:
            whole = _Run(recompute, tp, False, calls)
            expected = whole.whole()
            for together, leaves in ((GraphExecGroup(), False), (nullcontext(), tp > 1)):
                run = _Run(recompute, tp, leaves, calls)
                assert all(map(torch.equal, run.parts(together), expected)), (recompute, together)
                if recompute == "none":
                    continue
                assert whole.passes == [LAYERS, 2 * LAYERS]
                layers = 6 if recompute == "full" and isinstance(together, nullcontext) else 1
                assert run.passes == [LAYERS, 2 * LAYERS, (2 + layers) * LAYERS], (recompute, together)


@pytest.mark.parametrize("name", ["direct", *exhaustive("collective")])
def test_two_ranks(name: Implementation) -> None:
    pool(2).run(_compare, 2, name)


def test_one_rank() -> None:
    _compare(1, "direct")


@pytest.mark.parametrize("together", [GraphExecGroup, nullcontext])
def test_passes_that_use_a_recomputed_result_in_parts(together: Callable[[], AbstractContextManager[object]]) -> None:
    """Two products save the result that is recomputed; each of the later passes takes it for one of them."""
    x, first, second = (normal(seed, 4, 4, dtype=torch.float64).requires_grad_() for seed in (1, 2, 3))
    y = x.detach().exp()
    expected = y.t() @ torch.ones(4, 4, dtype=torch.float64)
    rounding = 4 * torch.finfo(torch.float64).eps  # of four terms above 0

    def check(gradients: Sequence[Tensor]) -> None:
        for found in gradients:
            torch.testing.assert_close(found, expected, rtol=rounding, atol=0.0)

    out = recomputed(torch.exp, (x,), lambda y: y @ first + y @ second)
    (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    torch.testing.assert_close(grad, (first + second).detach().sum(1) * y, rtol=1e-12, atol=1e-12)
    with together():
        for weight in (first, second):
            check(torch.autograd.grad(out.sum(), weight, retain_graph=True))
    for weights in ([second], [first, second], [first]):
        check(torch.autograd.grad(out.sum(), weights, retain_graph=True))
