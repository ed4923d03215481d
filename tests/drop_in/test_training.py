"""A parallelized model trains as the whole model does on one rank: plain loops, ZeRO, and what wraps a model."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpfuse
from tests.support.decoders import decoder, exact
from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.converted import ConvertedColumnLinear, ConvertedRowLinear
from tpfuse.drop_in.parallelize import replacements
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import shard
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.optimizer import ZeroOptimizer

IDS = integers(1, 4, 14, low=0, high=100, dtype=torch.int64)  # 13 positions, which 2 ranks do not divide
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.3}
CLIP, STEPS = 0.2, 4


def _loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Return the mean loss, in the logits' dtype; the models' own loss is float32."""
    logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _sum(model: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses at the labels, as the models compute it."""
    total: Tensor = model(input_ids=ids, labels=labels, num_items_in_batch=1).loss
    return total


def _steps(
    model: nn.Module, forward: Callable[..., Any], optimizer: Any, ids: Tensor, labels: Tensor | None = None
) -> list[float]:
    """Train with two micro-batches in each step; return the norms of the gradients.

    labels: for the mean over these, of which the micro-batches of all ranks have different numbers.
    """
    zero = isinstance(optimizer, ZeroOptimizer)
    clip = optimizer.clip_grad_norm_ if zero else partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    results: list[float] = []
    for _ in range(STEPS):
        *early, last = ids.chunk(2)
        for index, micro in enumerate((*early, last)):
            with optimizer.no_sync() if zero and micro is not last else contextlib.nullcontext():
                if labels is None:
                    (_loss(forward, micro) / 2).backward()
                    continue
                loss, count = _sum(forward, micro, labels.chunk(2)[index]), _count(labels.chunk(2)[index])
                (loss if zero else loss / _count(labels)).backward()
                if zero:
                    optimizer.divide_by(count)
        norm = clip(CLIP)
        results.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return results


def _count(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())


def _masked() -> Tensor:
    """Return labels of IDS: 13, 1, 0 and 5 of its sequences."""
    labels = IDS.clone()
    labels[1, :-1], labels[2, 1:], labels[3, 6:] = -100, -100, -100
    return labels


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
    whole, model = decoder("llama"), decoder("llama")
    tpfuse.parallelize(model, mesh_of(1, dist.get_world_size()))
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    with exact(whole):
        expected = _steps(whole, whole, _adamw(whole), IDS)
        found = _steps(model, model, _adamw(model), IDS)
    return (expected, _weights(whole, whole)), (found, _weights(model, whole))


class _Projected(nn.Module):
    """A model of transformers whose token embeddings follow those of images, which a projector makes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.projector, self.model = nn.Linear(7, 48).double(), model
        self.projector.weight.data = normal(3, 48, 7, dtype=torch.float64)
        self.projector.bias.data.zero_()

    def forward(self, input_ids: Tensor) -> Any:
        """Return the model's output, with the logits of the tokens."""
        images = self.projector(normal(5, 3, 7, dtype=torch.float64)).expand(len(input_ids), -1, -1)
        embeds = torch.cat([images, self.model.get_input_embeddings()(input_ids)], 1)
        return self.model(inputs_embeds=embeds, logits_to_keep=input_ids.shape[1])


def _zero(
    stage: int, dp: int, tp: int, cp: int, masked: bool = False, adapters: bool = False
) -> tuple[Trained, Trained]:
    """Train the whole model, and the parallelized one with ZeRO; return the norms and weights of both.

    masked: with the loss at some labels, of which each rank has another number. adapters: train those of PEFT alone.
    Otherwise a projector stands before the model.
    """
    make = partial(_adapted, "llama") if adapters else partial(decoder, "llama")
    whole, model = (make() if masked or adapters else _Projected(make()) for _ in range(2))
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
    mesh = mesh_of(dp, tp, cp)
    tpfuse.parallelize(model, mesh)
    _loss(model, IDS).backward()  # it registers the hooks that average over the context, before the engine is made
    model.zero_grad()
    optimizer = ZeroOptimizer(model, mesh, stage=stage, units=layers, bucket_bytes=20_000, **SETTINGS)
    inner = [whole.base_model.model] if adapters else []  # it computes the loss
    with exact(whole, *inner):
        labels = _masked() if masked else None
        expected = _steps(whole, whole, _adamw(whole), IDS, labels=labels)
        mine = slice(mesh.get_local_rank("dp"), None, dp)
        labels = None if labels is None else labels[mine]
        found = _steps(model, model, optimizer, IDS[mine], labels=labels)
    return (expected, _weights(whole, whole)), (found, _weights(model, whole))


def _agree(results: list[tuple[Trained, Trained]], tolerance: float) -> None:
    for (norms, weights), (found_norms, found) in results:
        assert min(norms) > CLIP  # otherwise clipping would not be tested
        assert found_norms == pytest.approx(norms, rel=tolerance)
        assert weights.keys() == found.keys()
        for name, weight in weights.items():
            error = float((found[name] - weight).abs().max())
            assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("world", "kind"), [(2, "checkpointing"), *exhaustive((4, "loop"))])
