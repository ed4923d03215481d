"""The GPT computes the same losses, gradients and logits on any number of ranks, and refuses bad input."""

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.collectives import all_reduce
from tpfuse.comm.layout import gather_whole, local_slices, local_tensor
from tpfuse.comm.mesh import flat_group
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.key_value_cache import KeyValueCache
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.ops.dropout import dropout_key, keep_mask
from tpfuse.parallel.context import Balance, ContextSchedule
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.compare import Expected
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12, dropout=0.2)


def _model(
    config: GPTConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
    mesh: DeviceMesh | None = None,
    options: GPTOptions | None = None,
) -> GPT:
    model = parallelize_gpt(GPT(config, dtype=dtype), mesh, options)
    initialize(model, 1)
    with torch.no_grad():  # biases start at zero, so that a forgotten one would change nothing
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("bias"):
                part = tuple(slice(*bounds) for bounds in local_slices(parameter))
                local_tensor(parameter).copy_(normal(seed, *parameter.shape)[part] / 4)
    return model


def _gradients(model: GPT, plain: GPT) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter's gradient on this rank, and that part of the gradient on one rank."""
    for (name, wanted), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None and wanted.grad is not None, name
        yield local_tensor(parameter.grad), wanted.grad[tuple(slice(*bounds) for bounds in local_slices(parameter))]


def _batch(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = integers(1, batch, length, low=0, high=vocabulary - 1, dtype=torch.int64)
    targets = ids.roll(-1, 1)
    targets[:, -1] = -1
    targets[0, 0] = -100
    return ids, targets


def _losses_and_gradients(config: GPTConfig, batch: int, length: int) -> None:
    plain, model = _model(config), _model(config, mesh=tensor_mesh())
    ids, targets = _batch(batch, length, config.vocab_size)
    weights = normal(2, batch, length, dtype=torch.float64)
    for dropout_at in (None, (3, 4)):
        expected, actual = (m(ids, targets, dropout_at=dropout_at) for m in (plain, model))
        assert torch.count_nonzero(actual[:, -1]) == 0
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
        (expected * weights).sum().backward()
        (actual * weights).sum().backward()
        for found, wanted in _gradients(model, plain):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    logits = model(ids)
    assert logits.shape == (batch, length, config.vocab_size), "exactly the vocabulary: nothing padded"
    torch.testing.assert_close(logits, plain(ids), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("world", "batch", "length"), [(2, 3, 13), (3, 1, 1), *exhaustive((4, 2, 16))])
def test_losses_and_gradients_are_those_of_one_rank(world: int, batch: int, length: int) -> None:
    pool(world).run(_losses_and_gradients, CONFIG, batch, length)


@on_ranks(2)
def test_the_weighted_sum_of_the_losses_without_whole_logits() -> None:
    config = GPTConfig(61, 8, 24, 2, 12)
    plain, model = _model(config), _model(config, mesh=tensor_mesh())
    ids, targets = _batch(3, 5, config.vocab_size)
    expected, actual = 0.3 * plain(ids, targets).sum(), model(ids, targets, loss_weight=0.3)
    assert actual.shape == ()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    for total in (expected, actual):
        total.backward()
    for found, expected_gradient in _gradients(model, plain):
        torch.testing.assert_close(found, expected_gradient, rtol=1e-10, atol=1e-12)


def test_vocabularies_smaller_than_the_world_and_no_biases() -> None:
    pool(3).run(_losses_and_gradients, GPTConfig(2, 16, 24, 1, 12, dropout=0.1), 2, 5)
    pool(3).run(_losses_and_gradients, GPTConfig(5, 16, 24, 1, 12, bias=False), 2, 5)


@pytest.mark.parametrize(
    ("tp", "cp", "schedule", "balance", "length", "ulysses"),
    [
        (1, 2, "ring", "zigzag", 13, 1),
        (1, 2, "ulysses", "striped", 13, 1),
        (1, 3, "ring", "zigzag", 4, 1),  # most of the tokens are padding
        *exhaustive((1, 4, "ulysses_ring", "striped", 16, 2), (2, 2, "auto", "zigzag", 13, 1)),
    ],
)
@on_ranks("tp", "cp")
def test_context_parallel_ranks_give_the_losses_and_gradients_of_one_rank(
    tp: int, cp: int, schedule: ContextSchedule, balance: Balance, length: int, ulysses: int
) -> None:
    """Compare losses, logits and gradients of ranks that share sequences with those of one rank."""
    mesh = mesh_of(1, tp, cp, ulysses)
    plain = _model()
    model = _model(mesh=mesh, options=GPTOptions(schedule, balance))
    ids, targets = _batch(3, length, CONFIG.vocab_size)
    weights = normal(2, 3, length, dtype=torch.float64)
    group = flat_group(mesh, "cp", "ring", "ulysses")
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-12, atol=1e-13)
    for weighted in (False, True):
        totals = []
        for m in (plain, model):
            if weighted:
                totals.append(m(ids, targets, loss_weight=0.3, dropout_at=(3, 4)))
            else:
                losses = m(ids, targets, dropout_at=(3, 4))
                totals.append((losses * weights).sum())
            totals[-1].backward()
        total = all_reduce(totals[1].detach(), group) if weighted else totals[1].detach()
        torch.testing.assert_close(total, totals[0].detach(), rtol=1e-12, atol=1e-12)
        for found, wanted in _gradients(model, plain):
            whole, largest = all_reduce(found, group), max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
            torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-12 * largest)
        plain.zero_grad()
        model.zero_grad()


