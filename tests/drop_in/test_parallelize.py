"""`parallelize` and `restore`: what survives in the model, what is left alone, dropout, and input that is refused."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from tests.support.decoders import decoder, exact
from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import UNEVEN_SEQUENCES, exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.parallelize import parallelize, replacements, restore
from tpfuse.drop_in.styles import (
    FusedColwiseParallel,
    FusedPrepareModuleInput,
    FusedRowwiseParallel,
    FusedSequenceParallel,
    WholeSequences,
)
from tpfuse.drop_in.weights import empty_model
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks

IDS = integers(1, 2, 7, low=3, high=101, dtype=torch.int64)


class Block(nn.Module):
    """A residual MLP after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)
        self.norm.register_buffer("calls", torch.zeros(1))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Plain(nn.Module):
    """An ordinary model of torch, whose head is tied to its embedding."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _plain() -> Plain:
    model = Plain().double()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape) / 3)
    return model


TIED = {
    "embed": FusedRowwiseParallel(input_layouts=Replicate()),
    "head": FusedColwiseParallel(output_layouts=Replicate()),
}
PLAN: dict[str, ParallelStyle] = {**TIED, "*.up": FusedColwiseParallel(), "*.down": FusedRowwiseParallel()}
# Block 0 is torch's, block 1 is tpfuse's; between them DTensors pass that are sharded along the sequence.
MIXED: dict[str, ParallelStyle] = {
    "embed": FusedRowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "blocks.0.norm": SequenceParallel(),
    "blocks.0.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.0.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "blocks.1.norm": FusedSequenceParallel(),
    "blocks.1.up": FusedColwiseParallel(input_layouts=Shard(1)),
    "blocks.1.down": FusedRowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "head": FusedColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip


def _logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    out: Any = model(ids)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def _evaluate(model: nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Return the logits and, by name, the whole gradients of all parameters."""
    model.zero_grad()
    logits = _logits(model, ids)
    logits.sin().sum().backward()
    found = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = gather_whole(parameter.grad)
    return found


def _check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, one in expected.items():
        error = (actual[name].reshape(one.shape) - one).abs().max()
        assert error < 1e-10, f"{name}: error {error}"


def _anatomy(model: nn.Module) -> dict[str, Any]:
    """Return what a module is, but for its tensors: its class, its attributes and its hooks."""
    tensors = {"_parameters", "_buffers", "_modules"}
    return {
        name: (
            type(module),
            {
                key: dict(x) if isinstance(x, dict) else x
                for key, x in vars(module).items()
                if key not in tensors and not isinstance(x, Tensor)
            },
        )
        for name, module in model.named_modules()
    }


def _check_anatomy(model: nn.Module, expected: dict[str, Any]) -> None:
    for name, (kind, attributes) in _anatomy(model).items():
        assert kind is expected[name][0] and attributes.keys() == expected[name][1].keys(), name
        for key, value in attributes.items():
            assert value == expected[name][1][key], (name, key, value, expected[name][1][key])


def _hook(*args: Any) -> None:
    """A user's hook that changes nothing."""


# These attributes of modules and models survive.


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=UNEVEN_SEQUENCES)])
@on_ranks("world")
def test_a_plan_of_ones_own_mixes_with_torchs_styles(mixed: bool) -> None:
    plan = MIXED if mixed else PLAN
    model = _plain()
    expected = _evaluate(model)
    parallelize(model, tensor_mesh(), plan)
    _check_equal(_evaluate(model), expected)
    assert len(replacements(model)) == 2 + (len(plan) - 2) * (1 if mixed else 2)


