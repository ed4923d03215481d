"""`tpfuse.Pipeline` trains a model of one's own as one process does, and refuses what it cannot cut."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import RankFailed
from tpfuse.comm.layout import copy_whole_, local_slices, local_tensor
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.parallel.pipeline.parts import Parts
from tpfuse.parallel.pipeline.pipeline import MicroBatch, Pipeline
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool

VOCABULARY, WIDTH, SEQUENCES, TOKENS, BLOCKS, MICRO_BATCHES, STEPS = 13, 6, 2, 5, 7, 6, 3
TIED, HEAD_FIRST = "tied", "head first"  # how the head and the table are one: the head may come first in the model


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        if mesh is None:
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        else:
            self.up = ColumnParallelLinear(WIDTH, 8, device_mesh=mesh)
            self.down = RowParallelLinear(8, WIDTH, device_mesh=mesh)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A language model of torch's layers. kind: "" if the head has a matrix of its own."""

    def __init__(self, kind: str = "", mesh: DeviceMesh | None = None, blocks: int = BLOCKS) -> None:
        super().__init__()
        if kind == HEAD_FIRST:
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.rand(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        if kind != HEAD_FIRST:
            self.head = nn.Linear(WIDTH, VOCABULARY)
        if kind:
            self.head.weight = self.wte.weight
        self.double()

    def embed(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.wte(ids) + self.positions  # type: ignore[no-any-return]

    def loss(self, x: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO_BATCHES

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids, targets)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, ids, targets)


def model_of(kind: str = "", mesh: DeviceMesh | None = None, seed: int = 1, **options: Any) -> Model:
    """Return a model with the weights that `seed` gives to the model in one process, or this rank's shards of them."""
    torch.manual_seed(seed)
    whole = Model(kind, **options)
    if mesh is None:
        return whole
    model = Model(kind, mesh, **options)
    for name, parameter in model.named_parameters():
        copy_whole_(parameter, whole.get_parameter(name).detach())
    return model


def pipeline_of(model: Model, mesh: DeviceMesh | None, **options: Any) -> Pipeline:
    return Pipeline(
        model,
        **{
            "embed": (model.embed, [model.wte, model.positions]),
            "blocks": model.blocks,
            "head": (model.loss, [model.norm, model.head]),
            "device_mesh": mesh,
            "micro_batches": MICRO_BATCHES,
            **options,
        },
    )


def batches_of(step: int, count: int = MICRO_BATCHES) -> list[MicroBatch]:
    shape = 2 * count, SEQUENCES, TOKENS
    ids = integers(step, *shape, low=0, high=VOCABULARY - 1, dtype=torch.int64)
    return list(zip(ids[:count], ids[count:], strict=True))


def check_close(found: Tensor, expected: Tensor, name: str = "") -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, name
    assert not found.numel() or (found - expected).abs().amax() <= 1e-12 * max(1.0, expected.abs().amax()), name


def check_weights(model: nn.Module, whole: nn.Module) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = tuple(slice(*each) for each in local_slices(parameter))
        check_close(local_tensor(parameter), whole.get_parameter(name).detach()[part], name)


def one_step(whole: nn.Module, batches: list[MicroBatch]) -> list[Tensor]:
    losses = [whole(*batch) for batch in batches]
    for loss in losses:
        loss.backward()
    return losses


def train(
    pp: int, schedule: str, stages_per_rank: int | None, kind: str, tp: int, layers: tuple[int, ...] | None
) -> set[str]:
    """Train some steps and compare with one process. Return the names of the parameters of this rank."""
    mesh = mesh_of(1, tp, pp=pp)
    model = model_of(kind, mesh["tp"] if tp > 1 else None)
    if kind and pp > 1 and mesh.get_local_rank("pp"):  # the rank of the first stage has the right tied weights
        nn.init.zeros_(model.wte.weight)
    pipeline = pipeline_of(
        model, mesh["pp"] if pp > 1 else None, schedule=schedule, stages_per_rank=stages_per_rank, layers=layers
    )
    whole = model_of(kind)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=False) for each in (model, whole)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in (0, 1) if step == 1 else (0,):  # gradients are accumulated over two steps of the pipeline
            losses = pipeline.step(batches_of(10 * step + part))
            expected = one_step(whole, batches_of(10 * step + part))
            assert len(losses) == (MICRO_BATCHES if pipeline.has_last else 0)
            for loss, other in zip(losses, expected, strict=False):
                check_close(loss, other.detach())
        norm = pipeline.clip_grad_norm_(0.5)
        check_close(norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).detach())
        assert norm > 0.5
        for optimizer in optimizers:
            optimizer.step()
        check_weights(model, whole)
    with torch.no_grad():
        for count in (1, MICRO_BATCHES):
            outputs = pipeline.forward(batches_of(99)[:count])
            assert len(outputs) == (count if pipeline.has_last else 0)
            for output, batch in zip(outputs, batches_of(99), strict=False):
                check_close(output, whole(*batch))
    return {name for name, _ in model.named_parameters()}