def test_a_plain_loop_trains_as_on_one_rank(world: int, kind: str) -> None:
    _agree(pool(world).run(_plain, kind), 1e-9)


@pytest.mark.parametrize(
    ("stage", "dp", "tp", "cp", "masked"),
    [
        (1, 1, 1, 2, False),  # over a context, after a projector
        *exhaustive((0, 2, 1, 2, True), (2, 2, 2, 1, True), (3, 1, 2, 2, True), (3, 2, 1, 2, False)),
    ],
)
def test_zero_trains_as_on_one_rank(stage: int, dp: int, tp: int, cp: int, masked: bool) -> None:
    _agree(pool(dp * tp * cp).run(_zero, stage, dp, tp, cp, masked), 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "dp", "cp"), [(2, 2, 1), (3, 1, 2)])
def test_zero_trains_adapters_as_on_one_rank(stage: int, dp: int, cp: int) -> None:
    _agree(pool(4).run(_zero, stage, dp, 2, cp, cp > 1, True), 1e-9)


def _without_the_context() -> list[str]:
    mesh, messages = mesh_of(1, 1, 2), []
    model = tpfuse.parallelize(decoder("llama"), mesh)
    for ranks in (mesh["dp"], DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("tp", "dp"))):
        try:
            shard(model, ranks, stage=1)
        except ValueError as error:
            messages.append(str(error))
    engine = shard(model, mesh["cp"], stage=0)
    return [*messages, str(engine.data_ranks)]


def test_an_engine_needs_all_ranks_of_the_context() -> None:
    for rank, (*messages, ranks) in enumerate(pool(2).run(_without_the_context)):
        assert messages[0] == 'shard: mesh is a slice without "cp", which has 2 ranks: pass the whole mesh'
        text = f"the data-parallel ranks are [{rank}]: expected the ranks [0, 1] of the model's context too: pass"
        assert len(messages) == 2 and messages[1].startswith(text)
        assert ranks == "2"  # the refusals have changed nothing


# Models with PEFT's adapters: the family, what differs from the settings below, and what tpfuse leaves alone.
ADAPTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]}, []),
    "shared heads": ("llama_three_kv_heads", {"target_modules": ["k_proj", "v_proj", "o_proj"]}, []),
    "tied": ("llama_tied", {"target_modules": ["q_proj", "down_proj"]}, []),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}, []),
    "phi3": ("phi3_shared", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]}, []),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "k_proj"], "lora_bias": False}, ["embed_tokens"]),
    "dora": (
        "llama",
        {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_dora": True, "lora_bias": False},
        ["self_attn", "mlp", "lm_head"],
    ),
    "saved norms": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, []),
    "saved head": ("llama_tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, ["lm_head"]),
    "gates": ("afmoe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}, []),
    "wrapped": ("moshi", {"target_modules": ["linear", "fc1", "fc2"]}, []),
    "tokens": ("llama_tied", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 70]}, ["lm_head"]),
}
_FIRST = ("llama", "tokens")
_TRAINED = ("lora_", "modules_to_save", "trainable_tokens_delta")


def _adapted(case: str, **settings: Any) -> Any:
    import peft

    family, own, _ = ADAPTED[case]
    config = peft.LoraConfig(**{"r": 3, "lora_bias": True, "init_lora_weights": False, **own, **settings})
    model: Any = peft.get_peft_model(decoder(family), config).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    for seed, p in enumerate(trained):
        p.data = normal(seed, *p.shape, dtype=torch.float64) / 8
    return model


