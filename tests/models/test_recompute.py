"""Activation checkpointing of the GPT gives the same gradients to the bit, and saves fewer bytes."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.meshes import mesh_of
from tests.support.saved_bytes import SavedBytes
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm.layout import local_tensor
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.key_value_cache import KeyValueCache
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.parallel.context import ContextSchedule
from tpfuse.parallel.initialize import initialize
from tpfuse.parallel.recompute import RECOMPUTE, Recompute, recomputed
from tpfuse.switches import use
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool

CONFIG = GPTConfig(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4)
B, T, C, H = 3, 12, 32, 4
M = B * T


def _step(model: GPT, at: tuple[int, int] | None = None, length: int = T) -> tuple[int, Tensor, list[Tensor]]:
    """Return (bytes saved for the backward pass, loss, gradients)."""
    ids = integers(1, B, length, low=0, high=60, dtype=torch.int64)
    model.zero_grad()
    saved = SavedBytes([local_tensor(parameter) for parameter in model.parameters()])
    with saved.hooks:
        loss = model(ids, ids.roll(-1, 1), loss_weight=0.1, dropout_at=at)
    loss.backward()
    return saved.total, loss.detach(), [local_tensor(parameter.grad).clone() for parameter in model.parameters()]


def _built(
    config: GPTConfig,
    recompute: Recompute,
    mesh: DeviceMesh | None = None,
    schedule: ContextSchedule = "auto",
    dtype: torch.dtype = torch.float32,
) -> GPT:
    model = parallelize_gpt(GPT(config, dtype=dtype), mesh, GPTOptions(recompute=recompute, context_schedule=schedule))
    initialize(model, 1)
    return model


def _equal(found: tuple[int, Tensor, list[Tensor]], expected: tuple[int, Tensor, list[Tensor]]) -> bool:
    return torch.equal(found[1], expected[1]) and all(map(torch.equal, found[2], expected[2]))


@pytest.mark.parametrize(("dropout", "dtype"), [(0.2, torch.bfloat16), *exhaustive((0.0, torch.float32))])
def test_gradients_are_the_same_to_the_bit(dropout: float, dtype: torch.dtype) -> None:
    config = GPTConfig(61, 16, C, 2, H, dropout=dropout)
    plain, *others = (_step(_built(config, name, dtype=dtype), (3, 4)) for name in RECOMPUTE)
    for found, least in zip(others, (1, 2), strict=True):
        assert _equal(found, plain)
        assert found[0] * (1 + least / 8) < plain[0]


def test_two_steps_of_accumulation_and_a_graph_that_is_kept() -> None:
    ids = integers(1, B, T, low=0, high=60, dtype=torch.int64)
    found = []
    for name in RECOMPUTE:
        model = _built(CONFIG, name)
        for _ in range(2):
            loss = model(ids, ids, loss_weight=0.1)
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))


@pytest.mark.parametrize(("tp", "cp", "schedule"), [(2, 1, "auto"), (1, 2, "ring"), *exhaustive((1, 2, "ulysses"))])
@on_ranks("tp", "cp")
def test_inputs_of_second_layers_are_freed(tp: int, cp: int, schedule: ContextSchedule) -> None:
    """Check which inputs of second layers exist after the forward pass, by weak references: hooks hide them from
    counting."""
    mesh = mesh_of(1, tp, cp)
    ids = integers(1, B, 11, low=0, high=60, dtype=torch.int64)
    for recompute, impl in itertools.product(("none", "selective"), ("direct", "collective")):
        model, inputs = _built(CONFIG, recompute, mesh, schedule), []
        for block in model.transformer.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.register_forward_pre_hook(
                    lambda _, given, inputs=inputs: inputs.append(StorageWeakRef(given[0].untyped_storage()))
                )
        with use(implementation=impl):
            loss = model(ids, ids, loss_weight=0.1)
            assert [x.expired() for x in inputs] == [recompute == "selective"] * 4
            loss.backward()


def _same_on_ranks(
    tp: int, cp: int, schedule: ContextSchedule, impl: Implementation, length: int, dropout: float
) -> None:
    mesh = mesh_of(1, tp, cp)
    config = GPTConfig(61, 16, C, 2, H, dropout=dropout)
    with use(implementation=impl):
        plain, *others = (_step(_built(config, name, mesh, schedule), (3, 4), length) for name in RECOMPUTE)
        for found in others:
            assert _equal(found, plain)
            assert found[0] < plain[0]


@pytest.mark.parametrize(
    ("tp", "cp", "schedule", "impl"),
    [
        (2, 1, "auto", "direct"),
        (1, 2, "ring", "collective"),
        *exhaustive((2, 1, "auto", "collective"), (1, 2, "ulysses", "direct"), (2, 2, "ring", "direct")),
    ],
)
def test_ranks_communicate_again_in_the_same_order(
    tp: int, cp: int, schedule: ContextSchedule, impl: Implementation
) -> None:
    for length, dropout in ((T, 0.0), (11, 0.2)):  # 33 tokens are padded
        pool(tp * cp).run(_same_on_ranks, tp, cp, schedule, impl, length, dropout)


@pytest.mark.exhaustive
def test_interpreted_kernels() -> None:
    """The activation's rounding in float32 is the same inside the product and after it, up to its last bit."""
    config = GPTConfig(61, 16, C, 1, 2)
    with use(kernels="triton"):
        plain, selective, full = (_step(_built(config, name), (3, 4)) for name in RECOMPUTE)
    assert _equal(full, plain)
    for found, expected in zip(selective[2], plain[2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert full[0] < selective[0] < plain[0]


@pytest.mark.parametrize("name", exhaustive("selective", "full"))
def test_one_graph(name: Recompute) -> None:
    model = _built(GPTConfig(61, 16, C, 1, 2), name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = _step(model), _step(compiled)
    assert _equal(found, expected)


@pytest.mark.parametrize("name", RECOMPUTE)
def test_without_gradients_and_with_a_cache_nothing_changes(name: Recompute) -> None:
    model, plain = _built(CONFIG, name), _built(CONFIG, "none")
    ids = integers(1, 2, T, low=0, high=60, dtype=torch.int64)
    with torch.no_grad():
        expected = plain(ids)
        assert torch.equal(model(ids), expected)
        cache = KeyValueCache(CONFIG, 2, 1, torch.device("cpu"), torch.float32)
        pieces = [model(ids[:, start:stop], cache=cache) for start, stop in itertools.pairwise((0, 5, T))]
    torch.testing.assert_close(torch.cat(pieces, 1), expected)


def test_a_recomputed_function_runs_twice_and_its_consumer_once() -> None:
    runs = []

    def function(x: Tensor) -> Tensor:
        runs.append("function")
        return x.exp()

    results = []

    def use(y: Tensor) -> Tensor:
        runs.append("use")
        results.append(StorageWeakRef(y.untyped_storage()))
        return y.t() @ y  # it saves y, and a view of y

    x = normal(1, 4, 5, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad((x.exp().t() @ x.exp()).sum(), x)
    saved = SavedBytes([])
    with saved.hooks:
        out = recomputed(function, (x,), use)
    assert saved.total == x.nbytes and runs == ["function", "use"]
    assert results[0].expired(), "counting cannot see tensors that other hooks hide"
    out.sum().backward()
    assert runs == ["function", "use", "function"]
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=0)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="recompute 'some': expected one of none, selective, full"):
        _built(CONFIG, "some")