SCHEDULES: list[tuple[str, int | None]] = [
    ("gpipe", None), ("1f1b", None), ("interleaved_1f1b", None), ("interleaved_1f1b", 3), ("zero_bubble", None),
    ("zero_bubble", 2), ("zbv", None),
]  # fmt: skip
FIRST_TIER = [
    (2, "zbv", None, TIED, 1, None),
    (3, "interleaved_1f1b", None, HEAD_FIRST, 1, None),
    (2, "zero_bubble", None, "", 2, (2, 5)),
]
MORE = [
    (pp, schedule, count, ("", TIED, HEAD_FIRST)[index % 3], 1 + index % 2 if pp < 3 else 1, None)
    for index, (pp, (schedule, count)) in enumerate(
        [(1, SCHEDULES[-2]), *((2, each) for each in SCHEDULES), (3, ("1f1b", None)), (3, ("zbv", None))]
    )
]


@pytest.mark.parametrize(
    ("pp", "schedule", "stages_per_rank", "kind", "tp", "layers"),
    [*FIRST_TIER, *exhaustive(*(case for case in MORE if case not in FIRST_TIER))],
)
def test_a_pipeline_trains_like_one_process(
    pp: int, schedule: str, stages_per_rank: int | None, kind: str, tp: int, layers: tuple[int, ...] | None
) -> None:
    ranks = pool(pp * tp).run(train, pp, schedule, stages_per_rank, kind, tp, layers)
    names = [name for rank in ranks[::tp] for name in rank]
    whole = [name for name, _ in Model(kind).named_parameters()]
    assert set(names) == set(whole)
    extra = 1 if kind and pp > 1 and schedule != "zbv" else 0
    assert len(names) == len(whole) + extra, "only a tied parameter is on two ranks"


@on_ranks(3)
def test_ends_in_different_numbers_of_groups_share_tied_parameters() -> None:
    rank, mesh = dist.get_rank(), mesh_of(1, 1, pp=3)["pp"]
    own = [dist.new_group([2], use_local_synchronization=True) for _ in range(rank // 2)]
    model = model_of(TIED, seed=1 + rank)
    pipeline_of(model, mesh)
    if rank != 1:
        assert torch.equal(model.wte.weight, model_of(TIED, seed=1).wte.weight)
    for each in own:
        dist.destroy_process_group(each)


@on_ranks(2)
def test_frozen_stages_are_passed_through() -> None:
    """Gradients pass through a stage of frozen parameters, and end before a first one."""
    for frozen, split in itertools.product((slice(0, 3), slice(4, 7)), ("1f1b", "zero_bubble")):
        model, whole = model_of(), model_of()
        for each in (model, whole):
            each.requires_grad_(frozen.start > 0)
            each.blocks[frozen].requires_grad_(False)
            each.blocks[3].requires_grad_(True)
            each.norm.requires_grad_(True)
        pipeline = pipeline_of(model, mesh_of(1, 1, pp=2)["pp"], schedule=split, layers=[3, 4])
        pipeline.step(batches_of(0))
        one_step(whole, batches_of(0))
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), name
            if parameter.grad is not None and expected is not None:
                check_close(parameter.grad, expected, name)


class Detached(Block):
    """A block whose output does not depend on its input, and if `constant` is set, on its parameters neither."""

    constant = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.constant):
            return super().forward(x.detach())


