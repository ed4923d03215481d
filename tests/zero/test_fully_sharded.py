"""Stage 3 trains like plain AdamW on one rank in every layout, and sends as many bytes as theory says."""

import functools
import itertools
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from tpfuse.comm import collectives
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.comm.mesh import context_mesh
from tpfuse.comm.settings import set_settings
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.forked_ranks import LIMIT, Rank, ranks
from tpfuse.testing.inputs import integers
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.train import checkpoint
from tpfuse.train.checkpoint import Shard
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.sharded_adamw import ShardedAdamW

# A vocabulary of 61 rows, which no world divides; some first dimensions are smaller than a world.
CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=20, n_layer=2, n_head=4, dropout=0.2)
STEPS, BATCH, LR, CLIP = 7, 12, 1e-2, 0.5
SPARED = 2 if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else BATCH
# The gradients of keys' biases are rounding errors only; a smaller eps would make their updates as large as all others.
ADAMW: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 1e-1}


class ToyBlock(nn.Module):
    """A block of odd sizes; `spare` is used in even steps only, and there for the rows of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.spare = nn.Linear(5, 5)

    def forward(self, x: Tensor, rows: Tensor, step: int) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        wanted = (rows < SPARED) & (step % 2 == 0)
        if wanted.any():
            x = x + wanted.view(-1, 1, 1) * self.spare(x)
        return x


class Toy(nn.Module):
    """Tied embeddings, a frozen parameter, one with three rows, and one with a gradient in every third step only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(3))
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.mixing = nn.Parameter(torch.randn(3, 5))
        self.seldom = nn.Parameter(torch.randn(1, 5))

    def forward(self, ids: Tensor, rows: Tensor, step: int) -> Tensor:
        x = self.embed(ids) + self.mixing.sin().sum(0) * self.frozen.mean(0)
        if step % 3 == 2:
            x = x + self.seldom
        for block in self.blocks:
            x = block(x, rows, step)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")


@dataclass
class Case:
    """A model, its units, and a function that returns the loss of some rows in a step."""

    model: nn.Module
    units: list[nn.Module]
    loss: Callable[[Tensor, int], Tensor]


def ids_of(vocabulary: int) -> Tensor:
    return integers(1, BATCH, CONFIG.n_positions, low=0, high=vocabulary - 1, dtype=torch.int64)


def toy(dtype: torch.dtype = torch.float64, **_: Any) -> Case:
    torch.manual_seed(3)
    model, ids = Toy().to(dtype), ids_of(13)
    return Case(model, list(model.blocks), lambda rows, step: model(ids[rows], rows, step) / ids.numel())


def gpt(dtype: torch.dtype = torch.float64, **options: Any) -> Case:
    model, ids = GPT(CONFIG, dtype=dtype, **options), ids_of(CONFIG.vocab_size)
    initialize(model, 1)

    def loss(rows: Tensor, step: int) -> Tensor:
        weight = 1 / ids.numel()
        return model(ids[rows], ids[rows].roll(-1, 1), loss_weight=weight, dropout_at=(3, step), sequences_B=rows)

    return Case(model, list(model.transformer.h), loss)


CASES = {"toy": toy, "gpt": gpt}


def torchs_adamw(parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters.items() if decays(name, p) == decay]} for decay in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0
    return torch.optim.AdamW(groups, lr=LR, **ADAMW)


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after STEPS steps of torch's AdamW on one rank, and the norms before clipping."""
    case = CASES[name](dtype)
    trained = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    optimizer, norms = torchs_adamw(trained), []
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
    """The numbers of ranks, tp × dp × cp, and of copies of the model among dp × cp."""

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
    dp_rank = mesh_of(layout.dp, layout.tp, layout.cp).get_local_rank("dp")
    return torch.arange(BATCH).chunk(layout.dp)[dp_rank].tensor_split(accumulation)


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
    """Return all parameters, whole; check that this rank's shard has the elements that `local_slices` gives."""
    weights = {}
    for name, parameter in engine.model.named_parameters():
        weights[name] = parameter.full_tensor().detach()
        part = weights[name][tuple(slice(*each) for each in local_slices(parameter))]
        assert torch.equal(part, local_tensor(parameter)), name
    return weights


