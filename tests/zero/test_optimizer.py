"""ZeroOptimizer replaces DDP and torch.optim.AdamW in a training loop, with the same weights."""

import contextlib
import copy
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.utils.checkpoint import checkpoint

from tests.support.meshes import mesh_from, mesh_of
from tests.support.nodes import pretended_nodes
from tests.support.tiers import exhaustive
from tests.zero.zero_training import TorchsMuon, torchs_adamw
from tpfuse.choices import Implementation
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.layout import gather_whole
from tpfuse.switches import use
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import MuonOptions, offload
from tpfuse.zero.compression import PowerSGDCompression
from tpfuse.zero.optimizer import ZeroOptimizer

BATCH, CLIP = 18, 0.05
BETAS, DECAY = (0.8, 0.95), 0.3
MUON: dict[str, Any] = {
    "algorithm": "muon", "muon": MuonOptions(lr=0.03, weight_decay=0.2, momentum=0.8),
    "matrices": {"0.weight": 1, "3.weight": 1},
}  # fmt: skip
ROWS = torch.arange(BATCH)
SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=5),
}


def made(dtype: torch.dtype = torch.float64) -> nn.Module:
    model = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5, bias=False)).to(dtype)
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape, dtype=dtype))
    model.dtype = dtype  # type: ignore[assignment]
    return model


