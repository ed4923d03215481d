"""The engines under a pipeline: many passes of several stages in one step, and parameters that two stages share."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tests.zero.zero_training import ADAMW, LR, Engine, check_same, torchs_adamw, whole
from tpfuse.choices import Accumulate
from tpfuse.comm.dispatch import choose_implementation
from tpfuse.comm.layout import local_slices, local_tensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.parallel.pipeline.order import Action, Kind
from tpfuse.parallel.pipeline.pipeline import MicroBatch, Pipeline
from tpfuse.parallel.pipeline.runner import Runner
from tpfuse.parallel.pipeline.shared_parameters import SharedParameters
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import adamw, shard
from tpfuse.zero.engine import RankGroups
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.optimizer import ZeroOptimizer

STEPS, BATCHES, WIDTH, VOCABULARY = 3, 4, 6, 14
TIED = "wte.weight"
Owned = list[tuple[str, str, Any]]


class Block(nn.Module):
    """`seldom` is used in the calls for which `turns` says so; `never` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.seldom, self.never = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.turns: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.seldom * x if self.turns and self.turns.pop(0) else x


class Products(Block):
    """A block that ends in a product: the second part of a split pass begins at its output, where torch has a hook."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Model(nn.Module):
    """Four blocks between an embedding and a head, which are tied."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight
        self.double()

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(x).sin().sum() / ids.numel()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, ids)


class Staged:
    """A pipeline of two ranks and two replicas with an engine, and the same model in one process."""

    def __init__(
        self,
        zero: int,
        schedule: str = "1f1b",
        used: bool = False,
        change: Callable[[Model], object] = lambda model: None,
        accumulate: Accumulate = "sharded",
    ) -> None:
        """used: freeze the parameters that take no part. change: is called with both models."""
        self.mesh = mesh_of(2 if dist.get_world_size() == 4 else 1, 1, pp=2)
        self.replica, self.replicas = self.mesh.get_local_rank("dp"), self.mesh["dp"].size()
        self.model, self.whole = Model(7 + self.replica), Model()  # replicas begin with the weights of the first
        for model in (self.model, self.whole):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not (used and name.endswith(("seldom", "never"))))
            change(model)
        self.pipeline = Pipeline(
            self.model,
            embed=self.model.wte,
            blocks=self.model.blocks,
            head=(self.model.loss, [self.model.head]),
            device_mesh=self.mesh["pp"],
            schedule=schedule,  # type: ignore[arg-type]
            micro_batches=BATCHES,
        )
        options: dict[str, Any] = {"units": self.pipeline.blocks, "shared": self.pipeline.shared}
        options["accumulate"] = accumulate
        self.engine = shard(self.model, self.mesh, stage=zero, bucket_bytes=200, **options)
        self.expected: dict[str, Tensor] = {}

    def step(self, step: int) -> None:
        """Run the passes of a step, and those of the whole model, whose gradients are then `expected`."""
        ids = integers(step, self.replicas, BATCHES, 2, 3, low=0, high=VOCABULARY - 1, dtype=torch.int64)
        self.whole.zero_grad()
        for replica in range(self.replicas):
            self._turns(self.whole.blocks, replica, step)
            for batch in ids[replica]:
                self.whole(batch).backward()
        named = self.whole.named_parameters()
        self.expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
        self._turns(self.pipeline.blocks, self.replica, step)
        batches: list[MicroBatch] = [(batch,) for batch in ids[self.replica]]
        self.pipeline.step(batches, self.engine)

    def _turns(self, blocks: Any, replica: int, step: int) -> None:
        for block in blocks:
            block.turns = [replica == 0 and step % 2 == 0, *[False] * (BATCHES - 1)]

    def check_gradients(self) -> None:
        for name, found, expected in parts(self.engine, self.expected):
            assert found.shape == expected.shape, name
            bound = 1e-12 * self.expected[name].abs().amax()
            assert not found.numel() or (found - expected).abs().amax() <= bound, name


def freeze(model: Model, blocks: Sequence[int]) -> None:
    """Freeze these blocks, and if there are any, the table and the head, which are one parameter."""
    for module in (model.wte, *(model.blocks[index] for index in blocks)) if blocks else ():
        module.requires_grad_(False)


