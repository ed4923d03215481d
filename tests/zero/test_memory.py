"""The count of memory equals bytes counted by hand, the ZeRO paper's table, and the buffers of real engines."""

from collections.abc import Mapping

import pytest
import torch

from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.rank_order import HALF
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.testing.ranks import pool
from tpfuse.zero import shard
from tpfuse.zero.bucket_layout import Kind, plan_buckets
from tpfuse.zero.flat_adamw import FlatAdamW
from tpfuse.zero.memory import MemoryAccount, Width, Widths, account, account_sharded, states

# A small model in bfloat16. Every parameter begins at a multiple of 16 elements:
#     replicated: weight [10, 7] at 0 .. 70, bias [5] at 80 .. 85, which ends at 96; 75 are elements of parameters;
#     partial:    norm [7] at 0 .. 7, which ends at 16.
# Two ranks have shards of a multiple of 16: buckets of 96 and 32 elements, shards of 48 + 16 = 64.
# Three ranks: buckets of 96 and 48, shards of 32 + 16 = 48.
SHAPES = {"weight": (10, 7), "bias": (5,), "norm": (7,)}


def _toy(world: int, stage: int, kept: Width = "float32", sent: Width | None = None, **options: int) -> MemoryAccount:
    parameters = [(name, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for name, shape in SHAPES.items()]
    worlds: Mapping[Kind, int] = {"sharded": world, "replicated": world, "partial": world}
    return account(plan_buckets(parameters, {"norm"}, worlds, 2**20), stage, kept, sent, **options)


ZERO_PAPER = Widths(parameter=2, gradient=2, summed=2, master=4, moment=4)  # section 3.1, with K = 12 bytes of state

HAND = {
    # world, stage: parameters, gradients, master, moments, buffers; then padding
    (2, 0): (128 * 2, 128 * 4, 128 * 4, 2 * 128 * 4, 0, 46 * 2),  # 96 - 75 + 32 - 7 = 46 elements are padding
    (2, 1): (128 * 2, 128 * 4, 64 * 4, 2 * 64 * 4, 0, 46 * 2),
    # 64 sums in float32, 75 unsent bfloat16 gradients of the larger bucket; gradient buffers of 96 and 32 elements
    (2, 2): (128 * 2, 64 * 4 + 75 * 2, 64 * 4, 2 * 64 * 4, 96 * 4 + 32 * 4, 46 * 2),
    (3, 0): (144 * 2, 144 * 4, 144 * 4, 2 * 144 * 4, 0, 62 * 2),
    (3, 1): (144 * 2, 144 * 4, 48 * 4, 2 * 48 * 4, 0, 62 * 2),
    (3, 2): (144 * 2, 48 * 4 + 75 * 2, 48 * 4, 2 * 48 * 4, 96 * 4 + 48 * 4, 62 * 2),
}


@pytest.mark.parametrize(("world", "stage"), HAND)
def test_buckets_counted_by_hand(world: int, stage: int) -> None:
    parameters, gradients, master, moments, buffers, padding = HAND[world, stage]
    expected = MemoryAccount(parameters, gradients, master, moments, buffers, 1000, padding)
    found = _toy(world, stage, activations=1000)
    assert found == expected
    assert found.total == parameters + gradients + master + moments + buffers + 1000


def test_shards_counted_by_hand() -> None:
    """Count one unit of weight and bias, and the model's own norm. Shards of the first dimension are rounded up."""
    units = [[(10, 7), (5,)], [(7,)]]
    # Two ranks: 5 x 7 + 3 = 38 and 4 elements, in float32. Gathered 76 and 8 in bfloat16; the unit's gradients are 75
    # as they arrive, and 76 in float32 as they are sent. An equal share of 82 is 41: one element is padding.
    assert account_sharded(units, 2, torch.bfloat16) == MemoryAccount(
        42 * 4, 42 * 4 + 75 * 2, 0, 2 * 42 * 4, 84 * 2 + 76 * 4, 0, 1 * 4
    )
    # Three ranks: 4 x 7 + 2 = 30 and 3; gathered 90 and 9; a third of 82 is 27, so 6 elements are padding.
    assert account_sharded(units, 3, torch.bfloat16) == MemoryAccount(
        33 * 4, 33 * 4 + 75 * 2, 0, 2 * 33 * 4, 99 * 2 + 90 * 4, 0, 6 * 4
    )
    # Several micro-batches leave all 82 gradients whole, here in the dtype in which they are sent.
    found = account_sharded(units, 2, torch.bfloat16, "parameter", accumulating=True)
    assert found.gradients == 42 * 4 + 75 * 2 + 82 * 2
    assert found.buffers == 84 * 2 + 76 * 2
    # Two of three units are gathered, and the model's own parameters; float64 parameters are their own masters.
    found = account_sharded([[(6,)], [(8,)], [(4,)], [(2,)]], 2, torch.float64)
    assert (found.parameters, found.moments, found.buffers) == (10 * 8, 2 * 10 * 8, (8 + 6 + 2) * 8 + 8 * 8)


def test_gradients_in_the_dtype_of_parameters() -> None:
    at_one = _toy(2, 1, "parameter")
    assert (at_one.gradients, at_one.buffers) == (128 * 2, 64 * 4), "sums are float32 and have their own buffer"
    apart = _toy(2, 1, "float32", "parameter")
    assert (apart.gradients, apart.buffers) == (128 * 4, 128 * 2 + 64 * 4), (
        "gradients are rounded into a buffer of their own"
    )
    at_two = _toy(2, 2, "parameter")
    assert (at_two.gradients, at_two.buffers) == (64 * 4 + 75 * 2, (96 + 32) * 2)


def test_accumulation_keeps_whole_gradients() -> None:
    assert _toy(2, 2, accumulating=True).gradients == 64 * 4 + 128 * 4
    assert _toy(2, 1, accumulating=True) == _toy(2, 1)


def test_tied_parameters_are_in_the_last_buckets_and_have_their_own_reducer() -> None:
    sizes = {"embedding": 128, "norm": 64, "bias": 64}
    parameters = [(name, torch.empty(size, device="meta")) for name, size in sizes.items()]
    worlds: Mapping[Kind, int] = {"sharded": 2, "replicated": 2, "partial": 2, "tied": 4}
    layouts = plan_buckets(parameters, {"norm"}, worlds, 2**20, tied={"embedding"})
    assert [(layout.kind, layout.world) for layout in layouts] == [("partial", 2), ("replicated", 2), ("tied", 4)]
    small = plan_buckets(parameters, {"norm"}, worlds, 1, tied={"embedding"})
    assert [layout.kind for layout in small] == ["partial", "replicated", "tied"], "also if the first bucket is full"
    assert account(layouts, 2).buffers == (64 + 64 + 128) * 4, "each of three reducers has a gradient buffer"
    assert account(layouts, 2).moments == 2 * (32 + 32 + 128 // 4) * 4
    with pytest.raises(ValueError, match="norm is tied, and its gradients are partial sums"):
        plan_buckets(parameters, {"norm"}, worlds, 2**20, tied={"norm"})


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_holds_everything(stage: int) -> None:
    for kept in ("float32", "parameter"):
        assert _toy(1, stage, kept, accumulating=True) == _toy(1, 0, kept)


def test_gradient_buffers_are_as_large_as_the_largest_bucket() -> None:
    parameters = [(str(size), torch.empty(size, device="meta")) for size in (64, 256, 32, 32)]
    layouts = plan_buckets(parameters, (), {"replicated": 2}, 1)  # type: ignore[dict-item]
    found = account(layouts, 2)
    assert len(layouts) == 4
    assert (found.buffers, found.gradients) == (3 * 256 * 4, (64 + 256 + 32 + 32) // 2 * 4 + 256 * 4)


def test_only_half_types_have_masters() -> None:
    for dtype in (torch.float32, torch.float64):
        layouts = plan_buckets([("x", torch.empty(32, dtype=dtype))], (), {"replicated": 2}, 1)  # type: ignore[dict-item]
        found = account(layouts, 1)
        size = dtype.itemsize
        assert (found.parameters, found.gradients, found.master, found.moments) == (
            32 * size,
            32 * size,
            0,
            2 * 16 * size,
        )


# arXiv:1910.02054, table 1: GB of each device, by the number of devices, for P_os, P_os+g and P_os+g+p.
PAPER = {
    7.5e9: {
        1: ("120", "120", "120"), 4: ("52.5", "41.3", "30"), 16: ("35.6", "21.6", "7.5"), 64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"), 1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"), 4: ("896", "704", "512"), 16: ("608", "368", "128"), 64: ("536", "284", "32"),
        256: ("518", "263", "8"), 1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"), 4: ("7000", "5500", "4000"), 16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"), 256: ("4046", "2054", "62.5"), 1024: ("4011", "2013", "15.6"),
    },
}  # fmt: skip


@pytest.mark.parametrize("parameters", PAPER)
def test_table_1_of_the_zero_paper(parameters: float) -> None:
    """The paper rounds its small numbers and truncates its large ones."""
    for devices, row in PAPER[parameters].items():
        for stage, printed in enumerate(row, start=1):
            found = states(int(parameters), -(-int(parameters) // devices), stage, ZERO_PAPER).total / 1e9
            digits = len(printed.partition(".")[2])
            cut = int(found * 10**digits) / 10**digits
            assert float(printed) in (round(found, digits), cut, round(found + 1e-9, digits)), (devices, stage, found)
    assert states(int(parameters), 1, 0, ZERO_PAPER).total == 16 * int(parameters)


def test_the_command_counts_with_the_papers_function() -> None:
    """A bucket without padding takes 2 + 4 + 12 / N bytes for each element at stage 1, with float32 gradients."""
    layouts = plan_buckets(
        [("x", torch.empty(7_500_000_000, dtype=torch.bfloat16, device="meta"))],
        (),
        {"replicated": 4},
        1,  # type: ignore[dict-item]
    )
    assert account(layouts, 1).total == (2 + 4 + 12 // 4) * 7_500_000_000
    paper = states(7_500_000_000, 1_875_000_000, 1, ZERO_PAPER)
    assert account(layouts, 1).total - paper.total == 2 * 7_500_000_000


@pytest.mark.parametrize("stage", [-1, 4])
def test_stages_that_do_not_exist_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match=f"stage {stage}: expected 0, 1, 2 or 3"):
        _toy(2, stage)
    with pytest.raises(ValueError, match="account_sharded"):
        _toy(2, 3)


def _real(dtype: torch.dtype, stage: int, tp: int) -> None:
    """Compare the count with the buffers of an engine and an optimizer that a test can see."""
    mesh = mesh_of(2, tp)
    config = GPTConfig(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    model = GPT(config, dtype=dtype, device_mesh=mesh["tp"] if tp > 1 else None)
    for parameter in model.parameters():
        local_tensor(parameter).zero_()
    buckets = shard(model, mesh, stage=stage)
    optimizer = FlatAdamW(buckets)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    buckets.start(last=True)
    model(ids, ids, loss_weight=0.1).backward()
    buckets.finish()
    expected = account([bucket.layout for bucket in buckets.buckets], stage)
    state = [optimizer.state(bucket) for bucket in buckets.buckets]
    assert sum(bucket.values.nbytes for bucket in buckets.buckets) == expected.parameters
    assert sum(x["exp_avg"].nbytes + x["exp_avg_sq"].nbytes for x in state) == expected.moments
    assert sum(x["model"].nbytes for x in state if dtype in HALF) == expected.master
    if stage < 2:
        accumulated = [bucket.accumulated for bucket in buckets.buckets]
        assert sum(x.nbytes for x in accumulated if x is not None) == expected.gradients
    else:
        unsent = expected.gradients - sum(bucket.reduced_shard.nbytes for bucket in buckets.buckets)
        assert 0 < unsent <= max(bucket.values.nbytes for bucket in buckets.buckets)
    optimizer.step(1e-3)


@pytest.mark.parametrize("tp", [1, *exhaustive(2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_count_equals_the_memory_of_the_engine(stage: int, tp: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool(2 * tp).run(_real, dtype, stage, tp)