def optimizer_of(model: nn.Module, stage: int, **options: Any) -> ZeroOptimizer:
    mesh = mesh_of(dist.get_world_size(), 1) if dist.is_initialized() else None
    return ZeroOptimizer(model, mesh, stage=stage, bucket_bytes=200, **options)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    clip: Callable[[float], Tensor],
    rows: Tensor,
    steps: range,
    no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    local: Sequence[int] = (0, 1),
) -> list[float]:
    """Run an ordinary training loop with three micro-batches per step; return the norms of the gradients.

    local: the micro-batches in `no_sync()`.
    """
    norms = []
    for step in steps:
        for number, micro in enumerate(rows.chunk(3)):
            with no_sync() if number in local else contextlib.nullcontext():
                (loss_of(model, step, micro) / 3).backward()
        norms.append(clip(CLIP).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return norms


def loss_of(model: nn.Module, step: int, rows: Tensor) -> Tensor:
    """Return the mean loss over these rows of the batch."""
    x = normal(100 + step, BATCH, 9, dtype=model.dtype)  # type: ignore[arg-type]
    loss: Tensor = model(x[rows]).square().mean()
    return loss


def one_rank(schedule: str, muon: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Train with torch's AdamW, and its Muon for the matrices; return the weights and the norms of the gradients."""
    model = made()
    named = dict(model.named_parameters())
    matrices = {name: named[name] for name in MUON["matrices"]} if muon else {}
    others = {name: p for name, p in named.items() if name not in matrices}
    parts: list[Any] = [torchs_adamw(others, betas=BETAS, eps=1e-8, weight_decay=DECAY)]
    if muon:
        parts.append(TorchsMuon(matrices.values(), **asdict(MUON["muon"])))
    schedulers = [SCHEDULES[schedule](getattr(each, "muon", each)) for each in parts]
    optimizer: Any = SimpleNamespace(step=lambda: [each.step() for each in parts], zero_grad=model.zero_grad)
    scheduler: Any = SimpleNamespace(step=lambda: [each.step() for each in schedulers])
    norms = loop(model, optimizer, scheduler, partial(nn.utils.clip_grad_norm_, named.values()), ROWS, range(4))
    return {name: p.detach() for name, p in named.items()}, norms


@pytest.mark.parametrize(
    ("world", "stage", "schedule", "local", "muon"),
    [
        (2, 1, "lambda", (0, 1), True),
        (2, 2, "cosine", (), False),
        (2, 3, "cosine", (1,), False),
        *exhaustive((3, 0, "lambda", (0, 1), False), (2, 2, "cosine", (0, 2), True), (3, 3, "lambda", (0, 2), True)),
    ],
)
@on_ranks("world")
def test_a_loop_trains_like_one_rank(stage: int, schedule: str, local: tuple[int, ...], muon: bool) -> None:
    """The loop has a scheduler, clipping and accumulation, and its gradient is the mean over ranks.

    From stage 2 on it may have several passes outside of `no_sync()`, and after the last one such a block.
    """
    expected, expected_norms = one_rank(schedule, muon)
    assert min(expected_norms) > CLIP
    model = made()
    optimizer = optimizer_of(model, stage, lr=1e-2, betas=BETAS, weight_decay=DECAY, **(MUON if muon else {}))
    # Every rank has the same number of rows of each micro-batch.
    rows = ROWS.view(3, dist.get_world_size(), -1)[:, dist.get_rank()].flatten()
    scheduler = SCHEDULES[schedule](optimizer)
    norms = loop(model, optimizer, scheduler, optimizer.clip_grad_norm_, rows, range(4), optimizer.no_sync, local)
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    check_near(model, expected)


def check_near(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, weight in expected.items():
        error = (gather_whole(model.get_parameter(name)) - weight).abs().max() / weight.abs().max().clamp(min=1.0)
        assert error <= 1e-12, f"{name}: {error:.1e}"


class Recomputed(nn.Module):
    """A module that torch's reentrant checkpoint computes again, by a backward pass inside the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return out


@pytest.mark.parametrize("stage", [2, *exhaustive(3)])
@on_ranks(2)
def test_reentrant_checkpoints_train_as_on_one_rank(stage: int) -> None:
    """The first gradient of a pass arrives in a checkpoint's own pass, or before it, from a layer at the end."""
    rows = ROWS.chunk(2)[dist.get_rank()]
    for ends in (False, True):
        blocks = [Recomputed(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.LayerNorm(7))) for _ in range(3)]
        model = nn.Sequential(nn.Linear(9, 7), *blocks, *[nn.Linear(7, 5)] * ends).double()
        for seed, parameter in enumerate(model.parameters()):
            parameter.data.copy_(normal(seed, *parameter.shape, dtype=torch.float64))
        model.dtype, plain = torch.float64, copy.deepcopy(model)  # type: ignore[assignment]
        optimizer = optimizer_of(model, stage, lr=1e-2, betas=BETAS, weight_decay=DECAY, units=blocks)
        reference = torchs_adamw(dict(plain.named_parameters()), betas=BETAS, eps=1e-8, weight_decay=DECAY)
        plain.dtype = torch.float64  # type: ignore[assignment]
        for step in range(3):
            for part in rows.tensor_split(2):
                last = stage > 1 or part[-1] == rows[-1]
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    (loss_of(model, step, part) * len(part) / len(rows)).backward()
            loss_of(plain, step, ROWS).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            assert (optimizer.clip_grad_norm_(CLIP) / expected - 1).abs() <= 1e-12
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        check_near(model, {name: p.detach() for name, p in plain.named_parameters()})


@on_ranks(2)
def test_reentrant_checkpoints_of_two_forward_passes_are_refused_below_stage_2() -> None:
    """Their gradients arrive twice in one backward pass. Without them, and from stage 2 on, the gradient is the sum."""
    rows = ROWS.chunk(2)[dist.get_rank()].tensor_split(2)
    for stage, recomputed in ((1, True), (1, False), (2, True)):
        layers = [nn.Linear(9, 7), nn.Linear(7, 7), nn.Linear(7, 5)]
        model = nn.Sequential(layers[0], Recomputed(layers[1]) if recomputed else layers[1], layers[2]).double()
        model.dtype = torch.float64  # type: ignore[assignment]
        optimizer = optimizer_of(model, stage, lr=1e-2)
        loss = loss_of(model, 0, rows[0]) + loss_of(model, 0, rows[1])
        if recomputed and stage < 2:
            expected = r"1.inner.bias got another gradient, from a checkpoint .*: give checkpoints use_reentrant=False"
            with pytest.raises(ValueError, match=expected):
                loss.backward()
            optimizer.engine.abandon()
            optimizer.zero_grad()
            loss_of(model, 0, rows[0]).backward()
            with pytest.raises(ValueError, match=r"^2.bias.grad is in the memory of ZeRO's gradient buckets"):
                loss_of(model, 0, rows[1]).backward()
            optimizer.engine.abandon()
            continue
        plain = copy.deepcopy(model)
        (loss_of(plain, 0, rows[0]) + loss_of(plain, 0, rows[1])).backward()
        gradients = [p.grad / 2 for p in plain.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient)
        loss.backward()
        expected = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert (optimizer.clip_grad_norm_(CLIP) / expected - 1).abs() <= 1e-12


def masks(step: int) -> Tensor:
    """Return the labelled rows, bool [micro-batches, ranks, rows]: from none to all of a rank's in a micro-batch."""
    mask = normal(200 + step, 3, dist.get_world_size() if dist.is_initialized() else 1, BATCH // 3) > 0
    mask[0, -1], mask[step % 3, 0], mask[1, -1, 1:] = False, True, False
    return mask


@pytest.mark.parametrize(
    ("world", "stage", "accumulation", "store"),
    [(2, 1, 3, False), *exhaustive((3, 2, 2, False), (3, 3, 3, False), (2, 1, 3, True))],
)
@on_ranks("world")
def test_the_gradient_of_sums_is_divided_by_the_labels_of_all_ranks(stage: int, accumulation: int, store: bool) -> None:
    """Ranks and micro-batches have different numbers of labels, some none, and each label has the same weight.

    torch's AdamW trains with the mean over all labels.
    """
    rank, model, whole = dist.get_rank(), made(), made()
    optimizer = optimizer_of(
        model, stage, lr=1e-2, betas=BETAS, weight_decay=DECAY, offload="host" if store else "none"
    )
    reference = torchs_adamw(dict(whole.named_parameters()), betas=BETAS, eps=1e-8, weight_decay=DECAY)

    def summed(of: nn.Module, mask: Tensor, step: int, micro: int, part: int) -> Tensor:
        x = normal(1000 + 100 * step + 10 * micro + part, BATCH // 3, 9, dtype=torch.float64)
        total: Tensor = (of(x).square().mean(1) * mask[micro, part]).sum()
        return total

    for step in range(4):
        mask = masks(step)[:accumulation]
        for micro in range(accumulation):
            with optimizer.no_sync() if micro < accumulation - 1 else contextlib.nullcontext():
                summed(model, mask, step, micro, rank).backward()
            optimizer.divide_by(mask[micro, rank].sum() if micro else int(mask[micro, rank].sum()))
            for part in range(mask.shape[1]):
                (summed(whole, mask, step, micro, part) / mask.sum()).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), CLIP if step % 2 else 1e9)
        if step % 2:  # the other steps are not clipped, and need no norm
            assert expected > CLIP
            assert (optimizer.clip_grad_norm_(CLIP) / expected - 1).abs() <= 1e-12
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    check_near(model, {name: p.detach() for name, p in whole.named_parameters()})


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("one rank", 2, "divide_by() was called on 1 of 2 ranks in this step: call it on every rank, with 0"),
        ("no labels", 2, "divide_by() was given 0 labels by all ranks together: skip such a step by zero_grad()"),
        ("a mask", 2, "divide_by() got a tensor of shape (3,): expected the number of labels"),
        ("late", 2, "divide_by() comes between zero_grad() and clip_grad_norm_() or step()"),
        ("never before", 1, "divide_by() after steps without it, whose losses were means: call it in every step"),
    ],
)
@on_ranks(2)
def test_a_miscount_is_one_line_on_every_rank(kind: str, count: int, message: str) -> None:
    """The step after such mistakes is taken."""
    model, messages = made(), []
    optimizer = optimizer_of(model, 2)
    rows = ROWS.chunk(dist.get_world_size())[dist.get_rank()]

    def attempt(update: Callable[[], Any], labels: Any = None) -> None:
        try:
            if labels is not None:
                optimizer.divide_by(labels)
            update()
        except ValueError as error:
            messages.append(str(error))

    for step in range(2):
        loss_of(model, step, rows).backward()
        if kind == "one rank":
            attempt(lambda: optimizer.clip_grad_norm_(1.0), None if dist.get_rank() else 5)
        elif kind == "no labels":
            attempt(optimizer.step, 0)
        elif kind == "a mask":
            attempt(optimizer.step, torch.ones(3, dtype=torch.bool))
        elif kind == "late":
            optimizer.divide_by(5)
            optimizer.clip_grad_norm_(1.0)
            attempt(optimizer.step, 5)
        elif kind == "never before":
            attempt(optimizer.step, 5 if step else None)
        optimizer.zero_grad()
    loss_of(model, 2, rows).backward()
    if kind != "never before":
        optimizer.divide_by(7)
    optimizer.step()
    assert len(messages) == count and all(line.startswith(message) for line in messages)