@on_ranks(3)
def test_context_parallel_ranks_generate_the_text_of_one_rank() -> None:
    """The prompt has fewer tokens than there are ranks, and the window is full before the end and then moves."""
    model = _model(mesh=mesh_of(1, 1, 3))
    ids, _ = _batch(2, 2, 101)
    with pytest.raises(ValueError, match="a sequence of 2 tokens cannot be sharded over 3 ranks"):
        model(ids)
    expected = generate(_model(), ids, 18, temperature=0.7, seed=3)
    assert torch.equal(generate(model, ids, 18, temperature=0.7, seed=3), expected)


@on_ranks(4)
def test_impossible_context_parallel_layouts_are_refused() -> None:
    mesh = mesh_of(1, 1, 4)
    with pytest.raises(ValueError, match="ulysses: 4 ranks cannot divide 6 heads; ring and all_gather can be used"):
        parallelize_gpt(GPT(GPTConfig(101, 16, 48, 2, 6)), mesh, GPTOptions("ulysses"))
    with pytest.raises(ValueError, match="cp 4 is more than the 3 tokens of a sequence"):
        parallelize_gpt(GPT(GPTConfig(101, 3, 48, 2, 6)), mesh)
    with pytest.raises(ValueError, match="schedule ulysses_ring: 1 of cp 4 exchange heads: expected"):
        parallelize_gpt(GPT(CONFIG), mesh, GPTOptions("ulysses_ring"))


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), *exhaustive((4, torch.float32))])
@on_ranks("world")
def test_errors_are_those_of_one_rank_in_the_same_dtype(dtype: torch.dtype) -> None:
    config = GPTConfig(101, 16, 48, 2, 12)
    plain, model = _model(config, dtype), _model(config, dtype, mesh=tensor_mesh())
    ids, targets = _batch(3, 13, 101)
    inputs = {name: parameter.detach() for name, parameter in plain.named_parameters()}

    def whole(**parameters: Tensor) -> Tensor:
        return torch.func.functional_call(plain, parameters, (ids, targets))

    grad = normal(2, 3, 13, dtype=dtype)
    expected = Expected(whole, inputs, grad)
    losses = model(ids, targets)
    losses.backward(grad.to(losses.dtype))
    expected.check("out", losses)
    for name, parameter in model.named_parameters():
        part = tuple(slice(*bounds) for bounds in local_slices(parameter))
        expected.check(name, local_tensor(parameter.grad), part)


def test_dropout_depends_on_the_sequence_and_not_on_its_row() -> None:
    model = _model()
    ids, targets = _batch(4, 13, 101)
    whole = model(ids, targets, dropout_at=(3, 4))
    rows = torch.tensor([2, 0])
    part = model(ids[rows], targets[rows], dropout_at=(3, 4), sequences_B=rows)
    torch.testing.assert_close(part, whole[rows], rtol=1e-12, atol=1e-13)
    assert not torch.allclose(model(ids, targets, dropout_at=(3, 5)), whole)
    assert not torch.allclose(model(ids, targets, dropout_at=(4, 4)), whole)


def test_every_dropout_site_has_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recorded(rows: Tensor, width: int, p: float, key: Tensor, *columns: Tensor) -> Tensor:
        seen.append(int(key))
        return keep_mask(rows, width, p, key, *columns)

    for module in ("dropout", "dense_attention"):
        monkeypatch.setattr(f"tpfuse.ops.{module}.keep_mask", recorded)
    ids, targets = _batch(1, 5, 101)
    _model()(ids, targets, dropout_at=(3, 4))
    assert len(seen) == len(set(seen)) == 1 + 3 * CONFIG.n_layer
    assert set(seen) <= {dropout_key(3, 4, site) for site in range(4 * CONFIG.n_layer)}