class Seen:
    """Hooks that keep what they see."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.given: list[Tensor] = []
        self.after: list[Tensor] = []

    def on(self, module: nn.Module, factor: float) -> None:
        module.register_forward_pre_hook(lambda _, inputs: (self.before.append(inputs[0]), inputs[0] * factor)[1])
        module.register_forward_hook(lambda _, inputs, out: (self.given.append(inputs[0]), out)[1])
        module.register_forward_hook(lambda _, inputs, out: (self.after.append(out), out * factor)[1])


@pytest.mark.parametrize("sequence_parallel", [True, *exhaustive(False)])
@on_ranks(2)
def test_hooks_survive_and_see_plain_tensors(sequence_parallel: bool) -> None:
    model = decoder("llama")
    layer = model.model.layers[1]
    watched = {
        "column": layer.self_attn.q_proj, "row": layer.mlp.down_proj, "norm": layer.input_layernorm,
        "last norm": model.model.norm, "mlp": layer.mlp, "head": model.lm_head,
    }  # fmt: skip
    seen = {name: Seen() for name in watched}
    for name, module in watched.items():
        seen[name].on(module, 1.5)
    with exact(model):
        expected = _evaluate(model)
        whole = {name: (each.before.pop(), each.after.pop()) for name, each in seen.items()}
        parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel)
        _check_equal(_evaluate(model), expected)
    for name, each in seen.items():
        (before,), (after,) = each.before, each.after
        for x in (before, each.given[-1], after):
            assert type(x) is Tensor and bool(x.isfinite().all()), name
        features = {"column": 2, "row": 1}.get(name, 1)
        assert after.shape[-1] * features == whole[name][1].shape[-1], name
    assert (seen["column"].before[0] - whole["column"][0]).abs().max() < 1e-10


def _seen(model: nn.Module) -> list[Tensor]:
    """Return what hooks that are registered now see: the gradient of an MLP's input, and the input of an attention."""
    seen: list[Tensor] = []
    layer: Any = model.get_submodule("model.layers.0")
    layer.mlp.register_full_backward_hook(lambda _, gradients, after: seen.append(gradients[0]))
    layer.self_attn.register_forward_pre_hook(lambda _, args, x: seen.append(x["hidden_states"]), with_kwargs=True)
    with exact(model):
        model(input_ids=IDS, labels=IDS).loss.backward()
    return [x[:, : IDS.shape[1]] for x in seen]  # without padding


@on_ranks(2)
def test_hooks_registered_afterwards_see_whole_inputs_and_gradients() -> None:
    expected = _seen(decoder("llama"))
    for sequence_parallel in (False, True):
        found = _seen(parallelize(decoder("llama"), tensor_mesh(), sequence_parallel=sequence_parallel))
        assert all((one - other).abs().max() < 1e-10 for one, other in zip(found, expected, strict=True))


@on_ranks(2)
def test_probabilities_of_attention_are_those_of_all_heads() -> None:
    model = decoder("llama")
    model.set_attn_implementation("eager")
    with exact(model):
        expected = model(input_ids=IDS, output_attentions=True).attentions
        parallelize(model, tensor_mesh())
        for each in (model, model.model):
            for named in (True, False):
                out = each(input_ids=IDS, output_attentions=True, use_cache=False, return_dict=named)
                found = out.attentions if named else out[-1]
                assert all((one - other).abs().max() < 1e-10 for one, other in zip(found, expected, strict=True))


@on_ranks(2)
def test_names_order_attributes_and_tying_of_parameters_survive() -> None:
    for family in ("gpt2", "llama_tied"):
        model = decoder(family)
        names = [name for name, _ in model.named_parameters()]
        matrices = [parameter.dim() >= 2 for parameter in model.parameters()]
        twice = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index % 3 > 0)
            parameter.number = index
        start = model.state_dict(keep_vars=True)
        for _ in range(2):
            parallelize(model, tensor_mesh())
            assert torch.equal(gather_whole(model.lm_head.weight), start["lm_head.weight"])
            assert [name for name, _ in model.named_parameters()] == names
            assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == twice
            assert model.lm_head.weight is model.get_input_embeddings().weight
            for index, parameter in enumerate(model.parameters()):
                assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
                assert parameter.requires_grad == (index % 3 > 0) and parameter.number == index
                assert (parameter.dim() >= 2) == matrices[index], "a rule of weight decay chooses the same ones"
            logits = _logits(model)
            logits.sum().backward()
            assert [parameter.grad is not None for parameter in model.parameters()] == [
                index % 3 > 0 for index in range(len(names))
            ]
            model.lm_head.weight.data.zero_()
            restore(model).load_state_dict(start, assign=True)


