"""Stage 3 trains as plain AdamW on one rank does, in every layout, and sends what theory says."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tpfuse.comm import collectives
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.comm.mesh import context_mesh
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.bucket_layout import decays
from tpfuse.parallel.fully_sharded import FullySharded
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.sharded_adamw import ShardedAdamW
from tpfuse.testing.inputs import integers
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.ranks import pool

# 61 tokens, 18 wide: rows that no world divides, and first dimensions smaller than a world.
CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=20, n_layer=3, n_head=4, dropout=0.2)
STEPS, BATCH, LR, CLIP = 10, 12, 1e-2, 0.5


class Piece(nn.Module):
    """Odd sizes; `spare` is used for every third row of even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.spare = nn.Linear(5, 5)

    def forward(self, x: Tensor, rows: Tensor, step: int) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        wanted = (rows % 3 == 1) & (step % 2 == 0)
        if wanted.any():
            x = x + wanted.view(-1, 1, 1) * self.spare(x)
        return x


class Toy(nn.Module):
    """Tied embeddings, a frozen parameter, one of three rows, one that has a gradient in every third step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.pieces = nn.ModuleList(Piece() for _ in range(3))
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.mixing = nn.Parameter(torch.randn(3, 5))
        self.seldom = nn.Parameter(torch.randn(1, 5))

    def forward(self, ids: Tensor, rows: Tensor, step: int) -> Tensor:
        x = self.embed(ids) + self.mixing.sin().sum(0) * self.frozen.mean(0)
        if step % 3 == 2:
            x = x + self.seldom
        for piece in self.pieces:
            x = piece(x, rows, step)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")


@dataclass
class Case:
    """A model, its units, and the loss of some rows in a step."""

    model: nn.Module
    units: list[nn.Module]
    loss: Callable[[Tensor, int], Tensor]


def ids_of(vocabulary: int) -> Tensor:
    return integers(1, BATCH, CONFIG.n_positions, low=0, high=vocabulary - 1, dtype=torch.int64)


def toy(dtype: torch.dtype = torch.float64, **_: Any) -> Case:
    torch.manual_seed(3)
    model, ids = Toy().to(dtype), ids_of(13)
    return Case(model, list(model.pieces), lambda rows, step: model(ids[rows], rows, step) / ids.numel())


def gpt(dtype: torch.dtype = torch.float64, **options: Any) -> Case:
    model, ids = GPT(CONFIG, dtype=dtype, **options), ids_of(CONFIG.vocab_size)
    initialize(model, 1)

    def loss(rows: Tensor, step: int) -> Tensor:
        weight = 1 / ids.numel()
        return model(ids[rows], ids[rows].roll(-1, 1), loss_weight=weight, dropout_at=(3, step), sequences_B=rows)

    return Case(model, list(model.transformer.h), loss)


CASES = {"toy": toy, "gpt": gpt}


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after STEPS steps of torch's AdamW on one rank, and the norms before clipping."""
    case = CASES[name](dtype)
    trained = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if decays(name, p) == decay], "weight_decay": 1e-2 * decay}
        for decay in (True, False)
    ]
    optimizer, norms = torch.optim.AdamW(groups, lr=LR), []
    for step in range(STEPS):
        case.loss(torch.arange(BATCH), step).backward()
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in case.model.named_parameters()}, norms


@dataclass(frozen=True)
class Layout:
    """Ranks: tp × dp × cp; how many copies of the model among dp × cp."""

    tp: int = 1
    dp: int = 1
    cp: int = 1
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.cp


def sharded(name: str, layout: Layout, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Case, FullySharded]:
    mesh = mesh_of(layout.dp, layout.tp, layout.cp)
    if name == "gpt":
        options |= {"device_mesh": mesh["tp"] if layout.tp > 1 else None, "context_mesh": context_mesh(mesh)}
    reduce_dtype = options.pop("reduce_dtype", "float32")
    case = CASES[name](dtype, **options)
    return case, FullySharded(
        case.model, mesh=mesh, units=case.units, replicas=layout.replicas, reduce_dtype=reduce_dtype
    )


def micro_batches(layout: Layout, accumulation: int) -> tuple[Tensor, ...]:
    place = mesh_of(layout.dp, layout.tp, layout.cp).get_local_rank("dp")
    return torch.arange(BATCH).chunk(layout.dp)[place].chunk(accumulation)


def train_step(
    case: Case, engine: FullySharded, optimizer: ShardedAdamW, batches: tuple[Tensor, ...], at: int
) -> float:
    for index, rows in enumerate(batches):
        engine.start(last=index == len(batches) - 1)
        case.loss(rows, at).backward()
    engine.finish()
    norm = float(collectives.all_reduce(engine.squared_norm(), dist.group.WORLD)) ** 0.5
    optimizer.step(LR, min(1.0, CLIP / (norm + 1e-6)))
    return norm


def whole(engine: FullySharded) -> dict[str, Tensor]:
    """All parameters, whole; this rank's part must be where `local_slices` says."""
    weights = {}
    for name, parameter in engine.model.named_parameters():
        weights[name] = parameter.full_tensor().detach()
        part = weights[name][tuple(slice(*each) for each in local_slices(parameter))]
        assert torch.equal(part, local_tensor(parameter)), name
    return weights


def run(name: str, layout: Layout, accumulation: int, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    case, engine = sharded(name, layout, dtype, **options)
    optimizer = ShardedAdamW(engine)
    batches = micro_batches(layout, accumulation)
    norms = [train_step(case, engine, optimizer, batches, step) for step in range(STEPS)]
    assert optimizer.updates == STEPS
    return whole(engine), norms


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


LAYOUTS = [Layout(dp=2), Layout(dp=3), Layout(dp=4), Layout(dp=4, replicas=2), Layout(dp=2, replicas=2)]
SHARED = [Layout(tp=2, dp=2), Layout(cp=2, dp=2), Layout(cp=2, dp=2, replicas=2), Layout(tp=2, dp=2, replicas=2)]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("name", "layout"), [*(("toy", each) for each in LAYOUTS), *(("gpt", each) for each in LAYOUTS + SHARED)]
)
def test_trains_as_one_rank_does(name: str, layout: Layout, accumulation: int) -> None:
    expected, norms = plain(name)
    for found, found_norms in pool(layout.world).run(run, name, layout, accumulation):
        assert_same(found, expected)
        assert found_norms == pytest.approx(norms, rel=1e-12)
