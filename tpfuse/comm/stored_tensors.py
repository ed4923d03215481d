"""Tensors in safetensors files, of which any slice can be read.

Safetensors files hold no code, and nothing is unpickled. A folder has its tensors in model.safetensors, or in several
files that model.safetensors.index.json lists.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


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
    """Return the tensors of a folder, or of one file, by their names.

    Raise ValueError for files that are missing or damaged, for pickles, and for a name that appears twice.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder_or_file):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name in tensors:
                        raise ValueError(f"{file}: {name} appears twice")
                    stored = opened.get_slice(name)
                    tensors[name] = StoredTensor(file, name, torch.Size(stored.get_shape()), stored.get_dtype())
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error
    return tensors


def _unreadable(file: Path, error: Exception) -> ValueError:
    way = "get it again, by hf download or git lfs pull"
    if not file.exists() and any(file.parent.glob("model-*.safetensors")) and file.name == "model.safetensors":
        way = "the files beside it are parts: get model.safetensors.index.json, which names them"
    return ValueError(f"{file}: cannot be read as a safetensors file: {error}: {way}")


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        if path.suffix == ".bin":
            raise ValueError(_pickled(path))
        yield path
        return
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file() or not index.is_file():
        pickles = sorted(path.glob("pytorch_model*.bin"))
        if pickles and not (path / "model.safetensors").is_file():
            raise ValueError(_pickled(pickles[0]))
        yield path / "model.safetensors"
        return
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: cannot be read as an index of safetensors files") from error
    for name in sorted(names, key=str):
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not the name of a file beside it")
        yield path / name


def _pickled(file: Path) -> str:
    folder = str(file.parent)
    return (
        f"{file} is a pickle, which can run code when it is read, and model.safetensors is missing: if you trust the"
        " file, convert it with transformers:"
        f' python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({folder!r})'
        f'.save_pretrained({folder!r})"'
    )
