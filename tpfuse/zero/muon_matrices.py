"""The matrices that Muon updates: those of a model's blocks, each by itself, also where one parameter packs several.

Muon is for the matrices of hidden layers; embeddings, the head, norms and biases belong to AdamW (Keller Jordan, "Muon:
An optimizer for hidden layers in neural networks"). Which parameters these are, and which rows of them make up a
matrix, follows from the modules, and is the same in every layout of ranks:

| parameter                                | matrices                                                           |
|------------------------------------------|--------------------------------------------------------------------|
| weight of a module in an nn.ModuleList   | one: [features out, features in]                                   |
| ColumnParallelLinear with several parts  | one for each part                                                  |
| c_attn, qkv_proj                         | q, k and v, one after another; fewer heads of keys and values than |
|                                          | of queries make k and v lower                                      |
| query_key_value of GPT-NeoX and BLOOM    | q, k and v, each of rows from all heads                            |
| gate_up_proj                             | gate and up                                                        |
| gate_up_proj [experts, rows, columns]    | gate and up of each expert                                         |
| gate_proj, up_proj, down_proj of three   | one for each expert                                                |
| dimensions                               |                                                                    |
| weight of a depthwise convolution        | none: its vectors, one for each channel, are AdamW's               |

Whether experts are stored as [experts, features in, features out], and gate and up alternately, is what transformers
says in the attributes `is_transposed` and `is_concatenated` of their module. A parameter that is also used outside the
blocks, or as an embedding, is AdamW's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tpfuse.comm import collectives
from tpfuse.comm.layout import Slices, model_device
from tpfuse.comm.mesh import shown
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear

Rows = tuple[tuple[int, int], ...]
"""The rows [start, stop) of a weight that make up a matrix, in their order in it."""
_PACKED = re.compile("qkv|query_key_value|c_attn|gate_up|in_proj")  # names of weights that pack several matrices
_ADAPTERS = re.compile("base_layer|lora_[AB]|default")  # of PEFT's LoRA, between the name of a layer and its weight
_HEAD_BY_HEAD = {"GPTNeoXAttention", "BloomAttention"}
_STACKED = {"gate_up_proj", "gate_proj", "up_proj", "down_proj"}  # parameters of experts
# The classes of experts without an attribute `is_transposed`, and what it would be.
_EXPERTS = {
    "Llama4TextExperts": True, "LongcatFlashExperts": False, "Step3p7Experts": False, "InklingSharedExperts": False,
}  # fmt: skip
_OTHERWISE = "in a loop of your own the argument `matrices` says it, or leaves it to AdamW"


class Box(NamedTuple):
    """A rectangle of a parameter, and the row and column of the matrix where it begins."""

    slices: Slices
    at: tuple[int, int]


@dataclass(frozen=True)
class HiddenMatrix:
    """A matrix in the parameter `name`. shape: its rows and columns as the parameter stores them."""

    name: str
    shape: tuple[int, int]
    boxes: tuple[Box, ...]
    transposed: bool  # whether it is stored as [features in, features out]
    numbering: tuple[int, ...]  # the dimensions of the parameter that number matrices: stacked ones, packed ones

    def parts(self, slices: Slices) -> Iterator[tuple[tuple[slice | int, ...], Slices]]:
        """Yield what a rectangle of the parameter has of the matrix: (index in the rectangle, slices of the matrix)."""
        for box, at in self.boxes:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(slices, box, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            index: list[slice | int] = [slice(a - low, b - low) for (a, b), (low, _) in zip(both, slices, strict=True)]
            inside = [(a - low, b - low) for (a, b), (low, _) in zip(both, box, strict=True)]
            for dim in reversed(self.numbering):
                index[dim] = both[dim][0] - slices[dim][0]
                del inside[dim]
            yield tuple(index), tuple((a + start, b + start) for (a, b), start in zip(inside, at, strict=True))


def block_matrices(model: nn.Module) -> dict[str, tuple[Rows, ...]]:
    """Return the parameters of a model that hold the matrices of its blocks, by name, with the rows of each matrix.

    Experts that are stacked in a parameter have the same rows, which are given once. The blocks are the modules in an
    nn.ModuleList. Frozen parameters are left out. Raise ValueError for a parameter of a block of which Muon cannot tell
    what matrices it holds: of more than two dimensions but no experts, or packed in an order that is not known.
    """
    found: dict[str, tuple[Rows, ...]] = {}
    in_blocks = {path for path, _ in model.named_modules() if _in_blocks(model, path)}
    elsewhere = {
        id(parameter)
        for path, module in model.named_modules()
        if path not in in_blocks or isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        hidden = path in in_blocks and id(parameter) not in elsewhere and not name.endswith("bias")
        vector = parameter.ndim != 2 and parameter.numel() == max(parameter.shape, default=1)
        if not hidden or vector or not parameter.numel() or not parameter.requires_grad:
            continue
        module = model.get_submodule(path)
        if isinstance(module, _ConvNd) and module.groups == module.in_channels:
            continue
        experts = kind in _STACKED and parameter.ndim > 2 and _stored_transposed(module) is not None
        if not experts and (kind != "weight" or parameter.ndim != 2 + (_parts(module) > 1)):
            raise ValueError(f"Muon cannot tell what {_described(name, parameter)} is; {_OTHERWISE}")
        found[name] = _rows_of(model, name if experts else path, module, parameter)
    return found


def hidden_matrices(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, tuple[Rows, ...]]:
    """Return `block_matrices`. Raise ValueError as that does, and if no rank has such matrices.

    group: the ranks of a pipeline, some of whose stages may be frozen; with it the call is collective.
    """
    found = block_matrices(model)
    if not collectives.on_any_rank(bool(found), model_device(model), group):
        raise ValueError(
            "Muon found no matrices of hidden layers, which it looks for in an nn.ModuleList of blocks: name the"
            ' matrices yourself, as in matrices={"0.weight": 1}'
        )
    return found


def _in_blocks(model: nn.Module, path: str) -> bool:
    names = path.split(".") if path else []
    return any(isinstance(model.get_submodule(".".join(names[:end])), nn.ModuleList) for end in range(len(names)))


def _described(name: str, parameter: Tensor) -> str:
    return f"{name} {list(parameter.shape)}"


def _parts(module: nn.Module) -> int:
    return module.parts if isinstance(module, ColumnParallelLinear) else 1


def _stored_transposed(experts: nn.Module) -> bool | None:
    """Return whether stacked weights are [experts, features in, features out]; None if the module does not say it."""
    known = (_EXPERTS[kind.__name__] for kind in type(experts).__mro__ if kind.__name__ in _EXPERTS)
    stored: bool | None = getattr(experts, "is_transposed", next(known, None))
    return stored


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a weight is [features in, features out], as in transformers' Conv1D."""
    return bool(getattr(module, "transposed", _stored_transposed(module))) or type(module).__name__ == "Conv1D"