def run(name: str, layout: Layout, accumulation: int, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    case, engine = sharded(name, layout, **options)
    optimizer = ShardedAdamW(engine, **ADAMW)
    batches = micro_batches(layout, accumulation)
    norms = []
    for step in range(STEPS):
        norms.append(train_step(case, engine, optimizer, batches, step))
        if step == 4:
            with torch.no_grad():
                case.loss(batches[0], step)
    assert optimizer.updates == STEPS
    return whole(engine), norms


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


# Each layout of data-parallel ranks is tried with both models and both numbers of micro-batches.
FIRST = [
    ("toy", Layout(dp=2), 3),
    ("toy", Layout(dp=3), 1),
    ("toy", Layout(dp=4, replicas=2), 3),
    ("gpt", Layout(tp=2, dp=2), 3),
    ("gpt", Layout(cp=2, dp=2, replicas=2), 1),
]
OTHERS = [
    ("gpt", Layout(dp=2), 1),
    ("gpt", Layout(dp=3), 3),
    ("gpt", Layout(dp=4), 1),
    ("toy", Layout(dp=4), 3),
    ("gpt", Layout(dp=4, replicas=2), 1),
    ("gpt", Layout(dp=2, replicas=2), 3),
    ("toy", Layout(dp=2, replicas=2), 1),
    ("gpt", Layout(cp=2, dp=2), 3),
    ("gpt", Layout(tp=2, dp=2, replicas=2), 1),
]


@pytest.mark.parametrize(("name", "layout", "accumulation"), [*FIRST, *exhaustive(*OTHERS)])
def test_training_equals_that_of_one_rank(name: str, layout: Layout, accumulation: int) -> None:
    expected, norms = plain(name)
    for found, found_norms in pool(layout.world).run(run, name, layout, accumulation):
        assert_same(found, expected)
        assert found_norms == pytest.approx(norms, rel=1e-12)


@pytest.mark.exhaustive
@on_ranks(2)
def test_recomputation_changes_no_bit() -> None:
    expected, norms = run("gpt", Layout(dp=2), 1)
    for recompute in ("selective", "full"):
        found, found_norms = run("gpt", Layout(dp=2), 1, recompute=recompute)
        assert found_norms == norms and found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def gradients(name: str, layout: Layout) -> None:
    """Check the gradients of step 2, in which every parameter takes part, accumulated over three micro-batches."""
    expected = CASES[name]()
    expected.loss(torch.arange(BATCH), 2).backward()
    case, engine = sharded(name, layout)
    batches = micro_batches(layout, 3)
    for rows in batches[:-1]:
        engine.start(last=False)
        case.loss(rows, 2).backward()
        assert all(member.sharded.grad is None for member in engine.members)
    engine.start(last=True)
    case.loss(batches[-1], 2).backward()
    engine.finish()
    for member in engine.members:
        wanted = expected.model.get_parameter(member.name).grad
        assert wanted is not None
        part = wanted[tuple(slice(*each) for each in local_slices(member.sharded))]
        assert (member.gradient - part).abs().amax() <= 1e-13 if part.numel() else member.gradient.shape == part.shape
    assert engine.nonfinite() == []
    engine.members[0].gradient.view(-1)[:1] = math.nan
    rows = len(engine.members[0].gradient)
    assert engine.nonfinite() == ([engine.members[0].name] if rows else [])


@pytest.mark.parametrize(("name", "layout"), [("toy", Layout(dp=4)), ("gpt", Layout(tp=2, dp=2))])
def test_gradients_of_shards_are_sums_over_ranks(name: str, layout: Layout) -> None:
    pool(layout.world).run(gradients, name, layout)


def shard_size(shape: torch.Size, shards: int) -> int:
    """Return the number of elements of each shard, padding included.

    The first dimension is cut; if a rank would then have more than an eighth too much, a dimension that divides evenly.
    """
    first = -(-shape[0] // shards)
    if first * shards > shape[0] * 9 / 8 and any(size % shards == 0 for size in shape):
        return shape.numel() // shards
    return first * (shape.numel() // shape[0])


def theory(case: Case, layout: Layout, accumulation: int, gathered: int, reduced: int) -> int:
    """Return the bytes of a step, computed from sizes; `gathered` and `reduced` are the bytes of an element."""
    shards = layout.dp * layout.cp // layout.replicas
    total, taken = 0, set()
    for unit in (*case.units, case.model):
        parameters = [p for p in unit.parameters() if id(p) not in taken]
        taken |= {id(p) for p in parameters}
        sizes = [shard_size(local_tensor(p).shape, shards) for p in parameters]
        trained = sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad)
        twice = unit is not case.model and unit is not case.units[-1]  # forward and backward
        total += (shards - 1) * gathered * sum(sizes) * accumulation * (1 + twice)
        total += (shards - 1) * reduced * trained
        total += 2 * (layout.replicas - 1) * reduced * trained // layout.replicas
    return total


def traffic(layout: Layout, accumulation: int, dtype: torch.dtype, reduce_dtype: str, reduced: int) -> None:
    plain_mesh = mesh_of(layout.dp, layout.tp, layout.cp)
    before = gpt(dtype, device_mesh=plain_mesh["tp"] if layout.tp > 1 else None, context_mesh=context_mesh(plain_mesh))
    wanted = theory(before, layout, accumulation, dtype.itemsize, reduced)
    case, engine = sharded("gpt", layout, dtype, reduce_dtype=reduce_dtype)
    optimizer = ShardedAdamW(engine)
    for step in range(1, 3):
        train_step(case, engine, optimizer, micro_batches(layout, accumulation), step)
        assert engine.traffic.sent == engine.traffic.received == step * wanted > 0


@pytest.mark.parametrize(
    ("layout", "accumulation", "dtype", "reduce_dtype", "reduced"),
    [
        (Layout(dp=3), 1, torch.float32, "float32", 4),
        (Layout(dp=4, replicas=2), 3, torch.bfloat16, "parameter", 2),
        *exhaustive(
            (Layout(dp=2), 3, torch.bfloat16, "float32", 4),
            (Layout(tp=2, dp=2), 1, torch.float64, "parameter", 8),
        ),
    ],
)
def test_bytes_equal_those_of_theory(
    layout: Layout, accumulation: int, dtype: torch.dtype, reduce_dtype: str, reduced: int
) -> None:
    pool(layout.world).run(traffic, layout, accumulation, dtype, reduce_dtype, reduced)


def masters(world: int, accumulation: int) -> dict[str, Tensor]:
    """Return float32 masters of a bfloat16 model, trained with gradients accumulated in float32 over micro-batches."""
    case = gpt(torch.bfloat16)
    named = dict(case.model.named_parameters())
    master = {name: p.detach().float().requires_grad_() for name, p in named.items()}
    optimizer = torchs_adamw(master)
    for step in range(3):
        for name, parameter in named.items():
            parameter.data.copy_(master[name])
        for rows in torch.arange(BATCH).chunk(world * accumulation):
            case.loss(rows, step).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None
                wide, parameter.grad = parameter.grad.float(), None
                master[name].grad = wide if master[name].grad is None else master[name].grad + wide
        optimizer.step()
        optimizer.zero_grad()
    return master


def half(accumulation: int) -> dict[str, Tensor]:
    layout = Layout(dp=2)
    case, engine = sharded("gpt", layout, torch.bfloat16)
    start = dict(gpt(torch.bfloat16).model.named_parameters())
    for member in engine.members:
        assert member.sharded.dtype == torch.float32
        part = start[member.name][tuple(slice(*each) for each in local_slices(member.sharded))]
        assert torch.equal(local_tensor(member.sharded), part.float()), (
            "weights are drawn in the model's dtype, then widened"
        )
    optimizer = ShardedAdamW(engine, **ADAMW)
    for step in range(3):
        for index, rows in enumerate(micro_batches(layout, accumulation)):
            engine.start(last=index == accumulation - 1)
            case.loss(rows, step).backward()
        engine.finish()
        optimizer.step(LR)
    return whole(engine)


@pytest.mark.parametrize("accumulation", [3, *exhaustive(1)])
def test_half_parameters_have_float32_masters(accumulation: int) -> None:
    expected = masters(2, accumulation)
    for found in pool(2).run(half, accumulation):
        for name, weight in expected.items():
            assert (found[name] - weight).abs().max() <= 1e-6 * weight.abs().max(), name


def save_after_five_steps(folder: str, layout: Layout) -> None:
    case, engine = sharded("gpt", layout)
    optimizer = ShardedAdamW(engine, **ADAMW)
    for step in range(5):
        train_step(case, engine, optimizer, micro_batches(layout, 1), step)
    saved = checkpoint.save(Path(folder), 5, parts_of(optimizer), {}, keep=0, group=dist.group.WORLD, warn=pytest.fail)
    assert saved is not None


def load_and_train(folder: str, layout: Layout) -> dict[str, Tensor]:
    """Load a checkpoint after a forward pass, which leaves parameters gathered, and train the remaining steps."""
    case, engine = sharded("gpt", layout)
    optimizer = ShardedAdamW(engine, **ADAMW)
    with torch.no_grad():
        case.loss(micro_batches(layout, 1)[0], 0)
    checkpoint.open_checkpoint(Path(folder) / "step-5").load(parts_of(optimizer))
    optimizer.publish()
    optimizer.updates = 5
    for step in range(5, STEPS):
        train_step(case, engine, optimizer, micro_batches(layout, 1), step)
    return whole(engine)


def parts_of(optimizer: ShardedAdamW) -> dict[str, list[Shard]]:
    return {
        f"{rectangle.kind}.{rectangle.name}": [
            Shard(rectangle.shape, rectangle.slices, rectangle.tensor, rectangle.is_owner)
        ]
        for rectangle in optimizer.rectangles()
    }


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(Layout(tp=2, dp=2), Layout(dp=3)), *exhaustive((Layout(dp=4, replicas=2), Layout(tp=2, dp=2)))],
)
def test_checkpoints_of_one_layout_resume_in_another(tmp_path: Path, saved: Layout, loaded: Layout) -> None:
    pool(saved.world).run(save_after_five_steps, str(tmp_path), saved)
    files = checkpoint.open_checkpoint(tmp_path / "step-5").manifest["files"]
    assert len(files) == saved.world, "ranks with the same shards share the writing"
    expected, _ = plain("gpt")
    for found in pool(loaded.world).run(load_and_train, str(tmp_path), loaded):
        assert_same(found, expected)


