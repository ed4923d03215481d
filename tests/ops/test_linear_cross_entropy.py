"""The fused projection and cross entropy, in chunks of tokens: results, gradients and memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.cases import naming
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive, pairwise
from tpfuse.comm.mesh import group_of, shard_range
from tpfuse.kernels import reference
from tpfuse.kernels.launch import recording
from tpfuse.ops import linear_cross_entropy as module
from tpfuse.ops.collectives import all_gather, replicate
from tpfuse.ops.linear_cross_entropy import linear_cross_entropy
from tpfuse.switches import use
from tpfuse.testing.compare import Expected, check_error
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["torch", "triton"]


def _inputs(rows: int, width: int, vocabulary: int, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    target = integers(3, rows, low=0, high=vocabulary - 1, dtype=torch.int64)
    target[4::5], target[9::10] = -1, -100
    target[1:2], target[2:3] = 0, vocabulary - 1
    return {
        "x": normal(1, rows, width, dtype=dtype),
        "weight": normal(2, vocabulary, width, dtype=dtype) * scale,
        "target": target,
        "weights": normal(4, rows).abs(),
    }


def _run(inputs: dict[str, Tensor], grad: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return the sum as "out", the losses, and every gradient."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    weights = leaves.pop("weights", None)
    vocabulary = len(inputs["weight"])
    total, losses = linear_cross_entropy(**leaves, vocabulary=vocabulary, weights=weights, **options)
    total.backward(grad)
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return (
        {"out": total.detach(), "losses": losses} | gradients | ({} if weights is None else {"weights": weights.grad})
    )


def _compare(inputs: dict[str, Tensor], upstream: float = 0.7, **options: Any) -> None:
    grad = torch.tensor(upstream, dtype=torch.float64 if inputs["x"].dtype == torch.float64 else torch.float32)
    expected = Expected(reference.linear_cross_entropy, inputs, grad)
    results = _run(inputs, grad, **options)
    losses = results.pop("losses")
    for name, actual in results.items():
        expected.check(name, actual)
    ignored = inputs["target"] < 0
    for name, actual in {"losses": losses, "x": results["x"], "weights": results.get("weights", losses)}.items():
        assert torch.count_nonzero(actual[ignored]) == 0, name
    assert not losses.requires_grad


@pytest.mark.parametrize(
    *pairwise(
        first=6,
        shape=[
            (63, 64, 63, 32),
            (40, 100, 257, 30),
            (1, 16, 1, None),
            (16, 1, 16, None),
            (64, 63, 64, 64),
            (100, 32, 100, 51),
            (24, 16, 5003, None),
        ],
        kind=["triton", "torch"],
        dtype=DTYPES,
    )
)
def test_results_and_gradients_match_the_reference(
    shape: tuple[int, int, int, int | None], kind: str, dtype: torch.dtype
) -> None:
    rows, width, vocabulary, chunk = shape
    with use(kernels=kind):
        _compare(_inputs(rows, width, vocabulary, dtype), chunk_tokens=chunk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "upstream"), [(torch.bfloat16, 1 / 3001), (torch.float16, 2.0**17)])
def test_the_upstream_gradient_is_not_rounded(dtype: torch.dtype, upstream: float, kind: str) -> None:
    inputs = _inputs(30, 16, 40, dtype)
    inputs["weights"] = inputs["weights"] * (1e-3 if upstream > 1 else 1)
    grad = torch.tensor(upstream)
    with use(kernels=kind):
        actual = _run(inputs, grad, chunk_tokens=16)
        by_one = _run(inputs, torch.tensor(1.0), chunk_tokens=16)
    for name in ("x", "weight", "weights"):
        assert torch.equal(actual[name], (by_one[name].float() * grad).to(actual[name].dtype)), name
        assert actual[name].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_returns_the_same(kind: str) -> None:
    inputs = _inputs(20, 16, 40, torch.float32)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    with use(kernels=kind):
        total, each = linear_cross_entropy(x, weight, inputs["target"], 40, chunk_tokens=8)
        each.div_(2.0)  # in place: the gradients of x and weight do not need the losses
        first = torch.autograd.grad(total * 3, (x, weight), retain_graph=True)
        again = torch.autograd.grad(total * 3, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [(), ("x",), ("weight",), ("weights",)])
def test_only_needed_gradients_are_returned(wanted: tuple[str, ...], kind: str) -> None:
    inputs = _inputs(20, 16, 40, torch.float32)
    with use(kernels=kind):
        whole = _run(inputs, torch.tensor(2.0), chunk_tokens=8)
        leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in inputs.items()}
        total, losses = linear_cross_entropy(**leaves, vocabulary=40, chunk_tokens=8)
    assert torch.equal(total, whole["out"]) and torch.equal(losses, whole["losses"])
    assert total.requires_grad == bool(wanted)
    if wanted:
        total.backward(torch.tensor(2.0))
    for name, x in leaves.items():
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, whole[name])


def _meta_inputs(rows: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta")
    return x, weight, torch.empty(rows, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("needs_weight", [False, True])
@pytest.mark.parametrize("needs_x", [False, True])
def test_gradients_that_are_not_needed_cost_no_product(needs_x: bool, needs_weight: bool) -> None:
    x, weight, target = _meta_inputs(4096, 768, 50257)
    with recording("sm_90") as record:
        module.chunks(x, weight, target, None, 50257, None, 1024, needs_x, needs_weight, triton=True)
    launched = [launch.kernel.__name__ for launch in record.launches]
    for name, wanted in {
        "cross_entropy_forward_kernel": True,
        "cross_entropy_backward_kernel": needs_x or needs_weight,
    }.items():
        assert launched.count(name) == 4 * wanted, name
    strides = [launch.arguments["stride_m"] for launch in record.launches if "stride_m" in launch.arguments]
    assert strides and all(stride % 16 == 0 for stride in strides), "rows of logits that TMA cannot read"


class _Peak(TorchDispatchMode):
    """Measures the most bytes of storage from within the block that were alive after any operation; reads no values."""

    def __init__(self, forget: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.forget, self.peak = forget, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forget()
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return out


def _plain(x: Tensor, weight: Tensor, target: Tensor) -> None:
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    F.cross_entropy(F.linear(*leaves).float(), target.masked_fill(target == -1, -100), reduction="sum").backward()


def _chunked(x: Tensor, weight: Tensor, target: Tensor, chunk: int, triton: bool) -> None:
    """Compute what forward and backward compute, on any device."""
    _, _, *gradients = module.chunks(x, weight, target, None, len(weight), None, chunk, True, True, triton)
    made = [module._times(torch.ones((), device=x.device), gradient) for gradient in gradients]
    del gradients, made


def _peak(function: Callable[..., None], *arguments: Any) -> int:
    with recording("sm_90") as record, _Peak(record.launches.clear) as tracker:
        function(*arguments)
    return tracker.peak


@pytest.mark.parametrize(("triton", "chunk"), [(True, 4096), (False, 4096), (False, 1024)])
def test_a_quarter_of_the_plain_memory(triton: bool, chunk: int) -> None:
    inputs = _meta_inputs(32768, 768, 50257)
    plain, fused = _peak(_plain, *inputs), _peak(_chunked, *inputs, chunk, triton)
    assert plain > 3 * 4 * 32768 * 50257  # the logits in bfloat16 and twice in float32: the tracker finds them
    bound = plain / 4 if not triton else plain / 20
    print(f"plain {plain / 2**30:.2f} GiB, chunks of {chunk}, triton {triton}: {fused / 2**30:.2f} GiB")
    assert fused <= bound


class _Operations(TorchDispatchMode):
    """Keeps the sizes of the factors of all products, and the bytes of all results outside of `weight`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight.untyped_storage()._cdata
        self.factors: list[set[int]] = []
        self.results: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.factors.append({size for x in args[-2:] for size in x.shape})
        out = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.results += [storage.nbytes() for storage in storages if storage._cdata != self._weight]
        return out


