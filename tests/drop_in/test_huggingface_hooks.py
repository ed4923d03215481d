"""transformers' own hooks: attention over a context, the loss of shards of the vocabulary, and styles of `tp_plan`."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.decoders import FAMILIES, decoder, exact, exact_loss
from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.drop_in.context_proof import prove_context
from tpfuse.drop_in.huggingface import register
from tpfuse.drop_in.outputs import NoLogits
from tpfuse.drop_in.parallelize import parallelize, replacements, restore
from tpfuse.drop_in.styles import FusedRowwiseParallel
from tpfuse.layers.explain import plans
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import on_ranks, pool

IDS = integers(1, 2, 13, low=3, high=101, dtype=torch.int64)  # neither 2 nor 4 divides the length
PACKED = torch.cat([torch.arange(n) for n in (5, 8, 10, 3)]).view(2, 13)  # the positions of four documents
CASES = ("whole", "left", "right", "packed")


def _inputs(case: str) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of the forward pass, and where its logits are to be compared."""
    ids, labels, valid = IDS.clone(), IDS.clone(), torch.ones_like(IDS, dtype=torch.bool)
    labels[1, 3:5] = -100
    arguments: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if case == "left":
        valid[0, :4] = False
        labels[0, :5] = -100
    elif case == "right":
        valid[1, -3:] = False
        labels[1, -3:] = -100
    elif case == "packed":
        arguments |= {"position_ids": PACKED, "use_cache": False}
    if not valid.all():
        arguments["attention_mask"] = valid.long()
    return arguments, valid


def _exactly(family: str, name: str, *args: Any) -> Any:
    """Call the function with this name while the family's norms compute in the dtype of their input."""
    with exact(decoder(family)):
        return globals()[name](*args)


def _gradient(parameter: nn.Parameter, like: Tensor) -> Tensor:
    assert parameter.grad is not None
    return (gather_whole(parameter.grad) if isinstance(parameter.grad, DTensor) else parameter.grad).reshape(like.shape)


def _close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 1e-10