def _lora(case: str, sequence_parallel: bool, cp: int) -> dict[str, str]:
    """Compare the logits of a model with adapters, and all their gradients, with the untouched model's.

    Return the reasons why modules were left alone.
    """
    whole, model = _adapted(case), _adapted(case)
    tpfuse.parallelize(model, mesh_of(1, dist.get_world_size() // cp, cp), sequence_parallel=sequence_parallel)
    with exact(whole):
        outs = [each(input_ids=IDS).logits for each in (whole, model)]
        for each in (whole, model):
            _loss(each, IDS).backward()
    assert (outs[0] - outs[1]).abs().max() < 1e-10
    for (name, p), (other, q) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and p.requires_grad == q.requires_grad == any(each in name for each in _TRAINED)
        if p.requires_grad:
            assert p.grad.abs().max() > 1e-6, name
            assert (gather_whole(q.grad).reshape(p.shape) - p.grad).abs().max() < 1e-10, name
    for name, module in model.named_modules():
        if case != "dora" and cp < dist.get_world_size() and hasattr(module, "lora_A") and "default" in module.lora_A:
            base, a, b = module.base_layer, module.lora_A.default, module.lora_B.default
            assert isinstance(base, ConvertedColumnLinear | ConvertedRowLinear), name
            assert type(base) is type(a if isinstance(base, ConvertedRowLinear) else b), name
    return {done.module.rpartition(".")[2]: done.reason for done in replacements(model) if done.reason}


@pytest.mark.parametrize(
    ("world", "case", "sequence_parallel", "cp"),
    [
        (2, "llama", True, 1),
        (2, "tokens", True, 1),
        *exhaustive(*((2, case, case not in _FIRST, 1) for case in ADAPTED), (2, "dora", False, 1)),
        *exhaustive((4, "phi3", True, 1), (4, "llama", True, 2)),
    ],
)
def test_lora_computes_as_in_the_untouched_model(world: int, case: str, sequence_parallel: bool, cp: int) -> None:
    for reasons in pool(world).run(_lora, case, sequence_parallel, cp):
        assert all("expected" in reasons[name] for name in ADAPTED[case][2])


def _prompted(kind: str) -> Any:
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(decoder("llama"), config).double()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
@on_ranks(2)
def test_prompts_have_the_gradients_of_one_rank_over_a_context(kind: str) -> None:
    whole, model = _prompted(kind), _prompted(kind)
    tpfuse.parallelize(model, mesh_of(1, 1, 2))
    with exact(whole, whole.base_model):
        for each in (whole, model):
            each(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss.backward()
    trained = [(p, q) for p, q in zip(whole.parameters(), model.parameters(), strict=True) if p.requires_grad]
    assert trained
    for p, q in trained:
        assert p.grad.abs().max() > 1e-6 and (p.grad - gather_whole(q.grad)).abs().max() < 1e-10


def _save_adapters(folder: Path) -> None:
    _adapted("phi3").save_pretrained(folder / f"whole{dist.get_rank()}")
    tpfuse.parallelize(_adapted("phi3"), mesh_of(1, 2)).save_pretrained(folder / "parallel")  # type: ignore[operator]


@pytest.mark.exhaustive
def test_adapters_are_saved_as_those_of_the_untouched_model(tmp_path: Path) -> None:
    pool(2).run(_save_adapters, tmp_path)
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole0", "parallel"))
    assert expected.keys() == found.keys() and all(torch.equal(x, found[name]) for name, x in expected.items())


def _lora_dropout() -> Tensor:
    """Return the features of the input of a row-parallel layer that this rank drops before its adapter."""
    model = tpfuse.parallelize(_adapted("llama", lora_dropout=0.5), mesh_of(1, 2))
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    out: Tensor = layer.lora_dropout.default(torch.ones(1, 64, 24, dtype=torch.float64))
    return out


@pytest.mark.exhaustive
def test_dropout_before_a_row_parallel_adapter_differs_between_ranks() -> None:
    first, second = pool(2).run(_lora_dropout)
    both = torch.cat([first, second], -1)
    assert set(both.unique().tolist()) == {0.0, 2.0} and abs(both.mean() - 1) < 0.1
    assert 0.4 < (first == second).double().mean() < 0.6
