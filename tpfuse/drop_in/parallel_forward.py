"""The forward pass of a converted model of transformers: whole sequences in and out, and shards of them inside.

`tpfuse.drop_in.huggingface.adapt` replaces the forward of a model by a `ParallelForward`; transformers, PEFT and
accelerate call it in several ways, and all of them find it there. Its arguments and its result are those of the
original, with whole sequences on every rank. With labels in training there are no logits to read, since no rank
computes whole ones: the loss of causal language models is `tpfuse.ops.cross_entropy` on each rank's slice of the
vocabulary and its tokens. A model with another loss keeps it, and computes it from whole logits; so does one whose code
before the loss reads whole ones (`tpfuse.drop_in.loss_proof`).

**Context parallelism.** The ranks of a context are given the same whole ids, labels, attention mask and positions, and
take their shards (`tpfuse.parallel.context`). The attention of every layer is `ring_attention`, under the name
"tpfuse_ring" of transformers' AttentionInterface. Where rows are padded, or packed from documents whose positions
start again, the batch becomes one sequence of documents that do not see each other. Padding before a text sees nothing,
as in the original, whose attention is zero there (but for "eager"): a label may follow it. The outputs at padding after
a text differ from the original; nothing uses them.

The losses of routers of a mixture of experts are computed from the logits of all tokens, on every rank. With a
key/value cache (generate()), every rank computes everything.

**Gradients over a context.** All code outside of the sharded pass runs on every rank, on whole tensors, and its
gradients are whole and equal on all. So those of the pass are made such that their mean over the ranks is the gradient:
its results `leave` the context, and the tensors that it is given `enter` it. A hook on every parameter takes the mean
in each backward pass, unless an engine of `tpfuse.zero` does.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tpfuse.comm import collectives
from tpfuse.comm.collectives.one_model import InputComparison, compare_inputs, share_generators
from tpfuse.comm.dispatch import meet
from tpfuse.comm.layout import local_tensor, model_device
from tpfuse.comm.mesh import group_of, groups_of, rank_and_size
from tpfuse.drop_in.converted import ConvertedColumnLinear
from tpfuse.drop_in.decoder_stages import DecoderStages
from tpfuse.drop_in.outputs import NO_LOGITS, WholeStates
from tpfuse.drop_in.shards import gather_sequence
from tpfuse.drop_in.sketch import mapped
from tpfuse.ops.collectives import all_gather, all_reduce
from tpfuse.ops.cross_entropy import IGNORE, TORCH_IGNORE, cross_entropy, is_ignored
from tpfuse.ops.dropout import drawn_keys
from tpfuse.parallel.context import ContextParallel, Documents, ShardedBatch
from tpfuse.parallel.pipeline.cut import Stage


@dataclass(frozen=True, eq=False)
class ShardedTokens:
    """The tokens of a forward pass, sharded over the ranks of a context. Layers get them as their attention mask."""

    sharded: ShardedBatch
    shape: tuple[int, ...]  # (batch, length) of the whole sequences
    unseeing: Tensor | None  # [1, local_length] bool: padding before a text, which sees no key; None if there is none
    last_position: Tensor  # [1, 1]: the largest position of all tokens
    dropout_keys: Tensor | None  # [layers] int64: for the dropout of attention, if there is one
    tensor_rank: int
    tensor_ranks: int
    window: int | None = None  # as for `ring_attention`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            f"context parallelism: the model reads {name} of its attention mask: expected attention that transformers'"
            " AttentionInterface computes"
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens [batch, length, ...] of which x [..., local_length, ...] are this rank's, as a result."""
        whole = self.sharded.gather(x.reshape(self.sharded.batch, self.sharded.local_length, x.shape[-1]))
        return self.sharded.context.leave(whole).reshape(*self.shape, x.shape[-1])

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x [batch, length, width], which every rank has computed of results."""
        x = self.sharded.context.enter(x)
        return self.sharded.shard(x.reshape(self.sharded.batch, self.sharded.length, x.shape[-1]))

    def dropout(self, layer: int, p: float, query: Tensor) -> dict[str, Any]:
        """Return the options of attention that drop probabilities; query: [batch, heads, tokens, size]."""
        assert self.dropout_keys is not None
        documents, heads = self.sharded.documents, query.shape[1]
        sequences = len(query) if documents is None else len(documents.cu_seqlens) - 1
        sequence_rows = torch.arange(sequences, device=query.device).unsqueeze(1) * (heads * self.tensor_ranks)
        head_rows = torch.arange(heads, device=query.device) + heads * self.tensor_rank
        return {"dropout_p": p, "key": self.dropout_keys[layer], "head_rows": sequence_rows + head_rows}


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward pass that runs."""

    head: ConvertedColumnLinear | None  # the projection to the vocabulary if it keeps its output sharded
    tokens: ShardedTokens | None = None  # None if every rank has all tokens
    targets: Tensor | None = None  # this rank's labels, shifted, if tokens are sharded
    items: Tensor | int | None = None  # the number of labels of all ranks


