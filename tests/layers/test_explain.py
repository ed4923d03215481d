"""tpfuse.explain reports the implementation of each layer of a model, and the reason."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tpfuse
from tpfuse.backend import Implementation, implementation
from tpfuse.comm.measurement import measuring
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.explain import LayerPlan, plans, summary
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.testing.meshes import mesh_of, tensor_mesh
from tpfuse.testing.ranks import pool


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
    with implementation(name):
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
    with measuring(20, file=Path(file)):
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
    with implementation(name):
        return plans(GPT(config, context_mesh=mesh_of(1, 1, 2)["cp"], context_balance="contiguous"))


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


def test_only_the_first_rank_prints() -> None:
    first, second = pool(2).run(_printed)
    assert first.count("\n") == 5 and "CPU ranks of one host" in first
    assert second == ""