def _agrees(
    cases: tuple[str, ...],
    family: str,
    tp: int,
    cp: int,
    ulysses: int,
    sequence_parallel: bool,
    settings: dict[str, Any],
) -> None:
    for case in cases:
        arguments, valid = _inputs(case)
        without = {name: x for name, x in arguments.items() if name != "labels"}
        plain, model = decoder(family, **settings), decoder(family, **settings)
        plain.set_attn_implementation("eager")
        with exact(plain):
            expected = plain(**arguments)
            expected.loss.backward()
            parallelize(model, mesh_of(1, tp, cp, ulysses), sequence_parallel=sequence_parallel)
            assert any(x.style == "tpfuse_ring" and x.module == "" for x in replacements(model))
            out = model(**arguments)
            assert isinstance(out.logits, NoLogits)
            model(**arguments).loss.backward()
            out.loss.backward()  # the gradients of two backward passes are accumulated
            _close(out.loss, expected.loss)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                _close(_gradient(mine, theirs), 2 * theirs.grad)
            _close(model(**without).logits[valid], expected.logits[valid])
            evaluated = model.eval()(**arguments)
            _close(evaluated.logits[valid], expected.logits[valid])
            _close(model(**arguments, return_dict=False)[0], expected.loss)
            if case == "whole":
                prompt = IDS[:, :5]
                theirs = plain.eval().generate(prompt, max_new_tokens=4, do_sample=False)
                assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), theirs)
    restore(model)
    untouched = decoder(family, **settings)
    assert model.__dict__.keys() == untouched.__dict__.keys()
    assert model.config._attn_implementation == untouched.config._attn_implementation
    for mine, parameter in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine, parameter) and not mine._backward_hooks
    _close(model(input_ids=IDS).logits, untouched(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("cases", "family", "tp", "cp", "ulysses", "sequence_parallel"),
    [
        (("whole", "left"), "gemma2", 1, 2, 1, False),  # windows and softcaps
        (("whole",), "gpt_oss", 1, 2, 1, False),  # sinks
        *exhaustive(
            *(
                (CASES[1 + 2 * (number % 2) :][:1], family, 1, 2, 1, False)  # padding at the left, and packed texts
                for number, family in enumerate(FAMILIES)
                if family not in ("stablelm_norms", "doge")
            ),
            (CASES[::2], "gpt_oss", 2, 2, 1, True),
            (CASES[::2], "llama_one_kv_head", 1, 4, 1, False),
            *((CASES[::2], family, 2, 2, 1, True) for family in ("gpt2", "phi3", "gemma3")),
            (CASES[::2], "qwen3", 2, 2, 1, False),
            (CASES[::2], "mistral", 1, 4, 2, False),
        ),
    ],
)
def test_a_context_gives_the_results_of_eager_attention(
    cases: tuple[str, ...], family: str, tp: int, cp: int, ulysses: int, sequence_parallel: bool
) -> None:
    pool(tp * cp).run(_agrees, cases, family, tp, cp, ulysses, sequence_parallel, {})


@pytest.mark.parametrize(("family", "tp", "cp"), [("mixtral", 1, 2), *exhaustive(("mistral", 1, 2), ("mixtral", 2, 2))])
@on_ranks("tp", "cp")
def test_losses_of_routers_and_labels_after_padding_are_those_of_one_rank(family: str, tp: int, cp: int) -> None:
    """Compare with sdpa on one rank: every token has a label, those after padding at the left too."""
    arguments, valid = _inputs("left")
    valid[1, -3:] = False
    arguments["attention_mask"] = valid.long()
    arguments["labels"] = IDS.masked_fill(~valid, -100)
    if family == "mixtral":
        arguments["output_router_logits"] = True
    plain, model = decoder(family), decoder(family)
    plain.router_aux_loss_coef = model.router_aux_loss_coef = 1.0
    parallelize(model, mesh_of(1, tp, cp))
    with exact(plain):
        expected, out = plain(**arguments, use_cache=False), model(**arguments)
        expected.loss.backward()
        out.loss.backward()
        # The losses of routers sum in float32, whose gradients are rounded differently where the sums are.
        eps = 8 * torch.finfo(torch.float32).eps if family == "mixtral" else 1e-11
        gradients = zip(_gradients(model, plain), _gradients(plain, plain), strict=True)
        for mine, theirs in ((out.loss, expected.loss), *gradients):
            assert mine.shape == theirs.shape and (mine - theirs).abs().max() <= eps * max(1.0, theirs.abs().max())
        for mine, theirs in zip(out.get("router_logits", ()), expected.get("router_logits", ()), strict=True):
            _close(mine[valid.flatten()], theirs[valid.flatten()])
    if family == "mixtral":
        assert out.aux_loss > 1 and len(out.router_logits) == 2
        base, its = parallelize(decoder(family).model, mesh_of(1, tp, cp)), decoder(family).model
        found = [each(IDS, output_router_logits=True).router_logits[0] for each in (base, its)]
        assert (found[0] - found[1]).abs().max() < 1e-6  # the norms of the untouched model compute in float32


def _gradients(model: nn.Module, like: nn.Module) -> list[Tensor]:
    return [_gradient(mine, theirs) for mine, theirs in zip(model.parameters(), like.parameters(), strict=True)]


IMAGES = normal(2, 2, 5, 7, dtype=torch.float64)


def _around_a_context(model: Any, projector: nn.Module, loss: str) -> tuple[Tensor, Tensor]:
    """Return a loss of code around the model, which runs on whole tensors, and the embeddings that it begins with."""
    embeds = torch.cat([projector(IMAGES), model.get_input_embeddings()(IDS)], 1)
    labels = torch.cat([IDS.new_full((2, 5), -100), IDS], 1)
    if loss == "labels":
        return model(inputs_embeds=embeds, labels=labels).loss, embeds
    if loss == "logits":
        return model(inputs_embeds=embeds).logits.square().mean(), embeds
    if loss == "decoder":
        return model.lm_head(model.model(inputs_embeds=embeds).last_hidden_state).square().mean(), embeds
    if loss == "penalty":  # of plain parameters
        return model(inputs_embeds=embeds).logits.mean() + sum(x.square().sum() for x in model.parameters()), embeds
    prefix = model(inputs_embeds=embeds[:, :7], use_cache=True)
    return model(inputs_embeds=embeds[:, 7:], labels=IDS[:, 2:], past_key_values=prefix.cache).loss, embeds


@pytest.mark.parametrize(
    ("losses", "tp", "cp"),
    [
        (("labels", "logits", "decoder", "cache"), 1, 2),
        *exhaustive(*((("labels", "logits", "cache"), tp, cp) for tp, cp in ((2, 1), (2, 2), (1, 3)))),
    ],
)
@on_ranks("tp", "cp")
def test_what_is_trained_around_a_model_has_the_gradients_of_one_rank(
    losses: tuple[str, ...], tp: int, cp: int
) -> None:
    runs: list[list[Tensor]] = []
    plain, model = decoder("llama"), decoder("llama")
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",)) if tp == 1 else mesh_of(1, tp, cp)
    parallelize(model, mesh)
    with exact(plain):
        for loss in (*losses, *(["penalty"] if tp == 1 else [])):
            for each in (plain, model):
                projector = nn.Linear(7, 48).double()
                projector.weight.data = normal(3, 48, 7, dtype=torch.float64)
                torch.nn.init.zeros_(projector.bias)
                each.zero_grad()
                value, embeds = _around_a_context(each, projector, loss)
                (by_embeds,) = torch.autograd.grad(value, embeds, retain_graph=True)
                value.backward()
                outside = [x.grad for x in projector.parameters() if x.grad is not None]
                runs.append([value, by_embeds, *outside, *_gradients(each, plain)])
            for mine, theirs in zip(*runs[-2:], strict=True):
                assert theirs.abs().max() > 1e-6
                _close(mine, theirs)


def _packed(family: str, ways: tuple[str, ...]) -> None:
    """Compare the losses of packed documents, which transformers separates only if it makes no key/value cache."""
    losses = []
    plain, model = decoder(family), decoder(family)
    parallelize(model, mesh_of(1, 1, 2))
    options: dict[str, dict[str, Any]] = {
        "False": {"use_cache": False}, "True": {"use_cache": True}, "mask": {"attention_mask": torch.ones_like(IDS)},
    }  # fmt: skip
    for way in ways:
        with exact(plain):
            for each in (plain, model):
                each.train(way != "eval").zero_grad()
                each.config.use_cache = way != "config"
                if way == "checkpointing":  # the last one
                    each.gradient_checkpointing_enable()
                out = each(IDS, position_ids=PACKED, labels=IDS, **options.get(way, {}))
                out.loss.backward()
                losses.append(out.loss.detach())
            _close(*losses[-2:])
            for mine, theirs in zip(_gradients(model, plain), _gradients(plain, plain), strict=True):
                _close(mine, theirs)
    together, separate = losses[0], losses[2]
    assert (together - separate).abs() > 1e-6
    for way, loss in zip(ways, losses[::2], strict=True):
        _close(loss, separate if way in ("False", "config", "checkpointing") else together)


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("llama", ("default", "False", "checkpointing")),
        *exhaustive(
            ("llama", ("default", "False", "True", "eval", "mask", "config", "checkpointing")),
            *((family, ("default", "False")) for family in FAMILIES if family not in ("stablelm_norms", "doge")),
        ),
    ],
)  # fmt: skip
def test_packed_documents_are_as_separate_as_on_one_rank(family: str, ways: tuple[str, ...]) -> None:
    pool(2).run(_packed, family, ways)