@pytest.mark.parametrize(("family", "sequence_parallel"), [("llama", True), *exhaustive(("phi3_shared", False))])
@on_ranks(2)
def test_copies_and_pickles_of_a_parallelized_model_compute_the_same(family: str, sequence_parallel: bool) -> None:
    model = parallelize(decoder(family), tensor_mesh(), sequence_parallel=sequence_parallel)
    expected = _evaluate(model)
    pickled, RemovableHandle.next_id = pickle.dumps(model), 0  # as in another process
    loaded = pickle.loads(pickled)
    assert all(key < RemovableHandle.next_id for module in loaded.modules() for key in module._forward_hooks), "taken"
    for copied in (copy.deepcopy(model), loaded):
        assert all(one is not other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
        assert all(torch.equal(one, expected[name]) for name, one in _evaluate(copied).items())
        copied.model.norm.weight.data.add_(1.0) if family == "llama" else None
        before = _anatomy(decoder(family))
        restore(copied)
        assert {name: kind for name, (kind, _) in _anatomy(copied).items()} == {
            name: kind for name, (kind, _) in before.items()
        }
    assert all(torch.equal(one, expected[name]) for name, one in _evaluate(model).items())


@on_ranks(2)
def test_restore_gives_the_original_back() -> None:
    cases: list[tuple[Callable[[], nn.Module], Any]] = [
        (_plain, MIXED),
        (lambda: decoder("phi3_shared"), "auto"),
        (lambda: decoder("gemma3"), "auto"),
    ]
    for make, plan in cases:
        model = make()
        for module in model.modules():
            module.register_forward_hook(_hook)
        before, tensors = _anatomy(model), copy.deepcopy(dict(model.named_parameters(remove_duplicate=False)))
        first = {id(parameter) for parameter in model.parameters()}
        logits = _logits(model)
        assert restore(parallelize(model, tensor_mesh(), plan)) is model
        _check_anatomy(model, before)
        found = dict(model.named_parameters(remove_duplicate=False))
        assert list(found) == list(tensors)
        for name, parameter in found.items():
            assert type(parameter) is nn.Parameter and torch.equal(parameter, tensors[name]), name
        assert len({id(parameter) for parameter in found.values()}) == len(first)  # what is tied is tied
        assert not any(isinstance(buffer, DTensor) for buffer in model.buffers())
        assert torch.equal(_logits(model), logits)


@on_ranks(2)
def test_hooks_of_parameters_that_restore_would_lose_and_ddp_are_refused() -> None:
    model = parallelize(_plain(), tensor_mesh(), PLAN)
    hook = model.head.weight.register_hook(lambda gradient: None)
    with pytest.raises(ValueError, match=r"^restore: embed\.weight has hooks, which would be lost: remove them"):
        restore(model)
    hook.remove()
    with pytest.raises(ValueError, match=r"^DistributedDataParallel: .* embed\.weight is a DTensor, .*: use tpfuse"):
        nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    assert type(restore(model).head.weight) is nn.Parameter
    nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize("family", ["phi3", *exhaustive("gpt2")])
@on_ranks(2)
def test_state_dicts_of_whole_tensors_make_the_round_trip(family: str, tmp_path: Path) -> None:
    """Load whole tensors, shards, and shards in a file of this rank, into models with and without values."""
    whole, model = decoder(family), parallelize(decoder(family), tensor_mesh())
    state, file = model.state_dict(), tmp_path / f"{dist.get_rank()}.pt"
    assert list(state) == list(whole.state_dict())
    for name, expected in whole.state_dict().items():
        assert state[name].shape == expected.shape and torch.equal(gather_whole(state[name]), expected), name
    torch.save(state, file)
    other = parallelize(decoder(family), tensor_mesh())
    for source in (state, whole.state_dict(), torch.load(file, weights_only=False)):
        for parameter in other.parameters():
            parameter.data.zero_()
        assert not any(other.load_state_dict(source))
        for one, another in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.to_local(), another.to_local())
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({name: x[:3] if x.ndim > 1 else x for name, x in whole.state_dict().items()})
    empty = parallelize(empty_model(decoder, family), tensor_mesh())
    empty.load_state_dict(whole.state_dict(), assign=True)
    empty.tie_weights()
    for name, expected in whole.state_dict().items():
        assert torch.equal(gather_whole(empty.state_dict()[name]), expected), name


# These modules are left alone.


