"""Outputs of a parallelized model for callers and hooks: hidden states, layers' inputs and outputs, and logits."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.decoders import decoder, exact
from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.parallelize import parallelize, replacements, restore
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks

IDS = integers(1, 2, 17, low=3, high=100, dtype=torch.int64)  # neither 2 nor 3 divides the length


def _close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 1e-11


def _check_step(model: nn.Module, seen: list[Tensor], plain: nn.Module, expected: list[Tensor]) -> None:
    """Compare what was seen, and the gradients of a loss on all of it."""
    assert len(seen) == len(expected)
    for each, tensors in ((model, seen), (plain, expected)):
        each.zero_grad()
        torch.stack([(x.sin() * (index + 1)).mean() for index, x in enumerate(tensors)]).sum().backward()
    for mine, theirs in zip(seen, expected, strict=True):
        _close(mine, theirs)
    for parameter, own in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = torch.zeros(own.shape, dtype=own.dtype) if parameter.grad is None else parameter.grad
        whole = gather_whole(gradient) if isinstance(gradient, DTensor) else gradient
        _close(whole.reshape(own.shape), torch.zeros_like(own) if own.grad is None else own.grad)


def _states(model: Any, **more: Any) -> list[Tensor]:
    """Return the hidden states, by name or (return_dict=False) as the last entry of a tuple."""
    out = model(input_ids=IDS, use_cache=False, **more)
    return [x for x in (out[-1] if type(out) is tuple else out.hidden_states) if x is not None]


WANTED: dict[str, dict[str, Any]] = {
    "all": {"output_hidden_states": True},
    "labels": {"output_hidden_states": True, "labels": IDS},
    "some": {"output_hidden_states": [-2, 0]},
    "tuple": {"output_hidden_states": True, "return_dict": False},
}


@pytest.mark.parametrize(
    ("family", "tp", "cp"),
    [
        ("llama", 2, 1),
        *exhaustive(
            ("gpt2", 3, 1), ("mixtral", 2, 1), ("bloom", 2, 1), ("stablelm_norms", 2, 1), ("gemma3", 2, 2),
            ("mistral", 1, 2),
        ),
    ],
)  # fmt: skip
@on_ranks("tp", "cp")
def test_hidden_states_and_their_gradients_are_those_of_one_rank(family: str, tp: int, cp: int) -> None:
    plain, model = decoder(family), decoder(family)
    parallelize(model, mesh_of(1, tp, cp))
    cases = dict(WANTED)
    if family == "bloom":  # its own code keeps the states, and knows no numbers of them
        del cases["some"]
    with exact(plain):
        for wanted in cases.values():
            _check_step(model, _states(model, **wanted), plain, _states(plain, **wanted))
        for each in (model, plain):
            each.config.output_hidden_states = True
        _check_step(model, _states(model), plain, _states(plain))
        _check_step(model.base_model, _states(model.base_model), plain.base_model, _states(plain.base_model))
        for each in (model, plain):
            each.gradient_checkpointing_enable()
        _check_step(model, _states(model), plain, _states(plain))
        options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        made = [each.eval().generate(IDS, **options, output_hidden_states=True) for each in (model, plain)]
        for mine, theirs in zip(made[0].hidden_states, made[1].hidden_states, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                _close(one, other)


@on_ranks(2)
def test_a_decoder_without_a_head_returns_whole_states() -> None:
    plain, model = decoder("llama").base_model, decoder("llama").base_model
    parallelize(model, tensor_mesh())
    with exact(plain):
        _check_step(model, _states(model, output_hidden_states=True), plain, _states(plain, output_hidden_states=True))


def _rows(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _with_rows(out: Any, x: Tensor) -> Any:
    return x if isinstance(out, Tensor) else (x, *out[1:])


def _hooked(model: Any, checkpointing: bool, parallel: Callable[[Any], None], first: bool) -> list[Tensor]:
    """Return what hooks of the layers see, some of which change it, and the logits. first: register hooks first."""
    seen: list[Tensor] = []
    if not first:
        parallel(model)
    one, other = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h

    def shift(layer: nn.Module, args: Any, kwargs: Any) -> Any:  # tokens meet in it
        return (args[0] + args[0].mean(1, keepdim=True), *args[1:]), kwargs

    def in_place(layer: nn.Module, args: Any, out: Any) -> None:
        _rows(out).mul_(1.5)

    for layer in (one, other):
        layer.register_forward_pre_hook(lambda layer, args: (args[0] * 1.25, *args[1:]))
        layer.register_forward_pre_hook(shift, with_kwargs=True)
    if not checkpointing:
        other.register_forward_hook(in_place)
    one.register_forward_hook(lambda layer, args, out: _with_rows(out, _rows(out) + _rows(out).flip(1)))
    one.register_forward_hook(lambda layer, args, kwargs, out: seen.append(args[0]), with_kwargs=True)
    other.register_forward_hook(lambda layer, args, out: seen.append(_rows(out)))
    if first:
        parallel(model)
    seen.append(model(input_ids=IDS).logits)
    return list(seen)


@pytest.mark.parametrize(
    ("family", "tp", "cp", "checkpointing", "first"),
    [
        ("llama", 2, 1, False, False),
        *exhaustive(
            ("gpt2", 3, 1, True, False), ("llama", 2, 1, False, True), ("stablelm_norms", 2, 1, True, False),
            ("llama", 1, 2, True, False), ("llama", 2, 2, False, False),
        ),
    ],
)  # fmt: skip
@on_ranks("tp", "cp")
def test_hooks_of_layers_see_and_change_whole_sequences(
    family: str, tp: int, cp: int, checkpointing: bool, first: bool
) -> None:
    plain, model = decoder(family), decoder(family)
    if checkpointing:
        plain.gradient_checkpointing_enable()
        model.gradient_checkpointing_enable()
    with exact(plain):
        expected = _hooked(plain, checkpointing, lambda _: None, first)
        seen = _hooked(model, checkpointing, lambda model: parallelize(model, mesh_of(1, tp, cp)) and None, first)
        _check_step(model, seen, plain, expected)
        _close(restore(model)(input_ids=IDS).logits, expected[-1])


class Recorder(nn.Module):
    """Somebody's decoder, which returns hidden states too, and what it computes of them."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        inner = decoder("llama").model
        self.embed_tokens, self.layers, self.norm, self.rotary = (
            inner.embed_tokens, inner.layers, inner.norm, inner.rotary_emb,
        )  # fmt: skip
        self.computes = computes

    def forward(self, ids: Tensor, everything: bool = False) -> Any:
        x = self.embed_tokens(ids)
        tables = self.rotary(x, torch.arange(ids.shape[1]).unsqueeze(0))
        states = [x]
        for layer in self.layers:
            x = layer(x, position_embeddings=tables)
            states.append(x)
        x = self.norm(x)
        if self.computes:
            return x, states[1].square().mean()
        return {"x": x, "states": states, "middle": states[1]} if everything else x


