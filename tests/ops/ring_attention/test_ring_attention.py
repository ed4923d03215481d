"""Every schedule of ring attention, compared with full attention in float64 whose mask is written out.

Padding, and tokens after the last document, hold numbers that would change the result if a query saw them.
"""

import functools
import itertools
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.ring_attention.attention_of_gpus import attention_of_gpus
from tests.support.cases import naming
from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation, Kernels
from tpfuse.ops.attention import attention
from tpfuse.ops.dropout import dropout_keys
from tpfuse.ops.linear.all_gather_linear import all_gather_linear
from tpfuse.ops.ring_attention import torch_blocks
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.collective import CollectiveRing
from tpfuse.ops.ring_attention.layout import BALANCES, Balance, SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.ops.ring_attention.schedule import schedule_for
from tpfuse.ops.ring_attention.triton_blocks import by_kernels, explained_blocks
from tpfuse.switches import use
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import pool

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SIZE = 16  # the size of a head
NAMES = ("out", "lse", "q", "k", "v")
Whole = dict[str, Tensor]


@dataclass(frozen=True)
class _Sequence:
    """The inputs and options of a call; of `heads`, `kv_heads` have keys and values of their own."""

    length: int = 37
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 4
    dtype: torch.dtype = F64

    @property
    def options(self) -> dict[str, Any]:
        cu_seqlens = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)
        return {"causal": self.causal, "window": self.window, "cu_seqlens": cu_seqlens}

    @property
    def hidden(self) -> Tensor:
        """Return [T, T] bool: whether a query (row) does not see a key (column)."""
        bounds = torch.tensor(self.documents or (0, self.length))
        position = torch.arange(self.length)
        document = torch.bucketize(position, bounds, right=True)
        distance = position.unsqueeze(1) - position
        hidden = (document.unsqueeze(1) != document) | (document == len(bounds))
        hidden |= (distance < 0) & self.causal
        return hidden | (distance.abs() >= (self.window or self.length))

    def inputs(self, seed: int) -> Whole:
        """Return q, k, v and the output's gradient."""
        batch = 1 if self.documents else 2
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "grad": self.heads}
        draw = functools.partial(normal, dtype=self.dtype)
        return {x: draw(7 * seed + i, batch, h, self.length, SIZE) for i, (x, h) in enumerate(heads.items())}


def _full(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse), by the definition in float64, otherwise by torch's scaled_dot_product_attention.

    A query that sees no key has no gradient: here it sees all keys, and its result is replaced.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    blind = hidden.all(-1, keepdim=True)
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden & ~blind, -torch.inf)
    if q.dtype == F64:
        scores = q @ k.mT / SIZE**0.5 + mask
        out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
    return out * ~blind, lse.masked_fill(blind.squeeze(-1), -torch.inf)


@dataclass(frozen=True)
class _Truth:
    """The whole result in float64, and the error that each tensor of it may have."""

    inputs: Whole
    whole: Whole
    bounds: dict[str, float]


def _new_truth(sequence: _Sequence, seed: int) -> _Truth:
    inputs, hidden = sequence.inputs(seed), sequence.hidden
    leaves = {name: x for name, x in inputs.items() if name != "grad"}
    expected = Expected(lambda **x: _full(**x, hidden=hidden)[0], leaves, inputs["grad"])
    lse = _full(**{name: x.double() for name, x in leaves.items()}, hidden=hidden)[1]
    if sequence.dtype == F64:
        return _Truth(inputs, expected.float64 | {"lse": lse}, dict.fromkeys(NAMES, 1e-12))
    seen = lse.isfinite()
    error = (_full(**leaves, hidden=hidden)[1].double() - lse)[seen].abs().max().item()
    bounds = {"lse": 2 * error + torch.finfo(F32).eps * lse[seen].abs().max().item()}
    bounds |= {name: expected.bound(name) for name in expected.float64}
    return _Truth(inputs, expected.float64 | {"lse": lse}, bounds)


_truth = functools.cache(_new_truth)


