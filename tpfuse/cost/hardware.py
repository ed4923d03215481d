"""GPUs and their links as data: one TOML file for each, whose entries say where their numbers come from.

    [memory]
    value = 84.9e9
    source = "torch reports 79.1 GiB on H100 SXM of 80 GB"

`hardware/gpus`, `hardware/links` and `hardware/networks` hold the files that tpfuse knows by name. `tpfuse plan
--calibrate` writes such a file with numbers that it has measured (`save`): that of a GPU, with its link in `[link.…]`.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tpfuse.comm.host import replace_file
from tpfuse.nearest import nearest

FOLDER = Path(__file__).parent / "hardware"
T = TypeVar("T", "Gpu", "Link", "Network")


@dataclass(frozen=True)
class Gpu:
    """A GPU, or the share of a CPU that a rank has.

    memory: bytes that a program can use. half_rate, single_rate: operations per second of products in 16-bit types and
    in float32, as the data sheet says or as measured at the best. product_share: the share of this rate that large
    products reach. unaligned_share: the share of that which remains if a matrix's rows do not begin at multiples of 16
    bytes, as with a vocabulary of 50,257. attention_share: the share that fused attention reaches. bandwidth: bytes per
    second of memory, as copies reach it. elementwise_share: the share of it that operators such as GELU and norms
    reach. packing_share: the share of it at which a CPU packs the matrices of a product, before it computes.
    multiprocessors: their number, which tiles of products fill in waves; 0 where work is divided freely, as on a CPU.
    launch_seconds: the least time between two kernels of a stream. host_seconds: the time in which the host issues
    one operator of autograd, forward or backward; a step cannot be shorter than its operators take to issue. price: of
    an hour, in dollars; 0 if it is not known. links: the names of the links that it can have to its neighbours; () for
    any. at_once: of a CPU, the number of ranks that compute at these rates at the same time; more of them take turns. 0
    for a GPU. wait_seconds: what a rank that takes turns loses each time it waits for another one.
    """

    name: str
    memory: float
    half_rate: float
    single_rate: float
    product_share: float
    attention_share: float
    bandwidth: float
    multiprocessors: int
    launch_seconds: float
    host_seconds: float
    price: float = 0.0
    links: tuple[str, ...] = ()
    at_once: float = 0.0
    unaligned_share: float = 0.5
    elementwise_share: float = 1.0
    packing_share: float = 1.0
    wait_seconds: float = 0.0

    def rate(self, size: int) -> float:
        """Return the operations per second of products on numbers of `size` bytes."""
        return self.half_rate if size < 4 else self.single_rate

    @property
    def is_host(self) -> bool:
        """Return whether this is a CPU, which issues operators and computes them in turn."""
        return self.at_once > 0


@dataclass(frozen=True)
class Link:
    """What connects ranks.

    bandwidth: bytes per second that a rank sends in large messages or collectives, while it receives as many. latency:
    seconds of a message, or of a step of a collective. start: seconds that every collective takes besides. in_network:
    whether switches reduce and multicast (NVLink SHARP), so that an all-reduce sends each byte once.
    """

    name: str
    bandwidth: float
    latency: float
    start: float
    in_network: bool = False


@dataclass(frozen=True)
class Network:
    """A kind of network between nodes. share: of its line rate that collectives reach. latency, start: as of a link."""

    name: str
    share: float
    latency: float
    start: float


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. gpus: of all nodes. per_node: of a node. inside: the link in a node. network: between nodes."""

    gpu: Gpu
    gpus: int
    per_node: int
    inside: Link
    network: Link

    def link(self, ranks: int, stride: int) -> Link:
        """Return the link that slows a group of `ranks` ranks down, of which neighbours are `stride` ranks apart."""
        return self.inside if ranks * stride <= self.per_node else self.network


def link_names() -> list[str]:
    """Return the names of the known links inside a node."""
    return _names("links")


def load_gpu(name_or_path: str) -> Gpu:
    """Return a GPU by its name, or from a TOML file. Raise ValueError for an unknown name and a malformed file."""
    return _load(Gpu, "GPU", "gpus", name_or_path)


def known_gpu(device: str, memory: float) -> Gpu | None:
    """Return the GPU that torch names `device`, with so many bytes of memory; None if no file describes it.

    The files describe modules (SXM). Cards of the same chips (PCIe, NVL) are slower.
    """
    if "PCIe" in device or "NVL" in device:
        return None
    found = [load_gpu(name) for name in _names("gpus") if name.partition("-")[0].upper() in device]
    return min(found, key=lambda gpu: abs(gpu.memory - memory), default=None)


