"""tpfuse.explain reports the implementation of each layer of a model, and the reason."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import tpfuse
from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.choices import Implementation
from tpfuse.comm.autotune import autotune
from tpfuse.drop_in.parallelize import restore
from tpfuse.drop_in.styles import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel, ReplicatedParallel
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.explain import LayerPlan, plans, summary
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.partial_gradients import warnings_of
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.rms_norm import RMSNorm
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.ops.collectives import replicate
from tpfuse.parallel.pipeline.cut import Cost
from tpfuse.parallel.pipeline.order import PipelineSchedule
from tpfuse.parallel.pipeline.pipeline import Pipeline
from tpfuse.parallel.pipeline.plan import PipelinePlan
from tpfuse.parallel.pipeline.timeline import most_in_flight
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import shard


def _model(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    mesh = tensor_mesh()
    return nn.ModuleDict(
        {
            "up": ColumnParallelLinear(8, 12, parts=3, sequence_parallel=True, device_mesh=mesh, dtype=dtype),
            "down": RowParallelLinear(12, 8, sequence_parallel=True, device_mesh=mesh, dtype=dtype),
            "head": ColumnParallelLinear(8, 12, device_mesh=mesh, dtype=dtype),
            "out": RowParallelLinear(12, 8, device_mesh=mesh, dtype=dtype),
            "norm": nn.LayerNorm(8),
        }
    )


def _plans(name: Implementation, dtype: torch.dtype) -> list[LayerPlan]:
    with use(implementation=name):
        return plans(_model(dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.float32, ("direct", "CPU ranks of one host")),
        ("direct", torch.float32, ("direct", "chosen")),
        ("fused", torch.bfloat16, ("fused", "chosen")),
        ("fused", torch.float64, ("direct", "there are no kernels for float64")),
        ("collective", torch.float32, ("collective", "chosen")),
    ],
)
def test_every_layer_is_reported_with_its_reason(
    name: Implementation, dtype: torch.dtype, expected: tuple[str, str]
) -> None:
    (up, down, head, out), other = pool(2).run(_plans, name, dtype)
    assert [up, down, head, out] == other
    assert up == LayerPlan("up", "ColumnParallelLinear", (3, 4, 8), (3, 2, 8), "all_gather_linear", *expected)
    assert down == LayerPlan("down", "RowParallelLinear", (8, 12), (8, 6), "linear_reduce_scatter", *expected)
    assert (head.operator, out.operator) == ("gemm", "linear_all_reduce")
    assert summary(other) == f"4 {expected[0]} ({expected[1]})"


def _measured_plans(file: str) -> list[LayerPlan]:
    """Return the plans of two layers, one of them measured in forward and backward."""
    mesh = tensor_mesh()
    up, down = ColumnParallelLinear(8, 12, sequence_parallel=True, device_mesh=mesh), RowParallelLinear(12, 8)
    with autotune(600, file=Path(file)):
        up(torch.ones(1, 2, 8, requires_grad=True)).sum().backward()
    return plans(nn.ModuleDict({"up": up, "down": down}))


def test_times_of_all_candidates_are_shown(tmp_path: Path) -> None:
    (up, _), other = pool(2).run(_measured_plans, str(tmp_path / "decisions.json"))
    assert other[0] == up
    times = r"(direct|collective) [\d.e-]+ ms, (direct|collective) [\d.e-]+ ms"
    found = re.fullmatch(rf"measured forward of 2x1x8: {times}; backward of 2x1x8: {times}", up.reason)
    assert found and up.implementation == found[1] != found[2] and found[3] != found[4]


def test_layers_of_one_rank_are_local(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(ColumnParallelLinear(8, 12), RowParallelLinear(12, 8))
    found = tpfuse.explain(model)
    assert [(plan.operator, plan.implementation, plan.reason) for plan in found] == [("gemm", "local", "one rank")] * 2
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["layer", "kind", "weight", "on", "a", "rank", "operator", "implementation", "reason"]
    assert first.split() == "0 ColumnParallelLinear (12, 8) (12, 8) gemm local one rank".split()
    assert second.index("RowParallelLinear") == head.index("kind")


def _context_plans(name: Implementation) -> list[LayerPlan]:
    config = GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with use(implementation=name):
        return plans(parallelize_gpt(GPT(config), mesh_of(1, 1, 2)["cp"], GPTOptions(context_balance="contiguous")))


def test_attention_over_context_ranks_reports_its_schedule() -> None:
    reason = "ulysses, contiguous: the heads can be divided, and it moves the fewest bytes; chosen"
    attention = LayerPlan("transformer.h.0.attn", "Attention", (), (), "ring_attention", "direct", reason)
    found = pool(2).run(_context_plans, "direct")[1]
    assert found[0] == attention
    assert [plan.implementation for plan in found[1:]] == ["local"] * 4
    assert "the heads can be divided" in pool(2).run(_context_plans, "collective")[0][0].reason


def _printed() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tpfuse.explain(_model())
    return out.getvalue()


def _sum(x: Tensor, *batch: Tensor) -> Tensor:
    return x.sum()


def _pipeline(schedule: PipelineSchedule, layers: list[int] | None = None) -> Pipeline:
    """Return a pipeline on two ranks through a table of 16 parameters, blocks of 8, 8, 16 and 32, and a head of 8."""
    table, head = nn.Embedding(2, 8), nn.Linear(8, 1, bias=False)
    blocks = nn.ModuleList(nn.Linear(8, width, bias=False) for width in (1, 1, 2, 4))
    model, mesh = nn.ModuleDict({"table": table, "blocks": blocks, "head": head}), mesh_of(1, 1, pp=2)["pp"]
    return Pipeline(
        model, embed=table, blocks=blocks, head=(_sum, [head]), device_mesh=mesh,
        schedule=schedule, micro_batches=4, layers=layers,
    )  # fmt: skip


def _explained_pipeline(
    name: Implementation, schedule: PipelineSchedule, layers: list[int] | None = None
) -> tuple[list[list[str]], PipelinePlan]:
    """Return the columns of the printed lines, and the plan."""
    with use(implementation=name), contextlib.redirect_stdout(io.StringIO()) as out:
        pipeline = _pipeline(schedule, layers)
        assert tpfuse.explain(pipeline) == []
        return [re.split("  +", line) for line in out.getvalue().splitlines()], pipeline.plan()


def test_a_pipeline_is_explained_by_its_stages_and_ranks() -> None:
    """Three passes of a micro-batch take 3 * 32 on the first rank and 3 * 40 on the second, and a step takes 576.

    The second rank computes without a break for 4 * 3 * 40. It waits for the first forward pass, which takes 32, and at
    the end for the last backward pass, which takes 64.
    """
    (printed, plan), (nothing, other) = pool(2).run(_explained_pipeline, "auto", "1f1b", [3, 1])
    assert nothing == [] and plan == other
    assert plan.costs == (Cost(6 * 32, 48), Cost(6 * 40, 40))
    assert printed == [
        ["1f1b: 4 micro-batches on 2 pipeline ranks with 1 stage each; predicted idle share at most 33%"],
        ["stage", "pipeline rank", "layers", "operations", "parameters"],
        ["0", "0", "0-2", "44.4%", "54.5%"],
        ["1", "1", "3", "55.6%", "45.5%"],
        ["pipeline rank", "stages", "predicted idle share", "most in flight"],
        ["0", "0", "33.3%", "2"],
        ["1", "1", "16.7%", "1"],
        ["messages: direct (CPU ranks of one host)"],
    ]


def test_several_stages_of_a_rank_and_a_chosen_implementation_are_explained() -> None:
    printed, plan = pool(2).run(_explained_pipeline, "collective", "zbv")[0]
    assert [row[:3] for row in printed[2:6]] == [["0", "0", "0"], ["1", "1", "1"], ["2", "1", "2"], ["3", "0", "3"]]
    assert [row[:2] for row in printed[7:9]] == [["0", "0, 3"], ["1", "1, 2"]]
    assert [row[3] for row in printed[7:9]] == [str(most_in_flight(plan.order, rank)) for rank in range(2)]
    assert printed[9:] == [["messages: collective (chosen)"]]


def _carriers() -> list[str]:
    """Return what carries messages before the first step, after it, and while another implementation is chosen."""
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model, mesh = nn.Sequential(*blocks), mesh_of(1, 1, pp=2)["pp"]
    pipeline = Pipeline(model, embed=torch.clone, blocks=blocks, head=_sum, device_mesh=mesh, micro_batches=2)
    with use(implementation="collective"):
        found = [pipeline.plan().implementation]
        pipeline.step([(torch.ones(1, 2),)] * 2)
        found.append(pipeline.plan().implementation)
    with use(implementation="direct"):
        return [*found, pipeline.plan().implementation]


def test_messages_are_explained_as_they_were_opened() -> None:
    assert pool(2).run(_carriers) == [["collective"] * 3] * 2


def test_only_models_are_explained() -> None:
    with pytest.raises(ValueError, match=r"^explain: model is a list: expected a module, a Pipeline or an engine"):
        tpfuse.explain([nn.Linear(2, 2)])  # type: ignore[arg-type]


def test_only_the_first_rank_prints() -> None:
    first, second = pool(2).run(_printed)
    assert first.count("\n") == 5 and "CPU ranks of one host" in first
    assert second == ""


class Summed(nn.Module):
    """A scale with a plain parameter, whose gradient the module sums itself unless an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.sum_gradients = nn.Parameter(torch.ones(8)), True

    def forward(self, x: Tensor) -> Tensor:
        return x * replicate(self.weight, torch.distributed.group.WORLD if self.sum_gradients else None)