@dataclass(frozen=True)
class _Way:
    """A schedule with a balance. ulysses: the number of ranks that exchange heads for tokens."""

    schedule: str
    balance: Balance = "zigzag"
    ulysses: int = 1

    @property
    def group(self) -> Any:
        if self.schedule != "ulysses_ring":
            return dist.group.WORLD
        mesh = mesh_of(dist.get_world_size() // self.ulysses, self.ulysses)
        return mesh["dp"].get_group(), mesh["tp"].get_group()

    def layout(self, length: int) -> SequenceLayout:
        return SequenceLayout(length, dist.get_world_size(), self.balance, self.ulysses)


def _ways(world: int) -> Iterator[_Way]:
    """Yield every schedule with every balance."""
    pairs = {4: (2,), 8: (2, 4)}.get(world, ())
    schedules = [("ring", 1), ("all_gather", 1), ("ulysses", world), *(("ulysses_ring", u) for u in pairs)]
    for (schedule, ulysses), balance in itertools.product(schedules, BALANCES):
        yield _Way(schedule, balance, ulysses)


def _shards(way: _Way, sequence: _Sequence, inputs: Whole) -> Whole:
    """Return this rank's shards, with large numbers as padding."""
    layout = way.layout(sequence.length)
    return {name: layout.shard(x, dist.get_rank(), 2, value=20.0) for name, x in inputs.items()}


def _run(way: _Way, sequence: _Sequence, inputs: Whole, attend: Any = ring_attention, **more: Any) -> Whole:
    """Return this rank's out, lse and gradients."""
    shards = _shards(way, sequence, inputs)
    grad = shards.pop("grad")
    leaves = {name: x.requires_grad_() for name, x in shards.items()}
    options = sequence.options | {"schedule": way.schedule, "balance": way.balance, "length": sequence.length} | more
    out, lse = attend(**leaves, group=way.group, return_lse=True, **options)
    assert out.dtype == grad.dtype and lse.dtype == (F64 if grad.dtype == F64 else F32) and not lse.requires_grad
    out.backward(grad)
    return {"out": out.detach(), "lse": lse} | {name: leaf.grad for name, leaf in leaves.items()}


def _check(way: _Way, sequence: _Sequence, found: Whole, truth: _Truth, names: Sequence[str] = NAMES) -> None:
    """Compare this rank's tensors with the truth."""
    layout, rank = way.layout(sequence.length), dist.get_rank()
    for name in names:
        expected = layout.shard(truth.whole[name], rank, 2, value=-torch.inf if name == "lse" else 0.0)
        same = found[name].double() == expected  # infinities among them
        error = (found[name].double() - expected).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf).max().item()
        right = found[name].shape == expected.shape and error <= truth.bounds[name]
        assert right, f"{way} {sequence}: {name} is off by {error:.2e} (> {truth.bounds[name]:.2e})"


def _heads(way: _Way, grouped: bool, least: int = 4) -> dict[str, int]:
    """Return numbers of heads that the ranks can divide; if grouped, four of q for one of keys."""
    u = way.ulysses
    return {"heads": 4 * u, "kv_heads": u} if grouped else dict.fromkeys(("heads", "kv_heads"), math.lcm(least, u))


MASKS = (
    _Sequence(37),
    _Sequence(48, causal=False),
    _Sequence(41, window=11),
    _Sequence(37, causal=False, window=6),
    _Sequence(48, documents=(0, 5, 5, 23, 39)),
    _Sequence(41, causal=False, documents=(0, 17, 41)),
    _Sequence(37, window=7, documents=(0, 1, 14, 30)),
)


ALL = range(len(MASKS))


def _products(name: Implementation, stride: int) -> None:
    """Check every stride-th combination; a stride coprime to the numbers of options meets every pair of options."""
    products = itertools.product(_ways(dist.get_world_size()), MASKS, (False, True))
    with use(implementation=name):
        for way, mask, grouped in itertools.islice(products, 0, None, stride):
            sequence = replace(mask, **_heads(way, grouped))
            truth = _truth(sequence, 1)
            _check(way, sequence, _run(way, sequence, truth.inputs), truth)