class Experts(nn.Module):
    """A mixture of two experts, which reads the weights of its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 2, bias=False)
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shares = F.linear(hidden_states, self.gate.weight).softmax(-1)
        # The mean over the sequence differs between whole sequences and shards.
        first, second = self.first(hidden_states), self.second(hidden_states - hidden_states.mean(1, keepdim=True))
        return first * shares[..., :1] + second * shares[..., 1:]


class Mixer(nn.Module):
    """A causal convolution in the place of attention, which returns a tuple as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(48, 48, 3, groups=48)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        x = F.pad(hidden_states.transpose(1, 2), (2, 0))
        out = F.conv1d(x, self.conv1d.weight, self.conv1d.bias, groups=48)
        return out.transpose(1, 2), None


class WideNorm(nn.Module):
    """A norm over all heads together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)

    def forward(self, x: Tensor) -> Tensor:  # [B, n, heads, head size]
        return self.norm(x.flatten(-2)).view(x.shape)


class NormedMLP(nn.Module):
    """A gated MLP with a norm over all its features, between projections of known names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48)
        self.norm = nn.LayerNorm(96)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.norm(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def _scaled(attention: nn.Module) -> nn.Module:
    """Return the attention with a parameter of its own, which scales the output."""
    own = type(attention)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *others = own.forward(self, *args, **kwargs)
        return out * self.scale, *others

    attention.__class__ = type("Scaled", (own,), {"forward": forward})
    attention.scale = nn.Parameter(torch.ones(48, dtype=torch.float64))
    return attention


@pytest.mark.parametrize(("world", "sequence_parallel"), [(2, True), *exhaustive((2, False), (3, True))])
@on_ranks("world")
def test_modules_that_the_plan_cannot_handle_are_left_alone_and_named(sequence_parallel: bool) -> None:
    model = decoder("qwen3", head_dim=4, num_hidden_layers=4)
    model.model.layers[3].mlp, model.model.norm = NormedMLP().double(), nn.Sequential(nn.LayerNorm(48)).double()
    _scaled(model.model.layers[3].self_attn)
    model.model.layers[0].mlp = Experts().double()
    model.model.layers[1].self_attn.q_norm = WideNorm().double()
    model.model.layers[2].self_attn = Mixer().double()
    prune.identity(model.model.layers[2].mlp.down_proj, "weight")
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape) / 4)
    with exact(model):
        expected = _evaluate(model)
        parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel)
        reasons = {each.module: each.reason for each in replacements(model)}
        assert reasons["model.layers.0.mlp"] == "Experts is no attention or MLP that tpfuse knows"
        assert reasons["model.layers.1.self_attn"] == "q_norm has 48 parameters: expected 4, those of a head"
        assert reasons["model.layers.2.self_attn"] == "Mixer is no attention or MLP that tpfuse knows"
        assert reasons["model.layers.2.mlp"].startswith("down_proj: it has the parameters weight_orig: expected weight")
        assert reasons["model.layers.3.mlp"] == "its norm.weight [96] is in none of its projections"
        assert reasons["model.layers.3.self_attn"] == (
            "its own parameter scale [48] is not known: expected sinks [12], with an entry for each head"
        )
        if sequence_parallel:
            assert reasons["model.norm"] == "Sequential is no norm that tpfuse knows"
        else:
            assert reasons["model.norm.0"] == "every rank computes the same"
        assert reasons["model.layers.1.mlp"] == reasons["model.layers.0.self_attn"] == ""
        _check_equal(_evaluate(model), expected)
    styles = {each.module: each.style for each in replacements(model)}
    assert styles["model.layers.0.mlp.first"] == styles["model.layers.1.self_attn.q_proj"] == "ReplicatedParallel"
    restore(model)
    assert type(model.model.layers[0].mlp) is Experts