@on_ranks(2)
def test_documents_that_a_family_does_not_separate_meet_over_a_context_too() -> None:
    plain, model = decoder("gpt_oss"), decoder("gpt_oss")
    parallelize(model, mesh_of(1, 1, 2))
    with exact(plain):
        _close(*(each(IDS, position_ids=PACKED, labels=IDS, use_cache=False).loss for each in (model, plain)))


@on_ranks(2)
def test_another_attention_than_that_of_the_context_is_refused_but_serves_a_cache() -> None:
    plain, model = decoder("llama").eval(), decoder("llama").eval()
    plain.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    parallelize(model, mesh_of(1, 1, 2))
    texts = [each.generate(IDS, max_new_tokens=4, cache_implementation="static") for each in (plain, model)]
    assert torch.equal(*texts)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa' now, .* tokens alone: expected 'tpfuse_ring'"):
        model(IDS)
    assert model(IDS, use_cache=True).logits.shape[1] == IDS.shape[1]
    model.set_attn_implementation("tpfuse_ring")
    with exact(plain):
        _close(model(IDS).logits, plain(IDS).logits)


@on_ranks(2)
def test_a_sharded_pass_says_that_it_keeps_no_cache() -> None:
    model = parallelize(decoder("llama"), mesh_of(1, 1, 2)).eval()
    line = r"keeps no key/value cache: call the model with use_cache=True for one; every rank then computes all"
    with torch.no_grad():
        none = model(IDS[:, :7]).past_key_values
        reads: list[Callable[[], Any]] = [
            lambda: model(IDS[:, 7:], past_key_values=none), lambda: none[0][0], lambda: list(none),
        ]  # fmt: skip
        for read in reads:
            with pytest.raises(ValueError, match=line):
                read()
        assert model(IDS, use_cache=False).past_key_values is None
    plain = decoder("llama").eval()
    model.forward.attention = "flash_attention_2"  # it separates the documents of one sequence by positions alone
    with exact(plain):
        together, separate = (plain(IDS, position_ids=PACKED, use_cache=use).logits for use in (True, False))
        _close(model(IDS, position_ids=PACKED).logits, together)
        _close(model(IDS[1:], position_ids=PACKED[1:]).logits, separate[1:])
    with pytest.raises(ValueError, match=r"called with cu_seq_lens_q without position_ids: .* position_ids separate"):
        model(IDS, cu_seq_lens_q=torch.tensor([0, 5, 13]))


