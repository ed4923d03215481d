"""The tensors of files by the names, and in the shapes, that transformers gives them when it loads them.

transformers has modules that do not look like the files of their models: for example, the experts of a
layer are one parameter, and each of them is a tensor of its own in a file. Its table of conversions says which tensors
it renames, and which it merges or splits; `save_pretrained` undoes this. Here the same conversions run when a tensor is
read: until then only shapes are known.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from tpfuse.comm.stored_tensors import StoredTensor
from tpfuse.drop_in.huggingface import conversions, outermost


@dataclass(frozen=True)
class MergedTensor(StoredTensor):
    """A tensor that transformers computes from tensors in files; file and dtype are those of the first of them."""

    merge: "_Conversion"

    def __getitem__(self, slices: slice | tuple[slice, ...] | EllipsisType) -> Tensor:
        """Return a slice of the tensor. Everything of which it is made is read for it. Raise ValueError as for one."""
        return self.merge.run(lambda stored: stored[()])[self.name][slices]


@dataclass(frozen=True)
class _Conversion:
    model: nn.Module
    converter: Any
    target: str
    sources: dict[str, list[StoredTensor]]  # for each of the converter's patterns, in the order of their names

    def run(self, read: Any) -> dict[str, Tensor]:
        """Return the tensors that the conversion makes, by their names. read: returns the values of a stored tensor."""
        converter: Any = copy.deepcopy(self.converter)
        for pattern, tensors in self.sources.items():
            for tensor in tensors:
                converter.add_tensor(self.target, tensor.name, pattern, lambda tensor=tensor: read(tensor))
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def tensors(self) -> Iterator[MergedTensor]:
        """Yield what the conversion makes. Raise ValueError if the shapes of its sources do not fit."""
        first = next(iter(self.sources.values()))[0]
        try:
            made = self.run(lambda stored: torch.empty(stored.shape, device="meta"))
        except Exception as error:  # a conversion may fail anywhere
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{first.file}: transformers cannot make {self.target} of {first.name}: {reason}"
            ) from error
        for name, value in made.items():
            yield MergedTensor(first.file, name, value.shape, first.dtype, self)


def loaded_tensors(whole: nn.Module, stored: Mapping[str, StoredTensor]) -> list[tuple[str, StoredTensor]]:
    """Return (name, tensor) of what transformers loads into a model for the tensors in files.

    Tensors for which it has no conversion stay as they are, and so do all those of other models. Raise ValueError for
    tensors that it cannot convert.
    """
    renamings, converters = conversions(whole)
    if not renamings and not converters:
        return list(stored.items())
    model = outermost(whole)
    assert model is not None
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    loaded: list[tuple[str, StoredTensor]] = []
    merges: dict[str, _Conversion] = {}
    for name in sorted(stored, key=_in_order):
        renamed, pattern, converter = name, None, None
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in converters:
            renamed, pattern = converter.rename_source_key(renamed)
            if pattern is not None:  # it is the only one
                break
        if pattern is None or (name in known and renamed not in known):
            loaded.append((name if name in known and renamed not in known else renamed, stored[name]))
            continue
        merge = merges.setdefault(renamed, _Conversion(model, converter, renamed, {}))
        merge.sources.setdefault(pattern, []).append(stored[name])
    return loaded + [(tensor.name, tensor) for merge in merges.values() for tensor in merge.tensors()]


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a key by which expert 10 follows expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