class Mixed(nn.Module):
    """A block with parameters of plain modules on shards: of the sequence (positions, norm) and of heads (scale)."""

    def __init__(self, right: bool) -> None:
        super().__init__()
        mesh = tensor_mesh()
        options: dict[str, Any] = {"sequence_parallel": True, "device_mesh": mesh}
        self.tokens = VocabParallelEmbedding(12, 8, **options)
        self.positions = PositionEmbedding(6, 8, **options) if right else nn.Embedding(6, 8)
        self.norm = LayerNorm(8, **options) if right else LayerNorm(8, device_mesh=mesh)
        self.up, self.down = ColumnParallelLinear(8, 12, **options), RowParallelLinear(12, 8, **options)
        self.scale = nn.PReLU(init=0.5)  # one parameter for all features
        self.last = nn.Sequential(RMSNorm(8, **options), Summed()) if right else nn.RMSNorm(8)
        self.right = right

    def forward(self) -> Tensor:
        rank = tensor_mesh().get_local_rank()
        x = self.tokens(torch.arange(6)[None]) + self.positions(torch.arange(3 * rank, 3 * rank + 3))
        inner = self.up(self.norm(x))
        x = self.down(torch.relu(inner) if self.right else self.scale(inner), residual=x)
        return self.tokens.loss(self.last(x), torch.arange(6), 1.0)


