"""Refusals of `parallelize` and of a parallelized model, and the differences that `check=True` finds."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.drop_in.plain_model import IDS, PLAN, anatomy_of, check_anatomy, check_equal, evaluate, logits_of, plain
from tests.support.decoders import decoder
from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.drop_in.parallelize import parallelize, restore
from tpfuse.drop_in.styles import FusedColwiseParallel, FusedRowwiseParallel
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks


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
    return parallelize_module(plain(), tensor_mesh(), {"blocks.0.up": ColwiseParallel()})


def _shared(part: str) -> nn.Module:
    model = decoder("llama")
    model.model.set_submodule(part.replace("0", "1"), model.model.get_submodule(part))
    return model


def _watched(register: str) -> nn.Module:
    model = decoder("llama")
    getattr(model.model.embed_tokens.weight, register)(lambda *_: None)
    return model


# By name: what makes the model, the plan, and the message.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a pattern that matches nothing": (
        plain, PLAN | {"*.upp": FusedColwiseParallel()}, r"plan '\*\.upp' matches no module; the model has embed",
    ),
    "a name in place of a style": (plain, PLAN | {"*.up": "colwise"}, r"plan '\*\.up': str is no ParallelStyle"),
    "an unknown plan": (plain, "automatic", "plan 'automatic': expected \"auto\", or styles by patterns"),
    "no layers": (plain, "auto", 'plan "auto": found no list of layers'),
    "heads that the ranks do not divide": (
        lambda: decoder("llama", num_attention_heads=3, head_dim=4, num_key_value_heads=3), "auto",
        r"^model\.layers\.0\.self_attn: 3 heads cannot be divided among 2 ranks: expected tp 1, 3$",
    ),
    "features that the ranks do not divide": (
        lambda: decoder("llama", intermediate_size=95), "auto",
        r"^model\.layers\.0\.mlp\.gate_proj: .*95 output features cannot be split among 2 ranks: .* or tp 1, 5$",
    ),
    "a parallelized model": (
        lambda: parallelize(plain(), tensor_mesh(), PLAN), PLAN, "^the model is parallelized already: call",
    ),
    "a model that torch has parallelized": (
        _torchs, PLAN, r"^blocks\.0\.up: its weight is a DTensor: expected a module that is not parallelized yet",
    ),
    "hooks of a weight": (
        lambda: _watched("register_hook"), "auto",
        r"^model\.embed_tokens: its weight has hooks, which would be lost",
    ),
    "hooks of an accumulated gradient": (
        lambda: _watched("register_post_accumulate_grad_hook"), "auto", "its weight has hooks, which would be lost",
    ),
    "one layer twice": (
        lambda: _shared("layers.0"), "auto", r'^plan "auto": model\.layers\.1 is model\.layers\.0, one module',
    ),
    "one part of two layers": (
        lambda: _shared("layers.0.mlp"), "auto", r"model\.layers\.1\.mlp is model\.layers\.0\.mlp, one module in t",
    ),
    "a quantized weight": (
        _quantized, "auto", r"^model\.layers\.1\.self_attn\.o_proj: .*its weight is torch\.int8: expected a float",
    ),
    "a style of another module": (
        plain, PLAN | {"*.norm": FusedColwiseParallel()}, r"^blocks\.0\.norm: FusedColwiseParallel of LayerNorm",
    ),
    "torch's style of another module": (
        plain, PLAN | {"*.norm": ColwiseParallel()}, r"^blocks\.0\.norm: ColwiseParallel: .*only support",
    ),
    "two styles of one module": (
        plain, PLAN | {"blocks.1.up": FusedRowwiseParallel()}, r"^blocks\.1\.up: FusedRowwiseParallel of .*DTensor",
    ),
    "parts of a tied weight": (
        plain, PLAN | {"head": FusedColwiseParallel(parts=101, output_layouts=Replicate())}, r"^head: .*it shares",
    ),
    "half of a tied weight": (
        plain, {name: PLAN[name] for name in ("head", "*.up", "*.down")}, r"^head\.weight is embed\.wei",
    ),
    "half of a tied weight for torch": (
        plain, PLAN | {"head": ColwiseParallel()}, r"^head\.weight is embed\.weight, the same parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_bad_input_is_refused_with_one_line_and_leaves_the_model_as_it_was(name: str) -> None:
    make, plan, message = REFUSED[name]
    model = make()
    before, parameters = anatomy_of(model), list(model.parameters())
    with pytest.raises(ValueError) as refused:
        parallelize(model, tensor_mesh(), plan)
    assert re.search(message, str(refused.value)) and "\n" not in str(refused.value), str(refused.value)
    check_anatomy(model, before)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


class _Unwritable(ParallelStyle):
    """A style that fits the outline of a module, but not the module, as where there is no memory for its shards."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not next(module.parameters()).is_meta:
            raise RuntimeError("out of memory")
        return module