@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer_first", "muon"),
    [
        (2, torch.bfloat16, True, True),
        *exhaustive(
            (0, torch.float16, False, False), (1, torch.float32, True, False), (3, torch.bfloat16, False, True)
        ),
    ],
)
@on_ranks(2)
def test_a_saved_state_resumes_to_the_bit(stage: int, dtype: torch.dtype, optimizer_first: bool, muon: bool) -> None:
    """Save and load after two of four steps; weights and state equal those of the uninterrupted run."""

    def run(model: nn.Module, optimizer: ZeroOptimizer, scheduler: LRScheduler, steps: range) -> None:
        loop(model, optimizer, scheduler, optimizer.clip_grad_norm_, rows, steps, optimizer.no_sync)

    rows = ROWS.chunk(dist.get_world_size())[dist.get_rank()]
    models, optimizers, schedulers = [], [], []
    for seed in range(2):
        model = made(dtype)
        with torch.no_grad():
            model[0].weight.add_(seed)
        optimizer = optimizer_of(model, stage, lr=1e-2 + seed, betas=BETAS, **(MUON if muon else {}))
        models.append(model)
        optimizers.append(optimizer)
        schedulers.append(SCHEDULES["cosine"](optimizer))
    run(models[0], optimizers[0], schedulers[0], range(2))
    saved = copy.deepcopy([each[0].state_dict() for each in (models, optimizers, schedulers)])
    run(models[0], optimizers[0], schedulers[0], range(2, 4))
    if optimizer_first:
        optimizers[1].load_state_dict(saved[1])
    models[1].load_state_dict(saved[0])
    if not optimizer_first:
        optimizers[1].load_state_dict(saved[1])
    schedulers[1].load_state_dict(saved[2])
    run(models[1], optimizers[1], schedulers[1], range(2, 4))
    for (name, x), y in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(gather_whole(x), gather_whole(y)), name
    first, second = (optimizer.state_dict() for optimizer in optimizers)
    assert all(torch.equal(x, second["state"][name]) for name, x in first["state"].items())
    assert all(first[key] == second[key] for key in ("param_groups", "updates"))
    state = saved[1]
    assert state["updates"] == 2
    assert [group["weight_decay"] for group in state["param_groups"]] == [1e-2, 0.0] + [0.2] * muon
    masters = [name for name in state["state"] if name.startswith("model.")]
    assert bool(masters) == (dtype in (torch.bfloat16, torch.float16) and stage < 3)
    before = copy.deepcopy(second)
    wide = {name: x.double() for name, x in before["state"].items()}
    lacking = dict(list(before["state"].items())[1:])
    of_dtype, of_layout = r"has [^\n]* in torch\.float64, this optimizer in", "is of another layout, it has"
    for other, message in ((wide, of_dtype), (lacking, of_layout)):
        with pytest.raises(ValueError, match=rf"^load_state_dict: the state {message} [^\n]*$"):
            optimizers[1].load_state_dict({**state, "state": other})
    assert all(torch.equal(x, before["state"][name]) for name, x in optimizers[1].state_dict()["state"].items())


