"""A parallelized model trains as the whole model does on one rank: plain loops, ZeRO, and what wraps a model."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpfuse
from tpfuse.parallel.whole import gather_whole
from tpfuse.testing.inputs import integers
from tpfuse.testing.meshes import mesh_of
from tpfuse.testing.ranks import pool
from tpfuse.testing.tiers import exhaustive
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.optimizer import ZeroOptimizer

IDS = integers(1, 4, 14, low=0, high=100, dtype=torch.int64)  # 13 positions, which 2 ranks do not divide
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.3}
CLIP, STEPS = 0.2, 4


def _made(dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm(self: Any, x: Tensor) -> Tensor:  # theirs computes in float32 even in a float64 model
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.weight * F.rms_norm(x.to(wide), (x.shape[-1],), eps=self.variance_epsilon).to(x.dtype)

    LlamaRMSNorm.forward = norm  # type: ignore[method-assign]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=4, attention_bias=True,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).train()
    for parameter in model.parameters():  # norms start at one and biases at zero, so that forgetting one is no error
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def _loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Return the mean loss, in the logits' dtype; the models' own loss is float32."""
    logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _steps(
    model: nn.Module,
    forward: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    autocast: bool = False,
) -> list[float]:
    """Train with two micro-batches in each step; return the norms of the gradients."""
    zero = isinstance(optimizer, ZeroOptimizer)
    results: list[float] = []
    for _ in range(STEPS):
        *early, last = ids.chunk(2)
        for micro in (*early, last):
            waits = zero and micro is not last
            with optimizer.no_sync() if waits else contextlib.nullcontext():  # type: ignore[attr-defined]
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = _loss(forward, micro)
                (loss / 2).backward()
        if zero:
            norm = optimizer.clip_grad_norm_(CLIP)  # type: ignore[attr-defined]
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        results.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return results


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name, p)]},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **SETTINGS)


Trained = tuple[list[float], dict[str, Tensor]]


def _weights(model: nn.Module, whole: nn.Module) -> dict[str, Tensor]:
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    return {name: gather_whole(p.detach()).reshape(shapes[name]).clone() for name, p in model.named_parameters()}


def _plain(kind: str) -> tuple[Trained, Trained]:
    """Train the whole model and the parallelized one in an ordinary loop; return the norms and weights of both."""
    dtype = torch.float32 if kind == "autocast" else torch.float64
    whole, model = _made(dtype), _made(dtype)
    tpfuse.parallelize(model, mesh_of(1, dist.get_world_size()))
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    forward = torch.compile(model, backend="aot_eager") if kind == "compile" else model
    expected = _steps(whole, whole, _adamw(whole), IDS, kind == "autocast")
    found = _steps(model, forward, _adamw(model), IDS, kind == "autocast")
    return (expected, _weights(whole, whole)), (found, _weights(model, whole))


def _zero(stage: int) -> tuple[Trained, Trained]:
    """Train the whole model, and the parallelized one at dp 2 with ZeRO; return the norms and weights of both."""
    whole, model = _made(torch.float64), _made(torch.float64)
    mesh = mesh_of(2, 2)
    tpfuse.parallelize(model, mesh)
    engine: Any
    if stage == 3:
        engine = FullySharded(model, mesh=mesh, units=model.model.layers)  # type: ignore[arg-type, union-attr]
    else:
        engine = GradientBuckets(
            model, stage=stage, data_group=mesh.get_group("dp"), world_group=dist.group.WORLD, bucket_bytes=20_000
        )
    expected = _steps(whole, whole, _adamw(whole), IDS)
    found = _steps(model, model, ZeroOptimizer(engine, **SETTINGS), IDS[mesh.get_local_rank("dp") :: 2])
    return (expected, _weights(whole, whole)), (found, _weights(model, whole))


def _agree(results: list[tuple[Trained, Trained]], tolerance: float) -> None:
    for (norms, weights), (found_norms, found) in results:
        assert min(norms) > CLIP  # otherwise clipping would not be tested
        assert found_norms == pytest.approx(norms, rel=tolerance)
        assert weights.keys() == found.keys()
        for name, weight in weights.items():
            error = float((found[name] - weight).abs().max())
            assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("world", "kind"), [(2, "checkpointing"), *exhaustive((2, "loop"), (4, "loop"), (2, "compile"))]
)
def test_a_plain_loop_trains_as_on_one_rank(world: int, kind: str) -> None:
    _agree(pool(world).run(_plain, kind), 1e-9)


def _error(weights: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return sum(float((weights[name].double() - x).square().sum()) for name, x in exact.items()) ** 0.5


@pytest.mark.exhaustive
def test_autocast_trains_as_exactly_as_on_one_rank() -> None:
    """Both models round, so they are compared with the whole model in float64."""
    exact = pool(2).run(_plain, "loop")[0][0][1]
    for (norms, whole), (found_norms, found) in pool(2).run(_plain, "autocast"):
        assert found_norms == pytest.approx(norms, rel=0.02)
        expected = _error(whole, exact)
        assert 0 < _error(found, exact) < 1.2 * expected


@pytest.mark.parametrize("stage", exhaustive(0, 1, 2, 3))
def test_zero_trains_as_on_one_rank(stage: int) -> None:
    _agree(pool(4).run(_zero, stage), 1e-9)
