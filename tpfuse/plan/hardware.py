"""GPUs and their links as data: tables of TOML, each entry of which says where its number comes from.

    memory = { value = 84.9e9, source = "torch reports 79.1 GiB on H100 SXM of 80 GB" }

`hardware.toml` holds what tpfuse knows by name. A file of the user's own has the entries of a GPU, and a table [link]
with those of its link, or link = { value = "nvlink4", ... }. `tpfuse plan --calibrate` writes such a file.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tpfuse.nearest import nearest

FILE = Path(__file__).parent / "hardware.toml"
T = TypeVar("T", "GpuSpec", "Link", "Network")


@dataclass(frozen=True)
class Link:
    """A connection of ranks."""

    name: str
    # Bytes per second that a rank sends in large messages or collectives, while it receives as many.
    bandwidth: float
    # Seconds of a message, or of a step of a collective.
    latency: float
    # Seconds that every collective takes in addition.
    start: float


NO_LINK = Link("none", 1.0, 0.0, 0.0)  # of a GPU alone, which never communicates


@dataclass(frozen=True)
class GpuSpec:
    """A GPU, as the model of cost knows it."""

    name: str
    # Bytes that a program can use.
    memory: float
    # Operations per second of products in 16-bit types and in float32: the data sheet's, or the best that was measured.
    half_rate: float
    single_rate: float
    # The share of this rate that large products reach, and the share that fused attention reaches.
    product_share: float
    attention_share: float
    # Bytes per second of memory, as copies reach it.
    bandwidth: float
    # SM count, for wave quantization; 0 disables it.
    multiprocessors: int
    # The least seconds between two kernels of a stream.
    launch_seconds: float
    # Seconds in which the host issues one operator of autograd, forward or backward.
    host_seconds: float
    # Dollars of an hour; 0 if the price is not known.
    price: float = 0.0
    # The share of `product_share` that remains if rows are not aligned to 16 bytes, as with a vocabulary of 50,257.
    unaligned_share: float = 0.5
    # The share of `bandwidth` that operators such as GELU and norms reach.
    elementwise_share: float = 1.0
    # What connects the GPUs of a node.
    link: Link = field(default=NO_LINK)

    def rate(self, size: int) -> float:
        """Return the operations per second of products on numbers of `size` bytes."""
        return self.half_rate if size < 4 else self.single_rate


@dataclass(frozen=True)
class Network:
    """A kind of network between nodes. latency, start: as for a link."""

    name: str
    # The share of its line rate that collectives reach.
    share: float
    latency: float
    start: float


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes."""

    gpu: GpuSpec
    # The number of GPUs of all nodes, and of each node.
    gpus: int
    per_node: int
    # What connects the nodes.
    network: Link

    def link(self, ranks: int, stride: int) -> Link:
        """Return the slowest link in any group of `ranks` ranks, of which neighbours are `stride` ranks apart.

        The groups divide the ranks into ranges of `ranks` x `stride`. If these do not divide a node, one is on two.
        """
        inside = self.gpus <= self.per_node or self.per_node % (ranks * stride) == 0
        return self.gpu.link if inside else self.network


def load_gpu(name_or_path: str) -> GpuSpec:
    """Return a GPU by its name, or from a TOML file. Raise ValueError for an unknown name and a malformed file."""
    known = known_tables()["gpu"]
    if name_or_path in known:
        return _gpu(name_or_path, known[name_or_path], str(FILE))
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ValueError(
            f"unknown GPU {name_or_path!r}: expected {', '.join(known)} or a TOML file"
            f"{nearest(name_or_path.lower(), list(known))}"
        )
    return _gpu(path.stem, read_tables(path), str(path))


def known_gpu(device: str, memory: float) -> GpuSpec | None:
    """Return the GPU that torch names `device`, with that many bytes of memory; None if it is not described.

    The descriptions are of whole modules (SXM), whose memory is known to a tenth. Cards of the same chips (PCIe, NVL,
    the H100 with HBM2e) are slower, and so are parts of a module (MIG).
    """
    words = set(re.findall(r"\w+", device.upper()))
    if words & {"PCIE", "NVL", "HBM2E", "MIG"}:
        return None
    found = [load_gpu(name) for name in known_tables()["gpu"] if name.partition("-")[0].upper() in words]
    return next((gpu for gpu in found if abs(gpu.memory - memory) <= 0.1 * gpu.memory), None)


