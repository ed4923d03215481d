"""The contents of a checkpoint: shards of tensors in memory, slices of them in files, and the manifest of both.

    {"sha256": of everything after this line,
     "format": 2, "step": N,
     "files":   {file: {"size": bytes, "sha256": …}},
     "tensors": {name: {"shape": global, "dtype": as in safetensors, "digest": of all elements (`digest`),
                        "slices": [{"file": …, "key": name in the file,
                                    "ranges": [[start, stop] for every dimension]}]}},
     "state":   the caller's}

The slices of a tensor are a partition of its shape: no slices overlap, and no element is missing. Slices without
elements are left out. A rank may hold several shards of one tensor; in its file their keys are NAME, NAME#1, NAME#2, …
"""

import hashlib
import json
import math
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpfuse.checkpoint.safetensors_file import DTYPES
from tpfuse.checkpoint.untrusted import EACH, Unreadable, check, parsed_json, quoted, read_bytes
from tpfuse.comm.layout import Slices
from tpfuse.errors import CheckpointError as CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
_SCHEMA = {
    "step": int,
    "files": {EACH: {"size": int, "sha256": str}},
    "tensors": {
        EACH: {"shape": [int], "dtype": str, "digest": int, "slices": [{"file": str, "key": str, "ranges": [[int]]}]},
    },
    "state": dict,
}
# The shards of a rank: by tensor, its global shape, its dtype, and the slices that the rank writes, if any, by key,
# with their digests.
Description = dict[str, tuple[tuple[int, ...], str, dict[str, tuple[Slices, int]]]]
_MODULUS = 2**64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20  # elements whose digest is computed in one call
# The factors of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), as
# signed numbers of 64 bits.
_STRIDE, _MIX = 0x9E3779B97F4A7C15 - _MODULUS, 0xBF58476D1CE4E5B9 - _MODULUS


@dataclass
class Shard:
    """A shard of a global tensor that this rank holds.

    shape: the shape of the global tensor. slices: [start, stop) of the shard in every dimension. tensor: the shard
    itself, on any device; loading writes into it in place. is_owner: whether this rank saves it; exactly one of the
    ranks with the same slices does.
    """

    shape: tuple[int, ...]
    slices: Slices
    tensor: Tensor
    is_owner: bool


Shards = Mapping[str, Sequence[Shard]]  # by the name of the global tensor, all shards of it that a rank holds


def extent(slices: Slices) -> tuple[int, ...]:
    """Return the shape of a rectangle."""
    return tuple(stop - start for start, stop in slices)


def intersection(a: Slices, b: Slices) -> Slices | None:
    """Return the intersection of two rectangles, or None if it is empty."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def index_within(slices: Slices, inside: Slices) -> tuple[slice, ...]:
    """Return the index of the rectangle `slices` in a tensor that holds the rectangle `inside`."""
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(slices, inside, strict=True))


def flaw(shape: tuple[int, ...], saved: list[Slices]) -> str | None:
    """Return why these rectangles are not a partition of the shape, or None if they are.

    Each place along a dimension has a random mass, and the mass of a rectangle is the product of those of its sides. If
    the masses of all rectangles add up to that of the whole, they are a partition, but for a chance of about 2**-64.
    """
    for slices in saved:
        inside = len(slices) == len(shape) and all(0 <= a < b <= n for (a, b), n in zip(slices, shape, strict=True))
        if not inside:
            return f"the slice {slices} has no elements or is not inside the shape {shape}"
    before: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbits(64))  # the mass before a place

    def mass(slices: Slices) -> int:
        return math.prod(before[axis, stop] - before[axis, start] for axis, (start, stop) in enumerate(slices))

    if sum(map(mass, saved)) == mass(tuple((0, size) for size in shape)):
        return None
    for index, slices in enumerate(saved):
        if any(intersection(slices, other) is not None for other in saved[:index]):
            return f"the slice {slices} of the shape {shape} overlaps another one"
    missing = math.prod(shape) - sum(math.prod(extent(slices)) for slices in saved)
    return f"no slice holds {missing} of the elements of the shape {shape}"


def check_shard(name: str, shard: Shard) -> None:
    """Raise ValueError if tensor, slices and shape contradict each other."""
    if tuple(shard.tensor.shape) != extent(shard.slices) or len(shard.shape) != len(shard.slices):
        raise ValueError(
            f"shard of {name}: a tensor of shape {tuple(shard.tensor.shape)} cannot be the slices {shard.slices} of"
            f" {shard.shape}"
        )


def slices_of(ranges: list[list[int]]) -> Slices:
    """Convert slices from the lists that JSON has made of them."""
    return tuple((start, stop) for start, stop in ranges)


def digest(shard: Shard) -> int:
    """Return a digest of 64 bits of a shard: the sum over its elements of a hash of their bits and global places.

    The digest of a tensor is the sum modulo 2**64 of those of its shards, in whatever way it is cut.
    """
    tensor, slices, shape = shard.tensor.detach(), shard.slices, shard.shape
    if not shape:
        tensor, slices, shape = tensor.reshape(1), ((0, 1),), (1,)
    inner = torch.zeros((), dtype=torch.int64, device=tensor.device)  # the places of a row's elements in a row
    for (start, stop), size in zip(slices[1:], shape[1:], strict=True):
        inner = inner[..., None] * size + torch.arange(start, stop, device=tensor.device)
    rows, row = max(1, _BLOCK // max(1, inner.numel())), math.prod(shape[1:])
    total = 0
    for first in range(0, len(tensor), rows):
        part = tensor[first : first + rows].contiguous()
        places = slices[0][0] + torch.arange(first, first + len(part), device=tensor.device)
        hashed = (places * row).view(-1, *[1] * inner.dim()) + inner
        hashed.mul_(_STRIDE).add_(part.view(_INTEGERS[part.element_size()]))
        hashed ^= (hashed >> 32) & 0xFFFFFFFF  # the shift repeats the sign
        hashed.mul_(_MIX)
        total += int(hashed.sum())
    return total % _MODULUS


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def owned_shards(name: str, shards: Sequence[Shard]) -> Iterator[tuple[str, Shard]]:
    """Yield the shards of a tensor that this rank writes, each with its key in the rank's file."""
    writes = (shard for shard in shards if shard.is_owner and shard.tensor.numel())
    for index, shard in enumerate(writes):
        yield f"{name}#{index}" if index else name, shard