class _NoCache:
    """Stands for the key/value cache of a sharded pass, which keeps none. Whoever reads it gets a ValueError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: Any) -> Any:
        raise ValueError(
            "context parallelism: a pass over shards of the tokens keeps no key/value cache: call the model with"
            " use_cache=True for one; every rank then computes all tokens"
        )


_NO_CACHE = _NoCache()


class _Running(threading.local):
    """The pass that runs in a thread, None outside of all; torch.compile traces no ContextVar."""

    def __init__(self) -> None:
        self.now: ForwardPass | None = None


_running = _Running()


def sharded_tokens() -> ShardedTokens | None:
    """Return the tokens of the forward pass that runs; None if every rank has all of them."""
    return None if _running.now is None else _running.now.tokens


class ParallelForward:
    """The forward of a converted model (see the module). It is an attribute of the model, and is copied with it.

    head: the projection to the vocabulary, whose output stays sharded for the loss. context: None for one rank. stages:
    those of this rank, if the model has been cut: the arguments stage and stage_input then choose one of them and give
    its input, and all but the last stage return the input of the next one. attention: the implementation that the model
    had before.
    """

    stages: DecoderStages | None = None
    states: WholeStates | None = None  # if the model itself is the decoder whose layers pass shards of the sequence
    agreed_pass = -1  # the backward pass for which `agree_on_gradients` has returned
    agreed: dict[str, bool] | None = None  # which parameters get gradients in it

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new one, a copy or an unpickled one too, whose hooks torch.compile lets `_register_means` register.

        The mark is set here, since it imports the compiler, which takes seconds; transformers has imported it by now.
        """
        torch.compiler.assume_constant_result(_register_means)  # type: ignore[no-untyped-call]
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        head: ConvertedColumnLinear | None,
        context: ContextParallel | None,
        tensor_mesh: DeviceMesh | None,
        attention: str | None,
    ) -> None:
        self.model, self.head, self.context, self.tensor_mesh = model, head, context, tensor_mesh
        self.attention = attention
        self.tensor_ranks = 1 if tensor_mesh is None else tensor_mesh.size()
        self.compare_inputs = InputComparison(type(model).__name__)
        self.own: Callable[..., Any] | None = model.__dict__.get("forward")
        parameters = inspect.signature(model.forward).parameters.values()
        self.names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the model's own forward; `inspect.signature` reads its arguments, and so does transformers."""
        return MethodType(type(self.model).forward, self.model) if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward returns for the whole sequences; the module says which logits."""
        given = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names) or any(name in kwargs for name in given):
            raise TypeError(f"forward() got an argument twice, or more than {len(self.names)} positional ones")
        kwargs = given | kwargs
        cached = any(kwargs.get(name) is not None for name in ("past_key_values", "cache"))
        whole = cached or (kwargs.get("use_cache") and self._makes_cache(kwargs))
        context = None if whole else self.context
        self._compare_inputs(kwargs, context)
        if self.context is not None:
            self.average_gradients()
        return self._run(kwargs, context)

    def _makes_cache(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the model's own forward would make a key/value cache for these arguments."""
        base: Any = self.model.base_model
        given = kwargs.get("use_cache")
        wanted = getattr(base.config, "use_cache", False) if given is None else given
        recomputes = getattr(base, "gradient_checkpointing", False) and base.training and torch.is_grad_enabled()
        return bool(wanted) and not recomputes

    def _compare_inputs(self, kwargs: dict[str, Any], context: ContextParallel | None) -> None:
        """Compare the arguments among the ranks that compute this call together, if that is due."""
        if not torch.compiler.is_compiling():
            given = {name: x for name, x in kwargs.items() if name != "stage_input"}
            sizes = self.tensor_ranks, 1 if context is None else context.size
            self.compare_inputs(given, self.model, sizes, partial(self._groups, context))

    def _groups(self, context: ContextParallel | None) -> list[dist.ProcessGroup]:
        return [*groups_of(self.tensor_mesh), *(() if context is None else context.groups)]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own `generate` does; ranks that compute it together draw as the first one would.

        Their random numbers are equal from then on. Raise Disagreement, on every rank, for different arguments.
        """
        generate: Callable[..., Any] = cast(Any, type(self.model)).generate
        device = model_device(self.model)
        given = dict(zip(list(inspect.signature(generate).parameters)[1:], args, strict=False)) | kwargs
        config = given.get("generation_config") or self.model.generation_config
        cached = given.get("use_cache", getattr(config, "use_cache", True)) is not False
        groups = self._groups(None if cached else self.context)
        meet("generate", *groups)
        compare_inputs("generate", given, groups, device)
        share_generators(groups, device.type)
        return generate(self.model, *args, **kwargs)

    def _run(self, kwargs: dict[str, Any], context: ContextParallel | None) -> Any:
        with_loss = kwargs.get("labels") is not None
        of_shards = with_loss and self.model.loss_function is causal_loss
        stage, x = kwargs.pop("stage", None), kwargs.pop("stage_input", None)
        running, keep, no_cache = ForwardPass(self.head if of_shards else None), 0, False
        if context is not None:
            if with_loss and not of_shards:
                raise ValueError("context parallelism: the model has a loss of its own: expected that of transformers")
            keep, no_cache = kwargs.pop("logits_to_keep", 0), self._makes_cache(kwargs)
            kwargs, running = self._shard(kwargs, running.head, context)
        wanted = kwargs.pop("return_dict", None)
        before, _running.now = _running.now, running
        try:
            if running.head is not None:
                running.head.gather_output = False
            out = self._run_own(kwargs) if stage is None else self._run_stage(kwargs, stage, x)
        finally:
            _running.now = before
            if running.head is not None:
                running.head.gather_output = True
        if isinstance(out, Tensor):
            return out
        if of_shards and self.model.training and (running.head is not None or running.tokens is not None):
            out["logits"] = NO_LOGITS
        elif running.head is not None:
            out["logits"] = running.head.finish(out["logits"])
        if self.states is not None:
            out = self.states(self.model, (), out)
        if running.tokens is not None:
            _gather(out, running.tokens, keep)
            if self.model.base_model is self.model:
                _gather_layers(out, running.tokens)
            if no_cache:
                out["cache"] = _NO_CACHE
        if self.model.base_model is self.model:
            out = give_all_heads(self.tensor_mesh, self.model, (), out)
        if wanted is None:
            wanted = getattr(self.model.config, "return_dict", True)
        return out if wanted else out.to_tuple()

    def _run_own(self, kwargs: dict[str, Any]) -> Any:
        """Return what the model's own forward returns; torch.compile does not trace the method of `__wrapped__`."""
        if self.own is not None:
            return self.own(**kwargs, return_dict=True)
        return type(self.model).forward(self.model, **kwargs, return_dict=True)

    def _run_stage(self, kwargs: dict[str, Any], stage: Stage, x: Tensor | None) -> Any:
        """Return the output of a stage: a tensor, or, of the last stage, what the model's own forward returns."""
        assert self.stages is not None
        with self.stages.only(stage, x, _given(kwargs).shape[:2]) as running:
            if stage.last:
                return self._run_own(kwargs)
            self.stages.decoder(**kwargs, return_dict=True)
            return running.output

    def _shard(
        self, kwargs: dict[str, Any], head: ConvertedColumnLinear | None, context: ContextParallel
    ) -> tuple[dict[str, Any], ForwardPass]:
        """Return the arguments with this rank's tokens, and the pass that they belong to. They are equal on all ranks.

        All tensors [batch, length, ...] are sharded. Raise ValueError for a mask or positions of another shape.
        """
        given = _given(kwargs)
        batch, length = given.shape[:2]
        kwargs = tree_map_only(Tensor, lambda x: context.enter(x) if x.requires_grad else x, kwargs)
        positions = kwargs.get("position_ids")
        for name in ("attention_mask", "position_ids"):
            x = kwargs.get(name)
            if x is not None and (not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != length):
                described = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise ValueError(f"context parallelism: {name} is {described}: expected a tensor {(batch, length)}")
        self._check_causal(kwargs)
        mask = kwargs.pop("attention_mask", None)
        packed = positions if self._separates_documents(kwargs, batch) else None
        starts = _document_starts(mask, packed, batch, length)
        if starts is not None and self.stages is None and not bool(starts[:, 1:].any()):
            starts = None  # each row is one document; the stages of a pipeline send all micro-batches in one shape
        if positions is None:
            positions = torch.arange(length, device=given.device).unsqueeze(0)
        labels, shifted = kwargs.get("labels"), kwargs.pop("shift_labels", None)
        per_token = {name: x for name, x in kwargs.items() if isinstance(x, Tensor) and x.shape[:2] == (batch, length)}
        per_token["position_ids"] = positions.expand(batch, length)
        items = kwargs.get("num_items_in_batch")
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=TORCH_IGNORE)[:, 1:] if shifted is None else shifted
            shifted = _counted(shifted, kwargs.get("ignore_index", TORCH_IGNORE))
            per_token["labels"] = shifted
            items = (~is_ignored(shifted)).sum() if items is None else items
        documents = None if starts is None else Documents(starts.to(given.device))
        if documents is not None:
            if mask is not None:
                unseeing = mask.cumsum(1) == 0
                self._check_padding(mask.bool(), unseeing, shifted)
                per_token["unseeing"] = unseeing
            per_token = {name: x.reshape(1, batch * length, *x.shape[2:]) for name, x in per_token.items()}
        sharded = context.sharded_batch(per_token["position_ids"], documents)
        fills = {"labels": TORCH_IGNORE}
        mine = {name: sharded.shard(x, fills.get(name, 0)) for name, x in per_token.items()}
        if mask is not None and kwargs.get(
            "output_router_logits", getattr(self.model.config, "output_router_logits", 0)
        ):
            mine["attention_mask"] = mask  # for the losses of routers, which are computed from all tokens
        tokens = ShardedTokens(
            sharded,
            tuple(given.shape[:2]),
            mine.pop("unseeing", None),
            positions.max().view(1, 1),
            self._dropout_keys(context, given),
            *rank_and_size(group_of(self.tensor_mesh)),
        )
        running = ForwardPass(head, tokens, mine.get("labels"), items)
        return kwargs | mine | {"use_cache": False}, running

    def _check_causal(self, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for arguments that change who sees whom in a way that `ring_attention` does not compute."""
        unpositioned = "flash" in (self.attention or "") and kwargs.get("position_ids") is None
        for name, refused in (
            ("encoder_hidden_states", kwargs.get("encoder_hidden_states") is not None),
            ("is_causal", kwargs.get("is_causal") is False),
            ("cu_seq_lens_q without position_ids", unpositioned and kwargs.get("cu_seq_lens_q") is not None),
        ):
            if refused:
                raise ValueError(
                    f"context parallelism: the model is called with {name}: expected causal attention among the tokens"
                    " alone, whose documents position_ids separate, or a mesh without cp"
                )

    def _separates_documents(self, kwargs: dict[str, Any], batch: int) -> bool:
        """Return whether positions that start again separate documents in transformers, without an attention mask.

        Its masks do so where there is no key/value cache, and flash attention for a batch of one sequence.
        """
        return batch == 1 if "flash" in (self.attention or "") else not self._makes_cache(kwargs)

    def _check_padding(self, mask: Tensor, unseeing: Tensor, shifted: Tensor | None) -> None:
        """Raise ValueError if the output at a token of padding, which is not that of the original, has a label.

        At padding before a text it is that of the original: attention returns zeros there, but for eager attention.
        """
        if shifted is None:
            return
        labelled = ~is_ignored(shifted) & ~mask
        if bool((labelled & ~unseeing).any()):
            raise ValueError(
                "context parallelism: a label follows padding at the right: expected -100 for tokens that the attention"
                " mask leaves out"
            )
        if self.attention == "eager" and bool(labelled.any()):
            raise ValueError(
                "context parallelism: the first token after padding at the left has a label, and eager attention"
                ' averages all values there: expected -100, or attn_implementation="sdpa" before tpfuse.parallelize'
            )

    def _dropout_keys(self, context: ContextParallel, ids: Tensor) -> Tensor | None:
        """Return keys for the dropout of attention that are equal on all ranks of the context, and new for each pass.

        The first rank draws them. They are drawn before the layers run, since a layer that is recomputed draws nothing.
        """
        config: Any = self.model.config
        dropped = any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
        if not self.model.training or not dropped:
            return None
        keys: Tensor = drawn_keys(ids, config.num_hidden_layers)
        for group in context.groups:
            keys = all_gather(keys, group)[: len(keys)]
        return keys

    def average_gradients(self) -> None:
        """Let hooks average gradients over the context, if there are any and no engine of `tpfuse.zero` does."""
        if not torch.is_grad_enabled() or not self.model.mean_over_context:
            return
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise ValueError(
                "context parallelism: torch's fully_shard replaces the parameters whose gradients are averaged over"
                " the context: use tpfuse.ZeroOptimizer with stage=3 and the mesh"
            )
        _register_means(self)

    def agree_on_gradients(self, device: torch.device) -> None:
        """Raise ValueError if a parameter gets a gradient on some ranks of the context alone.

        The ranks reduce gradients in the order of their backward passes, in which one would then stand for another. The
        first hook of each pass finds out which parameters will get one. On GPUs a rank waits for the answer only if
        they are others than in the pass before; of ranks that disagree, one at least sees others.
        """
        assert self.context is not None
        running = torch._C._current_graph_task_id()
        if running == self.agreed_pass:
            return
        trained = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        getting = {name: _gets_gradient(x) for name, x in trained.items()}
        counts = torch.tensor(list(getting.values()), dtype=torch.float32).to(device, non_blocking=True)
        for group in self.context.groups:
            counts = collectives.all_reduce(counts, group)
        if device.type == "cpu" or getting != self.agreed:
            for name, count in zip(trained, counts.tolist(), strict=True):
                if 0 < count < self.context.size:
                    raise ValueError(
                        f"context parallelism: {name} has a gradient on {count:.0f} of {self.context.size} ranks:"
                        " expected a module that runs on each of them, for any tokens"
                    )
        self.agreed_pass, self.agreed = running, getting


def _gets_gradient(parameter: nn.Parameter) -> bool:
    """Return whether the backward pass that runs comes to a parameter."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns its gradient
        return True


def _register_means(forward: ParallelForward) -> bool:
    """Register hooks that average gradients over the context on all parameters that have none, if they are trained.

    A layer that PEFT has added, a parameter that is trained from now on, and a copy of the model get their hooks in the
    next forward pass. torch.compile does not trace the call, in which it would see no hook and register them again at
    each step. It calls the function while it traces the pass, and traces again if `forward` is another one or another
    parameter is trained.
    """
    assert forward.context is not None
    for parameter in forward.model.parameters():
        hooks = (parameter._backward_hooks or {}).values()
        if parameter.requires_grad and not any(isinstance(hook, ContextMean) for hook in hooks):
            parameter.register_hook(ContextMean(forward, forward.context))  # type: ignore[no-untyped-call]
    return True


class ContextMean:
    """A hook of a parameter that takes the mean of its gradients on the ranks of a context."""

    __torch_unserializable__ = True  # a copy of the model registers hooks of its own

    def __init__(self, forward: ParallelForward, context: ContextParallel) -> None:
        self.forward, self.context = forward, context

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return the mean of the ranks' gradients; None for this rank's own, if an engine has taken the means over."""
        if not self.forward.model.mean_over_context:
            return None
        self.forward.agree_on_gradients(gradient.device)
        total = local_tensor(gradient)
        for group in self.context.groups:
            total = collectives.all_reduce(total, group)
        total = total / self.context.size
        if isinstance(gradient, DTensor):
            return DTensor(total, gradient._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return total


def _given(kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor of the arguments that says how many sequences and tokens there are."""
    ids: Tensor | None = kwargs.get("input_ids")
    given: Tensor | None = kwargs.get("inputs_embeds") if ids is None else ids
    if given is None:
        raise ValueError("the model got neither input_ids nor inputs_embeds")
    return given


def _document_starts(mask: Tensor | None, positions: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return [batch, length], where a document begins; None if neither a mask nor positions say so.

    As in transformers, positions that do not increase by one begin a document if there is no attention mask. The tokens
    of a row that the mask leaves out are documents of their own. Raise ValueError if they are amid the others.
    """
    if mask is not None:
        mask = mask.bool()
        starts = torch.cat([mask.new_ones(batch, 1), mask[:, 1:] != mask[:, :-1]], dim=1)
        if bool(((starts & mask).sum(1) > 1).any()):
            raise ValueError(
                "context parallelism: the attention mask leaves out tokens between others: expected padding at the"
                " left or the right"
            )
    elif positions is not None:
        positions = positions.expand(batch, length)
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    else:
        return None
    return starts


def _gather(out: Any, tokens: ShardedTokens, keep: int | Tensor) -> None:
    """Replace the tensors of a model's output by those of all tokens."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(out.get(name), Tensor):
            out[name] = tokens.gather(out[name])
    if isinstance(out.get("logits"), Tensor) and not (isinstance(keep, int) and keep == 0):
        out["logits"] = out["logits"][:, -keep:] if isinstance(keep, int) else out["logits"][:, keep]


def take_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take the mask of all tokens from the arguments of a decoder, which has this rank's tokens."""
    sharded = sharded_tokens() is not None
    return (args, {**kwargs, "attention_mask": None}) if sharded and "attention_mask" in kwargs else None


def give_all_heads(mesh: DeviceMesh | None, module: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return a decoder's output with the probabilities of attention [batch, heads, ...] of all heads.

    An attention that was left alone has all. mesh: the tensor-parallel one. The output is a tuple with
    return_dict=False.
    """

    def whole(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim != 4:
            return x
        has_all = x.shape[1] == module.config.get_text_config().num_attention_heads
        return x if has_all else gather_sequence(x, 1, group_of(mesh), None)

    if type(out) is tuple:
        return tuple(tuple(map(whole, each)) if type(each) is tuple else each for each in out)
    if getattr(out, "attentions", None):
        out["attentions"] = tuple(map(whole, out["attentions"]))
    return out


def give_whole_layers(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """Replace what a decoder's output has of its layers by that of all tokens; the losses of routers follow from it."""
    running = _running.now
    if running is not None and running.tokens is not None:
        _gather_layers(out, running.tokens)


def _gather_layers(out: Any, tokens: ShardedTokens) -> None:
    """Replace hidden states and logits of routers by those of all tokens."""

    def whole(x: Tensor) -> Tensor:
        gathered = tokens.gather(x)
        return gathered if x.ndim > 2 else gathered.flatten(0, 1)

    for name in ("hidden_states", "router_logits"):
        if getattr(out, name, None) is not None:
            out[name] = mapped(whole, out[name])


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = TORCH_IGNORE,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of transformers' causal language models, equal on all ranks that compute it together.

    It is the sum over all tokens divided by num_items_in_batch (None for the number of labels), in float32, or float64
    for float64. In a forward pass of `ParallelForward` the logits may be of this rank's tokens and of its slice of the
    vocabulary.
    """
    running = _running.now or ForwardPass(None)
    if running.targets is not None:
        target, num_items_in_batch = running.targets, running.items
    elif shift_labels is not None:
        target = shift_labels
    else:
        target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = target.reshape(-1).to(logits.device)
    target = _counted(target, ignore_index)
    group = None if running.head is None else running.head.group
    logits = logits.reshape(-1, logits.shape[-1])
    losses = cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target, vocab_size, group)
    items = (~is_ignored(target)).sum() if num_items_in_batch is None else num_items_in_batch
    loss = losses.sum() / (items.to(losses.device) if isinstance(items, Tensor) else items)
    if running.tokens is None:
        return loss
    context = running.tokens.sharded.context
    for context_group in context.groups:
        loss = all_reduce(loss, context_group)
    return context.leave(loss)


def _counted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the labels, -1 for those that the caller's `ignore_index` leaves out."""
    return labels if ignore_index == TORCH_IGNORE else labels.masked_fill(labels == ignore_index, IGNORE)


def frequencies_depend_on_length(module: nn.Module) -> bool:
    """Return whether a rotary embedding has other frequencies for longer sequences."""
    kinds = getattr(module, "rope_type", ())
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(kinds & {"dynamic", "longrope"})


def append_last_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a rotary embedding the largest position of all ranks too, so that its frequencies are equal on all."""
    tokens = sharded_tokens()
    if tokens is None:
        return None
    positions = args[1] if len(args) > 1 else kwargs["position_ids"]
    last = tokens.last_position.expand(positions.shape[0], 1)
    positions = torch.cat([positions, last], dim=1)
    if len(args) > 1:
        return (args[0], positions, *args[2:]), kwargs
    return args, {**kwargs, "position_ids": positions}


def drop_last_position(module: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Return the tables without the position that `append_last_position` has appended."""
    return None if sharded_tokens() is None else tuple(table[:, :-1] for table in out)
