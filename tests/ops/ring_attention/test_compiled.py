"""`torch.compile` makes one graph of ring attention, which computes the bits of a call without one."""

import itertools

import pytest
import torch

from tests.ops.ring_attention.whole_sequences import BF16, F32, NAMES, Case, Way, run, shards_of
from tests.support.cases import naming
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.ops.dropout import dropout_keys
from tpfuse.ops.ring_attention.ring_attention import ring_attention
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks

CASES = {
    "causal": Case(dtype=F32),
    "window": Case(window=5, kv_heads=1, dtype=BF16),
    "sinks": Case(),
    "documents": Case(documents=(0, 11, 20, 35), causal=False, kv_heads=2),
}
SCHEDULES = {"auto": 1, "ring": 1, "all_gather": 1, "ulysses": 1, "ulysses_ring": 2}  # ranks that exchange heads


@pytest.mark.parametrize(
    ("name", "schedules", "mask", "dropout"),
    exhaustive(
        ("direct", ("ring", "ulysses_ring"), "window", False),
        ("direct", (*SCHEDULES,), "documents", False),
        ("collective", ("auto",), "window", False),
        ("direct", ("ring", "ulysses"), "causal", True),
        ("direct", ("ring", "ulysses"), "sinks", False),
    ),
)
@on_ranks(2)
def test_one_graph_computes_the_same_bits(
    name: Implementation, schedules: tuple[str, ...], mask: str, dropout: bool
) -> None:
    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    for schedule in schedules:
        torch._dynamo.reset()
        case, way, more = CASES[mask], Way(schedule, ulysses=SCHEDULES[schedule]), {}
        if mask == "sinks":
            more = {"softcap": 2.0, "sinks": torch.ones(case.heads, requires_grad=True)}
        if dropout:
            rows = torch.arange(2 * case.heads).view(2, -1)
            more = {"dropout_p": 0.3, "head_rows": rows, "key": dropout_keys(torch.empty(0), 1, 2, 3)[0]}
        with use(implementation=name), naming((name, way, case)):
            inputs = case.inputs(3)
            expected, found = (run(way, case, inputs, attend, **more) for attend in (ring_attention, compiled))
            for part in NAMES:
                assert torch.equal(found[part], expected[part]), part
    assert len(torch._dynamo.utils.counters["graph_break"]) == 0


@on_ranks(2)
def test_the_compiler_gets_the_shapes_dtypes_and_strides_of_the_results() -> None:
    case = Case(kv_heads=1, dtype=BF16)
    operators = torch.ops.tpfuse.ring_attention, torch.ops.tpfuse.ring_attention_backward
    for op, schedule in itertools.product(operators, ("ring", "ulysses")):
        way = Way(schedule)
        q, k, v, grad = shards_of(way, case, case.inputs(1)).values()
        out, lse = ring_attention(q, k, v, group=way.group, schedule=schedule, length=37, return_lse=True)  # type: ignore
        options = {"ring": way.group.group_name, "ulysses": None, "causal": True, "schedule": schedule}
        options |= {"balance": "zigzag", "length": 37, "window": None, "scale": None}
        options |= {"dropout_p": 0.0, "dropout_width": None, "softcap": None}
        others = torch.zeros(q.shape[1]), None, None, None
        tensors = (q, k, v) if op is operators[0] else (grad, q, k, v, out, lse)
        with naming((op, schedule)):
            torch.library.opcheck(op, (*tensors, *others), options, test_utils="test_faketensor")
