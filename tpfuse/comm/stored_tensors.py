"""Tensors in safetensors files, of which any slice can be read, and the check that they are a model's.

Safetensors files hold no code, and nothing is unpickled. A folder has its tensors in model.safetensors, or in several
files that model.safetensors.index.json lists.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# What torch.compile puts into names, and DistributedDataParallel before them.
_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+|(?<=\.)_orig_mod\.")
_MERGED = "for a model with adapters of PEFT, call its merge_and_unload(), and save_pretrained() of the result"
UNQUANTIZED = "for quantized weights, get those that they were made from, or dequantize them"
# What to do about files with tensors of such names that the model does not have.
_WAYS = (
    (re.compile(r"qweight$|qzeros$|scales?$|scale_inv$|_packed$|absmax$|\.SCB$"), UNQUANTIZED),
    (re.compile(r"\.base_layer\.|\.lora_|^base_model\."), _MERGED),
    (re.compile(""), "expected the config.json that belongs to these files"),
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. dtype: its name in the file, such as "BF16"."""

    file: Path
    name: str
    shape: torch.Size
    dtype: str

    def __getitem__(self, slices: slice | tuple[slice, ...] | EllipsisType) -> Tensor:
        """Return a slice of the tensor, in the dtype of the file. Raise ValueError if the file cannot be read.

        The slice is a view of the file, which is mapped to memory as long as the slice exists: a process that copies
        one slice after another never has more than one tensor of the file in memory.
        """
        try:
            with safe_open(self.file, framework="pt") as opened:
                part: Tensor = opened.get_slice(self.name)[slices]
                return part
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.file, error) from error


def stored_tensors(folder_or_file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, or of one file, by their names without those of wrappers (`unwrapped`).

    If several files have a tensor, the one counts that the index names. Raise ValueError for files that are missing or
    damaged, for pickles, and for a name that appears twice.
    """
    files, owners = _files(folder_or_file)
    copies: dict[str, list[StoredTensor]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    stored = opened.get_slice(name)
                    tensor = StoredTensor(file, name, torch.Size(stored.get_shape()), stored.get_dtype())
                    copies.setdefault(unwrapped(name), []).append(tensor)
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error
    tensors: dict[str, StoredTensor] = {}
    for name, each in copies.items():
        first, *others = [x for x in each if owners.get(x.name) == x.file.name] or each
        if others:
            raise ValueError(twice(first, others[0]))
        tensors[name] = first
    return tensors


def unwrapped(name: str) -> str:
    """Return the name that a tensor has in a model which torch.compile and DistributedDataParallel do not wrap."""
    return _WRAPPERS.sub("", name)


def twice(one: StoredTensor, other: StoredTensor) -> str:
    """Return in words that two tensors of files are the same tensor of a model."""
    way = f"expected one of them, or a {_INDEX} that names its file"
    return f"{one.file}: {one.name} appears twice, also in {other.file} as {other.name}: {way}"


def check_tensor(tensor: StoredTensor, shape: Sequence[int], *, floating: bool = True) -> None:
    """Raise ValueError unless the tensor has a model's shape, and a float dtype if `floating`."""
    if floating and tensor.dtype not in _FLOATS:
        raise ValueError(
            f"{tensor.file}: {tensor.name} is {tensor.dtype}: expected {', '.join(_FLOATS)}; {UNQUANTIZED}"
        )
    if list(tensor.shape) != list(shape):
        raise ValueError(f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}: the model has {list(shape)}")


def check_names(
    path: Path, missing: Sequence[str], extra: Mapping[str, StoredTensor], parameters: Iterable[str], way: str = ""
) -> str:
    """Return a line that says which tensors of a folder or file, `path`, a model does not have; "" if it has all.

    missing: the names of the model's tensors that are not there. extra: those that it does not have, by the names they
    would have in it. parameters: the names of its parameters. way: what to do if tensors are missing, where that is
    known. Raise ValueError if tensors are missing, or if others belong to a layer of the model: biases, scales, norms
    and adapters change what it computes, but layers, heads and towers that it lacks do not.
    """
    holders = {name.rpartition(".")[0] for name in parameters}
    blocks = {outer for name in holders for outer in _outer(name)}
    layers = holders - blocks | {name for name in blocks if name.rpartition(".")[2].isdigit()}
    inside = [tensor.name for name, tensor in extra.items() if not layers.isdisjoint(_outer(name))]
    unknown = inside if inside and not missing else [tensor.name for tensor in extra.values()]
    not_there = f"{len(missing)} tensors are missing: {', '.join(missing[:5])}" if missing else ""
    not_known = f"{len(unknown)} tensors are not the model's: {', '.join(unknown[:5])}" if unknown else ""
    if not missing and not inside:
        return f"{path}: {not_known}: they are left out" if not_known else ""
    if unknown:
        way = way or next(way for pattern, way in _WAYS if any(map(pattern.search, unknown)))
    way = way or "expected all files of the model that config.json describes"
    raise ValueError(f"{path}: {'; '.join(filter(None, (not_there, not_known)))}: {way}")


def _outer(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module or tensor of this name."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _unreadable(file: Path, error: Exception) -> ValueError:
    way = "get it again, by hf download or git lfs pull"
    if not file.exists() and any(file.parent.glob("model-*.safetensors")) and file.name == "model.safetensors":
        way = f"the files beside it are parts: get {_INDEX}, which names them"
    if not file.exists() and (file.parent / "adapter_model.safetensors").is_file():
        way = _MERGED
    return ValueError(f"{file}: cannot be read as a safetensors file: {error}: {way}")


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files to read, and the names of the files that have tensors by an index, by the tensors' names."""
    if not path.is_dir():
        if path.suffix == ".bin":
            raise ValueError(_pickled(path))
        return [path], {}
    index = path / _INDEX
    if (path / "model.safetensors").is_file() or not index.is_file():
        pickles = sorted(path.glob("pytorch_model*.bin"))
        if pickles and not (path / "model.safetensors").is_file():
            raise ValueError(_pickled(pickles[0]))
        return [path / "model.safetensors"], {}
    try:
        owners = dict(json.loads(index.read_text())["weight_map"])
        names = sorted(set(owners.values()), key=str)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: cannot be read as an index of safetensors files") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not the name of a file beside it")
    return [path / name for name in names], owners


def _pickled(file: Path) -> str:
    folder = str(file.parent)
    return (
        f"{file} is a pickle, which can run code when it is read, and model.safetensors is missing: if you trust the"
        " file, convert it with transformers:"
        f' python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({folder!r})'
        f'.save_pretrained({folder!r})"'
    )