def describe(shards: Shards) -> Description:
    """Describe the shards that this rank holds and writes. Raise ValueError for a shard that cannot be saved."""
    description: Description = {}
    for name, held in shards.items():
        if "#" in name:
            raise ValueError(f"{name} cannot be saved: # separates a tensor's name from the number of its shard")
        for shard in held:
            check_shard(name, shard)
            if shard.tensor.dtype not in DTYPES:
                raise ValueError(f"{name} is {shard.tensor.dtype}: a checkpoint holds {', '.join(map(str, DTYPES))}")
        kinds = {(tuple(shard.shape), DTYPES[shard.tensor.dtype]) for shard in held}
        if len(kinds) > 1:
            raise ValueError(f"{name} has shards of different tensors on one rank: {sorted(kinds)}")
        for shape, dtype in kinds:
            written = {key: (shard.slices, digest(shard)) for key, shard in owned_shards(name, held)}
            description[name] = shape, dtype, written
    return description


def tensor_table(described: list[Description]) -> dict[str, Any]:
    """Return the manifest's tensors from every rank's description.

    Raise ValueError if ranks disagree or slices are missing.
    """
    table: dict[str, Any] = {}
    for rank, description in enumerate(described):
        for name, (shape, dtype, slices) in description.items():
            entry = table.setdefault(name, {"shape": list(shape), "dtype": dtype, "digest": 0, "slices": []})
            if (entry["shape"], entry["dtype"]) != (list(shape), dtype):
                raise ValueError(f"{name} is {dtype} {shape} on rank {rank}, {entry['dtype']} {entry['shape']} before")
            file = file_name(rank)
            entry["slices"] += [{"file": file, "key": key, "ranges": ranges} for key, (ranges, _) in slices.items()]
            entry["digest"] = (entry["digest"] + sum(of_slice for _, of_slice in slices.values())) % _MODULUS
    for name, entry in table.items():
        problem = flaw(tuple(entry["shape"]), [stored["ranges"] for stored in entry["slices"]])
        if problem is not None:
            raise ValueError(f"{name} cannot be saved: {problem} (exactly one rank writes each shard)")
    return table


def encode(body: dict[str, Any]) -> bytes:
    """Return the manifest as JSON whose first entry is the SHA-256 of every byte after that entry's line."""
    rest = json.dumps(body, indent=1).removeprefix("{\n").encode()
    return b'{\n "sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a step's folder, checked against its SHA-256 and the folder's name.

    Raise CheckpointError.
    """
    file = folder / MANIFEST
    try:
        raw = read_bytes(file)
    except (OSError, Unreadable) as error:
        raise CheckpointError(file, "a manifest", str(error)) from error
    head = re.match(rb'\{\n "sha256": "([0-9a-f]{64})",\n', raw)
    if head is None:
        raise CheckpointError(file, "its own SHA-256 in the first entry", repr(raw[:90]))
    stated, digest = head[1].decode(), hashlib.sha256(raw[head.end() :]).hexdigest()
    if stated != digest:
        raise CheckpointError(file, f"SHA-256 {stated}", digest)
    try:
        manifest: dict[str, Any] = parsed_json(raw, {"format": int})
        if manifest["format"] != FORMAT:
            raise CheckpointError(file, f"format {FORMAT}", f"format {manifest['format']}")
        if folder.name != f"step-{manifest['step']}":
            raise CheckpointError(file, f"the step of {folder.name}", f"step {manifest['step']}")
        check(manifest, _SCHEMA, "the manifest")
        _check_tables(file, manifest)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = str(error) if isinstance(error, Unreadable) else quoted(error)
        raise CheckpointError(file, f"a manifest of format {FORMAT}", found) from error


def _check_tables(file: Path, manifest: dict[str, Any]) -> None:
    for name in manifest["files"]:
        # A name with a folder in it could lead out of the checkpoint.
        if not re.fullmatch(r"rank-\d+\.safetensors", name):
            raise CheckpointError(file, "files rank-….safetensors", quoted(name))
    locations: set[tuple[str, str]] = set()
    for name, entry in manifest["tensors"].items():
        problem = flaw(tuple(entry["shape"]), [slices_of(stored["ranges"]) for stored in entry["slices"]])
        unknown = {stored["file"] for stored in entry["slices"]} - manifest["files"].keys()
        if problem is not None or unknown or entry["dtype"] not in DTYPES.values():
            raise CheckpointError(file, f"slices that make up {name}", problem or f"{entry['dtype']} in {unknown}")
        for location in ((stored["file"], stored["key"]) for stored in entry["slices"]):
            if location in locations:
                raise CheckpointError(file, f"slices of {name} that nothing else shares", " as ".join(location))
            locations.add(location)
