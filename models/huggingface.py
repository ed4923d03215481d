"""Read and write GPT-2 in Hugging Face's form: config.json and model.safetensors.

Parameter names are equal. Linear weights are stored [in, out] there (its Conv1D) and [out, in] here, and the packed
c_attn is [C, 3C] there and [3, C, C] here. Each rank reads only the slices that it holds
(`tpfuse.comm.stored_tensors`).
"""

import json
import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.collectives import on_any_rank
from tpfuse.comm.dispatch import meet
from tpfuse.comm.layout import gather_whole, load_part_, model_device
from tpfuse.comm.mesh import groups_of
from tpfuse.comm.stored_tensors import StoredTensor, check_names, check_tensor, stored_tensors, twice
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt

_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_LINEAR = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
_ROWS = 4096  # rows of the vocabulary that are compared at a time
# These settings of transformers' GPT2Config must have one of these values, since this model has no other form.
_FIXED: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


@dataclass(frozen=True)
class Pretrained:
    """A GPT-2 in Hugging Face's form. left_out: a line about tensors in its files that are not a GPT-2's, or ""."""

    config: GPTConfig
    left_out: str
    _tensors: dict[str, StoredTensor]  # by name without the prefix

    def read(self, name: str, slices: tuple[tuple[int, int], ...]) -> Tensor:
        """Return the slice [start, stop) … of parameter `name` of `GPT`, in the dtype of the file."""
        return _read(self._tensors[name.removeprefix(_PREFIX)], name, self.config.n_embd, slices)


def open_pretrained(folder_or_file: str | Path) -> Pretrained:
    """Find the tensors that `load_pretrained` loads, and check the names and shapes of all of them.

    Raise ValueError as `load_pretrained` does.
    """
    path = Path(folder_or_file)
    config = read_config(path)
    tensors = _find_tensors(path)
    return Pretrained(config, _check_tensors(config, tensors, path), tensors)


