"""Modules that `parallelize` leaves whole on every rank, recomputed layers, and projections that share a gather."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.drop_in.plain_model import IDS, check_equal, evaluate
from tests.support.decoders import decoder, exact
from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.parallelize import parallelize, replacements, restore
from tpfuse.drop_in.styles import FusedColwiseParallel, FusedPrepareModuleInput, FusedRowwiseParallel, WholeSequences
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks


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
        expected = evaluate(model)
        parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel)
        reasons = {each.module: each.reason for each in replacements(model)}
        assert reasons["model.layers.0.mlp"] == "Experts is no attention or MLP that tpfuse knows"
        assert reasons["model.layers.1.self_attn"].startswith("it fails on a rank's part: RuntimeError: ")
        assert reasons["model.layers.2.self_attn"] == "Mixer is no attention or MLP that tpfuse knows"
        assert reasons["model.layers.2.mlp"].startswith("down_proj: it has the parameters weight_orig: expected weight")
        assert reasons["model.layers.3.mlp"].startswith("it fails on a rank's part: RuntimeError: ")
        scaled = "the gradient of scale would differ" if sequence_parallel else ""
        assert reasons["model.layers.3.self_attn"].startswith(scaled)
        if sequence_parallel:
            assert reasons["model.norm"] == "Sequential is no norm that tpfuse knows"
        else:
            assert reasons["model.norm.0"] == "every rank computes the same"
        assert reasons["model.layers.1.mlp"] == reasons["model.layers.0.self_attn"] == ""
        check_equal(evaluate(model), expected)
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
