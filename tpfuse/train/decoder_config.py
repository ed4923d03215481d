"""The description of a decoder of Hugging Face's transformers in `tpfuse train`: --model.from FOLDER.

`DecoderConfig` describes such a model as `GPTConfig` does a GPT. It holds the contents of config.json, so that a
checkpoint needs no other file, and can be sampled, exported and resumed when FOLDER is gone.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpfuse.comm.stored_tensors import StoredTensor
from tpfuse.drop_in.context_proof import separates_documents
from tpfuse.drop_in.decoder_stages import DecoderStages, decoder_parts
from tpfuse.drop_in.huggingface import causal_model, check_context, configuration, quiet
from tpfuse.drop_in.parallelize import outlined_shards
from tpfuse.drop_in.stage_proof import prove_stages
from tpfuse.drop_in.structure import Recognised, decoder_layers, recognise
from tpfuse.drop_in.weights import empty_model, find_weights
from tpfuse.errors import instead_of
from tpfuse.parallel.context import ONE_RANK
from tpfuse.parallel.pipeline.cut import Cost, Stage
from tpfuse.parallel.pipeline.parts import as_modules

_USUAL_LENGTH = 1024  # tokens of a training sequence, unless the model's context is shorter or the user says otherwise
_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_LENGTHS = ("max_position_embeddings", "seq_length")  # the latter is Bloom's, whose positions have no limit
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
        vocabulary, width, layers, heads = (getattr(theirs, name) for name in _SIZES)
        lengths = (getattr(theirs, name, None) for name in _LENGTHS)
        longest = next((length for length in lengths if length is not None), n_positions or _USUAL_LENGTH)
        if not isinstance(longest, int) or longest < 1:
            raise ValueError(f"{_LENGTHS[0]} is {longest!r}: expected a positive number")
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
        prove_stages(model)
        parts = decoder_parts(model).of(model)
        first, last = (count_parameters(nn.ModuleList(as_modules(ends))) for ends in (parts.embed, parts.head))
        sizes, attention = [count_parameters(block) for block in parts.blocks], self.attention_flops()
        return [Cost(6 * size + attention, size) for size in sizes], Cost(0, first), Cost(6 * last, last)

    def attention_flops(self) -> int:
        """Return the mean operations of a layer's attention for a token in a training step, as counted for the GPT."""
        layers = configuration(self.settings).per_layer_config
        sizes = [getattr(layer, "head_dim", None) or self.n_embd // self.n_head for layer in layers]
        return int(12 * self.n_positions * self.n_head * sum(sizes) / len(sizes))

    @cached_property
    def tied(self) -> list[str]:
        """Return the names of the parameters that are in the embedding and in the head, which a pipeline has apart."""
        model: Any = self.empty(torch.float32)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        shared = {*embedding.parameters()} & {*head.parameters()}
        return [name for name, parameter in model.named_parameters() if parameter in shared]

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

    def check_documents(self) -> None:
        """Raise ValueError if a document in a sequence would see those before it, whatever its positions."""
        model = self.empty(torch.float32)
        if not separates_documents(model):
            raise ValueError(f"{type(model).__name__} lets a document see those before it, whatever its positions")

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


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