def _warnings(right: bool, taken: bool) -> tuple[list[str], str]:
    model = Mixed(right)
    if taken:
        del model.scale
        shard(model, mesh_of(1, 2), stage=0)
    model()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tpfuse.explain(model)
    return warnings_of(model), printed.getvalue()


def test_parameters_that_saw_a_shard_are_named() -> None:
    (lines, printed), (others, silent) = pool(2).run(_warnings, False, False)
    seen = [re.match(r"warning: (\S+) \((.*)\) of (\w+) sees this rank's shard of the (\w+) alone", x) for x in lines]
    assert [each.groups() for each in seen if each] == [
        ("positions.weight", "6, 8", "Embedding", "sequence"),
        ("norm.weight", "8,", "LayerNorm", "sequence"),
        ("norm.bias", "8,", "LayerNorm", "sequence"),
        ("scale.weight", "1,", "PReLU", "features"),
        ("last.weight", "8,", "RMSNorm", "sequence"),
    ]
    assert others == lines and printed.endswith("\n".join(lines) + "\n") and not silent


@pytest.mark.parametrize("taken", [False, True])
def test_layers_whose_gradients_are_summed_are_not_named(taken: bool) -> None:
    """They are not named where an engine sums them either."""
    assert [lines for lines, _ in pool(2).run(_warnings, True, taken)] == [[], []]


@pytest.mark.parametrize("forgotten", [True, False])
@on_ranks(2)
def test_converted_layers_name_what_saw_a_shard(forgotten: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8))
    plan = {"1": FusedColwiseParallel(input_layouts=Shard(1)), "3": FusedRowwiseParallel(output_layouts=Shard(1))}
    others = {"0": FusedSequenceParallel(use_local_output=True), "2": ReplicatedParallel(sum_gradients=True)}
    tpfuse.parallelize(model, tensor_mesh(), plan if forgotten else plan | others)
    model(torch.ones(2, 3, 8))
    named = [line.split()[1] for line in warnings_of(model)]
    assert named == (["0.weight", "0.bias", "2.weight"] if forgotten else [])
    assert not warnings_of(restore(model))