def parts(engine: Engine, gradients: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each parameter in this rank's shards, its summed gradient there, and that part of the whole."""
    if isinstance(engine, FullySharded):
        for member in engine.members:
            here = tuple(slice(*each) for each in local_slices(member.sharded))
            yield member.name, member.gradient, gradients[member.name][here]
        return
    for bucket in engine.buckets:
        for segment, part in bucket.layout.segments_in(bucket.shard):
            expected = gradients[segment.name].flatten()[part.start - segment.start : part.stop - segment.start]
            yield segment.name, bucket.reduced_shard[part.start - bucket.shard.start :][: len(part)], expected


def watched(seen: Callable[[Action], object]) -> Any:
    """Return a patch that calls `seen` after each pass of a pipeline."""
    run = Runner._run

    def watching(runner: Runner, action: Action, *arguments: Any) -> list[Tensor]:
        losses = run(runner, action, *arguments)
        seen(action)
        return losses

    return mock.patch.object(Runner, "_run", watching)


def train(zero: int, schedule: str, frozen: Sequence[int] = ()) -> Owned:
    """Train STEPS steps, compare gradients, norms and weights; return what this rank saves.

    frozen: the blocks that are frozen, and the table too.
    """
    staged = Staged(zero, schedule, change=lambda model: freeze(model, frozen))
    engine = staged.engine
    optimizer, torchs = adamw(engine, **ADAMW), torchs_adamw(dict(staged.whole.named_parameters()))
    for step in range(STEPS):
        staged.step(step)
        engine.finish()
        staged.check_gradients()
        expected = torch.stack([gradient.square().sum() for gradient in staged.expected.values()]).sum()
        assert abs(engine.norm() ** 2 - expected) <= 1e-12 * expected
        assert engine.nonfinite() == []
        for name, parameter in staged.whole.named_parameters():
            parameter.grad = staged.expected[name] if parameter.requires_grad else None
        torchs.step()
        optimizer.step(LR)
        weights = whole(engine)
        check_same(weights, {name: staged.whole.get_parameter(name).detach() for name in weights})
    return [(each.name, each.kind, each.slices) for each in optimizer.rectangles() if each.is_owner]


@pytest.mark.parametrize(
    ("zero", "schedule"),
    [(3, "1f1b"), (2, "interleaved_1f1b"), *exhaustive((0, "1f1b"), (1, "zero_bubble"), (3, "zbv"), (2, "zbv"))],
)
def test_ranks_train_and_save_each_element_once(zero: int, schedule: str) -> None:
    """Some parameters have gradients in few passes of one replica, others in none."""
    owned = pool(4).run(train, zero, schedule)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        saved = {name: torch.zeros(parameter.shape) for name, parameter in Model().named_parameters()}
        for name, its_kind, slices in (each for rank in owned for each in rank):
            if its_kind == kind:
                saved[name][tuple(slice(*each) for each in slices)] += 1
        assert all((count == 1).all() for count in saved.values())


@pytest.mark.parametrize("zero", [1, 3])
@on_ranks(4)
def test_a_stage_may_be_frozen_and_a_whole_model_may_not(zero: int) -> None:
    for frozen in ((0, 1), (2, 3)):
        stage = dist.get_rank() // 2
        assert bool(train(zero, "1f1b", frozen)) == (2 * stage not in frozen)
    with pytest.raises(ValueError, match=r"^shard: the model has no parameter that requires a gradient$"):
        Staged(zero, change=lambda model: freeze(model, range(4)))


@pytest.mark.parametrize("zero", [1, 3])
@on_ranks(2)
def test_muon_needs_matrices_on_some_stage(zero: int) -> None:
    mesh = mesh_of(1, 1, pp=2)
    for frozen in (2, 4):
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks, model.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 1)
        model.blocks[:frozen].requires_grad_(False)
        head = lambda x, _, head=model.head: head(x).sum(), [model.head]
        pipeline = Pipeline(
            model, embed=lambda x: x, blocks=model.blocks, head=head, device_mesh=mesh["pp"], micro_batches=2
        )
        options: dict[str, Any] = {"stage": zero, "algorithm": "muon", "shared": pipeline.shared}
        if frozen == 4:
            with pytest.raises(ValueError, match=r"^Muon found no matrices of hidden layers"):
                ZeroOptimizer(model, mesh, **options)
            continue
        optimizer = ZeroOptimizer(model, mesh, **options)
        before = [local_tensor(x).clone() for x in model.parameters()]
        optimizer.zero_grad()
        pipeline.step([(torch.rand(3, WIDTH),), (torch.rand(3, WIDTH),)], optimizer.engine)
        optimizer.step()
        changed = [not torch.equal(x, local_tensor(y)) for x, y in zip(before, model.parameters(), strict=True)]
        assert all(changed) if dist.get_rank() else not any(changed)