def network_kind(text: str) -> str:
    """Return the table of `hardware.toml` that describes the network "400Gb" or "100GbE"."""
    return "ethernet" if text.strip().endswith("E") else "infiniband"


def parse_network(text: str) -> Link:
    """Return a network by the line rate of each GPU: "400Gb" is InfiniBand with 400 Gb/s, "100GbE" Ethernet.

    Raise ValueError for another text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)GbE?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"network {text!r}: expected the Gb/s of each GPU, such as 400Gb (InfiniBand) or 100GbE (Ethernet)"
        )
    name = network_kind(text)
    kind = _read(Network, name, known_tables()["network"][name], str(FILE))
    return Link(text.strip(), float(match[1]) * 1e9 / 8 * kind.share, kind.latency, kind.start)


@cache
def known_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of `hardware.toml`, by kind and name."""
    return read_tables(FILE)


def read_tables(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raise ValueError, which names it."""
    if not path.is_file():
        raise ValueError(f"there is no file {path} that describes a GPU")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def described(gpu: GpuSpec, sources: Mapping[str, str]) -> str:
    """Return the TOML file of a GPU, for `load_gpu`. sources: by field; those of the link begin with "link "."""
    lines = _entries(gpu, "", sources)
    return (
        "\n".join(lines if gpu.link == NO_LINK else [*lines, "", "[link]", *_entries(gpu.link, "link ", sources)])
        + "\n"
    )


def _entries(item: GpuSpec | Link, prefix: str, sources: Mapping[str, str]) -> list[str]:
    values = {each.name: getattr(item, each.name) for each in fields(item)[1:] if each.name != "link"}
    return [
        f"{name} = {{ value = {value!r}, source = {json.dumps(sources[prefix + name], ensure_ascii=False)} }}"
        for name, value in values.items()
    ]


def _gpu(name: str, table: Mapping[str, Any], path: str) -> GpuSpec:
    table = dict(table)
    link = table.pop("link", None)
    connected = NO_LINK
    if isinstance(link, dict) and "value" in link:
        known = known_tables()["link"]
        if link["value"] not in known:
            raise ValueError(f"{path}: link: expected {', '.join(known)} or a table [link], not {link['value']!r}")
        connected = _read(Link, link["value"], known[link["value"]], str(FILE))
    elif link is not None:
        if not isinstance(link, dict):
            raise ValueError(f"{path}: link: expected a table of the link's entries")
        connected = _read(Link, name, link, f"{path}: link")
    return _read(GpuSpec, name, table, path, {"link": connected})


def _read(kind: type[T], name: str, table: Mapping[str, Any], path: str, others: Mapping[str, Any] | None = None) -> T:
    """Return what a table describes. others: the fields that are no numbers. Raise ValueError."""
    values = {"name": name, **(others or {})}
    known = {each.name: each for each in fields(kind) if each.name not in values}
    for entry in table:
        if entry not in known:
            raise ValueError(f"{path}: unknown entry {entry}{nearest(entry, list(known))}")
    for entry, each in known.items():
        if entry in table:
            values[entry] = _value(table[entry], each.type, f"{path}: {entry}")
        elif each.default is MISSING:
            raise ValueError(f"{path}: the entry {entry} is missing")
    return kind(**values)


def _value(entry: Any, kind: Any, place: str) -> float:
    """Return the number of an entry. kind: int or float. Raise ValueError."""
    if not isinstance(entry, dict) or entry.keys() != {"value", "source"} or not isinstance(entry["source"], str):
        raise ValueError(f"{place}: expected a table of value and source")
    value = entry["value"]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not place.endswith(("multiprocessors", "price"))):
        raise ValueError(f"{place}: expected a positive number, not {value!r}")
    if place.endswith("share") and value > 1:
        raise ValueError(f"{place}: expected a share of at most 1, not {value!r}")
    if kind is int and value != int(value):
        raise ValueError(f"{place}: expected a whole number, not {value!r}")
    return kind(value)  # type: ignore[no-any-return]