def _in_dtype(name: Implementation, dtype: torch.dtype, masks: Sequence[int]) -> None:
    """Check each schedule with one of the masks, in turn."""
    with use(implementation=name):
        for i, way in enumerate(_ways(dist.get_world_size())):
            sequence = replace(MASKS[masks[i % len(masks)]], dtype=dtype, **_heads(way, i % 2 == 1))
            truth = _truth(sequence, 2)
            _check(way, sequence, _run(way, sequence, truth.inputs), truth)


def _errors(name: Implementation) -> dict[tuple[str, str], float]:
    """Return this rank's sum of squared errors and largest error, by schedule and name of the result."""
    sequence, found = _Sequence(160, heads=8, kv_heads=8, dtype=BF16), {}
    truth = _truth(sequence, 3)
    with use(implementation=name):
        for way in (_Way("ring"), _Way("all_gather"), _Way("ulysses", ulysses=dist.get_world_size())):
            result, layout = _run(way, sequence, truth.inputs), way.layout(sequence.length)
            for key in ("out", "q", "k", "v"):
                error = result[key].double() - layout.shard(truth.whole[key], dist.get_rank(), 2)
                found[way.schedule, key] = error.square().sum().item()
    return found


@pytest.mark.parametrize(("name", "world"), exhaustive(("direct", 8), ("collective", 8)))
def test_the_error_of_bfloat16_does_not_grow_with_the_ring(name: Implementation, world: int) -> None:
    (alone,), ranks = pool(1).run(_errors, name), pool(world).run(_errors, name)
    for key, error in alone.items():
        assert math.sqrt(sum(rank[key] for rank in ranks)) <= 1.5 * math.sqrt(error), key


def _unsharded(sequence: _Sequence, inputs: Whole, dropout: dict[str, Any]) -> _Truth:
    """Return the result of `attention` in float64."""
    leaves = {name: x.double().clone().requires_grad_() for name, x in inputs.items() if name != "grad"}
    options = sequence.options | dropout
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), options.pop("cu_seqlens"))
    out, lse = attention(**leaves, **options, return_lse=True)
    out.backward(inputs["grad"].double())
    whole = {"out": out.detach(), "lse": lse.detach()} | {name: x.grad for name, x in leaves.items()}
    # Dropout scales the kept elements, and so their errors.
    return _Truth(inputs, whole, {name: 2 * bound for name, bound in _truth(sequence, 4).bounds.items()})


def _dropped(
    name: Implementation,
    dtype: torch.dtype,
    balances: Sequence[Balance],
    masks: Sequence[int],
    widths: Sequence[int | None] = (None, 50),
    schedules: Sequence[str] = ("ring", "all_gather", "ulysses", "ulysses_ring"),
) -> None:
    """Check dropout with head_rows of another part of the batch, and with the sequence's width and a larger one."""
    key = dropout_keys(torch.empty(0), 7, 3, 2)[1]
    for way, i, width in itertools.product(_ways(dist.get_world_size()), masks, widths):
        if way.balance not in balances or way.schedule not in schedules:
            continue
        sequence = replace(MASKS[i], dtype=dtype, **_heads(way, grouped=True))
        batch = 2 if sequence.documents is None else len(sequence.documents) - 1
        rows = 5 + 64 * torch.arange(batch).unsqueeze(1) + torch.arange(sequence.heads)
        dropout = {"dropout_p": 0.3, "key": key, "head_rows": rows, "dropout_width": width}
        truth = _unsharded(sequence, _truth(sequence, 4).inputs, dropout)
        with use(implementation=name):
            _check(way, sequence, _run(way, sequence, truth.inputs, **dropout), truth)


def _under_autocast() -> None:
    """Check that autocast, whose dtype the tensors have, changes nothing."""
    rows, found = torch.arange(8).view(2, 4), []
    dropout = {"dropout_p": 0.3, "key": torch.tensor(3), "head_rows": rows}
    sequence = _Sequence(dtype=BF16)
    for enabled in (True, False):
        with torch.autocast("cpu", BF16, enabled=enabled):
            found.append(_run(_Way("ring"), sequence, sequence.inputs(6), **dropout))
    assert all(torch.equal(found[0][key], found[1][key]) for key in NAMES)


