"""The engines under a pipeline: many passes of several stages in one step, and parameters that two stages share.

The stages run here without a pipeline: a model in one process gives the input of each stage and the gradient of its
output, and it is also what sums, norms and weights are compared with.
"""

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor

from tpfuse.comm import collectives
from tpfuse.comm.layout import copy_whole_, local_slices, local_tensor
from tpfuse.comm.mesh import flat_group, shard_range
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.testing.zero_training import LR, Engine, optimizer_of, torchs_adamw
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets

VOCABULARY, WIDTH, TOKENS, BLOCKS, STEPS = 14, 6, 4, 4, 3
TIED = "embed.weight"


class Scale(nn.Module):
    """A norm's weight on a shard of the tokens: each tensor-parallel rank has the gradient of its tokens."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        self.tp, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.mesh, self.sum_gradients = mesh, self.tp > 1

    def forward(self, x: Tensor) -> Tensor:
        own = (torch.arange(TOKENS) % self.tp == self.rank).view(-1, 1)
        weight = self.weight
        if self.mesh is not None and self.sum_gradients:  # no engine has taken this over
            weight, group = weight * 1, self.mesh.get_group()
            if weight.requires_grad:
                weight.register_hook(lambda gradient: collectives.all_reduce(gradient, group))
        return x * torch.where(own, weight, weight.detach())


class Block(nn.Module):
    """`seldom` is used in even steps only, and there for the first row of the batch; `never` is not used."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        options: dict[str, Any] = {"device_mesh": mesh, "dtype": torch.float64}
        self.norm, self.up = Scale(mesh), ColumnParallelLinear(WIDTH, 10, **options)
        self.down = RowParallelLinear(10, WIDTH, **options)
        self.seldom, self.never = (nn.Parameter(torch.rand(WIDTH, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor, step: int) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        wanted = (rows == 0) & (step % 2 == 0)
        return x + wanted.view(-1, 1, 1) * self.seldom * x if wanted.any() else x


class Staged(nn.Module):
    """The `stages` of a model of `count` stages; the head is tied to the embedding."""

    def __init__(self, stages: Collection[int], count: int, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"device_mesh": mesh, "dtype": torch.float64}
        self.count, first, last = count, 0 in stages, count - 1 in stages
        if first or last:
            self.embed = VocabParallelEmbedding(VOCABULARY, WIDTH, **options)
        if last:
            self.head = ColumnParallelLinear(WIDTH, VOCABULARY, bias=False, **options)
            self.head.weight = self.embed.weight
        present = [index * count // BLOCKS in stages for index in range(BLOCKS)]
        self.blocks = nn.ModuleList(Block(mesh) if here else nn.Identity() for here in present)

    def forward(self, x: Tensor, stage: int, rows: Tensor, step: int) -> Tensor:
        if stage == 0:
            x = self.embed(x)
        for block in self.blocks[stage * BLOCKS // self.count : (stage + 1) * BLOCKS // self.count]:
            x = block(x, rows, step)
        return self.head(x) if stage == self.count - 1 else x


@dataclass(frozen=True)
class Layout:
    """Stages by pipeline rank, and the numbers of data- and tensor-parallel ranks."""

    stages: tuple[tuple[int, ...], ...] = ((0,), (1,))
    dp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return len(self.stages) * self.dp * self.tp

    @property
    def count(self) -> int:
        return sum(map(len, self.stages))

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of(self.dp, self.tp, pp=len(self.stages))


INTERLEAVED = ((0, 2), (1, 3))
V_SHAPE = ((0, 3), (1, 2))  # the first rank has the embedding twice
FOUR = ((0,), (1,), (2,), (3,))


@functools.cache
def ends(layout: Layout, whole: bool) -> dist.ProcessGroup | None:
    """Return the ranks of both ends with this tensor rank; unless `whole`, only those with this data rank."""
    last, grid = len(layout.stages) - 1, torch.arange(layout.world).view(-1, layout.dp, layout.tp)
    found = None
    for tp_rank in range(layout.tp):
        for rows in [slice(None)] if whole else [slice(row, row + 1) for row in range(layout.dp)]:
            members = sorted(grid[[0, last], rows, tp_rank].flatten().tolist())
            group = dist.new_group(members)
            found = group if dist.get_rank() in members else found
    return found


def engine_of(model: Staged, layout: Layout, zero: int, **options: Any) -> Engine:
    mesh, stages = layout.mesh, layout.stages[layout.mesh.get_local_rank("pp")]
    shared, at_end = {0, layout.count - 1} <= set(stages), {0, layout.count - 1} & set(stages)
    group = ends(layout, zero < 3)
    if at_end and not shared:
        options |= {"tied": [TIED], "tied_group": group}
    if zero == 3:
        return FullySharded(model, mesh=mesh, units=[b for b in model.blocks if isinstance(b, Block)], **options)
    return GradientBuckets(
        model,
        stage=zero,
        data_group=flat_group(mesh, "dp"),
        partial_group=flat_group(mesh, "dp", "tp"),
        world_group=dist.group.WORLD,
        bucket_bytes=200,
        uses={TIED: 2} if shared else {},
        **options,
    )


def actions(stages: tuple[int, ...], count: int) -> Iterator[tuple[str, int, int]]:
    """Yield (pass, stage, micro-batch): forwards run two micro-batches ahead of backwards, weights one behind them."""
    for batch in range(count + 2):
        if batch < count:
            yield from (("forward", stage, batch) for stage in stages)
        if batch >= 2:
            yield from (("backward", stage, batch - 2) for stage in stages[::-1])
        if batch >= 3:
            yield from (("weight", stage, batch - 3) for stage in stages[::-1])
    yield from (("weight", stage, count - 1) for stage in stages[::-1])


class Passes:
    """The passes of one step on this rank. inputs, gradients: of each stage's input and output, for the rows given."""

    def __init__(self, model: Staged, split: bool) -> None:
        self.model, self.split = model, split
        self.alive: dict[tuple[int, int], Any] = {}

    def forward(self, key: tuple[int, int], x: Tensor, rows: Tensor, step: int) -> None:
        x = x.detach().clone().requires_grad_(x.is_floating_point())
        self.alive[key] = x, self.model(x, key[0], rows, step)

    def backward(self, key: tuple[int, int], gradient: Tensor) -> None:
        x, out = self.alive[key]
        if not self.split:
            out.backward(gradient)
        elif key[0] == 0:  # there is no input gradient
            self.alive[key] = lambda: out.backward(gradient)
        else:
            leaves = ((p, getattr(p, "local_leaf", None)) for p in self.model.parameters())
            weights = [parameter if leaf is None else leaf.value for parameter, leaf in leaves]
            _, groups = stage_backward_input([out], [gradient], [x], iter(weights))
            self.alive[key] = lambda: self._weights(weights, groups)

    def weight(self, key: tuple[int, int]) -> None:
        if self.split:
            self.alive.pop(key)()

    @staticmethod
    def _weights(weights: list[Tensor], groups: list[dict[str, Any]]) -> None:
        stage_backward_weight(iter(weights), groups)  # type: ignore[arg-type]
        for weight in weights:
            for hook in (weight._post_accumulate_grad_hooks or {}).values():
                hook(weight)


class Reference:
    """The whole model in one process, with torch's AdamW."""

    def __init__(self, layout: Layout, batches: int) -> None:
        torch.manual_seed(7)
        self.model, self.layout = Staged(range(layout.count), layout.count), layout
        self.named = dict(self.model.named_parameters())
        self.optimizer = torchs_adamw(self.named)
        self.rows = torch.arange(2 * batches * layout.dp)

    def step(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the gradients of a step; return the inputs of all stages, and the gradients of their outputs."""
        self.optimizer.zero_grad()
        inputs = [integers(step, len(self.rows), TOKENS, low=0, high=VOCABULARY - 1, dtype=torch.int64)]
        outputs: list[Tensor] = []
        for stage in range(self.layout.count):
            outputs.append(self.model(inputs[stage], stage, self.rows, step))
            outputs[-1].retain_grad()
            inputs.append(outputs[-1])
        (outputs[-1].sin() / outputs[-1].numel()).sum().backward()
        for parameter in self.named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return inputs, [output.grad for output in outputs if output.grad is not None]


def run_step(
    layout: Layout, engine: Engine, reference: Reference, split: bool, batches: int, step: int, after: Any = None
) -> None:
    """Run the passes of this rank's stages between start() and finish(); `after` is called after each."""
    mesh, stages = layout.mesh, layout.stages[layout.mesh.get_local_rank("pp")]
    inputs, gradients = reference.step(step)
    gradients[-1] = gradients[-1][..., slice(*shard_range(VOCABULARY, mesh.get_local_rank("tp"), layout.tp))]
    rows_of = reference.rows.chunk(layout.dp)[mesh.get_local_rank("dp")].chunk(batches)
    assert isinstance(engine.model, Staged)
    passes = Passes(engine.model, split)
    engine.start(last=True, backwards=batches)
    for kind, stage, batch in actions(stages, batches):
        key, rows = (stage, batch), rows_of[batch]
        if kind == "forward":
            passes.forward(key, inputs[stage][rows], rows, step)
        elif kind == "backward":
            passes.backward(key, gradients[stage][rows])
        else:
            passes.weight(key)
        if after is not None:
            after(kind, stage, batch)


def parts(engine: Engine, whole: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each parameter in this rank's shards, its summed gradient there, and that part of `whole`."""
    if isinstance(engine, FullySharded):
        for member in engine.members:
            part = tuple(slice(*each) for each in local_slices(member.sharded))
            yield member.name, member.gradient, whole[member.name][part]
        return
    for bucket in engine.buckets:
        for segment, part in bucket.layout.segments_in(bucket.shard):
            here = tuple(slice(*each) for each in local_slices(engine.trained[segment.name]))
            local_whole = whole[segment.name][here].flatten()[part.start - segment.start : part.stop - segment.start]
            yield segment.name, bucket.reduced_shard[part.start - bucket.shard.start :][: len(part)], local_whole


def check_close(name: str, found: Tensor, expected: Tensor, whole: Tensor) -> None:
    assert found.shape == expected.shape, name
    assert not found.numel() or (found - expected).abs().amax() <= 1e-12 * whole.abs().amax(), name


Owned = list[tuple[str, str, Any]]


def model_of(layout: Layout, reference: Reference) -> Staged:
    """Return this rank's stages; ranks other than the first begin with other weights at the ends and as replicas."""
    mesh, stages = layout.mesh, layout.stages[layout.mesh.get_local_rank("pp")]
    model = Staged(stages, layout.count, mesh["tp"] if layout.tp > 1 else None)
    other = dist.get_rank() // layout.tp if mesh.get_local_rank("dp") else 0
    for name, parameter in model.named_parameters():
        copy_whole_(parameter, reference.named[name].detach() + other + (name == TIED) * mesh.get_local_rank("pp"))
    return model


def train(layout: Layout, zero: int, batches: int, split: bool) -> Owned:
    """Train STEPS steps, compare gradients, norms and weights; return what this rank saves."""
    reference = Reference(layout, batches)
    engine = engine_of(model_of(layout, reference), layout, zero)
    optimizer = optimizer_of(engine)
    for step in range(STEPS):
        run_step(layout, engine, reference, split, batches, step)
        engine.finish()
        gradients = {name: p.grad for name, p in reference.named.items() if p.grad is not None}
        for name, found, expected in parts(engine, gradients):
            check_close(name, found, expected, gradients[name])
        squared = collectives.all_reduce(engine.squared_norm(), engine.world_group)
        expected = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()
        assert (squared - expected).abs() <= 1e-12 * expected
        assert engine.nonfinite() == []
        reference.optimizer.step()
        optimizer.step(LR)
        for name, parameter in engine.model.named_parameters():
            whole = reference.named[name].detach()
            part = whole[tuple(slice(*each) for each in local_slices(parameter))]
            check_close(name, local_tensor(parameter), part, whole)
    return [(each.name, each.kind, each.slices) for each in optimizer.rectangles() if each.is_owner]


def check_saved_once(layout: Layout, owned: list[Owned]) -> None:
    """Check that the ranks save each element of each parameter and moment exactly once."""
    model = Staged(range(layout.count), layout.count)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        saved = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
        for name, its_kind, slices in (each for rank in owned for each in rank):
            if its_kind == kind:
                saved[name][tuple(slice(*each) for each in slices)] += 1
        for name, count in saved.items():
            assert (count == 1).all(), name


CASES = [
    (Layout(), 0, 5, False),
    (Layout(dp=2), 1, 5, True),
    (Layout(dp=2), 2, 2, False),
    (Layout(dp=2), 3, 5, True),
    (Layout(V_SHAPE), 0, 2, True),
    (Layout(INTERLEAVED), 2, 5, True),
    (Layout(tp=2), 2, 2, True),
    (Layout(FOUR), 3, 2, False),
]
MORE = [
    (Layout(stages, dp, tp), zero, batches, split)
    for stages, dp, tp in (
        (((0,), (1,)), 1, 1), (((0,), (1,)), 2, 1), (((0,), (1,)), 1, 2), (INTERLEAVED, 2, 1), (V_SHAPE, 1, 1),
        (V_SHAPE, 2, 1), (V_SHAPE, 1, 2), (FOUR, 1, 1),
    )
    for zero in range(4)
    for batches in (1, 2, 5)
    for split in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "zero", "batches", "split"), [*CASES, *exhaustive(*(case for case in MORE if case not in CASES))]
)
def test_stages_train_like_the_whole_model(layout: Layout, zero: int, batches: int, split: bool) -> None:
    """Check layouts, ZeRO's stages, numbers of micro-batches, and whole and split backward passes."""
    check_saved_once(layout, pool(layout.world).run(train, layout, zero, batches, split))


@on_ranks(4)
def test_buckets_are_reduced_with_the_last_arrival_and_tied_ones_at_the_end() -> None:
    layout, counts = Layout(dp=2), []
    reference = Reference(layout, 5)
    engine = engine_of(model_of(layout, reference), layout, 1)
    assert isinstance(engine, GradientBuckets)
    for name in list(engine.trained):
        if name.endswith(("seldom", "never")):  # without a gradient a bucket is complete in finish() only
            engine.trained[name].requires_grad_(False)
    engine = engine_of(engine.model, layout, 1)
    tied = [bucket.layout.kind == "tied" for bucket in engine.buckets]
    assert tied == sorted(tied) and tied.count(True) == 1 and len(tied) > 3
    run_step(
        layout, engine, reference, False, 5, 1, lambda kind, *_: kind == "backward" and counts.append(engine._next)
    )
    assert counts == [0] * 4 + [tied.count(False)], "all gradients arrive once more in the last backward pass"
    engine.finish()
    assert engine._next == len(tied)


@pytest.mark.parametrize("zero", [0, 2, 3])
@on_ranks(2)
def test_a_step_that_is_discarded_leaves_nothing(zero: int) -> None:
    """Check that gradients of a whole step, and of one that fails in the middle, are not in the next step's sums."""
    layout = Layout(V_SHAPE)
    reference = Reference(layout, 2)
    engine = engine_of(model_of(layout, reference), layout, zero)

    def fail(kind: str, stage: int, batch: int) -> None:
        if (kind, batch) == ("weight", 0):
            raise InterruptedError

    run_step(layout, engine, reference, True, 2, 0)
    engine.discard()
    with pytest.raises(InterruptedError):
        run_step(layout, engine, reference, True, 2, 0, fail)
    engine.abandon()
    run_step(layout, engine, reference, True, 2, 0)
    engine.finish()
    gradients = {name: p.grad for name, p in reference.named.items() if p.grad is not None}
    for name, found, expected in parts(engine, gradients):
        check_close(name, found, expected, gradients[name])


@on_ranks(4)
def test_stage_3_gathers_and_reduces_once_in_a_step() -> None:
    layout = Layout(INTERLEAVED, dp=2)
    reference = Reference(layout, 5)
    engine = engine_of(model_of(layout, reference), layout, 3)
    assert isinstance(engine, FullySharded)
    bytes_of_shards = sum(local_tensor(member.sharded).nbytes for member in engine.members)  # all shapes are even
    for step in range(1, 3):
        run_step(layout, engine, reference, True, 5, 1)
        assert all(not isinstance(each, DTensor) for each in engine.model.parameters()), "gathered until finish()"
        engine.finish()
        assert engine.traffic.received == 2 * step * bytes_of_shards, "the all-gather and the reduce-scatter"
        assert all(isinstance(each, DTensor) for each in engine.model.parameters())
        engine.clear_gradients()
    with torch.no_grad():
        engine.model(torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64), 2 - (dist.get_rank() > 1), torch.ones(1), 1)
    first = next(block for block in engine.model.blocks if isinstance(block, Block))
    assert isinstance(first.norm.weight, DTensor), "outside of a step each unit frees its parameters"


@on_ranks(4)
def test_split_passes_accumulate_half_gradients_in_float32() -> None:
    layout = Layout(dp=2)
    reference, sums = Reference(layout, 5), []
    for split in (False, True):
        engine = engine_of(model_of(layout, reference).bfloat16(), layout, 3)
        assert isinstance(engine, FullySharded)
        engine.start(last=True, backwards=5)
        rows, pp = torch.ones(2), layout.mesh.get_local_rank("pp")
        passes = Passes(engine.model, split)  # type: ignore[arg-type]
        for batch in range(5):
            x = normal(batch, 2, TOKENS, WIDTH).bfloat16()
            x = integers(batch, 2, TOKENS, low=0, high=9, dtype=torch.int64) if pp == 0 else x
            passes.forward((pp, batch), x, rows, 1)
            passes.backward((pp, batch), normal(batch, 2, TOKENS, VOCABULARY if pp else WIDTH).bfloat16())
            passes.weight((pp, batch))
        engine.finish()
        sums.append({member.name: member.gradient for member in engine.members})
    assert all(torch.equal(sums[0][name], found) for name, found in sums[1].items())


@on_ranks(2)
def test_wrong_use_is_refused() -> None:
    layout, mesh = Layout(V_SHAPE), mesh_of(1, 2)
    reference = Reference(layout, 2)
    first = dist.get_rank() == 0
    engine = GradientBuckets(model_of(layout, reference), data_group=None, world_group=dist.group.WORLD)
    for options in ({"last": False, "backwards": 2}, {"last": True, "backwards": 0}):
        with pytest.raises(ValueError, match="expected at least 1, and 1 without last"):
            engine.start(**options)  # type: ignore[arg-type]
    if first:  # `uses` is missing, so the third gradient of the embedding is one too many
        with pytest.raises(ValueError, match=r"embed.weight.grad is in the memory of GradientBuckets"):
            run_step(layout, engine, reference, False, 2, 1)

    def message(model: Staged, **options: Any) -> str:
        groups = {"data_group": None, "partial_group": None, "world_group": dist.group.WORLD}
        with pytest.raises(ValueError) as caught:
            GradientBuckets(model, **{**groups, **options})  # type: ignore[arg-type]
        return str(caught.value)

    assert message(Staged([0], 2), tied=[TIED]).startswith("tied_group is missing: embed.weight is tied")
    assert message(Staged([0], 2), tied=["embed.bias"]).startswith("tied parameter embed.bias: the model has no")
    sharded = Staged([0], 2, mesh["tp"])
    group = dist.group.WORLD
    found = message(sharded, tied=["blocks.0.never"], tied_group=group)
    assert found.startswith("blocks.0.never is tied and replicated: expected a shard on each")
    sharded.embed.sum_gradients = True  # type: ignore[assignment]
    assert message(sharded, tied=[TIED], tied_group=group).startswith("embed.weight is tied, and its gradients are")
    lonely = FullySharded(Staged([0], 2), mesh=mesh_of(2, 1))
    with pytest.raises(ValueError, match=r'start\(backwards=2\): expected 1, because the mesh has no dimension "pp"'):
        lonely.start(last=True, backwards=2)