@pytest.mark.exhaustive
@on_ranks(4)
def test_remainders_of_compression_are_in_the_state() -> None:
    """Check on two pretended nodes that the state has PowerSGD's remainders."""
    with pretended_nodes(2, 2) as group:
        states = []
        for step in range(2):
            model = nn.Sequential(made(), nn.Linear(5, 64, dtype=torch.float64), nn.Linear(64, 64, dtype=torch.float64))
            model.dtype = torch.float64  # type: ignore[assignment]
            optimizer = ZeroOptimizer(model, mesh_from(group), stage=1, compression=PowerSGDCompression(1))
            if step:
                optimizer.load_state_dict(states[0])
            else:
                loss_of(model, step, torch.arange(dist.get_rank(), BATCH, 4)).backward()
                optimizer.step()
            optimizer.zero_grad()  # reduces no gradient: remainders stay as they are
            states.append(copy.deepcopy(optimizer.state_dict()))
        first, second = (state["compression"] for state in states)
        assert first and first.keys() == second.keys()
        assert all(torch.equal(x, second[name][kind]) for name, each in first.items() for kind, x in each.items())


@on_ranks(4)
def test_powersgd_tells_matrices_apart_and_forgets_discarded_gradients() -> None:
    """Two matrices are the first ones of buckets in two dtypes; the gradient of one of them is zero."""
    with pretended_nodes(2, 2) as group:
        norms = []
        for skip in ("", "discard", "abandon"):
            torch.manual_seed(0)
            zero, used = nn.Linear(64, 64, bias=False).bfloat16(), nn.Linear(64, 64, bias=False)
            options: dict[str, Any] = {"stage": 1, "lr": 0.0, "reduce_dtype": "parameter"}
            compression = PowerSGDCompression(1)
            optimizer = ZeroOptimizer(nn.ModuleList([zero, used]), mesh_from(group), compression=compression, **options)
            x = normal(dist.get_rank(), 64, 64)
            for scale in (1e3, 1.0, 1.0) if skip else (1.0, 1.0):
                (scale * used(x).square().mean() + 0.0 * zero(x.bfloat16()).float().sum()).backward()
                norms.append(optimizer.clip_grad_norm_(1.0))
                sums = {bucket.layout.dtype: bucket.reduced_shard for bucket in optimizer.engine.buckets}
                assert not sums[torch.bfloat16].any() and sums[torch.float32].any()
                if scale == 1.0:
                    optimizer.step()
                elif skip == "abandon":
                    optimizer.engine.abandon()
                optimizer.zero_grad()
            with pytest.raises(ValueError, match=r"^divide_by\(\) with PowerSGD, whose remainders would be divided"):
                optimizer.divide_by(2)
        assert norms[0] != norms[1] and norms[:2] == norms[3:5] == norms[6:]