def _is_stack(module: nn.Module, weight: Tensor) -> bool:
    """Return whether the first dimension of a weight numbers matrices that are stacked, and does not pack them."""
    return weight.ndim > 2 and _parts(module) == 1


def _features(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """Return (features in, features out) of a weight, which may have dimensions for stacked and packed matrices."""
    sizes = weight.shape[_is_stack(module, weight) :]
    features_in = sizes[0] if _is_transposed(module) else sizes[-1]
    return features_in, sizes.numel() // features_in


def _rows_of(model: nn.Module, path: str, module: nn.Module, weight: Tensor) -> tuple[Rows, ...]:
    """Return the rows of each matrix of a weight. Raise ValueError if its name says that it packs several."""
    features_in, features_out = _features(module, weight)
    if _parts(module) > 1:
        return _equal(_parts(module), features_out)
    names = path.split(".")
    while len(names) > 1 and _ADAPTERS.fullmatch(names[-1]):
        names.pop()
    parent: Any = model.get_submodule(".".join(names[:-1]))
    of_input = "lora_A" in path.split(".")  # it serves all packed matrices
    second = getattr(parent, "fc2", None)
    second = getattr(second, "base_layer", second)
    if names[-1] == "fc1" and isinstance(second, nn.Linear) and features_out == 2 * second.in_features and not of_input:
        return _equal(2, features_out)  # a gate and the first product, as in Moshi
    if not _PACKED.search(names[-1]) or of_input:
        return (((0, features_out),),)
    if names[-1] == "gate_up_proj" and features_out % 2 == 0 and getattr(module, "is_concatenated", True):
        return _equal(2, features_out)
    size = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
    if names[-1] == "query_key_value" and _HEAD_BY_HEAD & {kind.__name__ for kind in type(parent).__mro__} and size:
        starts = range(0, features_out, 3 * size)
        return tuple(tuple((at + part * size, at + (part + 1) * size) for at in starts) for part in range(3))
    if names[-1] == "qkv_proj" and hasattr(parent, "o_proj"):
        out = getattr(parent.o_proj, "base_layer", parent.o_proj)
        queries, _ = _features(out, out.weight)
        if queries < features_out and (features_out - queries) % 2 == 0:
            cut = (features_out + queries) // 2
            return ((0, queries),), ((queries, cut),), ((cut, features_out),)
    if names[-1] in ("c_attn", "qkv_proj") and features_out == 3 * features_in and not hasattr(parent, "multi_query"):
        return _equal(3, features_out)
    raise ValueError(f"Muon cannot tell what matrices {_described(path, weight)} packs; {_OTHERWISE}")


def _equal(parts: int, rows: int) -> tuple[Rows, ...]:
    height = rows // parts
    return tuple(((part * height, (part + 1) * height),) for part in range(parts))


def matrices_of(model: nn.Module, named: Mapping[str, int | Sequence[Rows]]) -> list[HiddenMatrix]:
    """Return the matrices in these parameters of this rank's model.

    named: by the names of parameters, the rows of each matrix (`hidden_matrices`), or into how many matrices of equal
    height the parameter is to be cut. A parameter of three dimensions stacks matrices [features out, features in], each
    of which is cut in this way. Raise ValueError for a parameter that is frozen, or no matrix and no stack, and for
    rows that do not have each of its rows once.
    """
    found: list[HiddenMatrix] = []
    parameters = dict(model.named_parameters())
    wide = {name: parameters[name].dtype is torch.float64 for name in named if name in parameters}
    if len(set(wide.values())) > 1:  # Newton-Schulz computes in one dtype
        double, other = (next(name for name, double in wide.items() if double is each) for each in (True, False))
        raise ValueError(f"matrices: {double} is float64 and {other} is not: expected all or none in float64")
    for name, packed in named.items():
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            raise ValueError(f"matrices: {shown(name)} is no parameter that the model trains")
        module = model.get_submodule(name.rpartition(".")[0])
        stacked = _is_stack(module, parameter)
        # Converted experts have a dimension of packed matrices, as linears have.
        packs = parameter.ndim == 4 and _stored_transposed(module) is not None if stacked else parameter.ndim == 3
        if parameter.ndim != 2 + stacked + packs or not parameter.numel() or isinstance(module, _ConvNd):
            raise ValueError(f"matrices: {_described(name, parameter)} is no matrix, which Muon needs")
        transposed, (_, features_out) = _is_transposed(module), _features(module, parameter)
        if packs and not stacked and packed == 1:
            packed = _parts(module)
        if isinstance(packed, int) and packed > 0 and features_out % packed == 0:
            packed = _equal(packed, features_out)
        covered = [] if isinstance(packed, int) else sorted(each for rows in packed for each in rows)
        if [0, *(stop for _, stop in covered)] != [*(start for start, _ in covered), features_out]:
            raise ValueError(
                f"matrices: {_described(name, parameter)} is to be cut into {packed}: expected a number that divides"
                f" its {features_out} rows, or all of them once"
            )
        assert not isinstance(packed, int)
        places: list[Slices] = [((at, at + 1),) for at in range(parameter.shape[0])] if stacked else [()]
        shape = tuple(parameter.shape)[stacked:]
        found += [_matrix(name, place, shape, rows, transposed, packs) for place in places for rows in packed]
    return found


def _matrix(
    name: str, place: Slices, shape: tuple[int, ...], rows: Rows, transposed: bool, packs: bool
) -> HiddenMatrix:
    """Return the matrix of some rows of a parameter, or of those at one place of a stack.

    place: slices of the dimension that numbers the stack, () for none. shape: the other dimensions. packs: whether
    these have one of parts before the rows.
    """
    dim = 1 if transposed else 0  # the first of the dimensions that number the rows
    height, boxes, end = shape[dim + packs], list[Box](), 0
    for start, stop in rows:
        for part in range(start // height, -(-stop // height)):
            first, last = max(start, part * height), min(stop, (part + 1) * height)
            slices = [(0, size) for size in shape]
            slices[dim + packs] = first - part * height, last - part * height
            if packs:
                slices[dim] = part, part + 1
            boxes.append(Box((*place, *slices), (0, end) if transposed else (end, 0)))
            end += last - first
    whole = (shape[0], end) if transposed else (end, shape[-1])
    numbering = (*range(len(place)), *[len(place) + dim] * packs)
    return HiddenMatrix(name, whole, tuple(boxes), transposed, numbering)
