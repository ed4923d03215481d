"""The formula of saved activations agrees with the bytes that autograd saves."""

import itertools

import pytest
import torch

from benchmarks.long_context import SavedBytes
from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive, pairwise
from tpfuse.backend import Kernels, kernels
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import context_mesh
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.saved_activations import MicroBatch, saved_bytes
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.parallel.context import Schedule
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.pipeline.cut import explicit_cut
from tpfuse.parallel.recompute import RECOMPUTE, Recompute
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks

SIZES = [GPTConfig(61, 12, 32, 1, 2), GPTConfig(100, 7, 48, 3, 12, bias=False), GPTConfig(5, 16, 64, 2, 4)]


def _counted(
    config: GPTConfig,
    sequences: int,
    dtype: torch.dtype,
    recompute: Recompute,
    *,
    tp: int,
    cp: int,
    schedule: Schedule,
    autocast: bool = False,
) -> int:
    mesh = mesh_of(1, tp, cp) if tp * cp > 1 else None
    model = GPT(
        config,
        dtype=dtype,
        recompute=recompute,
        device_mesh=None if mesh is None or tp == 1 else mesh["tp"],
        context_mesh=context_mesh(mesh),
        context_schedule=schedule,
    )
    initialize(model, 1)
    ids = integers(1, sequences, config.n_positions, low=0, high=config.vocab_size - 1, dtype=torch.int64)
    saved = SavedBytes([local_tensor(parameter) for parameter in model.parameters()])
    with saved.hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids, ids, loss_weight=0.1, dropout_at=(1, 2) if config.dropout else None)
    counted = saved.total
    loss.backward()
    return counted


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    [
        ("none", torch.bfloat16),
        ("selective", torch.float32),
        ("full", torch.bfloat16),
        *exhaustive(
            ("none", torch.float64), ("none", torch.float32), ("selective", torch.bfloat16), ("full", torch.float64)
        ),
    ],
)
def test_saved_bytes_on_one_rank(recompute: Recompute, dtype: torch.dtype) -> None:
    for config, sequences in itertools.product(SIZES, (1, 3)):
        counted = _counted(config, sequences, dtype, recompute, tp=1, cp=1, schedule="auto")
        assert counted == saved_bytes(MicroBatch(config, sequences, config.n_positions, dtype, triton=False), recompute)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_bytes_of_pipeline_stages(recompute: Recompute, dropout: float) -> None:
    config, dtype = GPTConfig(61, 12, 32, 4, 2, dropout=dropout), torch.float32
    ids = integers(1, 3, config.n_positions, low=0, high=config.vocab_size - 1, dtype=torch.int64)
    x = None
    for stage in explicit_cut("1,2,1", 4, 3):
        model = GPT(config, dtype=dtype, recompute=recompute, stages=[stage])
        initialize(model, 1)
        saved = SavedBytes([local_tensor(parameter) for parameter in model.parameters()])
        at = (1, 2) if dropout else None
        with saved.hooks:
            y = model(ids, ids, loss_weight=0.1, dropout_at=at, stage=stage, x_mC=x)
        counted = saved_bytes(MicroBatch(config, 3, config.n_positions, dtype, triton=False), recompute, stage)
        assert saved.total == counted, stage
        x = y.detach().requires_grad_()


@pytest.mark.parametrize(
    ("recompute", "name"),
    [("none", "torch"), *exhaustive(("none", "triton"), ("selective", "torch"), ("full", "torch"))],
)
def test_saved_bytes_under_autocast(recompute: Recompute, name: Kernels) -> None:
    config, dtype = SIZES[0], torch.float32
    with kernels(name):
        counted = _counted(config, 3, dtype, recompute, tp=1, cp=1, schedule="auto", autocast=True)
    batch = MicroBatch(config, 3, 12, dtype, triton=name == "triton", autocast=torch.bfloat16)
    # The hooks of `recomputed` hide the weights of the two projections after it from the hooks that count.
    hidden = 5 * config.n_embd**2 * 2 if recompute == "selective" else 0
    assert counted == saved_bytes(batch, recompute) - hidden


def test_saved_bytes_of_a_loss_in_several_chunks() -> None:
    config = GPTConfig(61, 400, 16, 1, 2)
    for dtype in (torch.float32, torch.bfloat16):
        counted = _counted(config, 3, dtype, "none", tp=1, cp=1, schedule="auto")
        assert counted == saved_bytes(MicroBatch(config, 3, 400, dtype, triton=False))


@pytest.mark.parametrize(
    ("tp", "cp", "schedule"),
    [(2, 1, "auto"), (1, 2, "ulysses"), *exhaustive((1, 2, "ring"), (1, 2, "all_gather"), (2, 2, "ring"))],
)
@on_ranks("tp", "cp")
def test_saved_bytes_on_several_ranks(tp: int, cp: int, schedule: Schedule) -> None:
    cases = [(config, 1, "none") for config in SIZES] + [
        (config, 3, name) for config in SIZES[:2] for name in RECOMPUTE
    ]
    for config, sequences, recompute in cases:
        counted = _counted(config, sequences, torch.float32, recompute, tp=tp, cp=cp, schedule=schedule)
        tokens = SequenceLayout(config.n_positions, cp).local_length if cp > 1 else config.n_positions
        batch = MicroBatch(config, sequences, tokens, torch.float32, tp, schedule == "ulysses", triton=False)
        first = tp == 1 or mesh_of(1, tp, cp)["tp"].get_local_rank() == 0
        if first:  # other ranks may have fewer rows of the vocabulary
            assert counted == saved_bytes(batch, recompute), (config, sequences, recompute)
        else:
            assert counted <= saved_bytes(batch, recompute)


@pytest.mark.parametrize(
    *pairwise(recompute=["none", "selective", "full"], dropout=[0.2, 0.0], dtype=[torch.bfloat16, torch.float32])
)
def test_interpreted_kernels(recompute: Recompute, dropout: float, dtype: torch.dtype) -> None:
    config = GPTConfig(61, 12, 32, 1, 2, dropout=dropout)
    with kernels("triton"):
        counted = _counted(config, 3, dtype, recompute, tp=1, cp=1, schedule="auto")
    assert counted == saved_bytes(MicroBatch(config, 3, 12, dtype), recompute)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_saved_bytes_with_masks_that_torch_saves(recompute: Recompute) -> None:
    config = GPTConfig(61, 12, 32, 2, 2, dropout=0.2)
    batch = MicroBatch(config, 3, 12, torch.float32, triton=False)
    assert _counted(config, 3, torch.float32, recompute, tp=1, cp=1, schedule="auto") == saved_bytes(batch, recompute)