def _twice(name: Implementation, dtype: torch.dtype, balances: Sequence[Balance]) -> None:
    """Check that two runs agree to the bit."""
    late = random.Random(dist.get_rank())
    for way in _ways(dist.get_world_size()):
        if way.balance not in balances:
            continue
        sequence = replace(MASKS[4], dtype=dtype, **_heads(way, grouped=True))
        results = []
        for _ in range(2):
            time.sleep(late.random() * 3e-3)
            with use(implementation=name):
                results.append(_run(way, sequence, sequence.inputs(5)))
        assert all(torch.equal(results[0][key], results[1][key]) for key in NAMES), way


def _rare_cases(name: Implementation, stride: int) -> None:
    """Check documents that leave some or all ranks without visible keys, as few tokens as ranks, and other scales."""
    world = dist.get_world_size()
    blind = [_Sequence(48, documents=documents) for documents in ((0, 3, 9), (0, 0), (0, 0, 1))]
    short = [_Sequence(length, causal=causal) for length in (world, world + 1, 2 * world) for causal in (True, False)]
    with use(implementation=name):
        products = itertools.product(_ways(world), (*blind, *short))
        for way, case in itertools.islice(products, 0, None, stride):
            sequence = replace(case, **_heads(way, grouped=False))
            truth = _truth(sequence, 6)
            _check(way, sequence, _run(way, sequence, truth.inputs), truth)
            scaled = truth.inputs | {"q": truth.inputs["q"] * 2}  # with half of the scale, only dQ differs
            result = _run(way, sequence, scaled, scale=0.5 / SIZE**0.5)
            _check(way, sequence, result | {"q": 2 * result["q"]}, truth)


def _packed(name: Implementation) -> None:
    """Check views of [B, n, 3, H, D] as q, k and v, as a projection returns them, and as the output's gradient."""
    sequence = MASKS[0]
    truth = _truth(sequence, 7)
    for way in _ways(dist.get_world_size()):
        if way.ulysses in (1, 2, 4):
            shards = _shards(way, sequence, truth.inputs)
            packed = torch.stack([shards[x].transpose(1, 2) for x in "qkv"], dim=2).requires_grad_()
            q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
            options = {"schedule": way.schedule, "balance": way.balance, "length": sequence.length}
            with use(implementation=name):
                out, lse = ring_attention(q, k, v, group=way.group, return_lse=True, **options)
                out.backward(shards["grad"].transpose(2, 3).contiguous().transpose(2, 3))
            gradients = dict(zip("qkv", (x.transpose(1, 2) for x in packed.grad.unbind(2)), strict=True))
            _check(way, sequence, {"out": out.detach(), "lse": lse} | gradients, truth)


def _some_gradients(name: Implementation) -> None:
    """Check every combination of inputs that need a gradient, and that none is computed in inference mode."""
    for way, wanted in itertools.product(_ways(dist.get_world_size()), ("q", "k", "v", "kv", "")):
        sequence = replace(MASKS[0], **_heads(way, grouped=False))
        truth = _truth(sequence, 8)
        shards = _shards(way, sequence, truth.inputs)
        grad = shards.pop("grad")
        for key in wanted:
            shards[key].requires_grad_()
        options = {"schedule": way.schedule, "balance": way.balance, "length": sequence.length}
        with use(implementation=name):
            out = ring_attention(**shards, group=way.group, **options)
            assert out.requires_grad == bool(wanted)
            if wanted:
                out.backward(grad)
            with torch.inference_mode():
                again = ring_attention(**shards, group=way.group, **options)
        assert torch.equal(again, out) and not again.requires_grad
        assert all((x.grad is not None) == (key in wanted) for key, x in shards.items())
        found = {"out": out.detach()} | {key: shards[key].grad for key in wanted}
        _check(way, sequence, found, truth, tuple(found))


@functools.cache
def _second_group() -> dist.ProcessGroup:
    return dist.new_group()