class _Scaled(torch.autograd.Function):
    """x * weight, whose weight counts as a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Scaled(Block):
    """A block whose first weight gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(x, self.norm.weight) + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@on_ranks(2)
def test_outputs_that_do_not_depend_on_the_input(schedule: str) -> None:
    """Check blocks and weights without a gradient, a loss without the last block's output, integers between stages."""
    mesh = mesh_of(1, 1, pp=2)["pp"]

    def check(model: Model, whole: Model, forward: Any, **options: Any) -> None:
        pipeline_of(model, mesh, schedule=schedule, layers=[3, 4], **options).step(batches_of(0))
        for batch in batches_of(0):
            forward(*batch).backward()
        for name, parameter in model.named_parameters():
            expected = whole.get_parameter(name).grad
            if parameter.grad is None or expected is None:  # stages before one that passes no gradient on get zeros
                assert expected is None and (parameter.grad is None or not parameter.grad.any()), name
            else:
                check_close(parameter.grad, expected, name)

    for place, constant in itertools.product((1, 4), (False, True)):
        models = model_of(), model_of()
        for model in models:
            model.blocks[place].__class__ = Detached
            model.blocks[place].constant = constant
        check(*models, models[1])
    models = model_of(), model_of()
    for model in models:
        model.blocks[4].__class__ = Scaled
    check(*models, models[1])
    model, whole = model_of(), model_of()
    check(
        model,
        whole,
        lambda ids, targets: whole.loss(torch.ones(*ids.shape, WIDTH).double(), ids, targets),
        head=(lambda x, *batch: model.loss(torch.ones_like(x), *batch), [model.norm, model.head]),
    )
    model, whole = model_of(), model_of()
    for each in (model, whole):
        each.blocks = nn.ModuleList(nn.Identity() for _ in range(BLOCKS))
    check(
        model,
        whole,
        whole,
        embed=lambda ids, targets: ids,
        blocks=model.blocks,
        head=(
            lambda x, *batch: model.loss(model.embed(x, x), *batch),
            [model.wte, model.positions, model.norm, model.head],
        ),
    )


@pytest.mark.parametrize("schedule", ["zero_bubble", *exhaustive("interleaved_1f1b", "zbv")])
def test_tensors_that_are_no_parameters_have_gradients(schedule: str) -> None:
    """`head` uses a number that is learned and in no module; a tensor of each micro-batch needs a gradient."""
    found = []
    for split in (True, False):
        model, number = model_of(), torch.ones((), dtype=torch.float64, requires_grad=True)
        shifts = [normal(index, WIDTH).double().requires_grad_() for index in range(MICRO_BATCHES)]
        batches = [(*batch, shift) for batch, shift in zip(batches_of(0), shifts, strict=True)]

        def embed(ids: Tensor, targets: Tensor, shift: Tensor, model: Model = model) -> Tensor:
            return model.embed(ids, targets) + shift

        def head(x: Tensor, *batch: Tensor, model: Model = model, number: Tensor = number) -> Tensor:
            return model.loss(x * number + batch[2], *batch[:2])

        options = {"schedule": schedule, "stages_per_rank": 2} if split else {}
        ends = {"embed": (embed, [model.wte, model.positions]), "head": (head, [model.norm, model.head])}
        pipeline_of(model, None, **ends, **options).step(batches)
        found.append([leaf.grad for leaf in (number, *shifts, *model.parameters())])
    for gradient, expected in zip(*found, strict=True):
        assert gradient is not None and expected is not None
        check_close(gradient, expected)


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class Failing(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: {}["mine"])
        return y