def train_until_a_rank_dies(rank: Rank) -> None:
    rank.join()
    set_settings(timeout=patient(LIMIT))
    case, engine = sharded("toy", Layout(dp=3))
    optimizer, batches = ShardedAdamW(engine), micro_batches(Layout(dp=3), 1)
    for step in itertools.count():
        train_step(case, engine, optimizer, batches, step)
        if step == 1:
            rank.tell("here")


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with ranks(3, tmp_path, train_until_a_rank_dies) as running:
        running.wait_for_all()
        killed = running.send(1, signal.SIGKILL)
        for survivor in (0, 2):
            when, error = running.result(survivor)
            assert isinstance(error, PeerTimeout), error
            assert (error.peer, error.rank) == (1, survivor)
            assert when - killed < LIMIT / 2, "the ranks notice the death before the deadline"


@on_ranks(2)
def test_parameters_that_cannot_be_sharded_are_named() -> None:
    mesh = mesh_of(2, 1)

    def message(change: Callable[[Toy], None], **options: Any) -> str:
        model = Toy()
        change(model)
        with pytest.raises(ValueError) as caught:
            FullySharded(model, mesh=mesh, units=model.blocks, **options)
        assert "\n" not in str(caught.value) and type(model) is Toy, "the model is unchanged"
        return str(caught.value)

    def scalar(model: Toy) -> None:
        model.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(())))

    def transposed(model: Toy) -> None:
        model.mixing = nn.Parameter(torch.randn(5, 3).T)

    def tie(model: Toy) -> None:
        model.blocks[2].up.weight = model.blocks[0].up.weight

    def taken(model: Toy) -> None:
        model.blocks[0].sum_gradients = True
        GradientBuckets(model, data_group=dist.group.WORLD, world_group=dist.group.WORLD)

    assert message(taken).startswith(
        "GradientBuckets sum the gradients of blocks.0 over tensor-parallel ranks: shard a"
    )
    assert message(scalar).startswith("blocks.1.gain is a scalar")
    assert message(transposed).startswith("mixing is not contiguous")
    assert message(tie).startswith("blocks.0.up.weight and blocks.2.up.weight are one parameter in two units")
    assert message(lambda model: model.blocks[0].half()).startswith("frozen is torch.float32, blocks.0.up.weight is")
    assert "no parameter that requires" in message(lambda model: model.requires_grad_(False))
    assert message(lambda model: None, replicas=3).startswith("replicas 3: expected a number that divides the 2")

    _, engine = sharded("toy", Layout(dp=2))
    engine.start(last=True)
    with pytest.raises(ValueError, match="call finish"):
        engine.start(last=False)
    optimizer = ShardedAdamW(engine)
    with pytest.raises(ValueError, match="an update without new gradients"):
        optimizer.step(LR)
    engine.finish()
    with pytest.raises(ValueError, match="without a last micro-batch"):
        engine.finish()
    optimizer.step(LR)
    with pytest.raises(ValueError, match="an update without new gradients"):
        optimizer.step(LR)
    engine.members[3].sharded.requires_grad_(False)
    with pytest.raises(ValueError, match=rf"{engine.members[3].name}.requires_grad is False now"):
        engine.start(last=True)