@on_ranks(2)
def test_ones_own_decoder_returns_whole_states() -> None:
    for computes in (False, True):
        plain, model = Recorder(computes), Recorder(computes)
        parallelize(model, tensor_mesh())
        reasons = [each.reason for each in replacements(model) if "its sequences stay whole" in each.reason]
        assert bool(reasons) == computes, "a mean over this rank's tokens is that of no sequence"
        with exact(plain):
            if computes:
                assert "tensor 1 of its output would differ by" in reasons[0]
                _check_step(model, list(model(IDS)), plain, list(plain(IDS)))
                continue
            found = []
            for each in (model, plain):
                out = each(IDS, everything=True)
                found.append([out["x"], *out["states"], out["middle"]])
            _check_step(model, found[0], plain, found[1])


@on_ranks(2)
def test_states_of_one_token_have_no_gradients_without_a_word() -> None:
    model, plain = parallelize(decoder("llama"), tensor_mesh()), decoder("llama")
    token = IDS[:, :1]
    with pytest.raises(ValueError, match=r"^LlamaModel: hidden states of 1 token have no gradients .* expected 2 tok"):
        model(input_ids=token, output_hidden_states=True)
    with torch.no_grad(), exact(plain):
        found = [each(input_ids=token, output_hidden_states=True).hidden_states for each in (model, plain)]
        for mine, theirs in zip(*found, strict=True):
            _close(mine, theirs)


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), *exhaustive((1, 2))])
@on_ranks("tp", "cp")
def test_logits_of_a_training_step_name_the_way_out(tp: int, cp: int) -> None:
    model = parallelize(decoder("llama"), mesh_of(1, tp, cp))
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    uses: list[Callable[[Any], Any]] = [
        lambda x: x[:, :-1], lambda x: x.argmax(-1), lambda x: x / 2, lambda x: F.softmax(x, -1), lambda x: list(x),
        lambda x: torch.zeros(2) + x, np.asarray, lambda x: x.shape, bool,
    ]  # fmt: skip
    as_tuple = model(input_ids=IDS, labels=IDS, use_cache=False, return_dict=False)
    copies = [pickle.loads(pickle.dumps(out)).logits, copy.deepcopy(out.logits)]
    copies.append(convert_outputs_to_fp32(lambda: out)().logits)
    for logits in (out.logits, out["logits"], out[1], as_tuple[1], *copies):
        for use in uses:
            with pytest.raises(
                (ValueError, AttributeError), match=r"^logits: .* call the model without labels, or in eval\(\)$"
            ):
                use(logits)
    assert "no logits" in repr(out)
    out.loss.backward()
    _close(model(input_ids=IDS).logits, model.eval()(input_ids=IDS, labels=IDS).logits)