@pytest.mark.parametrize(
    ("block", "error", "text"),
    [
        (Reentrant, NotImplementedError, "^stage 1: its backward pass fails where zero_bubble splits it: .*reentrant"),
        (Failing, KeyError, "^'mine'$"),
    ],
    ids=["reentrant", "own error"],
)
def test_a_split_backward_pass_that_fails_says_why(block: type[Block], error: type[Exception], text: str) -> None:
    model = model_of()
    model.blocks[5].__class__ = block
    pipeline = pipeline_of(model, None, schedule="zero_bubble", stages_per_rank=2)
    with pytest.raises(error, match=text):
        pipeline.step(batches_of(0))


def test_stages_have_equal_costs_and_tables_that_are_looked_up_cost_nothing() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(1000, 4), nn.Linear(4, 20, bias=False)  # as many as two blocks
            self.blocks = nn.ModuleList(nn.Linear(4, 10, bias=False) for _ in range(6))

    model = Ends()
    options: dict[str, Any] = {"embed": model.table, "blocks": model.blocks, "device_mesh": None, "micro_batches": 2}
    options |= {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
    found = Pipeline(model, **options, head=model.head).stages
    assert [len(stage.layers) for stage in found] == [4, 2]
    found = Pipeline(model, **options, head=(print, [model.head, model.table])).stages
    assert [len(stage.layers) for stage in found] == [5, 1]
    found = Pipeline(model, **options, head=model.head, layers=[1, 5]).stages
    assert [len(stage.layers) for stage in found] == [1, 5]
    found = Parts(model, model.blocks, [model.table], [model.head]).cut((0, 1, 0, 1), None)
    assert [len(stage.layers) for stage in found] == [2, 1, 2, 1], "each rank has as much as four blocks"


def test_models_that_cannot_be_cut_are_refused() -> None:
    two: dict[str, Any] = {"schedule": "interleaved_1f1b", "stages_per_rank": 4}
    model = model_of(blocks=3)
    outside = [*model.blocks, nn.Linear(1, 1)]
    for options, text in [
        (two, r"3 layers cannot be cut into 4 pipeline stages: expected at least one layer each"),
        ({"blocks": outside}, r"blocks\[3\] \(Linear\) is not in the model"),
        ({"embed": (print, [model.wte, "wpe"])}, r"embed\[1\] \(str\) is not in the model"),
        ({"embed": [model.wte]}, r"embed is a list: expected a module of the model, or \(function, \[modules that it"),
        ({"head": model.head}, "norm.weight is in no block: add it, or the module that has it, to `embed` or `head`"),
        ({"layers": [2]}, "2 has 1 stages and 2 layers: expected 1 stages of at least one layer and 3 layers together"),
        ({"micro_batches": 0}, "0 micro-batches of each rank in a step: schedule 1f1b on 1 ranks accepts 1 or more"),
        ({"schedule": "2f2b"}, "schedule '2f2b': expected one of gpipe, 1f1b"),
        ({"stages_per_rank": 2}, "schedule 1f1b with 2 stages on each rank: expected 1"),
        ({"device_mesh": "pp"}, "device_mesh is 'pp': expected a one-dimensional DeviceMesh"),
    ]:
        with pytest.raises(ValueError, match=text):
            pipeline_of(model, None, **options)
    assert len(list(model.parameters())) == len(list(Model(blocks=3).parameters())), "a refused model stays whole"


def test_calls_of_what_is_on_another_rank_are_refused() -> None:
    """`loss` uses `norm`, which `embed` alone lists; a bias is not at the end that has a tied weight only."""
    listed = lambda model: ([model.wte, model.positions, model.norm], [model.head])  # noqa: E731
    by_name = lambda model: ([model.wte, *model.norm.parameters(), model.positions], [model.head])  # noqa: E731
    for kind, ends, at, name in [
        ("", listed, 1, "norm"),
        ("", listed, 1, "blocks.0"),
        ("", by_name, 1, "norm.weight"),
        (TIED, listed, 0, "head.bias"),
    ]:
        model = model_of(kind, blocks=2)
        called = name.removesuffix(".weight").removesuffix(".bias")
        parts, captured = Parts(model, model.blocks, *ends(model)), model.get_submodule(called)
        parts.keep([parts.cut((0, 1), None)[at]])
        for module in (copy.deepcopy(model).get_submodule(called), captured):
            with pytest.raises(ValueError, match=f"^{name} is not on this rank, because no part of its stages lists"):
                module(torch.ones(TOKENS, WIDTH).double())


@on_ranks(2)
def test_pipelines_of_two_ranks_refuse() -> None:
    mesh = mesh_of(1, 1, pp=2)
    model = model_of()
    model.blocks[6].up.weight = model.blocks[0].up.weight
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight is in stages 0 and 1, on different ranks: only"):
        pipeline_of(model, mesh["pp"])
    with pytest.raises(ValueError, match=r"device_mesh has 2 axes .*: slice it"):
        pipeline_of(model, mesh["pp", "dp"])
    with pytest.raises(ValueError, match=r"7 micro-batches .* on 2 ranks accepts for example .*6, 8"):
        pipeline_of(model_of(), mesh["pp"], schedule="interleaved_1f1b", micro_batches=7)
    pipeline = pipeline_of(model_of(), mesh["pp"])
    batches = batches_of(0)
    short = tuple(x[:1] for x in batches[2])
    for wrong, text in [
        (batches[:5], "5 micro-batches: expected (1 or )?6"),
        ([*batches[:5], batches[5][0]], "micro-batch 5 is a Tensor: expected a tuple of tensors"),
        ([*batches[:5], (batches[5][0], None)], "element 1 of micro-batch 5 is a NoneType: expected a tensor"),
        (zip(*zip(*batches, strict=True), strict=True), "the micro-batches are a zip: expected a list of tuples"),
        (
            [*batches[:2], short, *batches[3:]],
            r"micro-batch 2 has tensors \[1, 5\] int64, \[1, 5\] int64: expected \[2,",
        ),
    ]:
        for run in (pipeline.step, pipeline.forward):
            with pytest.raises(ValueError, match=text):
                run(wrong)  # type: ignore[operator]


@on_ranks(4)
def test_ranks_of_a_pipeline_that_pass_different_micro_batches_are_refused() -> None:
    """Check values and shapes at the first step and later; replicas of the pipeline pass micro-batches of their own."""
    mesh = mesh_of(2, 1, pp=2)
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    pipeline = pipeline_of(model_of(), mesh["pp"])
    text = r"^pipeline: the ranks of one model have different inputs: batches.* int64 .* on rank [01] .* on rank [23]"
    for run in (pipeline.step, pipeline.forward):
        with pytest.raises(ValueError, match=text):
            run(batches_of(pp))
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            pipeline.step([(ids[pp:], targets[pp:]) for ids, targets in batches_of(0)])
        with pytest.raises(ValueError, match=text):
            pipeline.step([*batches_of(0)[:-1], batches_of(pp)[-1]])
        pipeline.step(batches_of(dp))


@on_ranks(2)
def test_the_shape_of_messages_stays_as_the_ranks_have_agreed() -> None:
    mesh, model, rows = mesh_of(1, 1, pp=2), model_of(), [SEQUENCES]
    pipeline = pipeline_of(
        model, mesh["pp"], embed=(lambda *batch: model.embed(*batch)[: rows[0]], [model.wte, model.positions])
    )
    pipeline.step(batches_of(0))
    rows[0] = 1
    if pipeline.stages[0].first:  # it raises before it sends anything
        with pytest.raises(ValueError, match=r"stage 0 sends \[1, 5, 6\] torch.float64: expected \[2, 5, 6\]"):
            pipeline.forward(batches_of(0))


@on_ranks(2)
def test_messages_that_an_error_has_left_reach_no_later_step() -> None:
    """The first rank does not notice the error; its messages would stand for those of the next step."""
    mesh, fails = mesh_of(1, 1, pp=2), [True]

    def head(x: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        if fails[0]:
            raise KeyError("a user's own")
        return model.loss(x, ids, targets)

    model = model_of()
    pipeline = pipeline_of(model, mesh["pp"], head=(head, [model.norm, model.head]))
    last = pipeline.stages[-1].last
    for error in (KeyError, RuntimeError):
        with pytest.raises(error, match=r"a user's own|call reset") if last else nullcontext():
            pipeline.forward(batches_of(0)[:1])
        fails[0] = False
    symmetric_memory(mesh["pp"].get_group(), torch.device("cpu")).reset()
    expected = pipeline_of(model_of(), None).forward(batches_of(1)[:1])
    found = pipeline.forward(batches_of(1)[:1])
    if last:
        torch.testing.assert_close(found[0], expected[0])


@on_ranks(2)
def test_an_error_of_the_first_pass_is_raised_on_every_rank_and_leaves_nothing() -> None:
    mesh, model, fails = mesh_of(1, 1, pp=2), model_of(), [True]

    def embed(*batch: Tensor) -> Tensor:
        if fails[0]:
            raise KeyError("a user's own")
        return model.embed(*batch)

    pipeline = pipeline_of(model, mesh["pp"], embed=(embed, [model.wte, model.positions]))
    error: type[Exception]
    error, text = KeyError, '^"a user\'s own"$'
    if not pipeline.stages[0].first:
        error, text = RankFailed, '^first pass of the pipeline failed on rank 0: KeyError: "a user\'s own"$'
    for run, rows in ((pipeline.forward, 1), (pipeline.step, SEQUENCES)):
        fails[0] = True
        with pytest.raises(error, match=text):
            run([(ids[:rows], targets[:rows]) for ids, targets in batches_of(1)])
        fails[0] = False
    losses = pipeline.step(batches_of(1))
    expected = [loss.detach() for loss in one_step(model_of(), batches_of(1))]
    torch.testing.assert_close(losses, expected if pipeline.has_last else [])


def test_what_a_stage_returns_is_checked() -> None:
    class Wider(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x], -1)

    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    def tokens(x: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        return x.sum(-1)

    for block, text in [(Wider(), r"\[2, 5, 12\] float64"), (Rounded(), r"\[2, 5, 6\] float32")]:
        model = model_of(blocks=3)
        model.blocks[1] = block
        pipeline = pipeline_of(model, None, micro_batches=1)
        for run in (pipeline.step, pipeline.forward):
            with pytest.raises(ValueError, match=rf"block 1 returns {text} for \[2, 5, 6\] float64: expected the same"):
                run(batches_of(0, 1))
    model = model_of(blocks=3)
    ends = {"embed": [model.wte, model.positions], "head": [model.norm, model.head]}
    for end, function, text in [
        ("head", tokens, r"`head` returns \[2, 5\] float64: expected a scalar loss"),
        ("head", lambda x, *batch: (x.sum(), x), "`head` returns a tuple: expected a scalar loss"),
        ("head", lambda x, *batch: x.detach().sum(), "`head` returns a constant loss: expected one that depends on"),
        ("embed", lambda *batch: (model.embed(*batch), None), "`embed` returns a tuple: expected a tensor, the input"),
        ("embed", lambda *batch: None, "`embed` returns a NoneType: expected a tensor"),
    ]:
        pipeline = pipeline_of(model, None, micro_batches=1, **{end: (function, ends[end])})
        with pytest.raises(ValueError, match=text):
            pipeline.step(batches_of(0, 1))
        if function is tokens:
            assert pipeline.forward(batches_of(0, 1))[0].shape == (2, 5)
    model.__dict__["forward"] = forward = lambda: "mine"
    pipeline_of(model, None, micro_batches=1).step(batches_of(0, 1))
    assert model.forward is forward, "a function that replaces the class's own stays"
    with pytest.raises(ValueError, match=r"step\(\) where gradients are disabled"), torch.no_grad():
        pipeline_of(model, None, micro_batches=1).step(batches_of(0, 1))