def test_large_products_have_aligned_sizes_and_no_weight_is_copied() -> None:
    x, weight, target = _meta_inputs(64, 768, 50257)
    with recording("sm_90"), _Operations(weight) as operations:
        module.chunks(x, weight, target, None, 50257, None, 64, True, False, triton=True)
    assert max(operations.results) < weight.nbytes / 4
    large = [sizes for sizes in operations.factors if max(sizes) > 10_000]
    assert len(large) == 2 and all(size % 16 == 0 for sizes in large for size in sizes)


def _in_ranks(kind: str, dtype: torch.dtype, vocabulary: int, sequence_parallel: bool) -> None:
    """Compare with one rank. x is sharded by tokens and gathered, or equal on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = group_of(tensor_mesh())
    inputs = _inputs(12 * 5, 24, vocabulary, dtype)
    own = slice(*shard_range(vocabulary, rank, world))
    tokens = slice(rank * 60 // world, (rank + 1) * 60 // world) if sequence_parallel else slice(None)
    grad = torch.tensor(0.5, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    expected = Expected(reference.linear_cross_entropy, inputs, grad)
    x, weight = inputs["x"][tokens].clone().requires_grad_(), inputs["weight"][own].clone().requires_grad_()
    weights = inputs["weights"].clone().requires_grad_()
    with use(kernels=kind):
        whole = all_gather(x, group) if sequence_parallel else replicate(x, group)
        total, losses = linear_cross_entropy(
            whole, weight, inputs["target"], vocabulary, group, weights=weights, chunk_tokens=25
        )
        total.backward(grad)
    expected.check("out", total)
    expected.check("weight", weight.grad, own)
    expected.check("weights", weights.grad)
    # The partial sums of half types are rounded on every rank before they are added, as those of any sharded product.
    truth, plain = expected.float64["x"], expected.same_dtype["x"]
    bound = 2 * (plain.double() - truth).abs().max() + world * torch.finfo(dtype).eps * truth.abs().max()
    check_error("x", x.grad, plain[tokens], truth[tokens], float(bound) * (100 if dtype == torch.float64 else 1))
    assert torch.count_nonzero(losses[inputs["target"] == -1]) == 0


IN_RANKS = [
    ("torch", torch.float64, 63, True),
    ("torch", torch.float32, 2, True),
    ("torch", torch.bfloat16, 130, False),
    ("triton", torch.float32, 63, True),
    ("triton", torch.float16, 2, True),
    ("triton", torch.bfloat16, 130, False),
]


@pytest.mark.parametrize(("world", "cases"), [(3, [IN_RANKS[0], IN_RANKS[2], IN_RANKS[3]]), *exhaustive((4, IN_RANKS))])
@on_ranks("world")
def test_slices_of_the_vocabulary(cases: list[tuple[str, torch.dtype, int, bool]]) -> None:
    for case in cases:
        with naming(case):
            _in_ranks(*case)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row_of_x_and_reaches_every_weight(kind: str) -> None:
    inputs = _inputs(20, 16, 40, torch.float32)
    x = inputs["x"].clone()
    x[6, 3] = torch.nan
    with use(kernels=kind):
        expected = _run(inputs, torch.tensor(1.0), chunk_tokens=8)
        actual = _run(inputs | {"x": x}, torch.tensor(1.0), chunk_tokens=8)
    others = torch.arange(20) != 6
    assert actual["out"].isnan() and actual["losses"][6].isnan() and actual["x"][6].isnan().all()
    assert torch.equal(actual["losses"][others], expected["losses"][others])
    assert torch.equal(actual["x"][others], expected["x"][others])
    assert actual["weight"].isnan().all(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits_and_inputs_of_any_stride_which_are_not_changed(kind: str) -> None:
    inputs = _inputs(30, 16, 40, torch.float32)
    with use(kernels=kind):
        for dtype in DTYPES[1:]:
            _compare(_inputs(33, 16, 130, dtype, scale=1e3), chunk_tokens=16)
        _compare({name: x for name, x in inputs.items() if name != "weights"}, chunk_tokens=16)
        for name, x in {"x": inputs["x"].t().contiguous().t(), "weight": normal(2, 40, 32)[:, ::2]}.items():
            before = x.clone()
            _compare(inputs | {name: x}, chunk_tokens=16)
            assert torch.equal(x, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 4])
def test_no_tokens(chunk: int | None, kind: str) -> None:
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(10, 8, requires_grad=True)
    with use(kernels=kind):
        total, losses = linear_cross_entropy(x, weight, torch.empty(0, dtype=torch.int64), 10, chunk_tokens=chunk)
        total.backward()
    assert total.item() == 0 and losses.shape == (0,) and x.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(10, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_its_dtype(kind: str) -> None:
    inputs = _inputs(30, 16, 40, torch.float32)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    with use(kernels=kind), torch.autocast("cpu", torch.bfloat16):
        total, losses = linear_cross_entropy(x, weight, inputs["target"], 40)
    total.backward()
    by_hand = {name: inputs[name].detach().bfloat16() for name in ("x", "weight")} | {"target": inputs["target"]}
    with use(kernels=kind):
        expected = _run(by_hand, torch.tensor(1.0))
    assert total.dtype == losses.dtype == torch.float32 and torch.equal(total, expected["out"])
    assert torch.equal(x.grad, expected["x"].float()) and torch.equal(weight.grad, expected["weight"].float())


def test_the_custom_operator_keeps_torchs_rules() -> None:
    inputs = _inputs(12, 16, 20, torch.bfloat16)
    x, weight, weights = (inputs[name].requires_grad_() for name in ("x", "weight", "weights"))
    arguments = (x, weight, inputs["target"], weights, 20, None, 5, True, True)
    with use(kernels="triton"):
        torch.library.opcheck(torch.ops.tpfuse.linear_cross_entropy_forward.default, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_refused(kind: str) -> None:
    x, weight, target = torch.zeros(3, 4), torch.zeros(10, 4), torch.zeros(3, dtype=torch.int64)
    call = partial(linear_cross_entropy, vocabulary=10)
    with use(kernels=kind):
        for message, refused in {
            r"x has shape \(4,\): expected \[M, C\]": lambda: call(x[0], weight, target),
            r"x is torch\.int64": lambda: call(x.long(), weight.long(), target),
            r"weight has shape \(9, 4\): expected \(10, 4\) on rank 0": lambda: call(x, weight[1:], target),
            r"weight is torch\.float16 on cpu: expected torch\.float32": lambda: call(x, weight.half(), target),
            r"weight is torch\.float32 on meta": lambda: call(x, weight.to("meta"), target),
            r"weights is torch\.float32 \(2,\)": lambda: call(x, weight, target, weights=torch.ones(2)),
            r"weights is torch\.int64 \(3,\)": lambda: call(x, weight, target, weights=target),
            "weights is on meta": lambda: call(x, weight, target, weights=torch.ones(3, device="meta")),
            "chunk_tokens 0: expected at least 1": lambda: call(x, weight, target, chunk_tokens=0),
            r"target is torch\.int64 \(2,\)": lambda: call(x, weight, target[:2]),
            "targets from 0 to 10: expected 0 to 9, or -1": lambda: call(x, weight, torch.tensor([0, 10, 3])),
        }.items():
            with pytest.raises(ValueError, match=message):
                refused()