@pytest.mark.parametrize("sequence_parallel", [True, *exhaustive(False)])
@on_ranks(2)
def test_a_trained_bias_of_attention_has_the_gradient_of_all_heads(sequence_parallel: bool) -> None:
    causal, biases = torch.full((13, 13), -1e9, dtype=torch.float64).triu(1), []
    plain, model = decoder("llama"), decoder("llama")
    parallelize(model, tensor_mesh(), sequence_parallel=sequence_parallel)
    with exact(plain):
        for each in (plain, model):
            biases.append(normal(4, 2, 1, 13, 13, dtype=torch.float64).requires_grad_())
            each(IDS, attention_mask=biases[-1] + causal, labels=IDS).loss.backward()
    assert biases[0].grad is not None and biases[1].grad is not None
    assert biases[0].grad.abs().max() > 1e-3
    _close(biases[1].grad, biases[0].grad)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "rope_theta": 1e4,
            "original_max_position_embeddings": 8,
        },
    ],
)  # fmt: skip
def test_rotary_tables_are_those_of_the_whole_length(scaling: dict[str, Any]) -> None:
    settings = {"rope_parameters": scaling, "max_position_embeddings": 8}
    pool(2).run(_agrees, CASES[::3], "llama", 1, 2, 1, False, settings)


