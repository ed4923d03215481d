"""Full attention of a whole sequence in float64, whose mask is written out, and a rank's part of it.

    check_call(Way("ring"), Case(causal=False), seed=1)  # on every rank

Padding, and tokens after the last document, hold numbers that would change the result if a query saw them.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.meshes import mesh_of
from tpfuse.ops.ring_attention.layout import BALANCES, Balance, SequenceLayout
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import normal

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SIZE = 16  # the size of a head
NAMES = ("out", "lse", "q", "k", "v")
Whole = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
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
class Truth:
    """The whole result in float64, and the error that each tensor of it may have."""

    inputs: Whole
    whole: Whole
    bounds: dict[str, float]


def new_truth(sequence: Case, seed: int) -> Truth:
    inputs, hidden = sequence.inputs(seed), sequence.hidden
    leaves = {name: x for name, x in inputs.items() if name != "grad"}
    expected = Expected(lambda **x: _full(**x, hidden=hidden)[0], leaves, inputs["grad"])
    lse = _full(**{name: x.double() for name, x in leaves.items()}, hidden=hidden)[1]
    if sequence.dtype == F64:
        return Truth(inputs, expected.float64 | {"lse": lse}, dict.fromkeys(NAMES, 1e-12))
    seen = lse.isfinite()
    error = (_full(**leaves, hidden=hidden)[1].double() - lse)[seen].abs().max().item()
    bounds = {"lse": 2 * error + torch.finfo(F32).eps * lse[seen].abs().max().item()}
    bounds |= {name: expected.bound(name) for name in expected.float64}
    return Truth(inputs, expected.float64 | {"lse": lse}, bounds)


truth_of = functools.cache(new_truth)


@dataclass(frozen=True)
class Way:
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


def ways(world: int) -> Iterator[Way]:
    """Yield every schedule with every balance."""
    pairs = {4: (2,), 8: (2, 4)}.get(world, ())
    schedules = [("ring", 1), ("all_gather", 1), ("ulysses", world), *(("ulysses_ring", u) for u in pairs)]
    for (schedule, ulysses), balance in itertools.product(schedules, BALANCES):
        yield Way(schedule, balance, ulysses)


def shards_of(way: Way, sequence: Case, inputs: Whole) -> Whole:
    """Return this rank's shards, with large numbers as padding."""
    layout = way.layout(sequence.length)
    return {name: layout.shard(x, dist.get_rank(), 2, value=20.0) for name, x in inputs.items()}


def run(way: Way, sequence: Case, inputs: Whole, attend: Any = ring_attention, **more: Any) -> Whole:
    """Return this rank's out, lse and gradients."""
    shards = shards_of(way, sequence, inputs)
    grad = shards.pop("grad")
    leaves = {name: x.requires_grad_() for name, x in shards.items()}
    options = sequence.options | {"schedule": way.schedule, "balance": way.balance, "length": sequence.length} | more
    out, lse = attend(**leaves, group=way.group, return_lse=True, **options)
    assert out.dtype == grad.dtype and lse.dtype == (F64 if grad.dtype == F64 else F32) and not lse.requires_grad
    out.backward(grad)
    return {"out": out.detach(), "lse": lse} | {name: leaf.grad for name, leaf in leaves.items()}


def check(way: Way, sequence: Case, found: Whole, truth: Truth, names: Sequence[str] = NAMES) -> None:
    """Compare this rank's tensors with the truth."""
    layout, rank = way.layout(sequence.length), dist.get_rank()
    for name in names:
        expected = layout.shard(truth.whole[name], rank, 2, value=-torch.inf if name == "lse" else 0.0)
        same = found[name].double() == expected  # infinities among them
        error = (found[name].double() - expected).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf).max().item()
        right = found[name].shape == expected.shape and error <= truth.bounds[name]
        assert right, f"{way} {sequence}: {name} is off by {error:.2e} (> {truth.bounds[name]:.2e})"


def check_call(way: Way, sequence: Case, seed: int) -> None:
    """Compare this rank's results and gradients of a call with the truth."""
    truth = truth_of(sequence, seed)
    check(way, sequence, run(way, sequence, truth.inputs), truth)


def heads_for(way: Way, grouped: bool, least: int = 4) -> dict[str, int]:
    """Return numbers of heads that the ranks can divide; if grouped, four of q for one of keys."""
    u = way.ulysses
    return {"heads": 4 * u, "kv_heads": u} if grouped else dict.fromkeys(("heads", "kv_heads"), math.lcm(least, u))


MASKS = (
    Case(37),
    Case(48, causal=False),
    Case(41, window=11),
    Case(37, causal=False, window=6),
    Case(48, documents=(0, 5, 5, 23, 39)),
    Case(41, causal=False, documents=(0, 17, 41)),
    Case(37, window=7, documents=(0, 1, 14, 30)),
)
