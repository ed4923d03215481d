"""ZeRO's stages 0, 1 and 2 train like AdamW on one rank, with every reducer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfuse.backend import Implementation, implementation
from tpfuse.comm import collectives
from tpfuse.comm.mesh import context_mesh, flat_group, rank_and_size
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.whole import gather_whole
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.nodes import pretended_nodes
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive, pairwise
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.flat_adamw import FlatAdamW
from tpfuse.zero.gradient_buckets import GradientBuckets

CONFIG = GPTConfig(vocab_size=61, n_positions=12, n_embd=24, n_layer=2, n_head=4, dropout=0.1)
STEPS, BATCH, LR, CLIP = 6, 12, 1e-2, 0.5
Weights = dict[str, Tensor]
Loss = Callable[
    [nn.Module, int, Tensor], Tensor
]  # a function of a model, a step and the rows of its batch, over which it sums


class Toy(nn.Module):
    """Tied and frozen weights, sizes that no world divides, and a branch that only odd rows of even steps take."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7, dtype=torch.float64)
        self.head = nn.Linear(7, 13, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(7, 7, dtype=torch.float64).requires_grad_(False)
        self.middle = nn.Linear(7, 7, dtype=torch.float64)
        self.sometimes = nn.Linear(7, 7, dtype=torch.float64)
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(normal(seed, *parameter.shape, dtype=torch.float64))

    def forward(self, ids: Tensor, rows: Tensor, step: int) -> Tensor:
        x = self.middle(self.frozen(self.embed(ids))) * self.one
        odd = rows % 2 == 1
        if step % 2 == 0 and odd.any():
            x = x + torch.where(odd[:, None, None], self.sometimes(x), 0.0)
        out: Tensor = self.head(x)
        return out


def toy_loss(model: nn.Module, step: int, rows: Tensor) -> Tensor:
    ids = integers(step, BATCH, 5, low=0, high=12, dtype=torch.int64)[rows]
    logits = model(ids, rows, step)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum") / BATCH


def gpt_loss(model: nn.Module, step: int, rows: Tensor) -> Tensor:
    ids = integers(step, BATCH, CONFIG.n_positions, low=0, high=60, dtype=torch.int64)[rows]
    loss: Tensor = model(
        ids, ids.roll(-1, 1), loss_weight=1 / BATCH / CONFIG.n_positions, dropout_at=(3, step), sequences_B=rows
    )
    return loss


def plainly(model: nn.Module, loss: Loss, clip: bool) -> Weights:
    """Return weights trained by torch's AdamW on one rank; parameters without a gradient have gradient zero."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(STEPS):
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)
        loss(model, step, torch.arange(BATCH)).backward()
        if clip:
            nn.utils.clip_grad_norm_([p for _, p in named], CLIP)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@functools.cache
def reference(kind: str, clip: bool) -> Weights:
    if kind == "toy":
        return plainly(Toy(), toy_loss, clip)
    model = GPT(CONFIG, dtype=torch.float64)
    initialize(model, 1)
    return plainly(model, gpt_loss, clip)


@dataclass(frozen=True)
class Case:
    kind: str = "gpt"
    stage: int = 1
    dp: int = 2
    tp: int = 1
    cp: int = 1
    accumulation: int = 1
    clip: bool = True
    name: Implementation = "auto"
    bucket_bytes: int = 10_000
    sums: bool = True

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp


def on_nodes(case: Case) -> tuple[Weights, int]:
    """Run `train` on two pretended nodes, which checks the class of the reducer."""
    with pretended_nodes(2, 2) as group:
        return train(case, group)


def train(case: Case, group: dist.ProcessGroup | None = None) -> tuple[Weights, int]:
    """Return the weights after STEPS, and the bytes that this rank received in the last. group: replaces the mesh's."""
    mesh = mesh_of(case.dp, case.tp, case.cp) if case.world > 1 else None
    replicas, world = flat_group(mesh, "dp", "cp"), flat_group(mesh, "dp", "cp", "tp")
    if group is not None:
        replicas = world = group
    dp_rank, _ = rank_and_size(flat_group(mesh, "dp"))
    if case.kind == "toy":
        model, loss = Toy(), toy_loss
    else:
        tensor = mesh["tp"] if mesh is not None and case.tp > 1 else None
        model, loss = GPT(CONFIG, device_mesh=tensor, context_mesh=context_mesh(mesh), dtype=torch.float64), gpt_loss
        initialize(model, 1)
    with implementation(case.name):
        buckets = GradientBuckets(
            model, stage=case.stage, data_group=replicas, world_group=world, bucket_bytes=case.bucket_bytes
        )
        assert group is None or all("2 nodes of 2 ranks, within one direct" in reason for reason in buckets.reasons)
        optimizer = FlatAdamW(buckets, betas=(0.9, 0.95), weight_decay=0.1)
        before = 0
        for step in range(STEPS):
            before = buckets.traffic.received
            micro = torch.arange(BATCH).chunk(case.dp)[dp_rank].tensor_split(case.accumulation)
            for index, rows in enumerate(micro):
                buckets.start(last=index == len(micro) - 1)
                loss(model, step, rows).backward()
            buckets.finish(sums=case.sums)
            factor = 1.0
            if case.clip:
                norm = collectives.all_reduce(buckets.squared_norm(), world).item() ** 0.5
                factor = min(1.0, CLIP / (norm + 1e-6))
            optimizer.step(LR, factor)
    weights = {name: gather_whole(p).clone() for name, p in model.named_parameters()}
    received = buckets.traffic.received - before
    buckets.close()
    return weights, received


def check(case: Case) -> list[int]:
    expected = reference(case.kind, case.clip)
    results = pool(case.world).run(train, case)
    for weights, _ in results:
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            error = (weight - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1.0)
            assert error <= 1e-12, f"{name}: {error:.1e}"
            assert torch.equal(weight, results[0][0][name]), f"{name} differs between ranks"
    return [received for _, received in results]


@pytest.mark.parametrize(
    ("stage", "accumulation", "clip", "sums"),
    [
        (2, 1, True, True),
        *exhaustive((0, 3, True, True), (1, 1, True, True), (1, 3, False, False), (2, 3, False, False)),
    ],
)
def test_training_on_two_nodes_equals_that_of_one_rank(stage: int, accumulation: int, clip: bool, sums: bool) -> None:
    """A rank of 4 on 2 nodes receives half of the gradients within its node, and half of those between nodes."""
    case = Case("gpt", stage, 4, accumulation=accumulation, clip=clip, sums=sums)
    expected = reference("gpt", clip)
    results = pool(4).run(on_nodes, case)
    whole = sum(sizes(4)) * 8
    for weights, received in results:
        for name, weight in weights.items():
            error = (weight - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1.0)
            assert error <= 1e-12, f"{name}: {error:.1e}"
            assert torch.equal(weight, results[0][0][name]), f"{name} differs between ranks"
        # Gradients: half of the bucket from the node's other rank, a quarter from the other node; parameters likewise.
        assert received == 2 * (whole // 2 + whole // 4)


STAGES = [0, 1, 2]
LAYOUTS = [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)]  # dp, tp, cp
FIRST = [
    ((2, 1, 1), 0, 1, "collective"),
    ((2, 1, 1), 1, 3, "auto"),
    ((3, 1, 1), 2, 3, "auto"),
    ((2, 1, 1), 2, 1, "collective"),
    ((1, 2, 1), 1, 3, "auto"),
    ((1, 1, 2), 2, 1, "auto"),
]
NAMES, ROWS = pairwise(first=0, layout=LAYOUTS, stage=STAGES, accumulation=[1, 3], name=["auto", "collective"])


@pytest.mark.parametrize(NAMES, [*FIRST, *(row for row in ROWS if row.values not in FIRST)])
def test_weights_equal_those_of_one_rank_and_bytes_those_of_theory(
    layout: tuple[int, int, int], stage: int, accumulation: int, name: Implementation
) -> None:
    """A rank receives 2 (world - 1) / world of the model in each step, at every stage (arXiv:1910.02054, section 7).

    These are the other data-parallel ranks' gradients of its shard, and the parameters of their shards.
    """
    case = Case("gpt", stage, *layout, accumulation, name=name)
    received = check(case)
    if case.dp == case.world:
        expected = 2 * (case.dp - 1) * sum(size // case.dp * 8 for size in sizes(case.dp))
        assert received == [expected] * case.world


@pytest.mark.parametrize(
    *pairwise(first=4, world=[2, 3, 1, 4], stage=[2, 1, 0], accumulation=[3, 1], name=["auto", "collective"])
)
def test_tied_and_frozen_weights_odd_sizes_and_missing_gradients(
    world: int, stage: int, accumulation: int, name: Implementation
) -> None:
    check(Case("toy", stage, world, accumulation=accumulation, name=name, bucket_bytes=300))


def norm_of_ones(name: Implementation) -> float:
    """Return the squared norm of gradients that are all 1; a small bucket follows larger ones in the same buffer."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (1, 64, 64, 64)])
    with implementation(name):
        buckets = GradientBuckets(model, stage=2, data_group=dist.group.WORLD, bucket_bytes=1)
        buckets.start(last=True)
        sum(parameter.sum() for parameter in model).backward()  # type: ignore[union-attr]
        buckets.finish()
        norm = collectives.all_reduce(buckets.squared_norm(), dist.group.WORLD).item()
    buckets.close()
    return norm


@pytest.mark.parametrize("name", ["auto", "collective"])
def test_padding_between_parameters_is_not_in_the_norm(name: Implementation) -> None:
    assert pool(2).run(norm_of_ones, name) == [2**2 * (1 + 3 * 64)] * 2


@pytest.mark.parametrize(("world", "name"), [(2, "auto"), (3, "collective"), *exhaustive((3, "auto"))])
def test_the_update_computes_sums_that_were_not_requested(world: int, name: Implementation) -> None:
    """The update of stage 1 sums the gradients itself if no caller has requested their norm."""
    check(Case("gpt", 1, world, clip=False, sums=False, name=name))
    check(Case("toy", 1, world, accumulation=3, clip=False, sums=False, name=name, bucket_bytes=300))


@pytest.mark.parametrize("world", exhaustive(2, 3))
def test_stages_are_equal_to_the_bit_where_nothing_is_clipped(world: int) -> None:
    results = [pool(world).run(train, Case("gpt", stage, world, clip=False))[0][0] for stage in STAGES]
    for weights in results[1:]:
        assert all(torch.equal(weight, results[0][name]) for name, weight in weights.items())


def sizes(world: int) -> list[int]:
    """Return the number of elements of each bucket for this many ranks."""
    from tpfuse.zero.bucket_layout import plan_buckets

    named = reversed(list(GPT(CONFIG, dtype=torch.float64, device="meta").named_parameters()))
    worlds = dict.fromkeys(("sharded", "replicated", "partial"), world)
    return [layout.size for layout in plan_buckets(named, (), worlds, 10_000)]