def _no_sequences() -> None:
    for name in ("direct", "collective"):
        for schedule in ("ring", "all_gather", "ulysses"):
            q = torch.ones(0, 2, 4, 16, requires_grad=True)
            with use(implementation=name):
                out = ring_attention(q, q, q, group=dist.group.WORLD, schedule=schedule)
                out.sum().backward()
            assert out.shape == q.shape and q.grad is not None


def _in_two_groups(name: Implementation, rounds: int, dtype: torch.dtype, length: int) -> None:
    """Run two groups of the same ranks; between one's forward and backward, the other group and products run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    way, layout = _Way("ring"), SequenceLayout(length, world)
    weight = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    for call in range(rounds):
        sequence, runs = _Sequence(length, dtype=dtype, heads=2, kv_heads=1), []
        for i, group in enumerate((dist.group.WORLD, _second_group())):
            truth = _new_truth(sequence, 200 + 2 * call + i)
            leaves = {key: layout.shard(x, rank, 2).requires_grad_() for key, x in truth.inputs.items()}
            grad = leaves.pop("grad").detach()
            with use(implementation=name):
                out, lse = ring_attention(**leaves, group=group, schedule="ring", length=length, return_lse=True)
                all_gather_linear(torch.ones(2, 3, dtype=dtype), weight, None, group).sum().backward()
            runs.append((truth, leaves, grad, out, lse))
        for truth, leaves, grad, out, lse in runs:
            out.backward(grad)
            found = {"out": out.detach(), "lse": lse} | {key: x.grad for key, x in leaves.items()}
            _check(way, sequence, found, truth)


class _Largest(TorchDispatchMode):
    """Keeps the size in bytes of the largest storage of a result."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.nbytes = max(self.nbytes, *sizes, 0)
        return result