@on_ranks(4)
def test_buckets_are_reduced_with_the_last_arrival_and_tied_ones_at_the_end() -> None:
    staged, counts = Staged(1, used=True), []  # without a gradient a bucket is complete in finish() only
    engine = staged.engine
    assert isinstance(engine, GradientBuckets)
    tied = [bucket.layout.kind == "tied" for bucket in engine.buckets]
    assert tied == sorted(tied) and tied.count(True) == 1 and len(tied) > 3
    with watched(lambda action: action.kind is Kind.BACKWARD and counts.append(len(engine._turns))):
        staged.step(1)
    assert counts == [len(tied)] * (BATCHES - 1) + [1], "all gradients arrive once more in the last pass"
    engine.finish()
    assert not engine._turns


@pytest.mark.parametrize("accumulate", ["sharded", "whole"])
@on_ranks(4)
def test_stage_3_reduces_a_unit_with_its_last_gradient(accumulate: Accumulate) -> None:
    staged, received = Staged(3, used=True, accumulate=accumulate), []
    engine = staged.engine
    assert isinstance(engine, FullySharded)
    first, second = staged.pipeline.blocks

    def watch(action: Action) -> None:
        if (action.kind, action.micro_batch) == (Kind.FORWARD, 0):  # now the parameters are gathered
            received.append(engine.traffic.received)
            first.up.bias.register_post_accumulate_grad_hook(lambda _: received.append(engine.traffic.received))

    with watched(watch):
        staged.step(1)
    in_second = {name for name, parameter in engine.model.named_parameters() if parameter in {*second.parameters()}}
    sizes = {member.name: local_tensor(member.sharded).nbytes for member in engine.members}  # all shapes are even
    before, whole = sum(sizes[name] for name in in_second & sizes.keys()), accumulate == "whole"
    # When the gradients of the first block arrive, the second block is reduced, and later the first one and the rest.
    passes = [0] * (BATCHES - 1) + [before] if whole else [i * sum(sizes.values()) + before for i in range(BATCHES)]
    assert [count - received[0] for count in received[1:]] == passes
    assert not engine._owed
    engine.finish()
    assert isinstance(second.up.bias, DTensor), "the parameters are free"


@pytest.mark.parametrize("zero", [0, 3, *exhaustive(2)])
@on_ranks(2)
def test_a_step_that_is_discarded_leaves_nothing(zero: int) -> None:
    """Check that gradients of a whole step, and of one that fails in the middle, are not in the next step's sums."""
    staged = Staged(zero, "zbv")

    def fail(action: Action) -> None:
        if (action.kind, action.micro_batch) == (Kind.WEIGHT, 0):
            raise InterruptedError

    staged.step(0)
    with pytest.raises(ValueError, match=r"begun the last micro-batch of a step: call finish\(\) first"):
        staged.engine.start(last=False, again=True)  # gradients have arrived
    staged.engine.discard()
    with pytest.raises(InterruptedError), watched(fail):
        staged.step(0)
    staged.engine.abandon()
    memory = choose_implementation(torch.device("cpu"), torch.float64, staged.mesh.get_group("pp")).memory
    assert memory is not None
    memory.reset()  # of the pipeline's messages
    staged.step(0)
    staged.engine.finish()
    staged.check_gradients()


