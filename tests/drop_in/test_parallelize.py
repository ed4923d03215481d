"""`parallelize` and `restore`: what survives in the model, and dropout."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tests.drop_in.plain_model import (
    IDS,
    MIXED,
    PLAN,
    anatomy_of,
    check_anatomy,
    check_equal,
    evaluate,
    logits_of,
    plain,
)
from tests.support.decoders import decoder, exact
from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import UNEVEN_SEQUENCES, exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.parallelize import parallelize, replacements, restore
from tpfuse.drop_in.styles import FusedColwiseParallel
from tpfuse.drop_in.weights import empty_model
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


def _hook(*args: Any) -> None:
    """A user's hook that changes nothing."""


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=UNEVEN_SEQUENCES)])
@on_ranks("world")
def test_a_plan_of_ones_own_mixes_with_torchs_styles(mixed: bool) -> None:
    plan = MIXED if mixed else PLAN
    model = plain()
    expected = evaluate(model)
    parallelize(model, tensor_mesh(), plan)
    check_equal(evaluate(model), expected)
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
        expected = evaluate(model)
        whole = {name: (each.before.pop(), each.after.pop()) for name, each in seen.items()}
        parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel)
        check_equal(evaluate(model), expected)
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
            logits = logits_of(model)
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
    expected = evaluate(model)
    pickled, RemovableHandle.next_id = pickle.dumps(model), 0  # as in another process
    loaded = pickle.loads(pickled)
    assert all(key < RemovableHandle.next_id for module in loaded.modules() for key in module._forward_hooks), "taken"
    for copied in (copy.deepcopy(model), loaded):
        assert all(one is not other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
        assert all(torch.equal(one, expected[name]) for name, one in evaluate(copied).items())
        copied.model.norm.weight.data.add_(1.0) if family == "llama" else None
        before = anatomy_of(decoder(family))
        restore(copied)
        assert {name: kind for name, (kind, _) in anatomy_of(copied).items()} == {
            name: kind for name, (kind, _) in before.items()
        }
    assert all(torch.equal(one, expected[name]) for name, one in evaluate(model).items())


@on_ranks(2)
def test_restore_gives_the_original_back() -> None:
    cases: list[tuple[Callable[[], nn.Module], Any]] = [
        (plain, MIXED),
        (lambda: decoder("phi3_shared"), "auto"),
        (lambda: decoder("gemma3"), "auto"),
    ]
    for make, plan in cases:
        model = make()
        for module in model.modules():
            module.register_forward_hook(_hook)
        before, tensors = anatomy_of(model), copy.deepcopy(dict(model.named_parameters(remove_duplicate=False)))
        first = {id(parameter) for parameter in model.parameters()}
        logits = logits_of(model)
        assert restore(parallelize(model, tensor_mesh(), plan)) is model
        check_anatomy(model, before)
        found = dict(model.named_parameters(remove_duplicate=False))
        assert list(found) == list(tensors)
        for name, parameter in found.items():
            assert type(parameter) is nn.Parameter and torch.equal(parameter, tensors[name]), name
        assert len({id(parameter) for parameter in found.values()}) == len(first)  # what is tied is tied
        assert not any(isinstance(buffer, DTensor) for buffer in model.buffers())
        assert torch.equal(logits_of(model), logits)


@on_ranks(2)
def test_hooks_of_parameters_that_restore_would_lose_and_ddp_are_refused() -> None:
    model = parallelize(plain(), tensor_mesh(), PLAN)
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


@on_ranks(2)
def test_dropout_of_whole_activations_draws_the_masks_of_the_untouched_model() -> None:
    model = decoder("gpt2", resid_pdrop=0.3, embd_pdrop=0.3)
    whole = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = evaluate(whole)
    torch.manual_seed(dist.get_rank())  # parallelize sets all ranks to the state of the first
    parallelize(model, tensor_mesh(), sequence_parallel=False)
    check_equal(evaluate(model), expected)


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
                found.append(evaluate(model, ids))
    plain = evaluate(decoder(family), ids)
    assert (found[0]["logits"] - plain["logits"]).abs().max() > 0.01  # something is dropped
    for other in found[1:]:
        check_equal(other, found[0])


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
