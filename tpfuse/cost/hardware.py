"""GPUs and their links as data: one TOML file for each, whose entries say where their numbers come from.

    [memory_bytes]
    value = 80e9
    source = "NVIDIA H100 data sheet, 2023"

`tpfuse plan --calibrate` writes such a file with numbers that it has measured.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "hardware"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or the share of a CPU that a rank has.

    memory: bytes. half_rate, single_rate: operations per second of products in 16-bit types and in float32, as the data
    sheet says or as measured at the best. product_share: the share of this rate that large products reach.
    unaligned_share: the share of that which remains if a matrix's rows do not begin at multiples of 16 bytes, as with a
    vocabulary of 50,257. attention_share: the share that fused attention reaches. bandwidth: bytes per second of
    memory, as copies reach it. multiprocessors: their number, which tiles of products fill in waves; 0 where work is divided
    freely. launch_seconds: the least time between two kernels of a stream. host_seconds: the time in which the host
    issues one operator of autograd, forward or backward; a step cannot be shorter than its operators take to issue.
    price: of an hour, in dollars; 0 if it is not known.
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
    unaligned_share: float = 0.5


@dataclass(frozen=True)
class Link:
    """What connects ranks.

    bandwidth: bytes per second that a rank sends, while it receives as many. latency: seconds of a message, or of a step
    of a collective. start: seconds that every collective takes besides. in_network: whether switches reduce and multicast
    (NVLink SHARP), so that an all-reduce sends each byte once.
    """

    name: str
    bandwidth: float
    latency: float
    start: float
    in_network: bool = False


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