@pytest.mark.parametrize(
    ("stage", "impl", "arrive"),
    [
        (2, "auto", "none"),
        (0, "collective", "none"),
        *exhaustive((2, "auto", "the last"), (3, "auto", "all"), (2, "collective", "none")),
    ],
)
@on_ranks(2)
def test_zero_grad_discards_gradients_that_no_step_has_used(stage: int, impl: Implementation, arrive: str) -> None:
    """Check that discarded gradients leave no trace, whether other ranks have received them or not.

    arrive: the layers whose gradients arrive in the skipped step on ranks other than 0.
    """
    results = []
    for skip in (False, True):
        model = made()
        with use(implementation=impl):
            optimizer = optimizer_of(model, stage)
        rows = ROWS.chunk(dist.get_world_size())[dist.get_rank()]
        for step in range(2):
            if skip:
                if dist.get_rank() and arrive == "the last":
                    model[3](torch.ones(1, 7, dtype=torch.float64)).sum().backward()
                elif not dist.get_rank() or arrive == "all":
                    loss_of(model, 8, rows).backward()
                if step:
                    optimizer.clip_grad_norm_(1e-3)
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, 7, rows).backward()
                if step:  # as after an error on some rank
                    optimizer.engine.abandon()
                optimizer.zero_grad()
            loss_of(model, step, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([gather_whole(parameter).clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stage", [0, *exhaustive(2, 3)])
@on_ranks(2)
def test_ranks_that_do_not_agree_to_skip_an_update_raise_at_once(stage: int) -> None:
    """Rank 1 alone skips an update."""
    model = made()
    optimizer = optimizer_of(model, stage)
    with pytest.raises(Disagreement, match="rank 0 runs") as caught:  # after the deadline it is a PeerTimeout
        for step in range(3):
            loss_of(model, step, ROWS).backward()
            if step == 0 or dist.get_rank() == 0:
                optimizer.step()
            optimizer.zero_grad()
    if stage < 3 or dist.get_rank():  # at stage 3 the next backward pass of rank 0 raises
        assert "every rank must call step(), or every rank must skip it by zero_grad()" in str(caught.value)


def test_a_gradient_scaler_is_refused() -> None:
    """The errors say what to do instead. A scaler would skip updates without the agreement of other ranks."""
    model = made(torch.float32)
    optimizer, scaler = ZeroOptimizer(model, stage=0), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0, ROWS)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"train in bfloat16, which needs no torch\.amp\.GradScaler"):
        scaler.unscale_(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(
        ValueError, match=r"^ZeroOptimizer does not work with torch\.amp\.GradScaler: train in bfloat16"
    ):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_hyperparameters_are_read_at_each_step_and_a_closure_computes_the_loss() -> None:
    model, plain = made(), made()
    optimizer = ZeroOptimizer(model, stage=0, weight_decay=0.0)
    reference = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)

    def closure(each: torch.optim.Optimizer, x: nn.Module, step: int) -> Tensor:
        each.zero_grad()
        loss = loss_of(x, step, ROWS)
        loss.backward()
        return loss

    for step in range(3):
        for each in (optimizer, reference):
            for group in each.param_groups:
                group |= {"lr": 0.01 * (step + 1), "betas": (0.5 + 0.1 * step, 0.9), "eps": 1e-3}
        losses = [each.step(partial(closure, each, x, step)) for each, x in ((optimizer, model), (reference, plain))]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"param_groups: lr is 0\.03 and 0\.5: ZeroOptimizer has one lr"):
        optimizer.step()
    optimizer.param_groups[1] |= {"lr": 0.03, "weight_decay": 0.1}
    with pytest.raises(ValueError, match=r"param_groups: weight_decay is 0\.0 and 0\.1"):
        optimizer.step()