@on_ranks(2)
def test_an_error_amid_the_conversion_says_that_the_model_must_be_loaded_again() -> None:
    with pytest.raises(ValueError, match=r"^blocks\.0\.norm: _Unwritable: out of memory") as refused:
        parallelize(plain(), tensor_mesh(), PLAN | {"*.norm": _Unwritable()})
    assert refused.value.__notes__ == ["tpfuse.parallelize has converted a part of the model: load the model again"]
    with pytest.raises(ValueError, match="matches no module") as refused:
        parallelize(plain(), tensor_mesh(), {"nothing": _Unwritable()})
    assert not hasattr(refused.value, "__notes__")


@on_ranks(2)
def test_meshes_and_releases_that_do_not_fit_are_refused() -> None:
    model, llama = plain(), decoder("llama")
    two, cp = [[0, 1]], DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    for refused, mesh, message in (
        (model, DeviceMesh("cpu", two, mesh_dim_names=("dp", "ep")), r"axes \('dp', 'ep'\): expected one named"),
        (llama, cp, r"mesh has the axes .*'cp'.*: expected one named"),
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
    expected = evaluate(parallelize(model, tensor_mesh()))
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
        check_equal(evaluate(model), expected)
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


WRONG: dict[str, tuple[ParallelStyle, type[Exception], str]] = {
    "logits": (
        _Scaled(1.5, 1.5), ValueError, "differs from the whole one in the logits, by 5.0e-01 of the largest",
    ),
    "logits of one rank": (_Scaled(1.0, 1.5), ValueError, "the ranks' logits differ from each other"),
    "logits that are not finite": (_Scaled(1.0, torch.nan), ValueError, "logits are not finite"),
    "a style that fails": (_Scaled(None, None), RuntimeError, "the style does not fit"),
    "gradients": (_Lost(), ValueError, r"in the gradient of model\.embed_tokens\.weight, by 5\.0e-01"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2)
def test_a_check_finds_what_is_wrong_and_restores_the_model(name: str) -> None:
    style, error, message = WRONG[name]
    model = decoder("llama").train()
    logits, anatomy = logits_of(model).detach(), anatomy_of(model)
    with pytest.raises(error, match=message):
        parallelize(model, tensor_mesh(), {"lm_head": style}, check=True)
    assert anatomy_of(model) == anatomy and model.training
    assert torch.equal(logits_of(model), logits)
    assert parallelize(model, tensor_mesh(), check=True).training


@on_ranks(2)
def test_models_that_a_check_cannot_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no config\.vocab_size"):
        parallelize(plain(), tensor_mesh(), PLAN, check=True)
    message = "the forward of Positional takes idx, targets, and no input_ids: expected check"
    with pytest.raises(ValueError, match=message):
        parallelize(Positional(), tensor_mesh(), {"embed": FusedRowwiseParallel()}, check=True)


@on_ranks(2)
def test_a_check_ignores_dropout_leaves_no_gradients_and_needs_no_head() -> None:
    dropping = parallelize(decoder("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3), tensor_mesh(), check=True)
    assert all(parameter.grad is None for parameter in dropping.parameters())
    base = parallelize(decoder("gemma").model, tensor_mesh(), check=True)  # without a head, so without a loss
    with pytest.raises(ValueError, match="differs from the whole one in the gradient"):
        parallelize(restore(base), tensor_mesh(), {"norm": _Lost()}, check=True)
