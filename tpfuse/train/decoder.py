"""Decoders of Hugging Face's transformers in `tpfuse train`: --model.from FOLDER.

`DecoderConfig` describes such a model as `GPTConfig` does a GPT. It holds the contents of config.json, so that a
checkpoint needs no other file, and can be sampled, exported and resumed when FOLDER is gone. `DecoderModel` makes the
model on a rank with `tpfuse.parallelize`. Its parameters have the names and the shapes of Hugging Face in checkpoints.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpfuse.comm.layout import Slices, copy_whole_
from tpfuse.comm.mesh import context_mesh, flat_group, rank_and_size, tensor_mesh
from tpfuse.comm.stored_tensors import StoredTensor
from tpfuse.drop_in.causal_loss import causal_loss
from tpfuse.drop_in.decoder_stages import DecoderStages, decoder_parts
from tpfuse.drop_in.huggingface import (
    adapt,
    causal_model,
    check_context,
    configuration,
    cut,
    quiet,
    replace_forward,
    takes_labels,
)
from tpfuse.drop_in.parallelize import outlined_shards, parallelize
from tpfuse.drop_in.structure import Recognised, decoder_layers, recognise
from tpfuse.drop_in.weights import empty_model, file_pieces, find_weights, read_weights, take_weights
from tpfuse.errors import instead_of
from tpfuse.models.generate import choose
from tpfuse.parallel.context import ONE_RANK, ContextParallel, Documents
from tpfuse.parallel.initialize import seed_of
from tpfuse.parallel.offloaded_inputs import OffloadedInputs
from tpfuse.parallel.pipeline.cut import Cost, Stage, whole_model
from tpfuse.parallel.pipeline.parts import as_modules
from tpfuse.train.batches import MicroBatch
from tpfuse.train.language_model import Drawing, LanguageModel
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import own_stages

_USUAL_LENGTH = 1024  # tokens of a training sequence, unless the model's context is shorter or the user says otherwise
_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# The rates of dropout in a configuration, but those of the heads of other tasks.
_RATE = re.compile(r"^(?!summary|classifier).*drop(out)?$")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of transformers, and the length of the sequences on which it is trained.

    settings: the contents of its config.json. n_positions: the tokens of a training sequence. files: the texts of small
    files that belong to the model and its tokenizer, by name. The other fields follow from settings: longest: the
    longest sequence of the model, in tokens; ends: the tokens that end a text; drops: whether training has dropout.
    """

    settings: dict[str, Any]
    n_positions: int
    files: dict[str, str]
    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    longest: int
    ends: tuple[int, ...]
    drops: bool

    @classmethod
    def of(cls, settings: dict[str, Any], n_positions: int = 0, files: dict[str, str] | None = None) -> "DecoderConfig":
        """Return the description. n_positions: 0 for the usual length. Raise ValueError for unusable settings."""
        theirs = configuration(settings)
        if isinstance(settings.get("text_config"), dict):
            raise ValueError(
                f"{settings['model_type']} takes more than text: expected a decoder of text alone, such as the one that"
                " text_config describes; write that table as the config.json of a folder of its own"
            )
        for name in _SIZES:
            size = getattr(theirs, name, None)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}: expected a decoder with a positive number")
        vocabulary, width, layers, heads, longest = (getattr(theirs, name) for name in _SIZES)
        ends = theirs.eos_token_id
        ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        n_positions = n_positions or min(longest, _USUAL_LENGTH)
        rates = [value for name, value in theirs.to_dict().items() if _RATE.search(name)]
        drops = any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
        return cls(settings, n_positions, files or {}, vocabulary, width, layers, heads, longest, ends, drops)

    @classmethod
    def read(cls, folder: Path, n_positions: int = 0) -> "DecoderConfig":
        """Return the description of the model in a folder. Raise ValueError, which names the file."""
        path = folder / "config.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("it is no JSON object")
            present = [name for name in _FILES if (folder / name).is_file()]
            files = {name: (folder / name).read_text(encoding="utf-8") for name in present}
            return cls.of(settings, n_positions, files)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}{instead_of(folder)}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: {error}: get it again, by hf download or git lfs pull") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def family(self) -> str:
        """Return the model_type."""
        return str(self.settings["model_type"])

    @property
    def dropout_sites(self) -> int:
        """Return the number of sites of dropout whose keys the host makes: none, since torch draws for them."""
        return 0

    def compared(self) -> dict[str, Any]:
        """Return what two models must have in common if one is to have the other's weights."""
        settings = {name: value for name, value in self.settings.items() if name != "transformers_version"}
        return settings | {"n_positions": self.n_positions}

    def check_prompt(self, tokens: int) -> None:
        """Raise ValueError for a prompt that leaves no place for another token."""
        if tokens >= self.longest:
            raise ValueError(f"the prompt has {tokens} tokens: expected fewer than the model's {self.longest}")

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` makes the description of."""
        return {"settings": self.settings, "n_positions": self.n_positions, "files": self.files}

    @classmethod
    def from_json(cls, description: dict[str, Any]) -> "DecoderConfig":
        """Return the description that `as_json` has returned. Raise ValueError or TypeError for another value."""
        files = description["files"]
        if not all(isinstance(text, str) and name in _FILES for name, text in files.items()):
            raise ValueError(f"files: expected texts by the names {', '.join(_FILES)}")
        return cls.of(description["settings"], description["n_positions"], files)

    def empty(self, dtype: torch.dtype) -> nn.Module:
        """Return the whole model with its parameters on the meta device. Raise ValueError."""
        quiet()
        model: nn.Module = empty_model(causal_model, self.settings, dtype)
        return model

    def outlined(self, mesh: DeviceMesh | None, dtype: torch.dtype, stages: Sequence[Stage] | None = None) -> nn.Module:
        """Return this rank's shards on the meta device. mesh: tensor-parallel, or None. Raise ValueError.

        stages: the pipeline stages of a rank, None for the whole model.
        """
        model = self.empty(dtype)
        shards = model
        if mesh is not None:
            shards = outlined_shards(model, mesh, self._recognised(mesh.size()))
        if stages is not None:
            DecoderStages(shards, stages)
        return shards

    def _recognised(self, tp: int) -> Recognised:
        return _recognised(json.dumps(self.settings, sort_keys=True), tp)

    def part_costs(self) -> tuple[list[Cost], Cost, Cost]:
        """Return the costs of each layer, of the embeddings, and of the last norm with the head, in a training step.

        They are counted as for the GPT. Raise ValueError for a model that a pipeline cannot cut.
        """
        return self._part_costs

    @cached_property
    def _part_costs(self) -> tuple[list[Cost], Cost, Cost]:
        model = self.empty(torch.float32)
        parts = decoder_parts(model).of(model)
        first, last = (_count(nn.ModuleList(as_modules(ends))) for ends in (parts.embed, parts.head))
        sizes, attention = [_count(block) for block in parts.blocks], self.attention_flops()
        return [Cost(6 * size + attention, size) for size in sizes], Cost(0, first), Cost(6 * last, last)

    def attention_flops(self) -> int:
        """Return the operations of a layer's attention for each token in a training step, as counted for the GPT."""
        size = getattr(configuration(self.settings), "head_dim", None) or self.n_embd // self.n_head
        return int(12 * self.n_positions * self.n_head * size)

    @cached_property
    def tied(self) -> list[str]:
        """Return the names of the parameters that a pipeline's first and last stage share."""
        model = self.empty(torch.float32)
        return decoder_parts(model).of(model).shared()

    def check(self, tp: int = 1) -> None:
        """Raise ValueError for a model that tpfuse cannot train on `tp` tensor-parallel ranks."""
        self.check_whole()
        model = self.empty(torch.float32)
        decoder_layers(model)
        if tp > 1 and dist.is_initialized():  # under torchrun; the ranks find sizes that they cannot divide
            self._recognised(tp)
            return
        with shape_mesh(tp) as mesh:
            self.outlined(mesh, torch.float32)

    def check_whole(self) -> None:
        """Raise ValueError for a model whose losses and texts tpfuse cannot compute even on one rank."""
        if not 1 <= self.n_positions <= self.longest:
            raise ValueError(f"n_positions {self.n_positions}: expected 1 to {self.longest}, the model's context")
        if self.settings.get("output_router_logits"):
            raise ValueError(
                "output_router_logits is true: tpfuse train adds no loss of routers to that of the tokens: set it to"
                " false in config.json"
            )

    def check_context(self, tp: int) -> None:
        """Raise ValueError if context-parallel ranks cannot share the model's sequences."""
        check_context(self.empty(torch.float32), ONE_RANK, tp)

    def find_weights(self, folder: Path) -> tuple[dict[str, list[StoredTensor]], str]:
        """Return the tensors in a folder's files for each parameter, by its name, and a line about others, or "".

        Raise ValueError.
        """
        return find_weights(self.empty(torch.float32), folder)


@contextlib.contextmanager
def shape_mesh(tp: int) -> Iterator[DeviceMesh | None]:
    """Yield a mesh for shapes alone of `tp` tensor-parallel ranks, None for one rank.

    This process, which must not have a process group, is the first rank; a fake process group stands in for the others.
    """
    if tp == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        yield init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@lru_cache(maxsize=8)
def _recognised(settings: str, tp: int) -> Recognised:
    """Return the plan for `tp` tensor-parallel ranks, which is proved once: that takes seconds for a large model.

    settings: the contents of config.json. Raise ValueError.
    """
    return recognise(empty_model(causal_model, json.loads(settings), torch.float32), tp, sequence_parallel=True)


class DecoderModel(LanguageModel):
    """A decoder on this rank. mesh: the whole mesh of the run, None for one rank.

    Raise ValueError for a model that the ranks cannot share.
    """

    def __init__(
        self,
        config: DecoderConfig,
        options: TrainCommand,
        mesh: DeviceMesh | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.device = config, device
        model: Any = config.empty(dtype)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        looked_up = sum(table.numel() for table in tables if table is not model.get_output_embeddings().weight)
        self._flops = 6 * (_count(model) - looked_up) + config.n_layer * config.attention_flops()
        self._takes_labels = takes_labels(model)  # else its forward computes another loss from them, or none
        schedule = options.parallel.cp_schedule
        self.context = ContextParallel(context_mesh(mesh), schedule)
        self.device_mesh = tensor_mesh(mesh)
        if mesh is not None and (self.device_mesh is not None or self.context.groups):
            parallelize(model, mesh, context_parallel=schedule if self.context.groups else "auto")
        else:
            adapt(model, self.context, None, sliced=False)
        self.stages = [whole_model(config.n_layer)]
        self._cut: DecoderStages | None = None
        if options.parallel.pp > 1:
            self.stages = own_stages(options, config, rank_and_size(flat_group(mesh, "pp"))[0])
            self._cut = cut(model, self.stages)
        take_weights(model, read_weights(model, {}, device), device)
        if options.train.recompute == "full":
            model.activation_checkpointing_enable({"use_reentrant": False})
        if options.train.offload_activations:
            offloaded = OffloadedInputs()
            for module in model.modules():
                if hasattr(module, "_gradient_checkpointing_func"):
                    module._gradient_checkpointing_func = partial(offloaded, module._gradient_checkpointing_func)
        self.module = model
        self._forward: Any = model  # in training

    def draw(self, seed: int) -> None:
        """Fill the parameters as transformers initialises the model after `torch.manual_seed(seed)`, on each rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            whole = dict(causal_model(self.config.settings, torch.float32).named_parameters())
        for name, parameter in self.module.named_parameters():
            copy_whole_(parameter, whole[name].detach().reshape(parameter.shape))

    def compile(self, *, one_graph: bool) -> None:
        """Let training steps run by torch.compile; one_graph is not asked of code that is not ours."""
        from tpfuse.train.compiled import compiled

        self._forward = compiled(self.module, one_graph=False, torch_dropout=self.config.drops)

    def part(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the output of a stage. Its dropout follows from (seed, step, first sequence, stage) and the layout."""
        ids, targets, weight, at, sequences, _, length = batch
        training = at is not None
        self.module.train(training)
        if at is not None and self.config.drops:
            assert not isinstance(at, Tensor)
            first = 0 if sequences is None else int(sequences[0])
            torch.manual_seed(seed_of(*at, first, *[stage.index] * (stage.index > 0)))
        more: dict[str, Any] = {} if self._cut is None else {"stage": stage, "stage_input": x}
        if targets is None:
            more |= _padded(ids, length or ids.shape[1], stage)
        elif self.document_start is not None:  # transformers masks documents by positions that do not increase by one
            documents = Documents(ids == self.document_start)
            more["position_ids"] = documents.positions.view(ids.shape)
        if targets is not None and stage.last and self._takes_labels:
            self.module.training = True  # with labels, the model in eval mode would return whole logits
            more |= {"labels": targets, "shift_labels": targets, "num_items_in_batch": 1}
        out = (self._forward if training else self.module)(input_ids=ids, use_cache=False, **more)
        if not stage.last:
            return out  # type: ignore[no-any-return]
        if targets is None:
            return out.logits  # type: ignore[no-any-return]
        loss: Tensor = (
            out.loss
            if self._takes_labels
            else causal_loss(out.logits, targets, out.logits.shape[-1], 1, shift_labels=targets)
        )
        if weight is not None:
            loss = loss * weight
        return loss / self.context.size  # the sum over these ranks, which the trainer takes, is the loss of the batch

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        return [self.module] if self._cut is None else self._cut.modules_of(stage)

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        drawing: Drawing,
        ends: tuple[int, ...] = (),
        logits: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Tensor:
        """Return the prompts with their continuations, by the `generate` of transformers.

        They end where the model's context is full; the prompts must be shorter than that. With `logits` there is no
        key/value cache: every token computes the whole text again, padded to its last length.
        """
        tokens = min(tokens, self.config.longest - ids.shape[1])
        model: Any = self.module.eval()
        if logits is not None:
            longest, compute = ids.shape[1] + tokens, logits

            def of_last(ids: Tensor) -> Tensor:
                padded = F.pad(ids, (0, longest - ids.shape[1]))
                return compute(MicroBatch(padded, length=ids.shape[1]))

            model = replace_forward(self.config.empty(torch.float32), of_last)
        draws = [] if drawing.temperature == 0 else [_draws(drawing, len(ids))]
        with torch.no_grad():
            out: Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                use_cache=logits is None,
                eos_token_id=list(ends) or None,
                pad_token_id=ends[0] if ends else 0,
                do_sample=False,
                logits_processor=draws,
            )
        return out

    def flops_per_token(self) -> int:
        return self._flops

    def stored(
        self, name: str, tensor: Tensor, slices: Slices, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Slices]]:
        """Yield this shard's rectangles of the tensor of Hugging Face, which packs projections in one dimension."""
        for piece, ranges in file_pieces(tensor, slices, shape, self._shapes[name]):
            yield self._shapes[name], piece, ranges


def _draws(drawing: Drawing, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what leaves transformers one token for each row of logits: the one that is drawn as for the GPT."""
    generators = [torch.Generator("cpu").manual_seed(drawing.seed + row) for row in range(rows)]

    def draw(_ids: Tensor, logits: Tensor) -> Tensor:
        drawn = choose(logits, drawing.temperature, drawing.top_k, drawing.top_p, generators).to(logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(1, drawn[:, None], 0.0)

    return draw


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _padded(ids: Tensor, length: int, stage: Stage) -> dict[str, Tensor]:
    """Return the arguments for the logits of the last of `length` tokens, which padding follows.

    Positions do not exceed those of the text, on which the frequencies of some rotary embeddings depend.
    """
    numbers = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    last = {"logits_to_keep": numbers[0, length - 1 : length]} if stage.last else {}
    return {"attention_mask": (numbers < length).long(), "position_ids": numbers.clamp(max=length - 1)} | last