def load_link(name_or_path: str) -> Link:
    """Return a link inside a node by its name, or from a TOML file, also from that of a GPU that describes its link.

    Raise ValueError as `load_gpu` does.
    """
    return _load(Link, "link", "links", name_or_path)


def check_link(gpu: Gpu, link: Link) -> None:
    """Raise ValueError if the GPU cannot have this link. A link from a file of the user's own is always accepted."""
    if gpu.links and link.name not in gpu.links and link.name in link_names():
        raise ValueError(f"{gpu.name} has no {link.name}: its links are {', '.join(gpu.links)}")


def parse_network(text: str) -> Link:
    """Return a network by the line rate of each GPU: "400Gb" is InfiniBand with 400 Gb/s, "100GbE" Ethernet.

    Raise ValueError for another text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)Gb(E?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"network {text!r}: expected the Gb/s of each GPU, such as 400Gb (InfiniBand) or 100GbE (Ethernet)"
        )
    kind = _read(Network, FOLDER / "networks" / ("ethernet.toml" if match[2] else "infiniband.toml"))
    return Link(text.strip(), float(match[1]) * 1e9 / 8 * kind.share, kind.latency, kind.start)


def save(item: Gpu | Link, path: Path, sources: Mapping[str, str], link: Link | None = None) -> None:
    """Write a GPU, perhaps with its link, or a link as a TOML file, which replaces another one at once.

    The file's name is that of the item. sources: of each field but the name; those of the link begin with "link.".
    """
    tables = _tables(item, "", sources) + ([] if link is None else _tables(link, "link.", sources))
    replace_file(path, "\n".join(tables))


def _tables(item: Gpu | Link, prefix: str, sources: Mapping[str, str]) -> list[str]:
    tables = []
    for name in (prefix + field.name for field in fields(item)[1:]):
        value = getattr(item, name.removeprefix(prefix))
        text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
        tables.append(f"[{name}]\nvalue = {text}\nsource = {json.dumps(sources[name], ensure_ascii=False)}\n")
    return tables


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / folder).glob("*.toml"))


def _load(kind: type[T], what: str, folder: str, name_or_path: str) -> T:
    names = _names(folder)
    if name_or_path in names:
        return _read(kind, FOLDER / folder / f"{name_or_path}.toml")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ValueError(
            f"unknown {what} {name_or_path!r}: expected {', '.join(names)} or a TOML file"
            f"{nearest(name_or_path.lower(), names)}"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path} that describes a {what}")
    return _read(kind, path)


def _read(kind: type[T], path: Path) -> T:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    link = tables.pop("link", None) if kind is not Network else None
    if kind is Link and link is not None:
        if not isinstance(link, dict):
            raise ValueError(f"{path}: link: expected a table of the link's entries")
        tables = link
    known = {field.name: field for field in fields(kind)[1:]}
    for name in tables:
        if name not in known:
            raise ValueError(f"{path}: unknown entry {name}{nearest(name, list(known))}")
    values = {}
    for name, field in known.items():
        if name in tables:
            values[name] = _value(tables[name], field.type, f"{path}: {name}")
        elif field.default is MISSING:
            raise ValueError(f"{path}: the entry {name} is missing")
    return kind(name=path.stem, **values)


def _value(table: Any, kind: Any, where: str) -> Any:
    """Return the value of an entry of a file. kind: the type of its field. Raise ValueError."""
    if not isinstance(table, dict) or not table.keys() == {"value", "source"} or not isinstance(table["source"], str):
        raise ValueError(f"{where}: expected a table of value and source")
    value = table["value"]
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{where}: expected true or false, not {value!r}")
        return value
    if kind not in (int, float):
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where}: expected a list of names, not {value!r}")
        return tuple(value)
    zero = where.endswith(("multiprocessors", "price", "at_once", "wait_seconds"))  # of a CPU; not known; of a GPU
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{where}: expected a positive number, not {value!r}")
    if where.endswith("share") and value > 1:
        raise ValueError(f"{where}: expected a share of at most 1, not {value!r}")
    if kind is int and value != int(value):
        raise ValueError(f"{where}: expected a whole number, not {value!r}")
    return kind(value)
