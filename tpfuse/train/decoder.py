"""Decoders of Hugging Face's transformers in `tpfuse train`: --model.from FOLDER.

`DecoderConfig` describes such a model as `GPTConfig` does a GPT. It holds the contents of config.json, so that a
checkpoint needs no other file, and can be sampled, exported and resumed when FOLDER is gone. `DecoderModel` makes the
model on a rank with `tpfuse.parallelize`. Its parameters have the names and the shapes of Hugging Face in checkpoints.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.layout import Slices, copy_whole_
from tpfuse.comm.mesh import context_mesh, tensor_mesh
from tpfuse.drop_in.huggingface import adapt, causal_model, check_context, configuration, quiet
from tpfuse.drop_in.parallelize import outlined_shards, parallelize
from tpfuse.drop_in.structure import decoder_layers, recognise
from tpfuse.drop_in.weights import empty_model, file_pieces, find_weights, load_weights
from tpfuse.parallel.context import ONE_RANK, ContextParallel
from tpfuse.parallel.initialize import seed_of
from tpfuse.parallel.stored import StoredTensor
from tpfuse.train.options import TrainCommand
from tpfuse.train.shape_mesh import shape_mesh

_USUAL_LENGTH = 1024  # tokens of a training sequence, unless the model's context is shorter or the user says otherwise
_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of transformers, and the length of the sequences on which it is trained.

    settings: the contents of its config.json. n_positions: the tokens of a training sequence. files: the texts of small
    files that belong to the model and its tokenizer, by name. The other fields follow from settings: longest: the
    longest sequence of the model, in tokens; ends: the tokens that end a text.
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

    @classmethod
    def of(cls, settings: dict[str, Any], n_positions: int = 0, files: dict[str, str] | None = None) -> "DecoderConfig":
        """Returns the description. n_positions: 0 for the usual length. Raises ValueError for unusable settings."""
        theirs = configuration(settings)
        for name in _SIZES:
            size = getattr(theirs, name, None)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}: expected a decoder with a positive number")
        vocabulary, width, layers, heads, longest = (getattr(theirs, name) for name in _SIZES)
        ends = theirs.eos_token_id
        ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        n_positions = n_positions or min(longest, _USUAL_LENGTH)
        return cls(settings, n_positions, files or {}, vocabulary, width, layers, heads, longest, ends)

    @classmethod
    def read(cls, folder: Path, n_positions: int = 0) -> "DecoderConfig":
        """Returns the description of the model in a folder. Raises ValueError, which names the file."""
        path = folder / "config.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("it is no JSON object")
            present = [name for name in _FILES if (folder / name).is_file()]
            files = {name: (folder / name).read_text(encoding="utf-8") for name in present}
            return cls.of(settings, n_positions, files)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def as_json(self) -> dict[str, Any]:
        """Returns what `from_json` makes the description of."""
        return {"settings": self.settings, "n_positions": self.n_positions, "files": self.files}

    @classmethod
    def from_json(cls, description: dict[str, Any]) -> "DecoderConfig":
        """Returns the description that `as_json` has returned. Raises ValueError or TypeError for another value."""
        files = description["files"]
        if not all(isinstance(text, str) and name in _FILES for name, text in files.items()):
            raise ValueError(f"files: expected texts by the names {', '.join(_FILES)}")
        return cls.of(description["settings"], description["n_positions"], files)

    def empty(self, dtype: torch.dtype) -> nn.Module:
        """Returns the whole model with its parameters on the meta device. Raises ValueError."""
        quiet()
        model: nn.Module = empty_model(causal_model, self.settings, dtype)
        return model

    def outlined(self, mesh: DeviceMesh | None, dtype: torch.dtype) -> nn.Module:
        """Returns this rank's shards on the meta device. mesh: tensor-parallel, or None. Raises ValueError."""
        model = self.empty(dtype)
        return model if mesh is None else outlined_shards(model, mesh)

    def check(self, tp: int = 1) -> None:
        """Raises ValueError for a model that tpfuse cannot train on `tp` tensor-parallel ranks."""
        if not 1 <= self.n_positions <= self.longest:
            raise ValueError(f"n_positions {self.n_positions}: expected 1 to {self.longest}, the model's context")
        model = self.empty(torch.float32)
        decoder_layers(model)
        if tp > 1 and dist.is_initialized():  # under torchrun; the ranks find sizes that they cannot divide
            recognise(model, tp, sequence_parallel=True)
            return
        with shape_mesh(tp) as mesh:
            self.outlined(mesh, torch.float32)

    def check_context(self, tp: int) -> None:
        """Raises ValueError if context-parallel ranks cannot share the model's sequences."""
        check_context(self.empty(torch.float32), ONE_RANK, tp)

    def find_weights(self, folder: Path) -> dict[str, list[StoredTensor]]:
        """Returns the tensors in a folder's files for each parameter, by its name. Raises ValueError."""
        return find_weights(self.empty(torch.float32), folder)