def load_pretrained(
    folder_or_file: str | Path,
    *,
    device_mesh: DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GPT:
    """Load the GPT-2 in a folder, or in a .safetensors file with its config.json beside it.

    device_mesh: the tensor-parallel mesh, on all of whose ranks this is called, without communication; None for one
    rank. Tensor names may begin with "transformer.", and lm_head.weight is accepted if it equals the embedding. Tensors
    of any float dtype are converted to `dtype`. Tensors of layers that the model lacks are left out with a warning.
    Raise ValueError for files that are missing or damaged, for tensors that are missing, unexpected in a layer of the
    model, or of another shape or kind, for a configuration that is not GPT-2's or has settings that `GPT` does not
    support, and if the mesh cannot hold the model.
    """
    pretrained = open_pretrained(folder_or_file)
    if pretrained.left_out and not any(device_mesh.get_coordinate() or () if device_mesh else ()):
        warnings.warn(pretrained.left_out, stacklevel=2)
    model = parallelize_gpt(GPT(pretrained.config, device="meta", dtype=dtype), device_mesh).to_empty(device=device)
    for name, parameter in model.named_parameters():
        load_part_(parameter, partial(pretrained.read, name))
    return model


def save_pretrained(
    model: GPT, folder: str | Path, *, bos_and_eos: tuple[int | None, int | None] | None = None
) -> None:
    """Write the model so that `transformers.GPT2LMHeadModel.from_pretrained(folder)` loads it.

    It is collective over the ranks of the model's mesh (with data parallelism, of one replica's mesh). The first rank
    writes, in the parameters' dtype. Biases that the model does not have are written as zeros, which give the same
    logits. bos_and_eos: the tokens that begin and that end a text, for config.json; without it the last token is both
    if the vocabulary has the size of GPT-2's. Raise ValueError on every rank if the folder holds either file already,
    and OSError on the writing rank alone.
    """
    folder = Path(folder)
    meet("save_pretrained, which all ranks of the model call", *groups_of(model.device_mesh))
    there = [name for name in ("config.json", "model.safetensors") if (folder / name).exists()]
    if on_any_rank(bool(there), model_device(model), *groups_of(model.device_mesh)):
        raise ValueError(
            f"{folder} holds {' and '.join(there) or 'a model'} already: remove it or choose another folder"
        )
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        whole = gather_whole(parameter)
        if model.rank == 0:
            tensors[name] = _to_conv1d(name, whole).cpu()
    if model.rank == 0:
        for name, shape in _shapes(model.config).items():
            if _PREFIX + name not in tensors:
                tensors[_PREFIX + name] = torch.zeros(shape, dtype=next(iter(tensors.values())).dtype)
        folder.mkdir(parents=True, exist_ok=True)
        # The configuration comes last: a folder without one is not taken for a model.
        unfinished = folder / "model.safetensors.unfinished"
        try:
            save_file(tensors, unfinished, metadata={"format": "pt"})
            unfinished.rename(folder / "model.safetensors")
        except SafetensorError as error:
            raise OSError(f"cannot write {unfinished}: {error}") from None
        finally:
            unfinished.unlink(missing_ok=True)
        (folder / "config.json").write_text(json.dumps(_config_of(model.config, bos_and_eos), indent=2) + "\n")


def read_config(folder_or_file: Path) -> GPTConfig:
    """Return the model that config.json, in the folder or beside the file, describes. Raise ValueError."""
    path = (folder_or_file if folder_or_file.is_dir() else folder_or_file.parent) / "config.json"
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a model's configuration: {error}") from error
    if not isinstance(settings, dict) or settings.get("model_type") != "gpt2":
        kind = settings.get("model_type") if isinstance(settings, dict) else None
        raise ValueError(f"{path}: model_type is {kind!r}, expected 'gpt2'")
    for name, allowed in _FIXED.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{path}: {name} is {settings[name]!r}, expected {' or '.join(map(repr, allowed))}")
    default = GPTConfig()
    sizes = {}
    for name in _SIZES:
        sizes[name] = settings.get(name, getattr(default, name))
        if type(sizes[name]) is not int:
            raise ValueError(f"{path}: {name} is {sizes[name]!r}, expected an integer")
    if settings.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(
            f"{path}: n_inner is {settings['n_inner']!r}, expected null or 4 n_embd = {4 * sizes['n_embd']}"
        )
    dropouts = {name: _number(path, settings, name, 0.1) for name in _DROPOUTS}
    if len(set(dropouts.values())) > 1:
        raise ValueError(f"{path}: the dropout probabilities {dropouts} differ, expected one for all")
    epsilon = _number(path, settings, "layer_norm_epsilon", 1e-5)
    return GPTConfig(**sizes, dropout=dropouts["embd_pdrop"], layer_norm_epsilon=epsilon)


def _number(path: Path, settings: dict[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path}: {name} is {value!r}, expected a number")
    return float(value)


def _config_of(config: GPTConfig, bos_and_eos: tuple[int | None, int | None] | None) -> dict[str, object]:
    gpt2_text = config.vocab_size == GPTConfig().vocab_size
    bos, eos = bos_and_eos or 2 * (config.vocab_size - 1 if gpt2_text else None,)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, name) for name in _SIZES},
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.layer_norm_epsilon,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def _shapes(config: GPTConfig) -> dict[str, list[int]]:
    """Return the shape of every tensor of a GPT-2 as Hugging Face has it, by name without the prefix."""
    c = config.n_embd
    shapes = {"wte.weight": [config.vocab_size, c], "wpe.weight": [config.n_positions, c]}
    for norm in ("ln_f", *(f"h.{i}.{norm}" for i in range(config.n_layer) for norm in ("ln_1", "ln_2"))):
        shapes |= {f"{norm}.weight": [c], f"{norm}.bias": [c]}
    linears = {"attn.c_attn": (c, 3 * c), "attn.c_proj": (c, c), "mlp.c_fc": (c, 4 * c), "mlp.c_proj": (4 * c, c)}
    for layer in range(config.n_layer):
        for linear, (wide, high) in linears.items():
            shapes |= {f"h.{layer}.{linear}.weight": [wide, high], f"h.{layer}.{linear}.bias": [high]}
    return shapes


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the file(s) by name without the prefix."""
    tensors: dict[str, StoredTensor] = {}
    for stored_name, tensor in stored_tensors(path).items():
        name = stored_name.removeprefix(_PREFIX)
        if name in tensors:
            raise ValueError(twice(tensor, tensors[name]))
        if not _BUFFERS.fullmatch(name):
            tensors[name] = tensor
    return tensors


def _check_tensors(config: GPTConfig, tensors: dict[str, StoredTensor], path: Path) -> str:
    """Return a line about tensors that are not a GPT-2's, or "". Raise ValueError as `load_pretrained` does."""
    expected = _shapes(config)
    missing = [name for name in expected if name not in tensors]
    extra = {name: tensors[name] for name in tensors if name not in expected and name != _HEAD}
    left_out = check_names(path, missing, extra, expected)
    for name, shape in expected.items():
        check_tensor(tensors[name], shape)
    if _HEAD in tensors and not _equal(tensors[_HEAD], tensors["wte.weight"]):
        raise ValueError(f"{path}: {_HEAD} is not wte.weight: the output embedding must be tied to the input's")
    return left_out


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:
        return False
    return all(torch.equal(a[i : i + _ROWS], b[i : i + _ROWS]) for i in range(0, a.shape[0], _ROWS))


def _read(tensor: StoredTensor, name: str, width: int, slices: tuple[tuple[int, int], ...]) -> Tensor:
    """Read the slice [start, stop) … of parameter `name` of `GPT` from the stored tensor."""
    rows = [slice(*bounds) for bounds in slices]
    if "c_attn" not in name or name.endswith("bias"):
        return tensor[rows[1], rows[0]].t() if _LINEAR.search(name) else tensor[tuple(rows)]
    parts, height = range(*slices[0]), slices[1]
    columns = [slice(p * width + height[0], p * width + height[1]) for p in parts]
    return torch.stack([tensor[rows[2], c].t() for c in columns])


def _to_conv1d(name: str, whole: Tensor) -> Tensor:
    if "c_attn" in name and name.endswith("weight"):
        whole = whole.flatten(0, 1)
    return whole.t().contiguous() if _LINEAR.search(name) else whole.contiguous()