class Attention(nn.Module):
    """Attention in the way of transformers: it takes the shape of the views before the projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, hidden_states: Tensor, others: Tensor | None = None) -> Tensor:
        """Return the output of self-attention, or of attention to the keys and values of `others`."""
        others = hidden_states if others is None else others
        shape = (*hidden_states.shape[:-1], -1, 2)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k, v = (each(others).view(shape).transpose(1, 2) for each in (self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(*shape[:-2], -1))


@on_ranks(2)
def test_projections_of_a_plan_of_ones_own_share_the_gather_of_their_module() -> None:
    x, rank = normal(1, 1, 4, 8).double(), dist.get_rank()
    whole = Attention().double()
    for seed, parameter in enumerate(whole.parameters()):
        parameter.data.copy_(normal(seed, 8, 8))
    expected = whole(x)[:, 2 * rank : 2 * rank + 2]
    shard = x[:, 2 * rank : 2 * rank + 2]
    column, row = FusedColwiseParallel(input_layouts=Shard(1)), FusedRowwiseParallel(output_layouts=Shard(1))

    itself = parallelize(copy.deepcopy(whole), tensor_mesh(), {"[qkv]_proj": column, "o_proj": row})
    with pytest.raises(ValueError, match=r"^o_proj \(ConvertedRowLinear\): the input has 8 features: expected the 4"):
        itself(shard)

    names = ["q_proj", "k_proj", "v_proj"]
    at_input = FusedPrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True, projections=names
    )
    plan = {"": at_input, "[qkv]_proj": FusedColwiseParallel(), "o_proj": row}
    right = parallelize(copy.deepcopy(whole), tensor_mesh(), plan)
    assert (right(shard) - expected).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"^k_proj \(ConvertedColumnLinear\): the input is not the first input of its"):
        right(shard, shard + 1)


class Layer(nn.Module):
    """An attention alone, which is given no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(8), Attention()
        self.self_attn.head_dim = 2

    def forward(self, x: Tensor) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x))


class Checkpointed(nn.Module):
    """A decoder that recomputes its layers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(101, 8), nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.training else layer(x)
        return self.norm(x)


@on_ranks(2)
def test_a_layer_is_recomputed_with_the_length_of_its_pass_or_refused() -> None:
    model, found = Checkpointed().double(), []
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape))
    for parallel in (False, True):
        model = parallelize(model, tensor_mesh()) if parallel else model
        model.zero_grad()
        sum(model(IDS[:, :length]).sin().sum() for length in (7, 4)).backward()  # a rank has 4 tokens, and 2
        found.append([gather_whole(parameter.grad) for parameter in model.parameters()])
    assert all((one - other).abs().max() < 1e-10 for one, other in zip(*found, strict=True))
    with pytest.raises(ValueError, match=r"^layers\.1\.self_attn: it is recomputed after forward passes of several"):
        sum(model(IDS[:, :length]).sin().sum() for length in (4, 3)).backward()
    model(IDS).sum().backward()


class Flat(nn.Module):
    """Experts that return all tokens in one dimension, with what their router said; or the mean over the tokens."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.experts, self.mean = nn.Linear(8, 8, bias=False), mean

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out = self.experts(x).cumsum(1)
        return out.mean(1) if self.mean else out.flatten(0, 1), None