class _WithPenalty(transformers.LlamaForCausalLM):
    """A model whose loss depends on the logits not only through its loss function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return type(out)(loss=out.loss + 0.1 * out.logits.logsumexp(-1).square().mean(), logits=out.logits)


def _loss_of_shards() -> None:
    model, plain = decoder("llama_three_kv_heads"), decoder("llama_three_kv_heads")
    parallelize(model, tensor_mesh(), sequence_parallel=False)
    plain.loss_function = exact_loss
    widths = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: widths.append(out.shape[-1]))
    arguments, _ = _inputs("whole")
    assert isinstance(model.train()(**arguments).logits, NoLogits)
    assert model.eval()(**arguments).logits.shape[-1] == model(input_ids=IDS).logits.shape[-1] == 101
    part = 51 if dist.get_rank() == 0 else 50
    assert widths == [part, part, 101]
    shifted = F.pad(arguments["labels"], (0, 1), value=-100)[:, 1:]
    for more in ({}, {"num_items_in_batch": 7}, {"shift_labels": shifted.roll(1, 1)}):
        _close(model(**arguments, **more).loss, plain(**arguments, **more).loss)
    model.loss_function = exact_loss  # a loss of the user's own gets whole logits
    _close(model.train()(**arguments).loss, plain(**arguments).loss)
    assert model(**arguments).logits.shape[-1] == 101
    model, plain = decoder("llama"), decoder("llama")
    model.__class__ = plain.__class__ = _WithPenalty
    parallelize(model, tensor_mesh())
    _close(model(**arguments).loss, plain(**arguments).loss)
    (head,) = (plan for plan in plans(model) if plan.layer == "lm_head")
    assert head.reason.endswith("; whole logits: its forward has a loss of its own")


def test_no_rank_holds_whole_logits_in_training() -> None:
    pool(2).run(_exactly, "llama", "_loss_of_shards")


def _counts_and_copies() -> None:
    model, plain = decoder("mistral"), decoder("mistral")
    plain.loss_function = exact_loss
    parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    arguments, _ = _inputs("left")
    labels, token = arguments["labels"], int(IDS[0, 7])
    left_out = arguments | {"labels": labels.masked_fill(labels == token, -100)}
    _close(model(**arguments, ignore_index=token).loss, plain(**left_out).loss)
    _close(model(**arguments | {"labels": labels.masked_fill(labels == -100, -1)}).loss, plain(**arguments).loss)
    embeds = plain.get_input_embeddings()(IDS).detach()
    _close(model(inputs_embeds=embeds).logits, plain(inputs_embeds=embeds).logits)
    _close(model(IDS, logits_to_keep=2).logits, plain(IDS, logits_to_keep=2).logits)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.forward.model is each
        each.model.layers[0].mlp.up_proj.weight.requires_grad_(True)  # trained from now on
        plain.zero_grad()
        plain(**arguments, use_cache=False).loss.backward()
        each.activation_checkpointing_enable()
        each.train()(**arguments).loss.backward()
        for mine, theirs in zip(each.parameters(), plain.parameters(), strict=True):
            _close(_gradient(mine, theirs), theirs.grad)


@pytest.mark.exhaustive
def test_counts_of_labels_copies_and_checkpointing() -> None:
    pool(2).run(_exactly, "mistral", "_counts_and_copies")


def _dropped(tp: int) -> tuple[Tensor, Tensor]:
    model = decoder("gpt2", attn_pdrop=0.5)
    parallelize(model, mesh_of(1, tp, dist.get_world_size() // tp))
    model.gradient_checkpointing_enable()
    torch.manual_seed(dist.get_rank() // tp)
    arguments, _ = _inputs("right")
    losses = [model(**arguments).loss for _ in range(2)]
    assert losses[0] != losses[1]
    losses[0].backward()
    return losses[0].detach(), _gradient(next(model.parameters()), next(model.parameters()))


@pytest.mark.exhaustive
def test_dropout_of_attention_depends_on_the_position_alone() -> None:
    loss, gradient = pool(2).run(_dropped, 1)[0]
    for tp in (1, 2):
        other_loss, other_gradient = pool(4).run(_dropped, tp)[0]
        _close(other_loss, loss)
        _close(other_gradient, gradient)


@on_ranks(2)
def test_what_a_context_cannot_do_is_refused() -> None:
    mesh = mesh_of(1, 1, 2)
    model = parallelize(decoder("mistral"), mesh)
    amid, after = torch.ones_like(IDS), torch.ones_like(IDS)
    amid[0, 3] = after[0, -2:] = 0
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": amid}, "leaves out tokens between others"),
        (
            {"attention_mask": torch.ones(2, 1, 13, 13)},
            r"attention_mask is \(2, 1, 13, 13\): expected a tensor \(2, 13",
        ),
        ({"attention_mask": after, "labels": IDS}, "a label follows padding at the right: expected -100"),
        ({"encoder_hidden_states": torch.ones(2, 13, 48)}, "called with encoder_hidden_states: expected causal atten"),
        ({"is_causal": False}, "called with is_causal: expected causal attention among the tokens alone"),
        ({"input_ids": IDS[:, :1]}, "a sequence of 1 tokens cannot be sharded over 2 ranks"),
        ({"input_ids": None}, "neither input_ids nor inputs_embeds"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": IDS} | arguments)
    model.loss_function = exact_loss
    eager, classifier = decoder("mistral"), transformers.MistralForSequenceClassification(model.config)
    eager.set_attn_implementation("eager")
    first = {"attention_mask": after.flip(1), "labels": IDS.masked_fill(after.flip(1) == 0, -100)}
    capped = parallelize(decoder("gemma2"), mesh)
    plain, tensors, style = decoder("mistral"), tensor_mesh(), FusedRowwiseParallel()
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: model(IDS, labels=IDS), "context parallelism: the model has a loss of its own"),
        (lambda: parallelize(eager, mesh)(IDS, **first),
         r"first token after padding .* or attn_implementation=\"sdpa\" before"),
        (lambda: capped.model(IDS), "Gemma2Attention of layer 0: softcap is not supported"),
        (lambda: parallelize(nn.Linear(2, 2), mesh), "the model is a Linear: expected a decoder of transformers"),
        (lambda: parallelize(classifier, mesh),
         "MistralForSequenceClassification is no base model and no causal language"),
        (lambda: parallelize(plain, tensors, context_parallel="ring"),
         r"context_parallel 'ring': expected a mesh with an axis \"cp\""),
        (lambda: parallelize(plain, mesh, context_parallel="rings"),  # type: ignore[arg-type]
         "schedule 'rings': expected one of auto, ring"),
        (lambda: parallelize(plain, mesh["cp"], {"*.o_proj": style}), 'expected one named "tp" for the plan'),
    ]  # fmt: skip
    for call, message in refusals:
        with pytest.raises(ValueError, match=message):
            call()
    assert "forward" not in plain.__dict__ and plain.config._attn_implementation == "sdpa"
    if dist.get_rank() == 1:
        capped.model.layers[0].mlp.forward = torch.zeros_like
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight has a gradient on 1 of 2 ranks"):
        capped(IDS, labels=IDS).loss.backward()
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"fully_shard replaces the parameters .* use tpfuse\.ZeroOptimizer with"):
        model(IDS)


class _Before(nn.Module):
    """A projection that adds the token before."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(x)
        return out + F.pad(out, (0, 0, 1, 0))[:, :-1]