@pytest.mark.parametrize("accumulate", ["sharded", *exhaustive("whole")])
@on_ranks(4)
def test_stage_3_gathers_once_in_a_step_and_reduces_each_pass_or_once(accumulate: Accumulate) -> None:
    staged = Staged(3, "interleaved_1f1b", accumulate=accumulate)
    engine = staged.engine
    assert isinstance(engine, FullySharded)
    bytes_of_shards = sum(local_tensor(member.sharded).nbytes for member in engine.members)  # all shapes are even
    for step in range(1, 3):
        staged.step(1)
        assert all(not isinstance(each, DTensor) for each in engine.model.parameters()), "gathered until finish()"
        engine.finish()
        exchanged = 1 + (BATCHES if accumulate == "sharded" else 1)  # the all-gather and the reduce-scatters
        assert engine.traffic.received == exchanged * step * bytes_of_shards
        assert all(isinstance(each, DTensor) for each in engine.model.parameters())
        engine.clear_gradients()
    staged.pipeline.forward([(torch.ones(2, 3, dtype=torch.int64),)])
    assert isinstance(staged.pipeline.blocks[0].up.bias, DTensor), "outside of a step each unit frees its parameters"


@pytest.mark.parametrize("accumulate", ["sharded", "whole"])
@on_ranks(4)
def test_split_passes_accumulate_half_gradients_in_float32(accumulate: Accumulate) -> None:
    sums = []
    for schedule in ("1f1b", "zero_bubble"):
        staged = Staged(3, schedule, change=nn.Module.bfloat16, accumulate=accumulate)
        staged.step(0)
        staged.engine.finish()
        sums.append({member.name: member.gradient for member in staged.engine.members})
    assert all(torch.equal(sums[0][name], found) for name, found in sums[1].items())


@on_ranks(4)
def test_stage_3_reduces_all_gradients_of_a_unit_after_a_split_pass() -> None:
    def change(model: Model) -> None:
        for block in model.blocks:
            block.__class__ = Products

    staged = Staged(3, "zero_bubble", change=change)
    staged.step(0)
    staged.engine.finish()
    staged.check_gradients()


@on_ranks(2)
def test_wrong_use_is_refused() -> None:
    staged, mesh = Staged(0, "zbv"), mesh_of(1, 2)
    engine = shard(staged.model, staged.mesh, stage=0)  # `uses` is missing, so it expects fewer gradients of the table
    for options in ({"last": False, "backwards": 2}, {"last": True, "backwards": 0}):
        with pytest.raises(ValueError, match="expected at least 1, and 1 without last"):
            engine.start(**options)  # type: ignore[arg-type]
    if staged.pipeline.has_last:
        table = staged.model.wte
        engine.start(last=True)
        table.weight.sum().backward()
        with pytest.raises(ValueError, match=r"wte.weight.grad is in the memory of ZeRO's gradient buckets"):
            table.weight.sum().backward()

    def message(model: nn.Module, mesh: Any, name: str, ends: tuple[int, int] | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            shard(model, mesh, stage=0, shared=SharedParameters(tied=[name], ends=ends))
        return str(caught.value)

    assert message(Model(), None, TIED).startswith("wte.weight is tied to a parameter of another rank: expe")
    assert message(Model(), None, "wte.bias").startswith("tied parameter wte.bias: the model has no")
    assert message(Model(), mesh, TIED, (0, 1)).startswith('shard: mesh has no axis "pp", along which')
    partial, sharded = Model(), Model()
    sharded.head = ColumnParallelLinear(WIDTH, VOCABULARY, device_mesh=mesh["tp"])
    assert message(sharded, mesh, TIED).startswith("wte.weight is tied and replicated: expected a shard on each")
    partial.wte.sum_gradients = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^wte.weight is tied, and its gradients are partial sums"):
        GradientBuckets(partial, RankGroups(ends=dist.group.WORLD), tied=[TIED])
    lonely = shard(Model(), mesh_of(2, 1), stage=3)
    with pytest.raises(ValueError, match=r'start\(backwards=2\): expected 1, because the mesh has no axis "pp"'):
        lonely.start(last=True, backwards=2)