@on_ranks(2)
def test_whole_sequences_may_be_returned_as_one_row_of_tokens() -> None:
    whole, rank = Flat(mean=False).double(), dist.get_rank()
    whole.experts.weight.data.copy_(normal(3, 8, 8))
    x = normal(1, 3, 4, 8).double()
    expected = whole(x)[0].view(3, 4, 8)[:, 2 * rank : 2 * rank + 2].flatten(0, 1)
    out, _ = parallelize(whole, tensor_mesh(), {"": WholeSequences()})(x[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(out, expected)
    mean = parallelize(Flat(mean=True).double(), tensor_mesh(), {"": WholeSequences()})
    with pytest.raises(ValueError, match=r"it returns \(3, 8\) for tokens \(3, 4\): expected the same tokens, or seq"):
        mean(x[:, :2])


# Random numbers


@on_ranks(2)
def test_dropout_of_whole_activations_draws_the_masks_of_the_untouched_model() -> None:
    model = decoder("gpt2", resid_pdrop=0.3, embd_pdrop=0.3)
    whole = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = _evaluate(whole)
    torch.manual_seed(dist.get_rank())  # parallelize sets all ranks to the state of the first
    parallelize(model, tensor_mesh(), sequence_parallel=False)
    _check_equal(_evaluate(model), expected)


@pytest.mark.parametrize("family", ["gpt2", *exhaustive("neox")])
@on_ranks(2)
def test_dropout_of_shards_draws_the_masks_of_one_rank_and_again_when_recomputed(family: str) -> None:
    ids = integers(2, 2, 8, low=3, high=101, dtype=torch.int64)
    dropped = {"hidden_dropout": 0.3} if family == "neox" else {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
    found = []
    for mesh in (mesh_of(dist.get_world_size(), 1)["tp"], tensor_mesh()):
        for recomputed in (False, True):
            torch.manual_seed(dist.get_rank() if mesh.size() > 1 else 0)
            model = parallelize(decoder(family, **dropped), mesh)
            if recomputed:
                model.gradient_checkpointing_enable()
            with exact(model):
                found.append(_evaluate(model, ids))
    plain = _evaluate(decoder(family), ids)
    assert (found[0]["logits"] - plain["logits"]).abs().max() > 0.01  # something is dropped
    for other in found[1:]:
        _check_equal(other, found[0])


@on_ranks(2)
def test_the_weights_and_random_numbers_of_the_first_rank_count() -> None:
    context, plan = mesh_of(1, 1, 2)["cp"], {"*.gate_proj": FusedColwiseParallel()}
    expected = decoder("llama")
    for mesh, options in ((context, {}), (tensor_mesh(), {"plan": plan})):
        model, draws = decoder("llama"), [0.0, 0.0]
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                x.mul_(1 + dist.get_rank())
        torch.manual_seed(dist.get_rank())
        parallelize(model, mesh, **options)  # type: ignore[arg-type]
        dist.all_gather_object(draws, torch.rand(1).item())
        assert draws[0] == draws[1]
        for name, x in model.state_dict(keep_vars=True).items():
            whole = x.full_tensor() if isinstance(x, DTensor) else x
            assert torch.equal(whole, expected.state_dict()[name]), name
        assert all(map(torch.equal, model.buffers(), expected.buffers()))
    for each in (context, tensor_mesh()):
        mixed = empty_model(decoder, "llama") if dist.get_rank() else decoder("llama")
        with pytest.raises(ValueError, match=r"^the model has values on some ranks of the mesh and is on the meta de"):
            parallelize(mixed, each)


# Bad input


class Packed(nn.Module):
    """A layer whose weight is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(48, 48, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def _quantized() -> nn.Module:
    model = decoder("llama")
    model.model.layers[1].self_attn.o_proj = Packed()
    return model


def _torchs() -> nn.Module:
    return parallelize_module(_plain(), tensor_mesh(), {"blocks.0.up": ColwiseParallel()})


def _shared(part: str) -> nn.Module:
    model = decoder("llama")
    model.model.set_submodule(part.replace("0", "1"), model.model.get_submodule(part))
    return model


def _watched(register: str) -> nn.Module:
    model = decoder("llama")
    getattr(model.model.embed_tokens.weight, register)(_hook)
    return model


@on_ranks(2)
def test_bad_input_is_refused_with_one_line_and_leaves_the_model_as_it_was() -> None:
    ranks = dist.get_world_size()
    cases: list[tuple[Callable[[], nn.Module], Any, str]] = [
        (_plain, PLAN | {"*.upp": FusedColwiseParallel()}, r"plan '\*\.upp' matches no module; the model has embed"),
        (_plain, PLAN | {"*.up": "colwise"}, r"plan '\*\.up': str is no ParallelStyle"),
        (_plain, "automatic", "plan 'automatic': expected \"auto\", or styles by patterns"),
        (_plain, "auto", 'plan "auto": found no list of layers'),
        (lambda: decoder("llama", num_attention_heads=3, head_dim=4, num_key_value_heads=3), "auto",
         rf"^model\.layers\.0\.self_attn: 3 heads cannot be divided among {ranks} ranks: expected tp 1, 3$"),
        (lambda: decoder("llama", intermediate_size=95), "auto",
         r"^model\.layers\.0\.mlp\.gate_proj: .*95 output features cannot be split among 2 ranks: .* or tp 1, 5$"),
        (lambda: parallelize(_plain(), tensor_mesh(), PLAN), PLAN, "^the model is parallelized already: call"),
        (_torchs, PLAN, r"^blocks\.0\.up: its weight is a DTensor: expected a module that is not parallelized yet"),
        (lambda: _watched("register_hook"), "auto", r"^model\.embed_tokens: its weight has hooks, which would be lost"),
        (lambda: _watched("register_post_accumulate_grad_hook"), "auto", "its weight has hooks, which would be lost"),
        (lambda: _shared("layers.0"), "auto", r'^plan "auto": model\.layers\.1 is model\.layers\.0, one module'),
        (lambda: _shared("layers.0.mlp"), "auto", r"model\.layers\.1\.mlp is model\.layers\.0\.mlp, one module in t"),
        (_quantized, "auto", r"^model\.layers\.1\.self_attn\.o_proj: .*its weight is torch\.int8: expected a float"),
        (_plain, PLAN | {"*.norm": FusedColwiseParallel()}, r"^blocks\.0\.norm: FusedColwiseParallel of LayerNorm"),
        (_plain, PLAN | {"*.norm": ColwiseParallel()}, r"^blocks\.0\.norm: ColwiseParallel: .*only support"),
        (_plain, PLAN | {"blocks.1.up": FusedRowwiseParallel()}, r"^blocks\.1\.up: FusedRowwiseParallel of .*DTensor"),
        (_plain, PLAN | {"head": FusedColwiseParallel(parts=101, output_layouts=Replicate())}, r"^head: .*it shares"),
        (_plain, {name: PLAN[name] for name in ("head", "*.up", "*.down")}, r"^head\.weight is embed\.wei"),
        (_plain, PLAN | {"head": ColwiseParallel()}, r"^head\.weight is embed\.weight, the same parameter"),
    ]  # fmt: skip
    for make, plan, message in cases:
        model = make()
        before, parameters = _anatomy(model), list(model.parameters())
        with pytest.raises(ValueError) as refused:
            parallelize(model, tensor_mesh(), plan)
        assert re.search(message, str(refused.value)) and "\n" not in str(refused.value), str(refused.value)
        _check_anatomy(model, before)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


@on_ranks(2)
def test_meshes_and_releases_that_do_not_fit_are_refused() -> None:
    model, llama = _plain(), decoder("llama")
    two, cp = [[0, 1]], DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    for refused, mesh, message in (
        (model, DeviceMesh("cpu", two, mesh_dim_names=("dp", "ep")), r"dimensions \('dp', 'ep'\): expected one named"),
        (llama, cp, r"mesh has the dimensions .*'cp'.*: expected one named"),
        (model, 2, "mesh is a int: expected a DeviceMesh"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(refused, mesh, {"*": FusedColwiseParallel()})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not parallelized"):
        restore(model)
    message = r"^transformers 4\.57\.6 is installed: expected 5\.24 or newer: pip"
    with mock.patch("transformers.__version__", "4.57.6"), pytest.raises(ValueError, match=message):
        parallelize(llama, tensor_mesh())


@on_ranks(2)
def test_what_would_change_whole_weights_is_refused_before_anything_changes() -> None:
    import peft

    model = decoder("llama")
    added = peft.LoraConfig(r=2, target_modules=["o_proj"])
    expected = _evaluate(parallelize(model, tensor_mesh()))
    for change, message in (
        (lambda: model.resize_token_embeddings(107), "resize_token_embeddings: the model is parallelized: call resize"),
        (lambda: model.add_adapter(added), "add_adapter: the model is parallelized"),
        (
            lambda: peft.get_peft_model(model, added),
            r"^model\.layers\.0\.self_attn\.o_proj .* sharded and takes no ada",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            change()
        _check_equal(_evaluate(model), expected)
    adapted = parallelize(peft.get_peft_model(decoder("llama"), added), tensor_mesh())
    with pytest.raises(ValueError, match=r"merge_and_unload .* after tpfuse\.restore\(model\)"):
        adapted.merge_and_unload()
    assert restore(adapted).merge_and_unload().resize_token_embeddings(107).num_embeddings == 107


@on_ranks(2)
def test_arguments_that_forward_has_not_are_refused() -> None:
    model = parallelize(decoder("llama"), mesh_of(1, 1, cp=2))
    for arguments, named in (((IDS,), {"input_ids": IDS}), ((IDS, *[None] * 20), {})):
        with pytest.raises(TypeError, match="got an argument twice, or more than"):
            model(*arguments, **named)


@on_ranks(2)
def test_whole_input_where_a_shard_is_due_is_refused() -> None:
    model = parallelize(decoder("llama"), tensor_mesh())
    layer = model.model.layers[1]
    whole, positions = normal(1, 2, 6, 48).double(), torch.arange(6)[None]
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.down_proj .*expected the 48 .* not all 96$"):
        layer.mlp.down_proj(normal(1, 2, 6, 96).double())
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.self_attn: .* 6 tokens: expected the 3 .* not all 6$"):
        layer.self_attn(hidden_states=whole, position_ids=positions)
    with pytest.raises(ValueError, match=r"q_proj \(ConvertedColumnLinear\): the input has 47 features: expected 48"):
        layer.self_attn.q_proj(normal(1, 2, 6, 47).double())


class Recomputing(nn.Module):
    """An MLP that recomputes its activations in training."""

    def __init__(self, mlp: Any, reentrant: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=self.reentrant) if self.training else self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@on_ranks(2)
def test_projections_that_are_recomputed_inside_of_their_module_are_refused() -> None:
    for reentrant in (False, True):
        model = decoder("llama")
        model.model.layers[0].mlp = Recomputing(model.model.layers[0].mlp, reentrant)
        parallelize(model, tensor_mesh(), check=True)
        with pytest.raises(
            ValueError, match=r"^model\.layers\.0\.mlp\.gate_proj .* runs it twice or without gradients"
        ):
            model(input_ids=IDS, labels=IDS).loss.backward()


class _Scaled(ParallelStyle):
    """A wrong style: it multiplies the output of a module by `factors` of each rank, or fails where one is None."""

    def __init__(self, *factors: float | None) -> None:
        self.factors = factors

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(self._scale)
        return module

    def _scale(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        factor = self.factors[dist.get_rank()]
        if factor is None:
            raise RuntimeError("the style does not fit")
        return out * factor


class _Lost(ParallelStyle):
    """A wrong style: the output of a module is right, and its gradient is half of the right one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, inputs, out: (out + out.detach()) / 2)
        return module


class Positional(nn.Module):
    """A language model that calls its tokens by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.config = nn.Embedding(101, 8), SimpleNamespace(vocab_size=101)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        return F.linear(self.embed(idx), self.embed.weight)


@on_ranks(2)
def test_a_check_finds_wrong_logits_and_gradients_and_restores_the_model() -> None:
    model = decoder("llama").train()
    logits, anatomy = _logits(model).detach(), _anatomy(model)
    for style, error, message in (
        (_Scaled(1.5, 1.5), ValueError, "differs from the whole one in the logits, by 5.0e-01 of the largest"),
        (_Scaled(1.0, 1.5), ValueError, "the ranks' logits differ from each other"),
        (_Scaled(1.0, torch.nan), ValueError, "logits are not finite"),
        (_Scaled(None, None), RuntimeError, "the style does not fit"),
        (_Lost(), ValueError, r"in the gradient of model\.embed_tokens\.weight, by 5\.0e-01"),
    ):
        with pytest.raises(error, match=message):
            parallelize(model, tensor_mesh(), {"lm_head": style}, check=True)
        assert _anatomy(model) == anatomy and model.training
        assert torch.equal(_logits(model), logits)
    with pytest.raises(ValueError, match=r"no config\.vocab_size"):
        parallelize(_plain(), tensor_mesh(), PLAN, check=True)
    with pytest.raises(
        ValueError, match="the forward of Positional takes idx, targets, and no input_ids: expected check"
    ):
        parallelize(Positional(), tensor_mesh(), {"embed": FusedRowwiseParallel()}, check=True)
    assert parallelize(model, tensor_mesh(), check=True).training
    dropping = parallelize(decoder("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3), tensor_mesh(), check=True)
    assert all(parameter.grad is None for parameter in dropping.parameters())
    base = parallelize(decoder("gemma").model, tensor_mesh(), check=True)  # without a head, so without a loss
    with pytest.raises(ValueError, match="differs from the whole one in the gradient"):
        parallelize(restore(base), tensor_mesh(), {"norm": _Lost()}, check=True)
