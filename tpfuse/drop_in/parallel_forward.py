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

A mixture of experts' router loss is computed from the logits of all tokens, on every rank. With a
key/value cache (generate()), every rank computes everything.

**Gradients over a context.** All code outside of the sharded pass runs on every rank, on whole tensors, and its
gradients are whole and equal on all. So those of the pass are made such that their mean over the ranks is the gradient:
its results `leave` the context, and the tensors that it is given `enter` it. A hook on every parameter takes the mean
in each backward pass, unless an engine of `tpfuse.zero` does.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from tpfuse.comm.collectives.one_model import InputComparison, compare_inputs, share_generators
from tpfuse.comm.dispatch import meet
from tpfuse.comm.layout import model_device
from tpfuse.comm.mesh import group_of, groups_of, rank_and_size
from tpfuse.drop_in.causal_loss import causal_loss, counted
from tpfuse.drop_in.context_gradients import AveragedGradients, register_means
from tpfuse.drop_in.context_hooks import gather_layers, give_all_heads
from tpfuse.drop_in.converted import ConvertedColumnLinear
from tpfuse.drop_in.decoder_stages import DecoderStages
from tpfuse.drop_in.outputs import NO_LOGITS, WholeStates
from tpfuse.drop_in.sharded_tokens import ForwardPass, ShardedTokens, current
from tpfuse.ops.collectives import all_gather
from tpfuse.ops.cross_entropy import TORCH_IGNORE, is_ignored
from tpfuse.ops.dropout import drawn_keys
from tpfuse.parallel.context import ContextParallel, Documents
from tpfuse.parallel.pipeline.cut import Stage


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
ATTENTION = "tpfuse_ring"  # attn_implementation over a context


class ParallelForward(AveragedGradients):
    """The forward of a converted model (see the module). It is an attribute of the model, and is copied with it.

    head: the projection to the vocabulary, whose output stays sharded for the loss. context: None for one rank. stages:
    those of this rank, if the model has been cut: the arguments stage and stage_input then choose one of them and give
    its input, and all but the last stage return the input of the next one. attention: the implementation that the model
    had before. separates: whether its masks separate documents whose positions start again; some families' do not.
    """

    stages: DecoderStages | None = None
    states: WholeStates | None = None  # if the model itself is the decoder whose layers pass shards of the sequence

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new one, a copy or an unpickled one too, whose hooks torch.compile lets `register_means` register.

        The mark is set here, since it imports the compiler, which takes seconds; transformers has imported it by now.
        """
        torch.compiler.assume_constant_result(register_means)  # type: ignore[no-untyped-call]
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        head: ConvertedColumnLinear | None,
        context: ContextParallel | None,
        tensor_mesh: DeviceMesh | None,
        attention: str | None,
        separates: bool,
    ) -> None:
        self.model, self.head, self.context, self.tensor_mesh = model, head, context, tensor_mesh
        self.attention, self.separates = attention, separates
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
        if self.context is None:
            return self._run(kwargs, None)
        self.average_gradients()
        if context is None:
            with self._own_attention():
                return self._run(kwargs, None)
        set_now = cast(Any, self.model).config._attn_implementation
        if set_now != ATTENTION:
            raise ValueError(
                f"context parallelism: attn_implementation is {set_now!r} now, by which a rank would attend to its own"
                f" tokens alone: expected {ATTENTION!r}; choose another one before tpfuse.parallelize"
            )
        return self._run(kwargs, context)

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Let the layers attend to all tokens as they did before the conversion, or as was set since then."""
        model: Any = self.model
        if model.config._attn_implementation != ATTENTION:
            yield
            return
        model.set_attn_implementation(self.attention)
        try:
            yield
        finally:
            model.set_attn_implementation(ATTENTION)

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
        if not cached or self.context is None:
            return generate(self.model, *args, **kwargs)
        with self._own_attention():  # it makes masks for a static cache, before the model runs
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
        before, current.now = current.now, running
        try:
            if running.head is not None:
                running.head.gather_output = False
            out = self._run_own(kwargs) if stage is None else self._run_stage(kwargs, stage, x)
        finally:
            current.now = before
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
                gather_layers(out, running.tokens)
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
            shifted = counted(shifted, kwargs.get("ignore_index", TORCH_IGNORE))
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

        Most families' masks do so where there is no key/value cache, and flash attention for a batch of one sequence.
        """
        if "flash" in (self.attention or ""):
            return batch == 1
        return self.separates and not self._makes_cache(kwargs)

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
