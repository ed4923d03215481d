"""What a checkpoint consists of: parts of tensors in memory, slices of them in files, and the manifest of both.

    {"sha256": of everything behind this line,
     "format": 1, "step": N,
     "files":   {file: {"size": bytes, "sha256": …}},
     "tensors": {name: {"shape": global, "dtype": as in safetensors,
                        "slices": [{"file": …, "ranges": [[start, stop] for every dimension]}]}},
     "state":   the caller's}

The slices of a tensor are a partition of its shape: none overlap, none lack. Those without elements are left out.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tpfuse.comm.layout import Slices
from tpfuse.train.safetensors_file import DTYPES

FORMAT = 1
MANIFEST = "manifest.json"
# What a rank holds: by tensor, its global shape, its dtype, and the slices that the rank writes, if any.
Description = dict[str, tuple[tuple[int, ...], str, Slices | None]]


class CheckpointError(Exception):
    """A damaged checkpoint: which file or folder, what was expected there, what was found."""

    def __init__(self, file: Path, expected: str, found: str) -> None:
        super().__init__(f"{file}: expected {expected}, found {found}")
        self.file, self.expected, self.found = file, expected, found


@dataclass
class Part:
    """The part of a global tensor that this rank holds.

    shape: of the global tensor. slices: [start, stop) of the part in every dimension. tensor: the part itself,
    on any device; loading writes into it in place. writer: whether this rank saves it; of the ranks with the
    same slices exactly one does.
    """

    shape: tuple[int, ...]
    slices: Slices
    tensor: Tensor
    writer: bool


def extent(slices: Slices) -> tuple[int, ...]:
    """The shape of a rectangle."""
    return tuple(stop - start for start, stop in slices)


def intersection(a: Slices, b: Slices) -> Slices | None:
    """The rectangle that both have, None where it is empty."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def place(slices: Slices, inside: Slices) -> tuple[slice, ...]:
    """The index of a rectangle in a tensor that holds the rectangle `inside`."""
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(slices, inside, strict=True))


def flaw(shape: tuple[int, ...], saved: list[Slices]) -> str | None:
    """Why these rectangles are not a partition of the shape; None if they are."""
    for index, slices in enumerate(saved):
        inside = len(slices) == len(shape) and all(0 <= a < b <= n for (a, b), n in zip(slices, shape, strict=True))
        if not inside:
            return f"the slice {slices} has no elements or is not inside the shape {shape}"
        if any(intersection(slices, other) is not None for other in saved[:index]):
            return f"the slice {slices} of the shape {shape} overlaps another one"
    missing = math.prod(shape) - sum(math.prod(extent(slices)) for slices in saved)
    return f"no slice holds {missing} of the elements of the shape {shape}" if missing else None


def check_part(name: str, part: Part) -> None:
    """Raises ValueError where tensor, slices and shape contradict each other."""
    if tuple(part.tensor.shape) != extent(part.slices) or len(part.shape) != len(part.slices):
        raise ValueError(
            f"part of {name}: a tensor {tuple(part.tensor.shape)} cannot be the slices {part.slices} of {part.shape}"
        )


def slices_of(ranges: list[list[int]]) -> Slices:
    """What JSON made lists of."""
    return tuple((start, stop) for start, stop in ranges)


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def describe(parts: dict[str, Part]) -> Description:
    """What this rank holds and writes. Raises ValueError for what cannot be saved."""
    description: Description = {}
    for name, part in parts.items():
        check_part(name, part)
        if part.tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {part.tensor.dtype}: a checkpoint holds {', '.join(map(str, DTYPES))}")
        writes = part.slices if part.writer and part.tensor.numel() else None
        description[name] = (tuple(part.shape), DTYPES[part.tensor.dtype], writes)
    return description


def tensor_table(described: list[Description]) -> dict[str, Any]:
    """The manifest's tensors from what each rank holds. Raises ValueError where ranks disagree or slices lack."""
    table: dict[str, Any] = {}
    for rank, description in enumerate(described):
        for name, (shape, dtype, slices) in description.items():
            entry = table.setdefault(name, {"shape": list(shape), "dtype": dtype, "slices": []})
            if (entry["shape"], entry["dtype"]) != (list(shape), dtype):
                raise ValueError(f"{name} is {dtype} {shape} on rank {rank}, {entry['dtype']} {entry['shape']} before")
            if slices is not None:
                entry["slices"].append({"file": file_name(rank), "ranges": slices})
    for name, entry in table.items():
        problem = flaw(tuple(entry["shape"]), [piece["ranges"] for piece in entry["slices"]])
        if problem is not None:
            raise ValueError(f"{name} cannot be saved: {problem} (exactly one rank writes each part)")
    return table


def encode(body: dict[str, Any]) -> bytes:
    """The manifest: JSON whose first entry is the SHA-256 of every byte behind that entry's line."""
    rest = json.dumps(body, indent=1).removeprefix("{\n").encode()
    return b'{\n "sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a step's folder, checked against itself and the folder's name. Raises CheckpointError."""
    file = folder / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(file, "a manifest", str(error)) from error
    head = re.match(rb'\{\n "sha256": "([0-9a-f]{64})",\n', raw)
    if head is None:
        raise CheckpointError(file, "its own SHA-256 in the first entry", repr(raw[:90]))
    stated, found = head[1].decode(), hashlib.sha256(raw[head.end() :]).hexdigest()
    if stated != found:
        raise CheckpointError(file, f"SHA-256 {stated}", found)
    try:
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise CheckpointError(file, f"format {FORMAT}", f"format {manifest['format']}")
        if folder.name != f"step-{manifest['step']}":
            raise CheckpointError(file, f"the step of {folder.name}", f"step {manifest['step']}")
        _check_tables(file, manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(file, f"a manifest of format {FORMAT}", repr(error)) from error


def _check_tables(file: Path, manifest: dict[str, Any]) -> None:
    manifest["state"]  # has to be there
    for name, entry in manifest["files"].items():
        # A name with a folder in it could lead out of the checkpoint.
        if not re.fullmatch(r"rank-\d+\.safetensors", name) or not {"size", "sha256"} <= entry.keys():
            raise CheckpointError(file, "files rank-….safetensors with size and sha256", f"{name!r}: {entry}")
    for name, entry in manifest["tensors"].items():
        problem = flaw(tuple(entry["shape"]), [slices_of(piece["ranges"]) for piece in entry["slices"]])
        unknown = {piece["file"] for piece in entry["slices"]} - manifest["files"].keys()
        if problem is not None or unknown or entry["dtype"] not in DTYPES.values():
            raise CheckpointError(file, f"slices that make up {name}", problem or f"{entry['dtype']} in {unknown}")