def _holds_one_block() -> None:
    """Check that backward over messages makes no tensor that grows with the number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v, grad = (normal(i, 1, 2, 8, SIZE, dtype=BF16) for i in range(4))
    call = RingCall(SequenceLayout(8 * world, world).runs, rank, causal=True, window=None, scale=1.0)
    ring = CollectiveRing(dist.group.WORLD)
    out, lse = ring.forward(q, k, v, call)
    with _Largest() as largest:
        ring.backward(grad, q, k, v, out, lse, call)
    assert largest.nbytes == 2 * k.numel() * F32.itemsize  # the contributions to the gradients of one rank's k and v


def _by_operators_of_gpus(backend: str, name: Implementation, kernels: Kernels, dtype: torch.dtype) -> None:
    """Check blocks that a GPU's operators compute; those of a call with documents are computed without them.

    With kernels triton the results of blocks are merged by the kernel. A contiguous rank has 130 tokens. Windows end
    one token before a block does, between blocks, inside two blocks, and inside each rank's own.
    """
    rank, world, on_cpu = dist.get_rank(), dist.get_world_size(), torch_blocks.chosen_operator

    def chosen(q: Tensor, call: RingCall) -> torch_blocks.AttentionOperator | None:
        return on_cpu(q, call) if call.cu_seqlens is not None else torch_blocks.gpu_operator(q)[0]

    length = 130 * world
    causal, whole = _Sequence(length - 1), _Sequence(length - 2, causal=False)
    contiguous = _Way("ring", "contiguous")
    cases = [(_Way("ring"), replace(causal, window=80))]
    if kernels == "auto":
        cases += [(_Way("ring"), causal), (_Way("ring", "striped"), causal), (_Way("ring"), whole)]
        cases += [(_Way("ulysses", ulysses=world), causal), (_Way("all_gather", "contiguous"), causal)]
        cases += [(contiguous, _Sequence(length, window=window)) for window in (30, 131, length // 2 + 20, length - 1)]
        cases += [(_Way("ring"), replace(whole, window=100)), (_Way("ring", "striped"), replace(causal, window=150))]
        cases += [(_Way("ring"), _Sequence(length, window=length // 2 - 7)), (_Way("ring"), replace(causal, length=9))]
        cases += [(_Way("ring"), replace(causal, documents=(0, 9)))]
    with (
        attention_of_gpus(SDPBackend.__members__[backend]) as calls,
        mock.patch.object(torch_blocks, "chosen_operator", chosen),
        use(implementation=name, kernels=kernels),
    ):
        for i, (way, mask) in enumerate(cases):
            calls.clear()
            sequence = replace(mask, dtype=dtype, **_heads(way, grouped=i % 3 == 0))
            truth = _truth(sequence, 10)
            _check(way, sequence, _run(way, sequence, truth.inputs), truth)
            forward, backward = ([c._replace(backward=False) for c in calls if c.backward == b] for b in (False, True))
            assert sorted(map(str, forward)) == sorted(map(str, backward)), (way, mask)  # the same rectangles alike
            assert bool(forward) == (mask.documents is None), (way, mask)
            plain = [call for call in forward if call.window == (None, None)]
            assert not mask.window or len(plain) < len(forward) or rank < world - 1, (way, mask)
            large = [call for call in plain if min(call.rows, call.keys) >= 64]  # cuDNN cannot attend to one key
            assert [call for call in forward if call.operator == "cudnn"] == (large if "CUDNN" in backend else [])


def _fused(dtype: torch.dtype, grouped: bool, chosen: Sequence[int]) -> None:
    """Check few and small cases, since kernels are interpreted. chosen: the indices of the schedules."""
    world = dist.get_world_size()
    ways = [_Way("ring"), _Way("all_gather"), _Way("ring", "striped"), _Way("all_gather", "contiguous")]
    ways += [_Way("ulysses", ulysses=world), *([_Way("ulysses_ring", ulysses=2)] if world == 4 else [])]
    with use(implementation="fused"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no fallback
        for i in chosen:
            way = ways[i]
            mask = MASKS[(3 * i + world) % len(MASKS)]
            heads = {"heads": 2 * way.ulysses, "kv_heads": way.ulysses if grouped else 2 * way.ulysses}
            sequence = replace(mask, dtype=dtype, **heads)
            truth = _truth(sequence, 9)
            _check(way, sequence, _run(way, sequence, truth.inputs), truth)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("direct", ["ulysses", "ring", "ring", "ring"]),
        ("collective", ["ulysses", "ulysses", "all_gather", "ring"]),
        ("fused", ["all_gather"] * 4),
    ],
)
def test_auto_chooses_by_heads_and_size(name: Implementation, expected: list[str]) -> None:
    shapes = (((1, 4, 8, 16), 4), ((1, 4, 8, 16), 1), ((1, 3, 8, 16), 3), ((1, 3, 2**21, 128), 3))
    assert [schedule_for(name, shape, heads, F32, 2)[0] for shape, heads in shapes] == expected
    assert schedule_for(name, *shapes[0], F32, 1)[0] == "ring"


CUDNN, TRITON = SDPBackend.CUDNN_ATTENTION, "blocks by Triton kernels"
HALF = "cuDNN and flash attention take half types alone"
FLASH, REST = SDPBackend.FLASH_ATTENTION, "with documents or dropout"
EDGES = "with flash attention at the edges of windows"


@pytest.mark.parametrize(
    ("dtype", "size", "backend", "kernels", "expected"),
    [
        (BF16, 128, CUDNN, "auto", f"blocks by cuDNN attention, {EDGES}; by Triton kernels {REST}"),
        (torch.float16, 64, FLASH, "torch", f"blocks by flash attention; by the definition {REST}"),
        (BF16, 64, SDPBackend.MATH, "auto", f"{TRITON} (scaled_dot_product_attention takes MATH here)"),
        (BF16, 64, CUDNN, "triton", f"{TRITON} (chosen)"),
        (BF16, 136, CUDNN, "auto", f"{TRITON} (cuDNN has gradients only for heads of at most 128 in multiples of 8)"),
        (F32, 64, CUDNN, "auto", f"{TRITON} ({HALF})"),
        (F32, 64, CUDNN, "torch", f"blocks by the definition ({HALF})"),
    ],
)
def test_a_gpu_takes_the_operator_that_torch_takes(
    dtype: torch.dtype, size: int, backend: SDPBackend, kernels: Kernels, expected: str
) -> None:
    q = FakeTensor(FakeTensorMode(), torch.empty(1, 4, 128, size, dtype=dtype, device="meta"), torch.device("cuda:0"))
    call = RingCall(SequenceLayout(256, 2).runs, 1, causal=True, window=None, scale=1.0)
    with attention_of_gpus(backend), use(kernels=kernels):
        assert explained_blocks(q) == expected
        assert by_kernels(q, call) == expected.startswith(TRITON)
        documents = torch.tensor([0, 256], dtype=torch.int32)
        for changes in ({"dropout_p": 0.1}, {"cu_seqlens": documents}):
            assert by_kernels(q, replace(call, **changes)) == (kernels != "torch"), changes  # type: ignore[arg-type]
        assert by_kernels(q, replace(call, window=128)) == by_kernels(q, call)
        with mock.patch("torch.backends.cuda.is_flash_attention_available", return_value=False):
            assert by_kernels(q, call) == (kernels != "torch")
        with mock.patch.dict(os.environ, TORCH_CUDNN_SDPA_AVOID_RECOMPILE="1"):
            assert by_kernels(q, call) == (kernels != "torch")
        torch.use_deterministic_algorithms(True)
        assert by_kernels(q, call) == (kernels != "torch")


def _compiled(name: Implementation, ways: Sequence[tuple[str, int, int]], options: Sequence[int]) -> None:
    """Check that one graph gives the same results and gradients as a call without one, to the bit."""
    sequences = (
        _Sequence(dtype=F32),
        _Sequence(window=5, kv_heads=1, dtype=BF16),
        _Sequence(documents=(0, 11, 20, 35), causal=False, kv_heads=2),
    )
    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    for (schedule, ulysses, dropout), index in itertools.product(ways, options):
        torch._dynamo.reset()
        sequence, way, more = sequences[index], _Way(schedule, ulysses=ulysses), {}
        if dropout:
            rows = torch.arange(2 * sequence.heads).view(2, -1)
            more = {"dropout_p": 0.3, "head_rows": rows, "key": dropout_keys(torch.empty(0), 1, 2, 3)[0]}
        with use(implementation=name), naming((name, way, sequence)):
            inputs = sequence.inputs(3)
            expected = _run(way, sequence, inputs, **more)
            found = _run(way, sequence, inputs, compiled, **more)
            for part in NAMES:
                assert torch.equal(found[part], expected[part]), part
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


# (schedule, number of ranks that exchange heads in each rank of the ring, whether there is dropout)
EVERY_WAY = (("auto", 1, 0), ("ring", 1, 0), ("all_gather", 1, 0), ("ulysses", 1, 0), ("ulysses_ring", 2, 0))


def _promised() -> None:
    """Check that the compiler gets the shapes, dtypes and strides that the results have."""
    sequence = _Sequence(kv_heads=1, dtype=BF16)
    for schedule in ("ring", "ulysses"):
        way = _Way(schedule)
        q, k, v, grad = _shards(way, sequence, sequence.inputs(1)).values()
        out, lse = ring_attention(q, k, v, group=way.group, schedule=schedule, length=37, return_lse=True)  # type: ignore
        options = {"ring": way.group.group_name, "ulysses": None, "causal": True, "schedule": schedule}
        options |= {"balance": "zigzag", "length": 37, "window": None, "scale": None}
        options |= {"dropout_p": 0.0, "dropout_width": None}
        forward, backward = torch.ops.tpfuse.ring_attention, torch.ops.tpfuse.ring_attention_backward
        for op, tensors in ((forward, (q, k, v)), (backward, (grad, q, k, v, out, lse))):
            with naming((op, schedule)):
                torch.library.opcheck(op, (*tensors, None, None, None), options, test_utils="test_faketensor")


# (the check, the number of ranks, its arguments)
Row = tuple[Callable[..., None], int, tuple[Any, ...]]
FIRST: list[Row] = [
    *((_products, world, ("direct", stride)) for world, stride in ((2, 11), (3, 5), (4, 11))),
    (_products, 3, ("collective", 11)),
    (_in_dtype, 2, ("direct", BF16, ALL)),
    (_in_dtype, 3, ("direct", F32, ALL)),
    (_dropped, 3, ("direct", F64, ("zigzag",), (0, 4))),
    (_dropped, 2, ("direct", F64, ("striped",), (2,))),
    (_twice, 4, ("direct", BF16, ("zigzag",))),
    (_under_autocast, 2, ()),
    (_rare_cases, 3, ("direct", 7)),
    (_packed, 4, ("direct",)),
    (_some_gradients, 3, ("direct",)),
    (_in_two_groups, 3, ("direct", 2, F64, 20)),
    (_no_sequences, 2, ()),
    (_fused, 2, (F32, True, (0,))),
    (_promised, 2, ()),
    (_holds_one_block, 4, ()),
    (_by_operators_of_gpus, 2, ("CUDNN_ATTENTION", "direct", "triton", torch.float16)),
    (_by_operators_of_gpus, 2, ("CUDNN_ATTENTION", "collective", "auto", BF16)),
]
MORE: list[Row] = [
    *((_products, world, ("direct", stride)) for world, stride in ((4, 5), (8, 11))),
    (_products, 4, ("collective", 5)),
    (_in_dtype, 3, ("collective", BF16, ALL)),
    (_dropped, 4, ("direct", F64, BALANCES, (0, 2))),
    *((_dropped, world, ("collective", F64, BALANCES, (mask,))) for world, mask in ((3, 0), (4, 4))),
    (_dropped, 2, ("fused", F32, ("zigzag",), (4,), (50,), ("ring",))),
    (_twice, 4, ("collective", BF16, ("zigzag",))),
    (_rare_cases, 4, ("direct", 5)),
    (_rare_cases, 3, ("collective", 4)),
    (_packed, 4, ("collective",)),
    (_some_gradients, 3, ("collective",)),
    (_in_two_groups, 3, ("collective", 3, F64, 20)),
    (_by_operators_of_gpus, 2, ("FLASH_ATTENTION", "collective", "auto", BF16)),
    (_fused, 2, (BF16, False, (1, 2, 4))),
    (_fused, 4, (BF16, False, (0, 5))),
    (_in_two_groups, 2, ("fused", 2, F32, 20)),
    (_twice, 2, ("fused", BF16, ("zigzag",))),
    (_compiled, 2, ("direct", EVERY_WAY[1::3], (1,))),
    (_compiled, 2, ("direct", EVERY_WAY, (2,))),
    (_compiled, 2, ("collective", EVERY_WAY[:1], (1,))),
    (_compiled, 2, ("direct", (("ring", 1, 1), ("ulysses", 1, 1)), (0,))),
]


@pytest.mark.parametrize(("check", "world", "arguments"), [*FIRST, *exhaustive(*MORE)])
def test_every_way_gives_the_result_of_the_whole_sequence(
    check: Callable[..., None], world: int, arguments: tuple[Any, ...]
) -> None:
    pool(world).run(check, *arguments)


def _changed() -> None:
    """Check that backward is refused after a tensor among the options was changed in place, as for `attention`."""
    for name, schedule in itertools.product(("key", "head_rows", "cu_seqlens"), ("ring", "ulysses")):
        sequence = MASKS[4 if name == "cu_seqlens" else 0]
        options = sequence.options | {"schedule": schedule, "length": sequence.length}
        if name != "cu_seqlens":
            rows = torch.arange(2 * sequence.heads).view(2, -1)
            options |= {"dropout_p": 0.3, "head_rows": rows, "key": torch.tensor(1)}
        shards = _shards(_Way(schedule), sequence, sequence.inputs(1))
        out = ring_attention(shards["q"].requires_grad_(), shards["k"], shards["v"], group=dist.group.WORLD, **options)
        options[name].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_options_changed_in_place_before_backward_are_refused() -> None:
    pool(2).run(_changed)