class _Counting(nn.Module):
    """Rotary positions that are counted from the first token of a call."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.own(x, torch.arange(x.shape[1]).unsqueeze(0))


def _with(model: Any, **changes: Any) -> Any:
    for path, value in changes.items():
        parent, _, name = path.rpartition("__")
        setattr(model.get_submodule(parent.replace("__", ".")) if parent else model, name, value)
    return model


def test_a_context_is_refused_where_tokens_meet_outside_of_attention() -> None:
    register()
    for name in ("llama", "mistral", "gemma3", "mixtral", "qwen3_moe"):
        prove_context(decoder(name))
    model = decoder("llama")
    for changed in (
        {"model__layers__1__mlp__up_proj": _Before(model.model.layers[1].mlp.up_proj)},
        {"model__norm": _Before(model.model.norm)},
        {"model__rotary_emb": _Counting(model.model.rotary_emb)},
    ):
        with pytest.raises(ValueError, match="cannot be sharded over the sequence: its tokens meet outside of atten"):
            prove_context(_with(decoder("llama"), **changed))
    nested = nn.Sequential(model.model.layers[0].self_attn.q_proj, nn.Linear(48, 48))
    with pytest.raises(ValueError, match="q_proj of LlamaAttention is no projection or norm; use a mesh without cp"):
        prove_context(_with(decoder("llama"), model__layers__0__self_attn__q_proj=nested))


PLAN = {
    "model.embed_tokens": "tpfuse_embedding_rowwise",
    **{f"model.layers.*.self_attn.{name}": "tpfuse_colwise" for name in ("q_proj", "k_proj", "v_proj")},
    "model.layers.*.self_attn.o_proj": "tpfuse_rowwise",
    **{f"model.layers.*.mlp.{name}": "tpfuse_colwise" for name in ("gate_proj", "up_proj")},
    "model.layers.*.mlp.down_proj": "tpfuse_rowwise",
    "lm_head": "tpfuse_colwise_gather_output",
}


def _from_pretrained(folder: Path) -> None:
    from transformers.distributed import DistributedConfig

    from tpfuse.drop_in.converted import ConvertedColumnLinear, ConvertedEmbedding, ConvertedRowLinear

    register()
    plan = DistributedConfig(tp_plan=PLAN, tp_size=2)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=plan)
    converted = [type(module) for module in model.modules()]
    assert [converted.count(kind) for kind in (ConvertedEmbedding, ConvertedColumnLinear, ConvertedRowLinear)] == [
        1, 2 * 5 + 1, 2 * 2,
    ]  # fmt: skip
    assert model.model.layers[0].mlp.up_proj.weight.to_local().shape == (48, 48)
    arguments, _ = _inputs("whole")
    expected, actual = plain(**arguments), model(**arguments)
    _close(actual.logits, expected.logits)
    expected.loss.backward()
    actual.loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        _close(_gradient(mine, theirs), theirs.grad)
    saved = folder.parent / "saved"
    model.save_pretrained(saved)
    again = transformers.LlamaForCausalLM.from_pretrained(saved, dtype=torch.float64)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True))


@pytest.mark.exhaustive
def test_transformers_loads_a_model_by_a_plan_of_fused_styles(tmp_path: Path) -> None:
    decoder("llama").save_pretrained(tmp_path / "plain")
    pool(2).run(_from_pretrained, tmp_path / "plain")