@on_ranks(2)
def test_logits_with_a_cache_are_those_without() -> None:
    model = _model(mesh=tensor_mesh())
    ids, _ = _batch(2, 16, 101)
    with torch.no_grad():
        whole = model(ids)
        weight = model.transformer.wte.weight
        cache = KeyValueCache(model.config, 2, model.tp, weight.device, weight.dtype)
        cuts = [0, 5, 6, 7, 10, 16]
        pieces = [model(ids[:, start:stop], cache=cache) for start, stop in itertools.pairwise(cuts)]
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="17 tokens do not fit a context of 16"):
        model(ids[:, :1], cache=cache)


@on_ranks(2)
def test_torch_clips_by_the_norm_of_one_rank() -> None:
    plain, model = _model(), _model(mesh=tensor_mesh())
    ids, targets = _batch(3, 13, 101)
    for m in (plain, model):
        m(ids, targets).mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
    for found, wanted in _gradients(model, plain):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-14)


def test_flops_per_token_are_counted() -> None:
    config = GPTConfig(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
    model = GPT(config, device="meta")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "bias" not in name)
    assert model.flops_per_token() == 6 * (matrices - 1024 * 768) + 12 * 12 * 1024 * 768
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # GPT-2's


@on_ranks(2)
def test_a_model_with_values_keeps_them_on_every_mesh_whose_ranks_share_layers() -> None:
    plain = _model()
    plain.transformer.wpe.weight.requires_grad_(False)
    for mesh, ranks in (
        (mesh_of(1, 2), 2),
        (init_device_mesh("cpu", (2,)), 2),
        (mesh_of(2, 1), 1),
        (mesh_of(2, 1)["dp"], 1),
    ):
        model = parallelize_gpt(copy.deepcopy(plain), mesh)
        assert model.tp == ranks and model.transformer.wpe.weight.requires_grad is False
        for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(parameter, DTensor) == (ranks > 1) and torch.equal(gather_whole(parameter), whole), name


@on_ranks(2)
def test_models_and_meshes_that_do_not_fit_are_refused_and_left_as_they_were() -> None:
    hooked, two = _model(), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("ep", "x"))
    hooked.transformer.h[1].mlp.c_fc.register_forward_hook(print)
    for model, mesh, message in (
        (_model(mesh=tensor_mesh()), tensor_mesh(), "the GPT is parallelized already: expected a new one"),
        (hooked, tensor_mesh(), r"^transformer\.h\.1\.mlp\.c_fc has hooks, which the new layer would not run"),
        (_model(), two, r"mesh has the axes \('ep', 'x'\): expected one named \"tp\", or one axis"),
    ):
        layers, tp = model.transformer, model.tp
        with pytest.raises(ValueError, match=message):
            parallelize_gpt(model, mesh)
        assert model.transformer is layers and model.tp == tp


@on_ranks(2)
def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp 2 does not divide n_head 3: it can be one of \[1, 3\]"):
        parallelize_gpt(GPT(GPTConfig(101, 16, 48, 2, 3)), tensor_mesh())
    for wrong, message in (
        ({"n_layer": 0}, "n_layer 0: expected at least 1"),
        ({"n_embd": 100}, "n_embd 100 is not a multiple of n_head 12"),
        ({"dropout": 1.0}, "dropout 1"),
    ):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**wrong).check()  # type: ignore[arg-type]
    model = _model()
    for arguments, message in (
        ([torch.zeros(1, 17, dtype=torch.int64)], "17 tokens do not fit a context of 16"),
        ([torch.zeros(1, 0, dtype=torch.int64)], "with at least one token"),
        ([torch.tensor([[101]])], "do not fit a table of 101 rows"),
        ([torch.tensor([[0, 1]]), torch.tensor([[0, 101]])], "targets from 0 to 101"),
        ([torch.tensor([0, 1])], r"ids of shape \(2,\): expected \[B, T\]"),
        ([torch.tensor([[0, 1]]), torch.tensor([[0], [1]])], r"targets of shape \(2, 1\): expected \(1, 2\), as ids"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    ids, starts = torch.tensor([[0, 1]]), torch.tensor([[True, False]])
    for options, message in (
        ({"loss_weight": 1.0}, "loss_weight 1.0 without targets"),
        ({"starts_BT": starts[:, :1]}, r"starts of shape \(1, 1\): expected \(1, 2\), as ids"),
        ({"starts_BT": starts.long()}, "starts of torch.int64: expected bool"),
        ({"starts_BT": starts, "cache": KeyValueCache(CONFIG, 1, 2, "cpu", torch.float64)}, "starts with a cache"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **options)