def test_a_second_clipping_finds_the_gradient_as_the_first_has_scaled_it() -> None:
    model, plain = made(), made()
    optimizer = ZeroOptimizer(model, stage=0)
    for each in (model, plain):
        loss_of(each, 0, ROWS).backward()
    for largest in (0.05, 0.01, 1.0, float("inf")):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), largest)
        torch.testing.assert_close(optimizer.clip_grad_norm_(largest), expected, rtol=1e-6, atol=0.0)


def test_errors_explain_what_is_wrong_in_a_loop() -> None:
    model, rows = made(), ROWS
    optimizer = ZeroOptimizer(model, stage=0)
    loss_of(model, 0, rows).backward()
    with pytest.raises(ValueError, match=r"put earlier backward passes of a step into its no_sync\(\)"):
        loss_of(model, 0, rows).backward()
    with pytest.raises(ValueError, match=r"^no_sync\(\) is for the backward passes between"), optimizer.no_sync():
        pass
    optimizer.step()
    with pytest.raises(ValueError, match=r"call its zero_grad\(\) after each step"):
        loss_of(model, 0, rows).backward()
    with pytest.raises(ValueError, match="has the parameters of its engine: for a changed model, make"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.zero_grad()
    model[0].bias.requires_grad_(False)
    loss_of(model, 0, rows).backward()
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ValueError, match=r"0\.bias\.requires_grad is False now"):
            call()


def test_wrong_options_and_states_are_refused() -> None:
    model = made()
    for options in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="expected betas from 0 to below 1, and no number below 0"):
            ZeroOptimizer(model, stage=0, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected that of ZeroOptimizer\.state_dict\(\)"):
        ZeroOptimizer(model, stage=0).load_state_dict(torch.optim.AdamW(made().parameters()).state_dict())
    optimizer = ZeroOptimizer(made(), stage=0)
    state = copy.deepcopy(optimizer.state_dict())
    name = next(iter(state["state"]))
    wrong: dict[str, dict[str, Any]] = {
        r"1 param_groups and 0 updates: expected 2 groups": {"param_groups": state["param_groups"][:1]},
        r"2 param_groups and None updates: expected 2 groups and a number": {"updates": None},
        rf"has {re.escape(name)} as \(1,\): expected a tensor": {"state": {**state["state"], name: torch.ones(1)}},
        rf"has {re.escape(name)} as .*: expected a tensor": {"state": {**state["state"], name: [1.0]}},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**state, **change})
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"ZeroOptimizer cannot be copied or pickled.*: save state_dict"):
            call(optimizer)
    with pytest.raises(ValueError, match="ZeroOptimizer runs no hooks around state_dict"):
        optimizer.register_state_dict_post_hook(lambda *_: None)


@on_ranks(2)
def test_an_offload_that_one_rank_cannot_make_is_refused_on_every_rank() -> None:
    folder = "/nowhere" if dist.get_rank() else "."
    own = "offload /nowhere is not a folder: expected none, host or a folder on a local disk"
    message = f"^{own}$" if dist.get_rank() else f"^offload . failed on rank 1.*: ValueError: {own}$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_IN_MEMORY", ())
        for stage in (1, 3):
            with pytest.raises(ValueError, match=message):
                optimizer_of(made(), stage, offload=folder)


@on_ranks(2)
def test_the_dtype_of_the_moments_is_an_argument() -> None:
    for stage in (2, 3):
        state = optimizer_of(made(torch.float32), stage, state_dtype="bfloat16").state_dict()["state"]
        assert {x.dtype for name, x in state.items() if name.startswith("exp_avg")} == {torch.bfloat16}
        with pytest.raises(ValueError, match=r"^state_dtype bfloat16 is for .*, not for float64$"):
            optimizer_of(made(torch.float64), stage, state_dtype="bfloat16")