class DecoderModel:
    """A decoder on this rank, which implements `tpfuse.train.language_model.LanguageModel`.

    mesh: the whole mesh of the run, None for one rank. Parameters are uninitialised: `draw` draws them. Raises
    ValueError for a model that the ranks cannot share.
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
        schedule = options.parallel.cp_schedule
        self.context = ContextParallel(context_mesh(mesh), schedule)
        self.device_mesh = tensor_mesh(mesh)
        if mesh is not None and (self.device_mesh is not None or self.context.groups):
            parallelize(model, mesh, context_parallel=schedule if self.context.groups else "auto")
        else:
            adapt(model, self.context, None)
        load_weights(model, {}, device)
        if options.train.recompute == "full":
            # Release 5.23 of transformers has renamed the method.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.module: nn.Module = model
        self._forward: Any = model  # in training
        self._drops = any(isinstance(value, float) and value for value in _dropouts(config.settings))

    def draw(self, seed: int) -> None:
        """Fills the parameters as transformers initialises the model after `torch.manual_seed(seed)`, on each rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            whole = dict(causal_model(self.config.settings, torch.float32).named_parameters())
        for name, parameter in self.module.named_parameters():
            copy_whole_(parameter, whole[name].detach().reshape(parameter.shape))

    def compile(self, *, one_graph: bool) -> None:
        """Lets training steps run by torch.compile; one_graph is not asked of code that is not ours."""
        from tpfuse.train.compiled import compiled

        self._forward = compiled(self.module, one_graph=False)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weight: float,
        at: tuple[int, int] | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss; see the protocol. Dropout masks follow from (seed, step, first sequence) and the layout."""
        training = at is not None
        self.module.train(training)
        self.module.training = True  # with labels, the model in eval mode would return whole logits
        if at is not None and self._drops:
            torch.manual_seed(seed_of(*at, 0 if sequences is None else int(sequences[0])))
        forward = self._forward if training else self.module
        out = forward(input_ids=ids, labels=targets, shift_labels=targets, num_items_in_batch=1, use_cache=False)
        loss: Tensor = out.loss * weight
        ranks = self.context.size  # each of them returns the whole loss, with the gradients of its own tokens
        return loss if ranks == 1 else loss - (1 - 1 / ranks) * loss.detach()

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None = None,
        ends: tuple[int, ...] = (),
        seed: int = 0,
    ) -> Tensor:
        """Returns the prompts with their continuations, by the `generate` of transformers; see the protocol.

        They end where the model's context is full; the prompts must be shorter than that.
        """
        model: Any = self.module.eval()
        drawing: dict[str, Any] = {"do_sample": False}
        if temperature:
            drawing = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            out: Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(tokens, self.config.longest - ids.shape[1]),
                eos_token_id=list(ends) or None,
                pad_token_id=ends[0] if ends else 0,
                **drawing,
            )
        return out

    def flops_per_token(self) -> int:
        """Returns the floating-point operations of a training step for each token, counted as for the GPT."""
        config, model = self.config, self.module
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        looked_up = sum(table.numel() for table in tables if table is not head.weight)
        products = sum(parameter.numel() for parameter in model.parameters()) - looked_up
        theirs = configuration(config.settings)
        size = getattr(theirs, "head_dim", None) or config.n_embd // config.n_head
        return int(6 * products + 12 * config.n_layer * config.n_positions * config.n_head * size)

    def stored(
        self, name: str, tensor: Tensor, slices: Slices, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Slices]]:
        """Yields this shard's rectangles of the tensor of Hugging Face, which packs projections in one dimension."""
        for piece, ranges in file_pieces(tensor, slices, shape, self._shapes[name]):
            yield self._shapes[name], piece, ranges


def _dropouts(settings: dict[str, Any]) -> Iterator[Any]:
    return (value for name, value in settings.items() if name.endswith(("dropout", "pdrop")))
